"""The claims of all boxes in one Triton kernel, one program a box; needs a GPU.

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


def fused_claims(
    scores_BCA: Tensor,
    boxes_BA4: Tensor,
    points_A2: Tensor,
    truth: tuple[Tensor, Tensor, Tensor, Tensor],
    topk: int,
    min_side: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``assign`` needs to know of every anchor, each int64 [B,A].

    Returns:
        best: the highest (overlap, row) key among the boxes that contain the anchor, 0: none.
        highest: the highest row that claims it, -1: none.
        lowest: the lowest such row; means nothing where none claims it.
    """
    boxes, classes, image_index, valid = truth
    batch, _, count = scores_BCA.shape
    rows = len(boxes)
    best = torch.zeros(batch, count, dtype=torch.int64, device=boxes.device)
    claims = torch.zeros(2, batch, count, dtype=torch.int32, device=boxes.device)
    numbers = torch.empty(rows, SMALL, dtype=torch.int32, device=boxes.device)
    found = torch.empty(rows, dtype=torch.int32, device=boxes.device)
    block = triton.next_power_of_2(count)
    _contained_kernel[(rows,)](
        points_A2,
        boxes,
        valid,
        numbers,
        found,
        count,
        min_side,
        SMALL=SMALL,
        BLOCK=1024,
        num_warps=4,
    )
    # Small boxes by small programs, the rest by programs that look at all anchors.
    for is_small, size, warps in ((True, SMALL, 4), (False, block, min(max(block // 1024, 4), 16))):
        _claims_kernel[(rows,)](
            scores_BCA, boxes_BA4, points_A2, boxes, classes, image_index, numbers, found, best, claims,
            rows, count, batch * count, *scores_BCA.stride(), *boxes_BA4.stride(), min_side,
            K=min(topk, count), IS_SMALL=is_small, SMALL=SMALL, BLOCK=size, num_warps=warps,
        )  # fmt: skip
    highest, lowest = claims.long().unbind(0)
    return best, highest - 1, rows - lowest


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
