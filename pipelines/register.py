"""Register a trained run in MLflow's model registry, through a gate.

    python -m pipelines.register run=runs/train name=pcb-detector
    python -m pipelines.register run=MLFLOW_RUN_ID mlflow.uri=http://127.0.0.1:5000 name=pcb-detector min_gain=0.005
    python -m pipelines.register name=pcb-detector rollback=true
    python -m pipelines.register name=pcb-detector to=3

The new version and the present @champion are judged on the same validation photos. The better one, by the options
min_gain, max_class_drop and max_latency, becomes @champion; a version that is refused stays @challenger, and the exit
code is 3. The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from typing import Any

from yolo_ray.cluster.register import register
from yolo_ray.config.load import load
from yolo_ray.config.register import RegisterConfig
from yolo_ray.entry import run
from yolo_ray.track.counting import counted
from yolo_ray.track.registry import ModelRegistry


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, register, return what is printed."""
    config = load(argv, RegisterConfig)
    return register(config, ModelRegistry(config), counted)


if __name__ == "__main__":
    sys.exit(run(main, schema=RegisterConfig))
