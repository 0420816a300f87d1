"""The assignment in a few Triton kernels: claims, one program a box, then owners and weights; needs a GPU.

Shapes: B images, A anchors, G rows of the flat list. Nothing of [G,A] ever reaches memory.
"""

# Kernels are Triton's language: their values and launches have no Python types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

SMALL = 1024  # anchors that a box of common size contains, at most
BLOCK = 256  # anchors of one program


def fused_assign(
    anchors: tuple[Tensor, Tensor, Tensor],
    truth: tuple[Tensor, Tensor, Tensor, Tensor],
    topk: int,
    single: bool,
    min_side: float,
) -> tuple[Tensor, Tensor]:
    """assign.assign for float32 boxes: rows int64 [B,A] and weights float32 [B,A].

    ``anchors``: logits [B,C,A], predicted boxes [B,A,4] px, centres [A,2] px. ``truth``: the flat list.
    """
    scores, predicted, _ = anchors
    boxes, classes, _, _ = truth
    batch, _, count = scores.shape
    total, rows = batch * count, len(boxes)
    # All tables that begin at zero, in one piece of memory.
    zeros = torch.zeros(2 * total + rows, dtype=torch.int64, device=boxes.device)
    best, claims, peaks = (
        zeros[:total],
        zeros[total : 2 * total].view(torch.int32),
        zeros[2 * total :],
    )
    peaks = peaks if single else peaks.view(torch.int32)  # one key a box, or two numbers
    _claim(anchors, truth, best, claims, (topk, min_side))
    row = torch.empty((batch, count), dtype=torch.int64, device=boxes.device)
    overlap, align = (torch.empty((batch, count), device=boxes.device) for _ in range(2))
    weight = torch.empty_like(align)
    grid = (triton.cdiv(total, BLOCK),)
    _owners_kernel[grid](
        scores, predicted, boxes, classes, best, claims, row, overlap, align, peaks,
        rows, count, total, *scores.stride(), *predicted.stride(), SINGLE=single, BLOCK=BLOCK,
    )  # fmt: skip
    _weights_kernel[grid](
        row, overlap, align, peaks, weight, rows, total, SINGLE=single, BLOCK=BLOCK
    )
    return row, weight


def _claim(
    anchors: tuple[Tensor, Tensor, Tensor],
    truth: tuple[Tensor, Tensor, Tensor, Tensor],
    best: Tensor,
    claims: Tensor,
    rule: tuple[int, float],
) -> None:
    """Let every box claim its anchors.

    Args:
        anchors: as above.
        truth: as above.
        best: int64 [B*A], gets the highest (overlap, row) key among the boxes that contain the anchor, 0: none.
        claims: int32 [2*B*A], gets one more than the highest row that claims it, then the rows less the lowest.
        rule: claims of a box, and the side px to which small boxes are widened.
    """
    scores, predicted, points = anchors
    boxes, classes, image_index, valid = truth
    topk, min_side = rule
    batch, _, count = scores.shape
    rows = len(boxes)
    numbers = torch.empty(rows, SMALL, dtype=torch.int32, device=boxes.device)
    found = torch.empty(rows, dtype=torch.int32, device=boxes.device)
    block = triton.next_power_of_2(count)
    _contained_kernel[(rows,)](
        points, boxes, valid, numbers, found, count, min_side, SMALL=SMALL, BLOCK=1024, num_warps=4
    )
    # Small boxes by small programs, the rest by programs that look at all anchors.
    for is_small, size, warps in ((True, SMALL, 4), (False, block, min(max(block // 1024, 4), 16))):
        _claims_kernel[(rows,)](
            scores, predicted, points, boxes, classes, image_index, numbers, found, best, claims,
            rows, count, batch * count, *scores.stride(), *predicted.stride(), min_side,
            K=min(topk, count), IS_SMALL=is_small, SMALL=SMALL, BLOCK=size, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _inside(points, boxes, row, a, live, min_side):
    """Whether the widened box contains the centres of anchors ``a``."""
    left, top = tl.load(boxes + row * 4), tl.load(boxes + row * 4 + 1)
    right, bottom = tl.load(boxes + row * 4 + 2), tl.load(boxes + row * 4 + 3)
    x, y = tl.load(points + a * 2, live, -1e9), tl.load(points + a * 2 + 1, live, -1e9)
    middle_x, half_x = (left + right) / 2, tl.maximum(right - left, min_side) / 2
    middle_y, half_y = (top + bottom) / 2, tl.maximum(bottom - top, min_side) / 2
    inside = live & (x - (middle_x - half_x) > 1e-9) & ((middle_x + half_x) - x > 1e-9)
    return inside & (y - (middle_y - half_y) > 1e-9) & ((middle_y + half_y) - y > 1e-9)


@triton.jit
def _contained_kernel(  # noqa: PLR0913 (a kernel's tensors are plain arguments)
    points, boxes, valid, numbers, found, count, min_side,
    SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The numbers of the anchors in each box, in order, as far as there is room, and how many."""
    row = tl.program_id(0)
    total = 0
    if tl.load(valid + row) != 0:
        for start in range(0, count, BLOCK):
            a = start + tl.arange(0, BLOCK)
            inside = _inside(points, boxes, row, a, a < count, min_side)
            place = total + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(numbers + row * SMALL + place, a, inside & (place < SMALL))
            total += tl.sum(inside.to(tl.int32), 0)
    tl.store(found + row, total)


@triton.jit
def _ciou(  # noqa: PLR0913 (two boxes)
    left1, top1, right1, bottom1, left2, top2, right2, bottom2
):  # fmt: skip
    """boxes.ciou, operation by operation."""
    width1, height1 = right1 - left1, bottom1 - top1 + 1e-7
    width2, height2 = right2 - left2, bottom2 - top2 + 1e-7
    shared_width = tl.maximum(tl.minimum(right1, right2) - tl.maximum(left1, left2), 0.0)
    shared_height = tl.maximum(tl.minimum(bottom1, bottom2) - tl.maximum(top1, top2), 0.0)
    shared = shared_width * shared_height
    iou = tl.div_rn(shared, width1 * height1 + width2 * height2 - shared + 1e-7)
    hull_width = tl.maximum(right1, right2) - tl.minimum(left1, left2)
    hull_height = tl.maximum(bottom1, bottom2) - tl.minimum(top1, top2)
    diagonal2 = hull_width * hull_width + hull_height * hull_height + 1e-7
    apart_x, apart_y = left2 + right2 - left1 - right1, top2 + bottom2 - top1 - bottom1
    centre2 = apart_x * apart_x + apart_y * apart_y
    shape = libdevice.atan(tl.div_rn(width2, height2)) - libdevice.atan(width1 / height1)
    v = 0.4052847345693511 * shape * shape  # 4 / pi^2
    alpha = tl.div_rn(v, 1.0 - iou + v + 1e-7)
    return iou - (tl.div_rn(centre2, 4.0 * diagonal2) + alpha * v)


@triton.jit
def _claims_kernel(  # noqa: PLR0913 (a kernel's tensors are plain arguments)
    scores, predicted, points, boxes, classes, image_index, numbers, found, best, claims,
    rows, count, total, score_b, score_c, score_a, box_b, box_a, box_4, min_side,
    K: tl.constexpr, IS_SMALL: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    contained = tl.load(found + row)
    if contained == 0 or (contained <= SMALL) != IS_SMALL:
        return
    image = tl.load(image_index + row)
    lane = tl.arange(0, BLOCK)
    if IS_SMALL:
        inside = lane < contained
        a = tl.load(numbers + row * SMALL + lane, inside, 0)
    else:
        a = lane
        inside = _inside(points, boxes, row, a, a < count, min_side)
    box = predicted + image * box_b + a * box_a
    overlap = _ciou(
        tl.load(boxes + row * 4), tl.load(boxes + row * 4 + 1),
        tl.load(boxes + row * 4 + 2), tl.load(boxes + row * 4 + 3),
        tl.load(box, inside, 0.0), tl.load(box + box_4, inside, 0.0),
        tl.load(box + 2 * box_4, inside, 0.0), tl.load(box + 3 * box_4, inside, 0.0),
    )  # fmt: skip
    overlap = tl.where(inside, tl.maximum(overlap, 0.0), 0.0)
    score = scores + image * score_b + tl.load(classes + row) * score_c + a * score_a
    logit = tl.load(score, inside, 0.0).to(tl.float32)
    cube = overlap * overlap * overlap
    align = tl.where(inside, tl.sqrt(1.0 / (1.0 + tl.exp(-logit))) * (cube * cube), 0.0)
    # The first of several equal overlaps wins, hence the descending row number.
    key = (overlap.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (rows - 1 - row)
    tl.atomic_max(best + image * count + a, key, inside, sem="relaxed")
    for _ in tl.static_range(K):
        # An alignment of 0 has no weight: such a claim would only dispute the anchor.
        most = tl.max(align, 0)
        which = tl.min(tl.where(align == most, a, count), 0)  # the first anchor of equals
        place = claims + image * count + which
        tl.atomic_max(place, row + 1, most > 0, sem="relaxed")
        tl.atomic_max(place + total, rows - row, most > 0, sem="relaxed")
        align = tl.where(a == which, 0.0, align)


@triton.jit
def _owners_kernel(  # noqa: PLR0913 (as above)
    scores, predicted, boxes, classes, best, claims, row_out, overlap_out, align_out, peaks,
    rows, count, total, score_b, score_c, score_a, box_b, box_a, box_4,
    SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Who owns each anchor, how well they agree, and the best of every box; align -1: nobody."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    image, a = (i // count).to(tl.int64), i % count
    highest = tl.load(claims + i, live, 0) - 1
    lowest = rows - tl.load(claims + total + i, live, 0)
    claimed = highest >= 0
    # Wanted by several: the one that overlaps it most among ALL boxes that contain it.
    disputed = rows - 1 - (tl.load(best + i, live, 0) & 0xFFFFFFFF).to(tl.int32)
    row = tl.where(claimed & (highest != lowest), disputed, tl.maximum(highest, 0))
    box = predicted + image * box_b + a * box_a
    overlap = _ciou(
        tl.load(boxes + row * 4, claimed, 0.0), tl.load(boxes + row * 4 + 1, claimed, 0.0),
        tl.load(boxes + row * 4 + 2, claimed, 0.0), tl.load(boxes + row * 4 + 3, claimed, 0.0),
        tl.load(box, claimed, 0.0), tl.load(box + box_4, claimed, 0.0),
        tl.load(box + 2 * box_4, claimed, 0.0), tl.load(box + 3 * box_4, claimed, 0.0),
    )  # fmt: skip
    overlap = tl.maximum(overlap, 0.0)
    score = scores + image * score_b + tl.load(classes + row, claimed, 0) * score_c + a * score_a
    logit = tl.load(score, claimed, 0.0).to(tl.float32)
    cube = overlap * overlap * overlap
    align = tl.sqrt(1.0 / (1.0 + tl.exp(-logit))) * (cube * cube)
    if SINGLE:
        # Rank by alignment, the first anchor of equals.
        rank = (align.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (total - 1 - i)
        tl.atomic_max(peaks + row, rank, claimed, sem="relaxed")
    else:
        tl.atomic_max(peaks + row, align.to(tl.int32, bitcast=True), claimed, sem="relaxed")
        place = peaks + rows + row
        tl.atomic_max(place, overlap.to(tl.int32, bitcast=True), claimed, sem="relaxed")
    tl.store(row_out + i, row.to(tl.int64), live)
    tl.store(overlap_out + i, overlap, live)
    tl.store(align_out + i, tl.where(claimed, align, -1.0), live)


@triton.jit
def _weights_kernel(  # noqa: PLR0913 (as above)
    rows_of, overlaps, aligns, peaks, weights, rows, total,
    SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Target scores: alignments, scaled for each box so that its best one equals its best overlap."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    row = tl.load(rows_of + i, live, 0)
    align = tl.load(aligns + i, live, -1.0)
    learns = align >= 0
    if SINGLE:
        rank = (align.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (total - 1 - i)
        learns = learns & (rank == tl.load(peaks + row, learns, -1))
        best_align, best_overlap = align, tl.load(overlaps + i, live, 0.0)
    else:
        best_align = tl.load(peaks + row, learns, 0).to(tl.float32, bitcast=True)
        best_overlap = tl.load(peaks + rows + row, learns, 0).to(tl.float32, bitcast=True)
    weight = tl.div_rn(align * best_overlap, best_align + 1e-9)
    tl.store(weights + i, tl.where(learns, weight, 0.0), live)
