"""From head outputs to detections: decoding, NMS, and the NMS-free choice of YOLOv10 and YOLO26.

Letters: b images, A anchors, C classes, S the square image side, k detections of one image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from yolo_ray.model.boxes import HeadOutput, decode_boxes, make_anchors

MAX_CANDIDATES = 30000


def decode(
    head: HeadOutput, strides: Sequence[int], reg_max: int, imgsz: int
) -> tuple[Tensor, Tensor]:
    """Boxes float32 [b,A,4] xyxy px of the S x S input and class probabilities float32 [b,A,C]."""
    points_A2, strides_A = make_anchors(imgsz, strides, device=head.boxes.device)
    boxes_bA4 = decode_boxes(head.boxes.float(), points_A2, strides_A, reg_max)
    return boxes_bA4, head.scores.float().sigmoid().movedim(1, 2)


def detect_nms(
    boxes_bA4: Tensor,
    scores_bAC: Tensor,
    *,
    conf: float,
    iou: float,
    max_det: int,
    max_candidates: int = MAX_CANDIDATES,
) -> list[Tensor]:
    """Class-aware non-maximum suppression with several labels a box, each image for itself.

    Ultralytics' validation protocol: every (anchor, class) with a score above ``conf`` is a
    candidate, the best ``max_candidates`` stay, boxes of one class that overlap a better one by
    more than ``iou`` go, and the best ``max_det`` remain. Boxes that are not finite and NaN
    scores are no candidates.

    Returns one float32 [k,6] an image: xyxy px, score, class; descending score, ties by anchor
    and class.
    """
    detections = []
    for boxes_A4, scores_AC in zip(boxes_bA4.float(), scores_bAC.float(), strict=True):
        boxes, scores, classes = _candidates(boxes_A4, scores_AC, conf)
        best = scores.argsort(descending=True, stable=True)[:max_candidates]
        boxes, scores, classes = boxes[best], scores[best], classes[best]
        # batched_nms may return equal scores in any order; candidates are sorted, so sort places
        kept = batched_nms(boxes, scores, classes, iou).sort().values[:max_det]
        detections.append(_rows(boxes[kept], scores[kept], classes[kept]))
    return detections


def detect_one_to_one(
    boxes_bA4: Tensor, scores_bAC: Tensor, *, conf: float, max_det: int
) -> list[Tensor]:
    """The best ``max_det`` of all (anchor, class) pairs above ``conf``, without suppression.

    For heads trained one-to-one (YOLOv10, Wang et al. 2024), which give one box an object.
    Returns float32 [k,6] an image as ``detect_nms`` does.
    """
    detections = []
    for boxes_A4, scores_AC in zip(boxes_bA4.float(), scores_bAC.float(), strict=True):
        boxes, scores, classes = _candidates(boxes_A4, scores_AC, conf)
        best = scores.argsort(descending=True, stable=True)[:max_det]
        detections.append(_rows(boxes[best], scores[best], classes[best]))
    return detections


def _candidates(boxes_A4: Tensor, scores_AC: Tensor, conf: float) -> tuple[Tensor, Tensor, Tensor]:
    """Finite boxes [n,4], scores [n] and classes [n] of all pairs above ``conf``, by anchor."""
    finite_A1 = boxes_A4.isfinite().all(dim=1, keepdim=True)
    anchors, classes = torch.where((scores_AC > conf) & finite_A1)
    return boxes_A4[anchors], scores_AC[anchors, classes], classes


def _rows(boxes: Tensor, scores: Tensor, classes: Tensor) -> Tensor:
    return torch.cat([boxes, scores[:, None], classes[:, None].float()], dim=1)
