"""Time the training step beside Ultralytics', on this machine's GPU or CPU.

    python -m pipelines.benchmark
    python -m pipelines.benchmark cases=[yolo11n.yaml:16,yolo26n.yaml:16] optimizer=MuSGD compile=true

Options: cases device imgsz boxes optimizer precision compile rival eager deterministic steps blocks
profile out; yolo_ray/bench/options.py describes them. The table goes to stderr and to
runs/benchmark; the last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from typing import Any

from yolo_ray.bench.compare import compare
from yolo_ray.bench.options import parse
from yolo_ray.entry import run


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, measure, return what is printed."""
    return compare(parse(argv))


if __name__ == "__main__":
    sys.exit(run(main, schema=None))
