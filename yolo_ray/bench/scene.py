"""Made-up batches for a benchmark: noise photos in mosaics as the plan lays them out, random boxes."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.batch import Batch, PhotoRing
from yolo_ray.data.plan import Plan, PlanStep, bucket_of
from yolo_ray.data.records import Records

NUM_BATCHES = 4
NUM_CLASSES = 80


def make_batches(batch: int, imgsz: int, boxes: int, device: torch.device) -> list[Batch]:
    """Batches of one ring, on ``device``, with exactly ``boxes`` boxes an image."""
    plan = Plan(
        make_records(batch * 16), seed=0, epochs=1, batch=batch, imgsz=imgsz,
        augment=AugmentConfig(close_mosaic=0),
    )  # fmt: skip
    ring = PhotoRing(batch, imgsz, plan.window, device)
    rng = np.random.default_rng(0)
    out: list[Batch] = []
    for step in range(1 - plan.window, NUM_BATCHES):
        ring.put(step, rng.integers(0, 256, (batch, imgsz, imgsz, 3), dtype=np.uint8))
        if step >= 0:
            planned = _with_boxes(plan.at(step), rng, imgsz, boxes)
            out.append(ring.batch(planned, range(batch), bucket_of(batch * boxes)))
    return out


def make_records(count: int) -> Records:
    """Records of ``count`` photos of 640 x 480 px that are never read, without boxes."""
    return Records(
        paths=[f"{index}.jpg" for index in range(count)],
        sizes=np.full((count, 2), (480, 640), np.int32),
        offsets=np.zeros(count + 1, np.int64),
        boxes=np.zeros((0, 4), np.float32),
        classes=np.zeros(0, np.int32),
        names=tuple(f"class{index}" for index in range(NUM_CLASSES)),
        digest="",
        bad=(),
    )


def _with_boxes(planned: PlanStep, rng: np.random.Generator, imgsz: int, boxes: int) -> PlanStep:
    count = len(planned.images) * boxes
    centre = rng.uniform(0, imgsz, (count, 2))
    half = rng.uniform(0.02, 0.15, (count, 2)) * imgsz
    corners = np.concatenate([centre - half, centre + half], 1).clip(0, imgsz)
    return dataclasses.replace(
        planned,
        boxes=corners.astype(np.float32),
        classes=rng.integers(0, NUM_CLASSES, count),
        slots=np.repeat(np.arange(len(planned.images)), boxes),
    )
