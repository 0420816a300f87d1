"""Steps and states that the GPU tests share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from yolo_ray.bench.scene import make_records
from yolo_ray.data.batch import Batch
from yolo_ray.model.build import build_detector
from yolo_ray.model.loss import head_gains_at
from yolo_ray.step.build import build_step
from yolo_ray.step.graph import Step
from yolo_ray.step.reduce import AllReduce, no_reduce
from yolo_ray.step.schedule import Controls
from yolo_ray.step.train_step import StepOptions, TrainStep

IMGSZ, BATCH, BOXES = 128, 4, 6
NAMES = make_records(1).names
CUDA = torch.device("cuda")
FAMILIES = ("yolov8n.yaml", "yolo11n.yaml", "yolo26n.yaml")
OTHER_FAMILIES = ("yolov5nu.yaml", "yolov9t.yaml", "yolov10n.yaml", "yolo12n.yaml")


def make_step(
    model: str = "yolo11n.yaml",
    optimizer: str = "SGD",
    precision: str = "bf16",
    reduce: AllReduce = no_reduce,
    *,
    imgsz: int = IMGSZ,
    **changes: Any,
) -> TrainStep:
    options = StepOptions(
        batch=BATCH, gains=(7.5, 0.5, 1.5), clip_norm=10.0, optimizer=optimizer, momentum=0.9,
        precision=precision,
    )  # fmt: skip
    options = dataclasses.replace(options, **changes)
    detector = build_detector(model, NAMES, imgsz=imgsz, seed=0).to(CUDA).train()
    return build_step(detector, options, reduce)


def run(step: Step, batch: Batch, *, lr: float = 1e-3, update: bool = True) -> None:
    step.set_controls(Controls(lr, lr, 0.9, 5e-4, 0.99), head_gains_at(0, 10, step.num_heads))
    step(batch, update=update)


def state_of(step: Step) -> dict[str, Tensor]:
    flat = step.flat
    named = {
        "state": flat.state,
        "ema": flat.ema,
        "counters": flat.counters,
        "pending": step.pending,
    }
    return {
        k: v.clone() for k, v in {**named, **step.optimizer.slots, "skipped": step.skipped}.items()
    }


def assert_equal(ours: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for key, value in other.items():
        gap = (ours[key].double() - value.double()).abs().max().item()
        assert torch.equal(ours[key], value), f"{key} differs by {gap:.3g}"
