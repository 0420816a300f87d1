"""Suppression image by image, as it was first written, and inputs on which a batch must give the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import nms

RULES: dict[str, Any] = {"conf": 0.001, "iou": 0.7, "max_det": 300}
Case = tuple[str, Tensor, Tensor, dict[str, Any]]


def image_by_image(
    boxes_bA4: Tensor, scores_bAC: Tensor, *, suppress: Any, conf: float, iou: float,
    max_det: int, max_candidates: int = 30000,
) -> list[Tensor]:  # fmt: skip
    """The reference; ``suppress(boxes, scores, classes, iou)`` gives the places that stay, in any order."""
    detections = []
    for boxes_A4, scores_AC in zip(boxes_bA4, scores_bAC, strict=True):
        finite_A1 = boxes_A4.isfinite().all(dim=1, keepdim=True)
        anchors, classes = torch.where((scores_AC > conf) & finite_A1)
        boxes, scores = boxes_A4[anchors], scores_AC[anchors, classes]
        best = scores.argsort(descending=True, stable=True)[:max_candidates]
        boxes, scores, classes = boxes[best], scores[best], classes[best]
        kept = suppress(boxes, scores, classes, iou).sort().values[:max_det]
        columns = (boxes[kept], scores[kept, None], classes[kept, None].float())
        detections.append(torch.cat(columns, dim=1))
    return detections


def class_by_class(boxes: Tensor, scores: Tensor, classes: Tensor, iou: float) -> Tensor:
    """torchvision's suppression of each class for itself, boxes as they are (sorted by score)."""
    kept = []
    for one in classes.unique():
        rows = torch.where(classes == one)[0]
        # Falling places for scores: equal ones must not change places.
        kept.append(rows[nms(boxes[rows], -torch.arange(len(rows)).float(), iou)])
    return torch.cat([torch.zeros(0, dtype=torch.int64), *kept])


def whole_boxes(seed: int, images: int, anchors: int, classes: int) -> tuple[Tensor, Tensor]:
    """Crowded boxes on whole pixels, whose overlaps are the same wherever they are shifted."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 40, (images, anchors, 2), generator=generator).float()
    size = torch.randint(10, 30, (images, anchors, 2), generator=generator).float()
    scores = torch.rand(images, anchors, classes, generator=generator) ** 4
    return torch.cat([corner, corner + size], dim=2), scores


def cases() -> Iterator[Case]:
    """Name, boxes [b,A,4], scores [b,A,C] and rules."""
    yield "random", *whole_boxes(0, 5, 400, 3), RULES
    yield "one image", *whole_boxes(1, 1, 300, 4), RULES
    yield "one class, more than a tile", *whole_boxes(2, 2, 1500, 1), RULES | {"iou": 0.45}
    yield "all stay", *whole_boxes(3, 2, 700, 1), RULES | {"iou": 1.0}
    yield "the first only", *whole_boxes(4, 3, 200, 2), RULES | {"max_det": 1}
    yield "few candidates", *whole_boxes(5, 3, 300, 3), RULES | {"max_candidates": 37}
    yield "one candidate", *whole_boxes(6, 3, 50, 3), RULES | {"max_candidates": 1}
    boxes, scores = whole_boxes(7, 4, 200, 2)
    yield "equal scores", boxes, (scores * 3).round() / 3, RULES
    yield "all equal", boxes, torch.full_like(scores, 0.5), RULES
    scores = scores.clone()
    scores[0], scores[2], scores[3, 5:] = 0.0, 0.0009, 0.0
    yield "images without a candidate", boxes, scores, RULES
    yield "no candidate at all", boxes, torch.zeros_like(scores), RULES
    boxes, scores = whole_boxes(8, 3, 300, 2)
    boxes[0, ::3, 1], boxes[1, :, 2], boxes[2, 7] = float("nan"), float("inf"), -float("inf")
    scores[2, ::2, 1] = float("nan")
    yield "not finite", boxes, scores, RULES
    boxes, scores = whole_boxes(9, 2, 300, 2)
    boxes[0, :, 2:] = boxes[0, :, :2]  # no area: 0 / 0 is no overlap
    boxes[1] = boxes[1, 0]
    yield "without area, all the same", boxes, scores, RULES
    # Overlaps of exactly 3/5, which float32 rounds up and 0.6 in double does not.
    boxes = torch.tensor([[[0.0, 0, 8, 1], [2, 0, 10, 1], [4, 0, 12, 1], [40, 0, 48, 1]]])
    for iou in (0.6, 0.5999, 0.6001):
        yield f"exactly 0.6 against {iou}", boxes, torch.rand(1, 4, 2), RULES | {"iou": iou}


def far_too_many() -> Case:
    """More candidates than any image may have."""
    boxes, scores = whole_boxes(10, 2, 8000, 5)
    return "too many", boxes, scores + 0.01, RULES | {"iou": 0.3}
