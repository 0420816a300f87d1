"""Fetch the tree-crown photos and cut them into a YOLO data set: --out FOLDER."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from yolo_ray.data.trees import FetchError, fetch_trees
from yolo_ray.errors import EXIT_FAILURE, EXIT_OK, EXIT_USER, UserError


def main(argv: list[str]) -> int:
    """Make the data set, or find it complete; print one JSON line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.fetch", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("datasets/trees"), help="folder to make")
    parser.add_argument("--wheel", type=Path, help="deepforest wheel on disk, instead of pip")
    arguments = parser.parse_args(argv)
    try:
        counts = fetch_trees(arguments.out, arguments.wheel)
    except (FetchError, UserError, OSError) as error:
        code = EXIT_USER if isinstance(error, UserError) else EXIT_FAILURE
        print(f"error: {error}", file=sys.stderr)
        print(json.dumps({"exit": code, "error": str(error)}))
        return code
    splits = {split: asdict(count) for split, count in counts.items()}
    print(json.dumps({"data": str(arguments.out / "data.yaml"), **splits, "exit": EXIT_OK}))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
