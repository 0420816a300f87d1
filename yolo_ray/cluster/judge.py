"""The driver of an evaluation: judge weights and data first, then let the workers detect."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
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
from yolo_ray.data.records import Records, load_records
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
        weights = open_weights(path)
        given = str(config.weights)
        shown = str(path) if Path(given).expanduser().exists() else given  # fetched for this alone
        config = _fitting(config, weights)
        val = load_validation(config, counted)
        check_classes(weights.names, val, shown)
        return evaluate_on(config, val) | {"weights": shown}


def load_validation(config: EvaluateConfig, counted: Counted) -> Records:
    """The validation photos, judged.

    Raises:
        UserError: none given, or bad ones.
    """
    judge = judge_on(config.cluster, counted)
    return load_records(data_path(config), "val", max_bad=config.data.max_bad, judge=judge)


def check_classes(names: Sequence[str], val: Records, weights: str) -> None:
    """Refuse data that names other classes. Raises UserError."""
    if tuple(names) != val.names:
        raise UserError(
            f"{weights} knows the classes {list(names)[:5]}, the data has {list(val.names)[:5]}: "
            "evaluate with the data.yaml it was trained on"
        )


def evaluate_on(config: EvaluateConfig, val: Records) -> dict[str, Any]:
    """``evaluate`` on photos that were judged before; the file ``config.weights`` and the side fit them.

    Raises:
        UserError: the cluster cannot do it, or a photo is gone.
    """
    path = Path(str(config.weights))
    reading = reading_of(config.data, config.imgsz, val)
    connect(config.cluster.address)
    placement = place(config.cluster)
    check_device(config, placement)
    with (
        tempfile.TemporaryDirectory(prefix="yolo_ray-evaluate-") as folder,
        cached(reading, config.data) as (reading, sentences),
    ):
        job = EvaluateJob(
            config, Path(folder), placement, ray.put(val), str(path), content_of(path), reading
        )
        metrics = run_workers(job, evaluate_worker, 0)
        for text in [text for _, text in sentences] + _warnings(Path(folder)):
            print(text, file=sys.stderr)
    named = {name.removeprefix("val/"): value for name, value in metrics.items()}
    return {
        "weights": str(path),
        "imgsz": config.imgsz,
        "photos": len(val),
        "left_out": len(val.bad),
        **named,
    }


def _fitting(config: EvaluateConfig, weights: Weights) -> EvaluateConfig:
    """The options as the weights want them, or a sentence why they cannot be so."""
    given = config.is_given("imgsz") or not weights.imgsz
    side = weights.side(config.imgsz if given else None)
    if side != config.imgsz:
        config = config.override({"imgsz": side})
    weights.check_choice(conf=config.eval.conf, nms=config.eval.nms)
    return config.override({"weights": str(weights.path)})


def _warnings(folder: Path) -> list[str]:
    """What the workers had to say."""
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line)["text"] for line in lines]
