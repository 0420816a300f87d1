"""The driver of an evaluation: judge weights and data first, then let the workers detect."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

from yolo_ray.cluster.caching import cached, reading_of
from yolo_ray.cluster.launch import check_device, data_path, run_workers
from yolo_ray.cluster.preflight import connect, place
from yolo_ray.cluster.scan import Counted, judge_on
from yolo_ray.cluster.worker import EvaluateJob, evaluate_worker
from yolo_ray.config.schema import EvaluateConfig
from yolo_ray.data.records import Records, load_records
from yolo_ray.errors import UserError
from yolo_ray.model.build import Detector, load_detector


def evaluate(config: EvaluateConfig, counted: Counted) -> dict[str, Any]:
    """The metrics of ``config.weights`` on the data's validation photos; ``counted`` shows how far their check is.

    Raises:
        UserError: no such weights, other classes than the data's, or anything else wrong with the input.
    """
    if config.weights is None:
        raise UserError("no weights given: pass weights=runs/NAME/weights/best.pt")
    weights = str(Path(config.weights).expanduser().resolve())
    detector = load_detector(weights)
    config = config.override({"weights": weights})
    if detector.trained_imgsz and not config.is_given("imgsz"):
        config = config.override({"imgsz": detector.trained_imgsz})
    check_side(config.imgsz, detector)
    val = load_validation(config, counted)
    check_classes(detector, val, weights)
    return evaluate_on(config, val)


def load_validation(config: EvaluateConfig, counted: Counted) -> Records:
    """The validation photos, judged.

    Raises:
        UserError: none given, or bad ones.
    """
    judge = judge_on(config.cluster, counted)
    return load_records(data_path(config), "val", max_bad=config.data.max_bad, judge=judge)


def check_side(imgsz: int, detector: Detector) -> None:
    """Refuse a side that the strides do not divide. Raises UserError."""
    stride = max(detector.strides)
    if imgsz % stride:
        raise UserError(
            f"imgsz={imgsz} is not a multiple of the model's stride {stride}: use imgsz={-(-imgsz // stride) * stride}"
        )


def check_classes(detector: Detector, val: Records, weights: str) -> None:
    """Refuse data that names other classes. Raises UserError."""
    if tuple(detector.names) != val.names:
        raise UserError(
            f"{weights} knows the classes {list(detector.names)[:5]}, the data has {list(val.names)[:5]}: "
            "evaluate with the data.yaml it was trained on"
        )


def evaluate_on(config: EvaluateConfig, val: Records) -> dict[str, Any]:
    """``evaluate`` on photos that were judged before; weights and side are given and fit.

    Raises:
        UserError: the cluster cannot do it, or a photo is gone.
    """
    weights = str(config.weights)
    reading = reading_of(config.data, config.imgsz, val)
    connect(config.cluster.address)
    placement = place(config.cluster)
    check_device(config, placement)
    with (
        tempfile.TemporaryDirectory(prefix="yolo_ray-evaluate-") as folder,
        cached(reading) as (reading, sentences),
    ):
        job = EvaluateJob(config, Path(folder), placement, ray.put(val), weights, reading)
        metrics = run_workers(job, evaluate_worker, 0)
        for text in [text for _, text in sentences] + _warnings(Path(folder)):
            print(text, file=sys.stderr)
    named = {name.removeprefix("val/"): value for name, value in metrics.items()}
    return {
        "weights": weights,
        "imgsz": config.imgsz,
        "photos": len(val),
        "left_out": len(val.bad),
        **named,
    }


def _warnings(folder: Path) -> list[str]:
    """What the workers had to say."""
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["text"] for line in lines]
