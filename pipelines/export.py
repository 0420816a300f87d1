"""Export weights to ONNX, TorchScript or a compiled package of torch.export, checked against torch.

    python -m pipelines.export weights=runs/train format=onnx
    python -m pipelines.export weights=models:/parts@champion format=onnx nms=true out=parts.onnx

The file appears only if it gives the same boxes as torch on photos. The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from yolo_ray.config.deploy import ExportConfig, needed
from yolo_ray.config.load import load
from yolo_ray.entry import run
from yolo_ray.export.run import export
from yolo_ray.track.weights import weights_at


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, export, return what is printed."""
    config = load(argv, ExportConfig)
    reference = needed(config.weights, "weights", "runs/NAME/weights/best.pt")
    with weights_at(reference, config.mlflow.uri) as weights:
        return export(config, weights, partial(print, file=sys.stderr, flush=True))


if __name__ == "__main__":
    sys.exit(run(main, schema=ExportConfig))
