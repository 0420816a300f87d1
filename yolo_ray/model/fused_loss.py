"""The terms of the loss that run over [B,C,A] and [B,4*reg_max,A], in Triton; needs a GPU.

Shapes: B images, A anchors, C classes, R = reg_max bins. Logits are read in the precision and the layout the
network gives (anchors or channels innermost), arithmetic is float32, gradients are written once, like the logits.
"""

# Kernels are Triton's language: their values and launches have no Python types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language.extra import libdevice

BLOCK = 128  # anchors of one program


def class_loss(logits_BCA: Tensor, classes_BA: Tensor, weight_BA: Tensor) -> Tensor:
    """Sum of the binary cross-entropies; the target is ``weight`` at the class, 0 elsewhere."""
    return _ClassLoss.apply(_packed(logits_BCA), classes_BA, weight_BA)


def decoded_boxes(boxes_BDA: Tensor, grid: tuple[Tensor, Tensor], reg_max: int) -> Tensor:
    """boxes.decode_boxes without a gradient, float32 [B,A,4] px in memory laid out [B,4,A].

    ``grid``: centres [A,2] and strides [A], px.
    """
    batch, _, anchors = boxes_BDA.shape
    raw = _packed(boxes_BDA.detach())
    out = torch.empty((batch, 4, anchors), device=raw.device)
    _boxes_kernel[(triton.cdiv(anchors, BLOCK), batch, 4)](
        raw, *grid, out, anchors, reg_max, *raw.stride(),
        R=triton.next_power_of_2(reg_max), BLOCK=BLOCK,
    )  # fmt: skip
    return out.movedim(1, 2)


def box_loss(
    boxes_BDA: Tensor, assigned: tuple[Tensor, Tensor], truth_G4: Tensor, how: tuple[Any, ...]
) -> Tensor:
    """Sums over all anchors of weight * (1 - CIoU) and weight * (DFL or L1), float32 [2].

    Args:
        boxes_BDA: raw distances of the head.
        assigned: row int64 [B,A] of the box that each anchor learns, weight float32 [B,A].
        truth_G4: all boxes xyxy px.
        how: (centres [A,2], strides [A]), reg_max, imgsz.
    """
    return _BoxLoss.apply(_packed(boxes_BDA), *assigned, truth_G4, how)


def _packed(logits: Tensor) -> Tensor:
    """Without gaps, anchors or channels innermost: so ``empty_like`` has the same strides."""
    is_packed = logits.is_contiguous() or logits.transpose(1, 2).is_contiguous()
    return logits if is_packed else logits.contiguous()


class _ClassLoss(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        batch, count, anchors = logits.shape
        grid = (triton.cdiv(anchors, BLOCK), batch)
        partial = torch.empty(grid, device=logits.device)
        _class_loss_kernel[grid](
            logits, classes, weight, partial, count, anchors, *logits.stride(), C=8, BLOCK=BLOCK
        )
        ctx.save_for_backward(logits, classes, weight)
        return partial.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, classes, weight = ctx.saved_tensors
        batch, count, anchors = logits.shape
        out = torch.empty_like(logits)
        _class_gradient_kernel[(triton.cdiv(anchors, BLOCK), batch, triton.cdiv(count, 8))](
            logits, classes, weight, gradients[0], out, count, anchors, *logits.stride(),
            C=8, BLOCK=BLOCK,
        )  # fmt: skip
        return out, None, None


class _BoxLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, row: Tensor, weight: Tensor, truth: Tensor, how: tuple[Any, ...]
    ) -> Tensor:
        grid, reg_max, imgsz = how
        batch, _, anchors = raw.shape
        programs = (triton.cdiv(anchors, BLOCK), batch)
        partial = torch.empty((2, programs[0] * batch), device=raw.device)
        slopes = torch.empty((batch, 4, anchors), device=raw.device)
        options = {"R": triton.next_power_of_2(reg_max), "BLOCK": BLOCK}
        _box_loss_kernel[programs](
            raw, row, weight, truth, *grid, partial, slopes, anchors, reg_max, imgsz,
            *raw.stride(), **options,
        )  # fmt: skip
        ctx.save_for_backward(raw, row, weight, truth, *grid, slopes)
        ctx.how, ctx.options = (reg_max, imgsz), options
        return partial.sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raw, row, weight, truth, points, strides, slopes = ctx.saved_tensors
        reg_max, imgsz = ctx.how
        batch, _, anchors = raw.shape
        out = torch.empty_like(raw)
        _box_gradient_kernel[(triton.cdiv(anchors, BLOCK), batch, 4)](
            raw, row, weight, truth, points, strides, slopes, gradients[0].contiguous(), out,
            anchors, reg_max, imgsz, *raw.stride(), **ctx.options,
        )  # fmt: skip
        return out, None, None, None, None


@triton.jit
def _class_loss_kernel(  # noqa: PLR0913 (a kernel's tensors are plain arguments)
    logits, classes, weight, partial, count, anchors, by_b, by_c, by_a,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = a < anchors
    own = tl.load(classes + image * anchors + a, live, 0)
    share = tl.load(weight + image * anchors + a, live, 0.0)
    total = tl.zeros((C, BLOCK), tl.float32)
    for start in range(0, count, C):
        c = start + tl.arange(0, C)
        mask = (c < count)[:, None] & live[None, :]
        place = logits + image.to(tl.int64) * by_b + c[:, None] * by_c + a[None, :] * by_a
        x = tl.load(place, mask, 0.0).to(tl.float32)
        target = tl.where(c[:, None] == own[None, :], share[None, :], 0.0)
        loss = tl.maximum(x, 0.0) - x * target + tl.log(1.0 + tl.exp(-tl.abs(x)))
        total += tl.where(mask, loss, 0.0)
    tl.store(partial + tl.program_id(0) * tl.num_programs(1) + image, tl.sum(tl.sum(total, 0), 0))


@triton.jit
def _class_gradient_kernel(  # noqa: PLR0913 (as above)
    logits, classes, weight, scale, out, count, anchors, by_b, by_c, by_a,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * C + tl.arange(0, C)
    live = a < anchors
    mask = (c < count)[:, None] & live[None, :]
    own = tl.load(classes + image * anchors + a, live, 0)
    share = tl.load(weight + image * anchors + a, live, 0.0)
    place = image.to(tl.int64) * by_b + c[:, None] * by_c + a[None, :] * by_a
    x = tl.load(logits + place, mask, 0.0).to(tl.float32)
    target = tl.where(c[:, None] == own[None, :], share[None, :], 0.0)
    grad = (1.0 / (1.0 + tl.exp(-x)) - target) * tl.load(scale)
    tl.store(out + place, grad.to(out.dtype.element_ty), mask)


@triton.jit
def _bins(  # noqa: PLR0913 (as above)
    logits, image, side, a, live, by_b, by_c, by_a, reg_max, R: tl.constexpr
):  # fmt: skip
    """Logits of one side [R,BLOCK], their places, bins, largest, sum of exponentials."""
    k = tl.arange(0, R)
    mask = (k < reg_max)[:, None] & live[None, :]
    row = (side * reg_max + k[:, None]) * by_c
    place = image.to(tl.int64) * by_b + row + a[None, :] * by_a
    x = tl.load(logits + place, mask, -1e30).to(tl.float32)
    most = tl.max(x, 0)
    power = tl.where(mask, tl.exp(x - most[None, :]), 0.0)
    return x, power, place, mask, k.to(tl.float32)[:, None], most


@triton.jit
def _distance(  # noqa: PLR0913 (as above)
    raw, image, side, a, live, by_b, by_c, by_a, reg_max, R: tl.constexpr
):  # fmt: skip
    """The distance of one side in strides: expected, or the raw value where there are no bins."""
    if R == 1:
        place = raw + image.to(tl.int64) * by_b + side * by_c + a * by_a
        return tl.load(place, live, 0.0).to(tl.float32)
    _, power, _, _, k, _ = _bins(raw, image, side, a, live, by_b, by_c, by_a, reg_max, R)
    return tl.sum(power * k, 0) / tl.sum(power, 0)


@triton.jit
def _wanted(truth, row, side, centre, stride, live):
    """The distance in strides from an anchor's centre to a side of the box that it learns."""
    edge = tl.load(truth + row * 4 + side, live, 0.0)
    return tl.div_rn(tl.where(side < 2, centre - edge, edge - centre), stride)


@triton.jit
def _nearness(target, reg_max, k):
    target = tl.minimum(tl.maximum(target, 0.0), reg_max - 1 - 0.01)
    return tl.maximum(1.0 - tl.abs(k - target[None, :]), 0.0)


@triton.jit
def _boxes_kernel(  # noqa: PLR0913 (as above)
    raw, points, strides, out, anchors, reg_max, by_b, by_c, by_a,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, side = tl.program_id(1), tl.program_id(2)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = a < anchors
    reach = _distance(raw, image, side, a, live, by_b, by_c, by_a, reg_max, R)
    reach *= tl.load(strides + a, live, 1.0)
    centre = tl.load(points + a * 2 + side % 2, live, 0.0)
    edge = tl.where(side < 2, centre - reach, centre + reach)
    tl.store(out + (image * 4 + side) * anchors + a, edge, live)


@triton.jit
def _above(x, y):
    """Gradient of max(x, y) by x, shared by equals as torch does."""
    return tl.where(x > y, 1.0, tl.where(x == y, 0.5, 0.0))


@triton.jit
def _ciou_and_slopes(  # noqa: PLR0913 (two boxes)
    left1, top1, right1, bottom1, left2, top2, right2, bottom2
):  # fmt: skip
    """boxes.ciou and its gradient by the first box, alpha a constant (arXiv 1911.08287)."""
    width1, height1 = right1 - left1, bottom1 - top1 + 1e-7
    width2, height2 = right2 - left2, bottom2 - top2 + 1e-7
    shared_width = tl.minimum(right1, right2) - tl.maximum(left1, left2)
    shared_height = tl.minimum(bottom1, bottom2) - tl.maximum(top1, top2)
    meets_x = tl.where(shared_width >= 0, 1.0, 0.0)
    meets_y = tl.where(shared_height >= 0, 1.0, 0.0)
    shared_width, shared_height = tl.maximum(shared_width, 0.0), tl.maximum(shared_height, 0.0)
    shared = shared_width * shared_height
    union = width1 * height1 + width2 * height2 - shared + 1e-7
    iou = tl.div_rn(shared, union)
    # d iou = by_shared * d shared - by_area * d (width1 * height1)
    by_shared, by_area = (1.0 + iou) / union, iou / union
    along_x, along_y = by_shared * shared_height * meets_x, by_shared * shared_width * meets_y
    d_left = -along_x * _above(left1, left2) + by_area * height1
    d_right = along_x * _above(right2, right1) - by_area * height1
    d_top = -along_y * _above(top1, top2) + by_area * width1
    d_bottom = along_y * _above(bottom2, bottom1) - by_area * width1

    hull_width = tl.maximum(right1, right2) - tl.minimum(left1, left2)
    hull_height = tl.maximum(bottom1, bottom2) - tl.minimum(top1, top2)
    diagonal2 = hull_width * hull_width + hull_height * hull_height + 1e-7
    apart_x, apart_y = left2 + right2 - left1 - right1, top2 + bottom2 - top1 - bottom1
    apart = tl.div_rn(apart_x * apart_x + apart_y * apart_y, 4.0 * diagonal2)
    # d apart = (d centre2 / 4 - apart * d diagonal2) / diagonal2
    pull_x, pull_y = -0.5 * apart_x / diagonal2, -0.5 * apart_y / diagonal2
    hull_x, hull_y = 2.0 * apart * hull_width / diagonal2, 2.0 * apart * hull_height / diagonal2
    d_left -= pull_x + hull_x * _above(left2, left1)
    d_right -= pull_x - hull_x * _above(right1, right2)
    d_top -= pull_y + hull_y * _above(top2, top1)
    d_bottom -= pull_y - hull_y * _above(bottom1, bottom2)

    shape = libdevice.atan(tl.div_rn(width2, height2)) - libdevice.atan(tl.div_rn(width1, height1))
    v = 0.4052847345693511 * shape * shape  # 4 / pi^2
    alpha = tl.div_rn(v, 1.0 - iou + v + 1e-7)
    # d atan(w/h) = (h dw - w dh) / (w^2 + h^2), and v falls where it grows towards the target's
    turn = 2.0 * 0.4052847345693511 * alpha * shape / (width1 * width1 + height1 * height1)
    d_left -= turn * height1
    d_right += turn * height1
    d_top += turn * width1
    d_bottom -= turn * width1
    return iou - (apart + alpha * v), d_left, d_top, d_right, d_bottom


@triton.jit
def _box_loss_kernel(  # noqa: PLR0913 (as above)
    raw, rows, weights, truth, points, strides, partial, slopes, anchors, reg_max, imgsz,
    by_b, by_c, by_a, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of a block of anchors, and the slope of the first one by each distance."""
    image = tl.program_id(1)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = a < anchors
    weight = tl.load(weights + image * anchors + a, live, 0.0)
    learns = weight > 0
    box = tl.sum(tl.zeros((BLOCK,), tl.float32), 0)
    side_loss = box
    if tl.sum(learns.to(tl.int32), 0) > 0:  # most blocks are background alone
        row = tl.load(rows + image * anchors + a, live, 0)
        stride = tl.load(strides + a, live, 1.0)
        x, y = tl.load(points + a * 2, live, 0.0), tl.load(points + a * 2 + 1, live, 0.0)
        left = x - _distance(raw, image, 0, a, live, by_b, by_c, by_a, reg_max, R) * stride
        top = y - _distance(raw, image, 1, a, live, by_b, by_c, by_a, reg_max, R) * stride
        right = x + _distance(raw, image, 2, a, live, by_b, by_c, by_a, reg_max, R) * stride
        bottom = y + _distance(raw, image, 3, a, live, by_b, by_c, by_a, reg_max, R) * stride
        overlap, d_left, d_top, d_right, d_bottom = _ciou_and_slopes(
            left, top, right, bottom,
            tl.load(truth + row * 4, learns, 0.0), tl.load(truth + row * 4 + 1, learns, 0.0),
            tl.load(truth + row * 4 + 2, learns, 0.0), tl.load(truth + row * 4 + 3, learns, 0.0),
        )  # fmt: skip
        box = tl.sum(tl.where(learns, (1.0 - overlap) * weight, 0.0), 0)
        scale = weight * stride
        place = slopes + image * 4 * anchors + a
        tl.store(place, tl.where(learns, d_left * scale, 0.0), live)
        tl.store(place + anchors, tl.where(learns, d_top * scale, 0.0), live)
        tl.store(place + 2 * anchors, tl.where(learns, -d_right * scale, 0.0), live)
        tl.store(place + 3 * anchors, tl.where(learns, -d_bottom * scale, 0.0), live)
        total = tl.zeros((BLOCK,), tl.float32)
        for side in tl.static_range(4):
            wanted = _wanted(truth, row, side, x if side % 2 == 0 else y, stride, learns)
            if R == 1:
                gap = _distance(raw, image, side, a, live, by_b, by_c, by_a, reg_max, R) - wanted
                total += tl.abs(gap) * (stride / imgsz)
            else:
                logits, power, _, mask, k, most = _bins(
                    raw, image, side, a, live, by_b, by_c, by_a, reg_max, R
                )
                near = _nearness(wanted, reg_max, k)
                total += most + tl.log(tl.sum(power, 0))
                total -= tl.sum(tl.where(mask, logits * near, 0.0), 0)
        side_loss = tl.sum(tl.where(learns, total * 0.25 * weight, 0.0), 0)
    number = tl.program_id(0) * tl.num_programs(1) + image
    tl.store(partial + number, box)
    tl.store(partial + tl.num_programs(0) * tl.num_programs(1) + number, side_loss)


@triton.jit
def _box_gradient_kernel(  # noqa: PLR0913 (as above)
    raw, rows, weights, truth, points, strides, slopes, gradients, out, anchors, reg_max, imgsz,
    by_b, by_c, by_a, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, side = tl.program_id(1), tl.program_id(2)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = a < anchors
    weight = tl.load(weights + image * anchors + a, live, 0.0)
    learns = weight > 0
    k = tl.arange(0, R)
    base = image.to(tl.int64) * by_b
    place = base + (side * reg_max + k[:, None]) * by_c + a[None, :] * by_a
    inside = (k < reg_max)[:, None] & live[None, :]
    grad = tl.zeros((R, BLOCK), tl.float32)
    if tl.sum(learns.to(tl.int32), 0) > 0:
        row = tl.load(rows + image * anchors + a, live, 0)
        stride = tl.load(strides + a, live, 1.0)
        centre = tl.load(points + a * 2 + side % 2, live, 0.0)
        wanted = _wanted(truth, row, side, centre, stride, learns)
        slope = tl.load(slopes + (image * 4 + side) * anchors + a, learns, 0.0)
        by_distance = slope * tl.load(gradients)
        by_side = tl.where(learns, weight * 0.25 * tl.load(gradients + 1), 0.0)
        if R == 1:
            gap = tl.load(raw + place, inside, 0.0).to(tl.float32) - wanted[None, :]
            sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
            grad += by_distance[None, :] + sign * (by_side * stride / imgsz)[None, :]
        else:
            _, power, _, _, bins, _ = _bins(raw, image, side, a, live, by_b, by_c, by_a, reg_max, R)
            share = power / tl.sum(power, 0)[None, :]
            distance = tl.sum(share * bins, 0)
            near = _nearness(wanted, reg_max, bins)
            grad += share * (bins - distance[None, :]) * by_distance[None, :]
            grad += (share - near) * by_side[None, :]
    tl.store(out + place, grad.to(out.dtype.element_ty), inside)
