"""Train a detector on a Ray cluster.

    python -m pipelines.train data=path/to/data.yaml model=yolo11n.yaml epochs=100 batch=16 cluster.workers=2
    python -m pipelines.train configs/trees.yaml lr0=0.02
    python -m pipelines.train resume=runs/train

YAML files and key=value merge left to right. The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from typing import Any

from yolo_ray.cluster.launch import train
from yolo_ray.config.load import load
from yolo_ray.entry import run
from yolo_ray.track.observer import RunObserver


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, train, return what is printed."""
    return train(load(argv), RunObserver())


if __name__ == "__main__":
    sys.exit(run(main))
