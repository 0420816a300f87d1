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

BLOCK = 128  # anchors of one program


def class_loss(logits_BCA: Tensor, classes_BA: Tensor, weight_BA: Tensor) -> Tensor:
    """Sum of the binary cross-entropies; the target is ``weight`` at the class, 0 elsewhere."""
    return _ClassLoss.apply(_packed(logits_BCA), classes_BA, weight_BA)


def decoded_distances(boxes_BDA: Tensor, reg_max: int) -> Tensor:
    """boxes.expected_distances without a gradient, float32 [B,4,A]."""
    if reg_max == 1:  # the head gives distances themselves
        return boxes_BDA.detach().float()
    batch, _, anchors = boxes_BDA.shape
    logits = _packed(boxes_BDA.detach())
    out = torch.empty((batch, 4, anchors), device=logits.device)
    _distances_kernel[(triton.cdiv(anchors, BLOCK), batch, 4)](
        logits,
        out,
        anchors,
        reg_max,
        *logits.stride(),
        R=triton.next_power_of_2(reg_max),
        BLOCK=BLOCK,
    )
    return out


def distances_and_dfl(boxes_BDA: Tensor, wanted_B4A: Tensor, reg_max: int) -> tuple[Tensor, Tensor]:
    """boxes.expected_distances [B,4,A] and boxes.dfl_loss [B,A], with one gradient for both."""
    return _DistancesAndDfl.apply(_packed(boxes_BDA), wanted_B4A.contiguous(), reg_max)


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


class _DistancesAndDfl(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, reg_max: int) -> tuple[Tensor, Tensor]:
        batch, _, anchors = logits.shape
        distances = torch.empty((batch, 4, anchors), device=logits.device)
        dfl = torch.empty((batch, anchors), device=logits.device)
        _box_terms_kernel[(triton.cdiv(anchors, BLOCK), batch)](
            logits, wanted, distances, dfl, anchors, reg_max, *logits.stride(),
            R=triton.next_power_of_2(reg_max), BLOCK=BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(logits, wanted)
        ctx.reg_max = reg_max
        return distances, dfl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, wanted = ctx.saved_tensors
        batch, _, anchors = logits.shape
        out = torch.empty_like(logits)
        _box_gradient_kernel[(triton.cdiv(anchors, BLOCK), batch, 4)](
            logits, wanted, gradients[0].contiguous(), gradients[1].contiguous(), out,
            anchors, ctx.reg_max, *logits.stride(), R=triton.next_power_of_2(ctx.reg_max), BLOCK=BLOCK,
        )  # fmt: skip
        return out, None, None


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
def _nearness(  # noqa: PLR0913 (as above)
    wanted, image, side, a, live, anchors, reg_max, k
):  # fmt: skip
    target = tl.load(wanted + (image * 4 + side) * anchors + a, live, 0.0)
    target = tl.minimum(tl.maximum(target, 0.0), reg_max - 1 - 0.01)
    return tl.maximum(1.0 - tl.abs(k - target[None, :]), 0.0)


@triton.jit
def _distances_kernel(  # noqa: PLR0913 (as above)
    logits, out, anchors, reg_max, by_b, by_c, by_a, R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    image, side = tl.program_id(1), tl.program_id(2)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = a < anchors
    _, power, _, _, k, _ = _bins(logits, image, side, a, live, by_b, by_c, by_a, reg_max, R)
    distance = tl.sum(power * k, 0) / tl.sum(power, 0)
    tl.store(out + (image * 4 + side) * anchors + a, distance, live)


@triton.jit
def _box_terms_kernel(  # noqa: PLR0913 (as above)
    logits, wanted, distances, dfl, anchors, reg_max, by_b, by_c, by_a,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = a < anchors
    total = tl.zeros((BLOCK,), tl.float32)
    for side in tl.static_range(4):
        x, power, _, mask, k, most = _bins(
            logits, image, side, a, live, by_b, by_c, by_a, reg_max, R
        )
        whole = tl.sum(power, 0)
        distance = tl.sum(power * k, 0) / whole
        tl.store(distances + (image * 4 + side) * anchors + a, distance, live)
        near = _nearness(wanted, image, side, a, live, anchors, reg_max, k)
        total += most + tl.log(whole) - tl.sum(tl.where(mask, x * near, 0.0), 0)
    tl.store(dfl + image * anchors + a, total * 0.25, live)


@triton.jit
def _box_gradient_kernel(  # noqa: PLR0913 (as above)
    logits, wanted, grad_distances, grad_dfl, out, anchors, reg_max, by_b, by_c, by_a,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, side = tl.program_id(1), tl.program_id(2)
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = a < anchors
    _, power, place, mask, k, _ = _bins(logits, image, side, a, live, by_b, by_c, by_a, reg_max, R)
    share = power / tl.sum(power, 0)[None, :]
    distance = tl.sum(share * k, 0)
    near = _nearness(wanted, image, side, a, live, anchors, reg_max, k)
    by_distance = tl.load(grad_distances + (image * 4 + side) * anchors + a, live, 0.0)
    by_dfl = tl.load(grad_dfl + image * anchors + a, live, 0.0) * 0.25
    grad = share * (k - distance[None, :]) * by_distance[None, :]
    grad += (share - near) * by_dfl[None, :]
    tl.store(out + place, grad.to(out.dtype.element_ty), mask)
