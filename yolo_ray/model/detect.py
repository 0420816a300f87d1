"""From head outputs to detections: decoding, NMS, and the NMS-free choice of YOLOv10 and YOLO26.

Letters: b images, A anchors, C classes, S the square image side, k detections of one image, N candidates of
all images. A whole batch goes through a few kernels, and the host waits twice: for the number of candidates and
for the detections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yolo_ray.model.boxes import HeadOutput, decode_boxes, make_anchors

MAX_CANDIDATES = 30000
Kept = tuple[Tensor, Tensor]  # places int64 [b,max_det] in N, and how many int64 [b] of them count


class Candidates(NamedTuple):
    """Image by image, each by descending score, ties by anchor and class."""

    boxes: Tensor  # float32 [N,4] xyxy px, finite
    scores: Tensor  # float32 [N]
    classes: Tensor  # int64 [N]
    counts: Tensor  # int64 [b], of each image


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

    Returns one float32 [k,6] an image, on the host: xyxy px, score, class; descending score, ties
    by anchor and class.
    """
    found = _candidates(boxes_bA4.float(), scores_bAC.float(), conf)
    suppress = _SUPPRESS[found.boxes.device.type]
    return _rows(found, suppress(found, found.counts.clamp(max=max_candidates), iou, max_det))


def detect_one_to_one(
    boxes_bA4: Tensor, scores_bAC: Tensor, *, conf: float, max_det: int
) -> list[Tensor]:
    """The best ``max_det`` of all (anchor, class) pairs above ``conf``, without suppression.

    For heads trained one-to-one (YOLOv10, Wang et al. 2024), which give one box an object.
    Returns float32 [k,6] an image as ``detect_nms`` does.
    """
    found = _candidates(boxes_bA4.float(), scores_bAC.float(), conf)
    first = torch.arange(max_det, device=found.boxes.device)
    return _rows(found, (_starts(found)[:, None] + first, found.counts.clamp(max=max_det)))


def _candidates(boxes_bA4: Tensor, scores_bAC: Tensor, conf: float) -> Candidates:
    """All pairs above ``conf`` whose box is finite; waits for the device, which alone knows how many."""
    finite_bA1 = boxes_bA4.isfinite().all(dim=2, keepdim=True)
    images, anchors, classes = torch.where((scores_bAC > conf) & finite_bA1)
    scores = scores_bAC[images, anchors, classes]
    batch = torch.arange(len(boxes_bA4), device=images.device)
    counts = torch.searchsorted(images, batch, right=True).diff(prepend=batch[:1])
    order = scores.argsort(descending=True, stable=True)
    if len(batch) > 1:
        order = order[images[order].argsort(stable=True)]
    boxes = boxes_bA4[images[order], anchors[order]]
    return Candidates(boxes, scores[order], classes[order], counts)


def _starts(found: Candidates) -> Tensor:
    """Where the candidates of each image begin, int64 [b]."""
    return found.counts.cumsum(0) - found.counts


def _suppress_each(found: Candidates, used_b: Tensor, iou: float, max_det: int) -> Kept:
    """torchvision's suppression of the first ``used_b`` candidates of each image, one after the other."""
    from torchvision.ops import (
        batched_nms,
    )  # brings torch.compile along: 3 s of every process's start

    places = torch.zeros(len(used_b), max_det, dtype=torch.int64)
    numbers = torch.zeros_like(used_b)
    for image, (start, used) in enumerate(
        zip(_starts(found).tolist(), used_b.tolist(), strict=True)
    ):
        rows = slice(start, start + used)
        kept = batched_nms(found.boxes[rows], found.scores[rows], found.classes[rows], iou)
        # It may return equal scores in any order; candidates are sorted, so places are sorted.
        kept = kept.sort().values[:max_det]
        places[image, : len(kept)] = kept + start
        numbers[image] = len(kept)
    return places, numbers


def _suppress_together(found: Candidates, used_b: Tensor, iou: float, max_det: int) -> Kept:
    """The same for all images at once, without a word to the host.

    torchvision would be called for each image, and shifts the boxes of each class apart in float32,
    which rounds them; here they stay as they are.
    """
    from yolo_ray.model.suppress import suppress_together  # Triton: on a GPU only

    counts = torch.stack((found.counts, used_b), 1)
    return suppress_together(found.boxes, found.classes, counts, iou=iou, max_det=max_det)


_SUPPRESS: dict[str, Callable[[Candidates, Tensor, float, int], Kept]] = {
    "cpu": _suppress_each,
    "cuda": _suppress_together,
}


def _rows(found: Candidates, kept: Kept) -> list[Tensor]:
    """The kept candidates of each image on the host, float32 [k,6]; waits for the device once."""
    places, numbers = kept
    if not len(found.scores):
        return [torch.zeros(0, 6) for _ in numbers]
    places = places.clamp(max=len(found.scores) - 1)
    columns = (found.boxes, found.scores[:, None], found.classes[:, None].float())
    rows = torch.cat([column[places] for column in columns], dim=2).cpu()
    return [image[:number].clone() for image, number in zip(rows, numbers.tolist(), strict=True)]
