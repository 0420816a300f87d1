"""The detection loss of all families: fixed shapes, no host reads, un-normalised sums.

Shapes: B images, A anchors, C classes, G rows of the flat ground-truth list, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from yolo_ray.model.assign import (
    CHUNK,
    ONE_TO_MANY,
    ONE_TO_ONE,
    Assignment,
    Rule,
    Truth,
    assign,
    rows_of,
)
from yolo_ray.model.boxes import (
    HeadOutput,
    boxes_from_distances,
    ciou,
    decode_boxes,
    dfl_loss,
    distances_from_boxes,
    expected_distances,
    make_anchors,
)

FIRST_GAIN, LAST_GAIN = 0.8, 0.1
Grid = tuple[Tensor, Tensor]  # centres [A,2] and strides [A], px


class LossSums(NamedTuple):
    """Sums over this worker's rows, before gains and before division by the score sum.

    ``items`` [H,3]: box, cls and dfl (L1 when reg_max is 1), with gradients.
    ``scores`` [H]: sums of the target scores, detached.
    """

    items: Tensor
    scores: Tensor


class Head(Protocol):
    """What the loss must know about a detector."""

    reg_max: int
    strides: tuple[int, ...]
    dual: bool


def head_gains_at(epoch: int, epochs: int, heads: int = 2) -> tuple[float, ...]:
    """Weight of each head's loss in an epoch (0-based) of a run of ``epochs``.

    Two heads: one-to-many falls from 0.8 to 0.1 along a line, one-to-one is the rest (the
    schedule that the installed Ultralytics gives YOLOv10 and YOLO26). One head: always 1.
    """
    if heads == 1:
        return (1.0,)
    left = max(1 - epoch / max(epochs - 1, 1), 0)
    many = left * (FIRST_GAIN - LAST_GAIN) + LAST_GAIN if epoch else FIRST_GAIN
    return many, max(1.0 - many, 0)


class _Terms(NamedTuple):
    """The passes over all logits: in torch, or fused for a GPU; ``grid`` is (centres, strides) in px."""

    decode: Callable[[Tensor, Grid, int], Tensor]
    """(raw, grid, reg_max) -> predicted boxes [B,A,4] px, without gradient."""
    boxes: Callable[[Tensor, Assignment, Tensor, tuple[Grid, int, int]], Tensor]
    """(raw, assignment, true boxes, (grid, reg_max, imgsz)) -> sums of box and dfl (or L1) loss [2]."""
    classes: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(logits, class of each anchor, weight) -> sum of the class loss."""


def _decode(raw_BDA: Tensor, grid: Grid, reg_max: int) -> Tensor:
    return decode_boxes(raw_BDA.detach(), *grid, reg_max)


def _box_loss(
    raw: Tensor, assigned: Assignment, truth_G4: Tensor, how: tuple[Grid, int, int]
) -> Tensor:
    (points, strides), reg_max, imgsz = how
    # Background gets a harmless box on both sides: 0 * finite is 0, 0 * inf would be NaN.
    foreground = (assigned.weight > 0)[..., None]
    cell = torch.cat((points - strides[:, None], points + strides[:, None]), 1)
    target = torch.where(foreground, rows_of(truth_G4, assigned.row), cell)
    wanted = distances_from_boxes(target, points, strides)
    distances = expected_distances(raw, reg_max)
    if reg_max > 1:
        side = dfl_loss(raw, wanted, reg_max)
    else:
        side = ((raw - wanted) * (strides / imgsz)).abs().mean(1)
    predicted = boxes_from_distances(distances, points, strides)
    overlap = ciou(torch.where(foreground, predicted, cell), target)
    box = ((1 - overlap) * assigned.weight).sum()
    return torch.stack((box, (side * assigned.weight).sum()))


def _class_loss(logits_BCA: Tensor, classes_BA: Tensor, weight_BA: Tensor) -> Tensor:
    target = torch.zeros_like(logits_BCA)
    target.scatter_(1, classes_BA[:, None], weight_BA[:, None])
    return functional.binary_cross_entropy_with_logits(logits_BCA, target, reduction="sum")


TORCH_TERMS = _Terms(_decode, _box_loss, _class_loss)


def _fused_terms() -> _Terms:
    from yolo_ray.model import fused_loss  # Triton comes with torch for GPUs only

    return _Terms(fused_loss.decoded_boxes, fused_loss.box_loss, fused_loss.class_loss)


class DetectionLoss:
    """Assignment, CIoU, classification and distance loss of one or two heads."""

    def __init__(self, detector: Head, *, chunk: int = CHUNK) -> None:
        self._reg_max = detector.reg_max
        self._strides = tuple(detector.strides)
        self._rules = (ONE_TO_MANY, ONE_TO_ONE) if detector.dual else (ONE_TO_MANY,)
        self._chunk = chunk
        self._grids: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        heads: Sequence[HeadOutput],
        boxes: Tensor,
        classes: Tensor,
        image_index: Tensor,
        valid: Tensor,
        imgsz: int,
    ) -> LossSums:
        """Loss sums of the heads (one-to-many first) for ``boxes`` [G,4] xyxy px and the rest [G].

        Half precision is computed in float32, float64 stays. Rows with ``valid`` False contribute
        nothing. Every term keeps a gradient, also when no image has a box.
        """
        assert len(heads) == len(self._rules), "one output per head of the detector"
        precise = heads[0].boxes.dtype == torch.float64
        dtype = torch.float64 if precise else torch.float32
        truth = Truth(boxes.to(dtype), classes, image_index, valid)
        grid = self._grid(imgsz, boxes.device, dtype)
        if precise or not boxes.is_cuda:
            terms = TORCH_TERMS
            heads = [HeadOutput(*(part.to(dtype) for part in head)) for head in heads]
        else:
            terms = _fused_terms()
        sums = [
            self._head_sums(head, truth, grid, rule, (imgsz, terms))
            for head, rule in zip(heads, self._rules, strict=True)
        ]
        return LossSums(torch.stack([s.items for s in sums]), torch.stack([s.scores for s in sums]))

    def _head_sums(
        self,
        head: HeadOutput,
        truth: Truth,
        grid: Grid,
        rule: Rule,
        how: tuple[int, _Terms],
    ) -> LossSums:
        """Items [3] and score sum [] of one head."""
        imgsz, terms = how
        predicted = terms.decode(head.boxes, grid, self._reg_max)
        assigned = assign(
            head.scores.detach(),
            predicted,
            grid[0],
            truth,
            rule,
            min_side=self._strides[min(1, len(self._strides) - 1)],
            chunk=self._chunk,
        )
        cls = terms.classes(head.scores, truth.classes[assigned.row], assigned.weight)
        box, side = terms.boxes(
            head.boxes, assigned, truth.boxes, (grid, self._reg_max, imgsz)
        ).unbind()
        return LossSums(torch.stack((box, cls, side)), assigned.weight.sum())

    def _grid(self, imgsz: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        key = (imgsz, device, dtype)
        if key in self._grids:
            return self._grids[key]
        grid = make_anchors(imgsz, self._strides, device=device, dtype=dtype)
        # A tensor made during capture has no values before the first replay: never keep it.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._grids[key] = grid
        return grid
