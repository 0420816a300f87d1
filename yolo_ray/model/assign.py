"""Task-aligned assignment from a FLAT ground-truth list: fixed shapes, nothing read on the host.

Shapes: B images, A anchors, C classes, G rows of the flat list (real boxes and padding), K claims
a box may make. Source: TOOD (arXiv 2108.07755) with alignment score^0.5 * CIoU^6; the second,
one-to-one rule is the dual assignment of YOLOv10 (arXiv 2405.14458).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from yolo_ray.model.boxes import ciou

CHUNK = 1024
"""Rows of the flat list handled at once: bounds the memory of the [G,A] tensors."""

NORM_EPS = 1e-9
LOW_32 = (1 << 32) - 1


class Truth(NamedTuple):
    """The flat list: ``boxes`` [G,4] xyxy px, ``classes``, ``image_index``, ``valid`` (bool) [G].

    Padding rows hold valid = False, an image index inside the batch and any class in range.
    """

    boxes: Tensor
    classes: Tensor
    image_index: Tensor
    valid: Tensor


class Rule(NamedTuple):
    """Who may claim: every box its ``topk`` best anchors; ``single`` keeps one anchor a box."""

    topk: int
    single: bool


class Assignment(NamedTuple):
    """For every anchor [B,A]: the row of the list it learns and its target score.

    ``weight`` is 0 for background, where ``row`` means nothing (it is a valid index).
    """

    row: Tensor
    weight: Tensor


ONE_TO_MANY = Rule(topk=10, single=False)
ONE_TO_ONE = Rule(topk=7, single=True)


class _Anchors(NamedTuple):
    """What the predictions say, without gradient."""

    scores_BCA: Tensor
    boxes_BA4: Tensor
    points_A2: Tensor


@torch.no_grad()
def assign(
    scores_BCA: Tensor,
    boxes_BA4: Tensor,
    points_A2: Tensor,
    truth: Truth,
    rule: Rule,
    *,
    min_side: float,
    chunk: int = CHUNK,
) -> Assignment:
    """Assign every anchor to a box or to the background.

    ``scores_BCA`` are logits, ``boxes_BA4`` decoded boxes xyxy px, ``points_A2`` anchor centres px.
    A box claims the ``topk`` best aligned of the anchors whose centres lie inside it; sides below
    ``min_side`` px (the second stride) are first widened to it. An anchor claimed by several boxes
    goes to the one with the highest overlap among ALL boxes that contain it. Target scores are the
    alignments, scaled for each box so that its best one equals its best overlap.
    """
    anchors = _Anchors(scores_BCA, boxes_BA4, points_A2)
    if truth.boxes.is_cuda and truth.boxes.dtype == torch.float32:
        from yolo_ray.model.fused_assign import fused_assign  # Triton comes with torch for GPUs

        return Assignment(*fused_assign(anchors, truth, rule.topk, rule.single, min_side))
    row, claimed = _owners(anchors, truth, rule.topk, min_side, chunk)
    overlap, align = _alignment_of_owner(anchors, truth, row)
    rows = truth.boxes.shape[0]
    if rule.single:
        # Rank by alignment, the first anchor of equals; both in one integer, so one scatter does.
        last = row.numel() - 1
        rank = torch.arange(last, -1, -1, device=row.device).view_as(row)
        key = _ordered_bits(align) | rank
        claimed = claimed & (key == _peaks(key, row, claimed, rows)[row])
    align = torch.where(claimed, align, 0)
    best_align = _peaks(align, row, claimed, rows)
    best_overlap = _peaks(overlap, row, claimed, rows)
    return Assignment(row, align * best_overlap[row] / (best_align[row] + NORM_EPS))


def _owners(
    anchors: _Anchors, truth: Truth, topk: int, min_side: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Row of the list that owns each anchor [B,A], and whether any box claimed it [B,A]."""
    batch, _, count = anchors.scores_BCA.shape
    rows = truth.boxes.shape[0]
    assert rows > 0, "the capacity of the flat list is at least one row"
    device = truth.boxes.device
    row_G = torch.arange(rows, device=device)
    best_BA = torch.zeros(batch, count, dtype=torch.int64, device=device)
    claims, lives = [], []
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        piece = Truth(*(column[part] for column in truth))
        inside, overlap, align = _alignment(anchors, piece, min_side)
        most, top = align.topk(min(topk, count), dim=1)
        claims.append(piece.image_index[:, None] * count + top)
        # An alignment of 0 has no weight; such a claim would only dispute the anchor, and which of many
        # zeros topk returns is nobody's choice.
        lives.append(inside.gather(1, top) & (most > 0))
        # The first of several equal overlaps wins, hence the descending row number.
        key = _ordered_bits(overlap) | (rows - 1 - row_G[part, None])
        key = torch.where(inside, key, 0)
        best_BA.scatter_reduce_(0, piece.image_index[:, None].expand_as(key), key, "amax")
    claim, live = torch.cat(claims), torch.cat(lives)
    # Highest and lowest claimer of each anchor: they differ where several boxes want it.
    highest = _peaks((row_G[:, None] + 1).expand_as(claim), claim, live, batch * count)
    lowest = rows - _peaks((rows - row_G[:, None]).expand_as(claim), claim, live, batch * count)
    highest, lowest = (highest - 1).view(batch, count), lowest.view(batch, count)
    return _owner_rows(best_BA, highest, lowest, rows)


def _owner_rows(
    best_BA: Tensor, highest_BA: Tensor, lowest_BA: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """The owner of each anchor: its one claimer, or the best overlap where several claim it."""
    claimed = highest_BA >= 0
    contested = claimed & (highest_BA != lowest_BA)
    row = torch.where(contested, rows - 1 - (best_BA & LOW_32), highest_BA.clamp(min=0))
    return row, claimed


def _alignment(anchors: _Anchors, truth: Truth, min_side: float) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates (bool), overlaps and alignments of every box with every anchor, [G,A] each."""
    low, high = truth.boxes[:, :2], truth.boxes[:, 2:]
    centre, half = (low + high) / 2, (high - low).clamp(min=min_side) / 2
    (left, top), (right, bottom) = (centre - half).unbind(1), (centre + half).unbind(1)
    x_A, y_A = anchors.points_A2.unbind(1)
    inside = (x_A - left[:, None] > NORM_EPS) & (right[:, None] - x_A > NORM_EPS)
    inside &= (y_A - top[:, None] > NORM_EPS) & (bottom[:, None] - y_A > NORM_EPS)
    inside &= truth.valid[:, None]
    # Gathered as [G,4,A], so that every coordinate is one contiguous plane.
    predicted = anchors.boxes_BA4.movedim(2, 1)[truth.image_index].movedim(1, 2)
    overlap = torch.where(inside, ciou(truth.boxes[:, None], predicted).clamp(min=0), 0)
    logits = anchors.scores_BCA[truth.image_index, truth.classes]
    return inside, overlap, torch.where(inside, _aligned(logits, overlap), 0)


def _alignment_of_owner(anchors: _Anchors, truth: Truth, row_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Overlap and alignment of each anchor with the box it belongs to, [B,A] each."""
    overlap = ciou(rows_of(truth.boxes, row_BA), anchors.boxes_BA4).clamp(min=0)
    logits = anchors.scores_BCA.gather(1, truth.classes[row_BA][:, None]).squeeze(1)
    return overlap, _aligned(logits.to(overlap.dtype), overlap)


def rows_of(values_G4: Tensor, row_BA: Tensor) -> Tensor:
    """``values[row]``, [B,A,4], every column a contiguous plane (rows of 16 bytes are slow to gather)."""
    return values_G4.T.contiguous()[:, row_BA].movedim(0, -1)


def _aligned(logits: Tensor, overlap: Tensor) -> Tensor:
    """score^0.5 * overlap^6."""
    return logits.sigmoid().sqrt() * (overlap * overlap * overlap).square()


def _ordered_bits(values: Tensor) -> Tensor:
    """Non-negative values as int64, their order kept, the low 32 bits free for an index."""
    return values.float().contiguous().view(torch.int32).long() << 32


def _peaks(values: Tensor, index: Tensor, live: Tensor, size: int) -> Tensor:
    """Largest of the live, non-negative values of every index, 0 where there is none, [size].

    Dead entries each go to a place of their own: thousands of atomics on one address are slow.
    """
    spare = torch.arange(size, size + index.numel(), device=index.device)
    place = torch.where(live.flatten(), index.flatten(), spare)
    peaks = torch.zeros(size + index.numel(), dtype=values.dtype, device=values.device)
    return peaks.scatter_reduce_(0, place, values.flatten(), "amax")[:size]
