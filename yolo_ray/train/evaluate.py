"""Distributed evaluation: every photo once, one gather, the same numbers on every rank.

It knows neither Ray nor MLflow. Letters: b rows of a batch, S the square image side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from yolo_ray.config.schema import JudgeConfig
from yolo_ray.data.geometry import resized_extents
from yolo_ray.data.records import Records
from yolo_ray.errors import UserError
from yolo_ray.model.build import Detector
from yolo_ray.model.detect import detect_nms, detect_one_to_one
from yolo_ray.train.graphed_eval import GraphedEval
from yolo_ray.train.metrics import (
    Detections,
    EvalResult,
    Sample,
    evaluate_detections,
    join_detections,
)

Gather = Callable[[object], list[object]]
"""Collective: takes this rank's object, returns the objects of all ranks by rank, on every rank."""


class Forward(Protocol):
    """A detector from images to boxes: ``GraphedEval``, or an exported file."""

    replays: int  # of a CUDA graph

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes float32 [b,A,4] xyxy px and probabilities [b,A,C] of images uint8 [b,3,S,S]."""
        ...


PADDING_ID = -1
SAMPLES = 16  # photos whose detections are kept for pictures


@dataclass(frozen=True)
class EvalBatch:
    """Letterboxed photos in a batch of fixed size."""

    images: Tensor  # uint8 [b,3,S,S] RGB
    ids: Tensor  # int64 [b] record index; -1: a gray row that only fills the batch


def rank_images(num_images: int, rank: int, world: int) -> np.ndarray:
    """Record indices int64 that one of ``world`` ranks evaluates: rank, rank + world, ..."""
    return np.arange(rank, num_images, world, dtype=np.int64)


def eval_batch(ids: np.ndarray, photos: np.ndarray, *, pinned: bool = False) -> EvalBatch:
    """An EvalBatch of record indices [b] (-1: padding) and letterboxed photos uint8 [b,S,S,3].

    ``pinned``: for a GPU, channels last as they come, in memory that uploads without a wait.
    """
    if pinned:
        images = torch.from_numpy(np.ascontiguousarray(photos)).pin_memory().permute(0, 3, 1, 2)
    else:
        images = torch.from_numpy(np.ascontiguousarray(photos.transpose(0, 3, 1, 2)))
    return EvalBatch(images, torch.from_numpy(ids.astype(np.int64)))


def letterbox_geometry(height: int, width: int, imgsz: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale [2] and padding [2] (x, y; float64) from a photo to its letterboxed square.

    ``square_px = photo_px * scale + padding``, as ``augment.images.letterbox`` places the photo.
    The two scales differ a little, since the shorter side is rounded up.
    """
    new = resized_extents(np.array([[height, width]]), imgsz)[0]
    return new / (width, height), (imgsz - new) // 2


def to_original(boxes: np.ndarray, height: int, width: int, imgsz: int) -> np.ndarray:
    """Boxes [k,4] xyxy px of the letterboxed square as float32 px of the photo, NOT clipped to it.

    Ultralytics' validation judges unclipped boxes. Clipping first raised mAP50-95 by 0.024 on
    photos with many objects at the edge, so numbers would no longer compare.
    """
    scale, padding = letterbox_geometry(height, width, imgsz)
    original = (boxes.astype(np.float64) - np.tile(padding, 2)) / np.tile(scale, 2)
    return original.astype(np.float32)


def evaluate(
    detector: Detector,
    batches: Iterable[EvalBatch],
    records: Records,
    *,
    imgsz: int,
    options: JudgeConfig,
    gather: Gather,
    predict: GraphedEval | None = None,
) -> EvalResult:
    """Judge the detector on ``records``; a collective call that every rank makes exactly once.

    ``batches`` are this rank's photos (``rank_images``), possibly none. One ``gather`` joins the
    detections of all ranks; every rank then computes the metrics from the same arrays, so no rank
    waits for another's arithmetic. The detector runs in evaluation mode without gradients on the
    device of its parameters, and leaves with the modes it came with. ``predict`` is its forward
    pass; without one it runs eagerly.

    Raises UserError when classes of model and data differ in number, or ``nms=false`` is asked of
    a model without an NMS-free head.
    """
    _check(detector, records, options)
    if predict is None:
        predict = GraphedEval(detector, nms=options.nms, mode="off")
    with evaluating(detector):
        return judge(predict, batches, records, imgsz=imgsz, options=options, gather=gather)


def judge(
    forward: Forward,
    batches: Iterable[EvalBatch],
    records: Records,
    *,
    imgsz: int,
    options: JudgeConfig,
    gather: Gather,
) -> EvalResult:
    """``evaluate`` for any forward pass that knows the data's classes; also a collective call."""
    seen, found = _detect_all(forward, batches, records, imgsz, options)
    parts = cast(list[tuple[np.ndarray, Detections]], gather((seen, found)))
    judged = np.sort(np.concatenate([part[0] for part in parts]))
    assert np.array_equal(judged, np.arange(len(records))), "every photo is evaluated exactly once"
    detections = join_detections([part[1] for part in parts])
    result = evaluate_detections(records, detections, records.names, options.max_det)
    samples = [_sample(detections, records, i) for i in range(min(SAMPLES, len(records)))]
    return replace(result, nms=options.nms, samples=samples, replays=forward.replays)


def _check(detector: Detector, records: Records, options: JudgeConfig) -> None:
    if detector.num_classes != len(records.names):
        raise UserError(
            f"the model knows {detector.num_classes} classes and the data names "
            f"{len(records.names)}; evaluate it with the data.yaml it was trained on"
        )
    if not options.nms and not detector.dual:
        raise UserError(
            "eval.nms=false needs a model with an NMS-free head (YOLOv10 or YOLO26); "
            "leave eval.nms=true for this one"
        )


def _detect_all(
    forward: Forward,
    batches: Iterable[EvalBatch],
    records: Records,
    imgsz: int,
    options: JudgeConfig,
) -> tuple[np.ndarray, Detections]:
    """Ids of this rank's photos [n] and their detections in original pixels."""
    ids, rows, counts = [], [], []
    for batch in batches:
        assert batch.images.shape[-1] == imgsz, "batches are letterboxed to imgsz"
        outputs = detect(forward, batch.images, options)
        for image_id, output in zip(batch.ids.tolist(), outputs, strict=True):
            if image_id == PADDING_ID:
                continue
            height, width = records.sizes[image_id].tolist()
            output[:, :4] = to_original(output[:, :4], height, width, imgsz)
            ids.append(image_id)
            rows.append(output)
            counts.append(len(output))
    seen = np.array(ids, dtype=np.int64)
    flat = np.concatenate([np.zeros((0, 6), np.float32), *rows])
    image_ids = np.repeat(seen, np.array(counts, dtype=np.int64))
    return seen, Detections(image_ids, flat[:, :4], flat[:, 4], flat[:, 5].astype(np.int64))


@torch.inference_mode()
def detect(forward: Forward, images: Tensor, options: JudgeConfig) -> list[np.ndarray]:
    """float32 [k,6] of every row of a batch: xyxy px of the square, score, class.

    On a CPU the photos go through one at a time: its kernels round the last bit differently by a
    photo's place in the batch, and the place depends on the number of ranks.
    """
    outputs: list[np.ndarray] = []
    for part in images.split(1 if forward.device.type == "cpu" else len(images)):
        boxes, scores = forward(part)
        if options.nms:
            kept = detect_nms(
                boxes, scores, conf=options.conf, iou=options.iou, max_det=options.max_det
            )
        else:
            kept = detect_one_to_one(boxes, scores, conf=options.conf, max_det=options.max_det)
        outputs += [rows.numpy() for rows in kept]
    return outputs


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module has the mode it had (frozen ones too)."""
    training = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, was_training in training.items():
            module.training = was_training


def _sample(detections: Detections, records: Records, image_id: int) -> Sample:
    """The detections of one photo for a picture, clipped to it."""
    low, high = np.searchsorted(detections.image_ids, [image_id, image_id + 1])
    one = detections.take(np.arange(low, high))
    edges = np.tile(records.sizes[image_id, ::-1], 2).astype(np.float32)
    return image_id, np.clip(one.boxes, 0, edges), one.scores, one.classes
