"""Pack a data set into a few large files, to copy, to read from a store, or to start in seconds.

    python -m pipelines.pack data=PATH/data.yaml out=FOLDER shard_mb=256
    python -m pipelines.train data=FOLDER/data.yaml

Options: data (a path or an address), out (a folder to make), shard_mb (256), max_bad (0.01).
The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from yolo_ray.data.packing import pack, parse
from yolo_ray.entry import run


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, pack, return what is printed."""
    return pack(parse(argv), partial(print, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(run(main, schema=None))
