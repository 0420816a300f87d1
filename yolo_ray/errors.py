"""The two ways a pipeline ends early: the user's mistake and a requested stop."""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_GATE = 3
EXIT_STOPPED = 75


class UserError(ValueError):
    """A mistake of the user's. The message is one sentence: what is wrong, where, and the remedy."""


class StopRequested(Exception):
    """The user (Ctrl-C) or the cluster (SIGTERM) asked the run to stop; running again goes on."""
