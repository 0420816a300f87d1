"""Search the options of training: many runs, sharing a Ray cluster.

    python -m pipelines.tune configs/tune.yaml data=path/to/data.yaml num_samples=20 max_concurrent=4
    python -m pipelines.tune data=path/to/data.yaml 'space.lr0={loguniform: [1e-4, 1e-1]}' num_samples=10
    python -m pipelines.tune resume=runs/study

Options are those of pipelines.train, a `tune` section and a `space`. The best options are in runs/study/best.yaml,
which pipelines.train takes as it is. The last line of the output is one JSON object.
"""

from __future__ import annotations

import sys
from typing import Any

from yolo_ray.cluster.tuning import tune
from yolo_ray.config.load import load
from yolo_ray.config.tune import TuneConfig
from yolo_ray.entry import run
from yolo_ray.track.study import StudyObserver


def main(argv: list[str]) -> dict[str, Any]:
    """Parse, search, return what is printed."""
    return tune(load(argv, TuneConfig), StudyObserver())


if __name__ == "__main__":
    sys.exit(run(main, schema=TuneConfig))
