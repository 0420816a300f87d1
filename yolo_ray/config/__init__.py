"""Options: their schema, and how they are read."""
