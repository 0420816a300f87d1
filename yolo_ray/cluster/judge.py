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
from yolo_ray.cluster.weights import Weights, WeightsAt, content_of, in_place, open_weights
from yolo_ray.cluster.worker import EvaluateJob, evaluate_worker
from yolo_ray.config.schema import EvaluateConfig
from yolo_ray.data.records import load_records
from yolo_ray.errors import UserError


def evaluate(
    config: EvaluateConfig, counted: Counted, weights_at: WeightsAt = in_place
) -> dict[str, Any]:
    """The metrics of ``config.weights`` on the data's validation photos; ``counted`` shows how far their check is.

    ``weights_at`` finds the file that a name of weights means; without it, the name is a path.

    Raises:
        UserError: no such weights, other classes than the data's, or anything else wrong with the input.
    """
    if config.weights is None:
        raise UserError("no weights given: pass weights=runs/NAME/weights/best.pt")
    with weights_at(config.weights, config.mlflow.uri) as path:
        return _evaluate(config, open_weights(path), counted)


def _evaluate(config: EvaluateConfig, weights: Weights, counted: Counted) -> dict[str, Any]:
    config = _fitting(config, weights)
    judge = judge_on(config.cluster, counted)
    val = load_records(data_path(config), "val", max_bad=config.data.max_bad, judge=judge)
    if weights.names != val.names:
        raise UserError(
            f"{weights.path} knows the classes {list(weights.names)[:5]}, the data has {list(val.names)[:5]}: "
            "evaluate with the data.yaml it was trained on"
        )
    reading = reading_of(config.data, config.imgsz, val)
    connect(config.cluster.address)
    placement = place(config.cluster)
    check_device(config, placement)
    with (
        tempfile.TemporaryDirectory(prefix="yolo_ray-evaluate-") as folder,
        cached(reading) as (reading, sentences),
    ):
        path = weights.path
        job = EvaluateJob(
            config, Path(folder), placement, ray.put(val), str(path), content_of(path), reading
        )
        metrics = run_workers(job, evaluate_worker, 0)
        for text in [text for _, text in sentences] + _warnings(Path(folder)):
            print(text, file=sys.stderr)
    named = {name.removeprefix("val/"): value for name, value in metrics.items()}
    return {
        "weights": _shown(config, weights),
        "imgsz": config.imgsz,
        "photos": len(val),
        "left_out": len(val.bad),
        **named,
    }


def _shown(config: EvaluateConfig, weights: Weights) -> str:
    """The file, or the name of what was fetched for this evaluation alone."""
    given = str(config.weights)
    return str(weights.path) if Path(given).expanduser().exists() else given


def _fitting(config: EvaluateConfig, weights: Weights) -> EvaluateConfig:
    """The options as the weights want them, or a sentence why they cannot be so."""
    given = config.is_given("imgsz") or not weights.imgsz
    side = weights.side(config.imgsz if given else None)
    if side != config.imgsz:
        config = config.override({"imgsz": side})
    weights.check_choice(conf=config.eval.conf, nms=config.eval.nms)
    return config


def _warnings(folder: Path) -> list[str]:
    """What the workers had to say."""
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["text"] for line in lines]
