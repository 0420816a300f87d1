"""Time the training step beside Ultralytics', on this machine's GPU or CPU.

    python -m pipelines.benchmark
    python -m pipelines.benchmark cases=[yolo11n.yaml:16,yolo26n.yaml:16] precision=[bf16,fp32] \\
        optimizer=[SGD,MuSGD] compile=true
    python -m pipelines.benchmark table=false sweep=true cases=yolo11n.yaml:16
    python -m pipelines.benchmark table=false startup=true static_assignment=true

The tables go to stderr and to runs/benchmark (or runs/benchmark2 ...), after every setting; the last line of the
output is one JSON object.
docs/benchmarks/README.md says what each column means.
"""

from __future__ import annotations

import sys
from typing import Any

from yolo_ray.bench.compare import compare
from yolo_ray.bench.options import BenchConfig, parse
from yolo_ray.entry import run


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, measure, return what is printed."""
    return compare(parse(argv))


if __name__ == "__main__":
    sys.exit(run(main, schema=BenchConfig))
