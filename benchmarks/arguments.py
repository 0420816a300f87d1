"""The command line that the benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path


def command_line(
    doc: str | None, argv: list[str]
) -> tuple[argparse.ArgumentParser, list[str], list[str]]:
    """A parser with --data and --out, the arguments for it, and those behind ``--``, which our pipelines get."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser, argv[:split], argv[split + 1 :]
