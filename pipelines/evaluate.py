"""Evaluate weights on the validation photos of a data set.

    python -m pipelines.evaluate weights=runs/train/weights/best.pt data=path/to/data.yaml
    python -m pipelines.evaluate weights=models:/parts@champion data=path/to/data.yaml

weights is a .pt, an .onnx, a run's folder, the id of an MLflow run, or models:/NAME@ALIAS or models:/NAME/VERSION.
imgsz defaults to what the weights were trained with. The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from typing import Any

from yolo_ray.cluster.judge import evaluate
from yolo_ray.config.load import load
from yolo_ray.config.schema import EvaluateConfig
from yolo_ray.entry import run
from yolo_ray.track.counting import counted
from yolo_ray.track.weights import weights_at


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, evaluate, return what is printed."""
    return evaluate(load(argv, EvaluateConfig), counted, weights_at)


if __name__ == "__main__":
    sys.exit(run(main, schema=EvaluateConfig))
