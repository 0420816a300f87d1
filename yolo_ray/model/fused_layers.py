"""Concatenation, splitting and max pooling of channels-last activations, in Triton; needs a GPU.

Legend: B images, H x W pixels, C channels, N = B*H*W rows of dense channels.
torch copies what lies in strides, and the parts of a concatenation do, element by element; and it pools
a small picture with few threads.
"""

# Kernels are Triton's language: their values and launches have no Python types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from yolo_ray.model.fused_norm import rows_of_channels

TILE = 4096  # elements of one copy
PIXELS, CHANNELS = 16, 64  # of one pooling program


def concatenate(*parts: Tensor) -> Tensor:
    """Activations whose pixels are rows of dense channels, side by side over channels."""
    return _Concatenation.apply(*parts)


def split(x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """``x.split(widths, 1)`` of dense channels-last activations; gradients are joined by our copies."""
    return _Split.apply(x, tuple(widths))


def dense(x: Tensor) -> Tensor:
    """x channels last without gaps: itself, or a copy."""
    if x.is_contiguous(memory_format=torch.channels_last) or not are_rows([x]):
        return x.contiguous(memory_format=torch.channels_last)
    return _joined([x])


def max_pool(x: Tensor, size: int) -> Tensor:
    """torch's max_pool2d with an odd window of ``size``, stride 1 and padding size // 2."""
    return _MaxPool.apply(x.contiguous(memory_format=torch.channels_last), size)


def are_rows(tensors: Sequence[Tensor]) -> bool:
    """Whether all are activations of one type whose pixels are rows of dense channels."""
    first = tensors[0]
    return first.ndim == 4 and all(
        t.dtype == first.dtype
        and t.stride(1) == 1
        and t.stride(2) == t.stride(3) * t.shape[3]
        and t.stride(0) == t.stride(2) * t.shape[2]
        for t in tensors
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    batch, _, height, width = parts[0].shape
    total = sum(part.shape[1] for part in parts)
    first = parts[0]
    out = torch.empty((batch, height, width, total), dtype=first.dtype, device=first.device)
    rows, start = batch * height * width, 0
    for part in parts:
        channels = part.shape[1]
        block = min(channels & -channels, 64)
        tile = TILE // block
        _copy_kernel[(triton.cdiv(rows, tile), channels // block)](
            part, out, rows, part.stride(3), total, start, R=tile, C=block
        )
        start += channels
    return out.permute(0, 3, 1, 2)


class _Concatenation(Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.widths = [part.shape[1] for part in parts]
        return _joined(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0].split(ctx.widths, 1)


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.split(widths, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (_joined(gradients) if are_rows(gradients) else torch.cat(gradients, 1)), None


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        _, channels, height, width = x.shape
        y = torch.empty_like(x)
        taps = torch.empty_like(x, dtype=torch.uint8)
        _pool_kernel[_pool_grid(x)](
            x, y, taps, height, width, channels, K=size, P=PIXELS, C=CHANNELS
        )
        ctx.save_for_backward(taps)
        ctx.size = size
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (taps,) = ctx.saved_tensors
        dy, stride = rows_of_channels(gradients[0])
        dx = torch.empty_like(taps, dtype=dy.dtype)
        _, channels, height, width = taps.shape
        _pool_gradient_kernel[_pool_grid(taps)](
            dy, dx, taps, height, width, channels, stride, K=ctx.size, P=PIXELS, C=CHANNELS
        )
        return dx, None


def _pool_grid(x: Tensor) -> tuple[int, int, int]:
    batch, channels, height, width = x.shape
    return triton.cdiv(height * width, PIXELS), triton.cdiv(channels, CHANNELS), batch


@triton.jit
def _copy_kernel(  # noqa: PLR0913 (a kernel's tensors are plain arguments)
    part, out, rows, stride, total, start, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    mask = (r < rows)[:, None]
    wide = r[:, None].to(tl.int64)
    value = tl.load(part + wide * stride + c[None, :], mask)
    tl.store(out + wide * total + start + c[None, :], value, mask)


@triton.jit
def _pool_kernel(  # noqa: PLR0913 (as above)
    x, y, taps, height, width, channels, K: tl.constexpr, P: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    c = tl.program_id(1) * C + tl.arange(0, C)
    base = tl.program_id(2).to(tl.int64) * height * width * channels
    row, column = pixel // width, pixel % width
    live = (pixel < height * width)[:, None] & (c < channels)[None, :]
    best = tl.full((P, C), float("-inf"), tl.float32)
    which = tl.full((P, C), K * K // 2, tl.int32)
    for tap in range(K * K):
        line, place = row + tap // K - K // 2, column + tap % K - K // 2
        there = (line >= 0) & (line < height) & (place >= 0) & (place < width)
        source = base + (line * width + place)[:, None] * channels + c[None, :]
        value = tl.load(x + source, live & there[:, None], float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)  # the first of equals; NaN is passed on
        best = tl.where(better, value, best)
        which = tl.where(better, tap, which)
    target = base + pixel[:, None] * channels + c[None, :]
    tl.store(y + target, best.to(y.dtype.element_ty), live)
    tl.store(taps + target, which.to(tl.uint8), live)


@triton.jit
def _pool_gradient_kernel(  # noqa: PLR0913 (as above)
    dy, dx, taps, height, width, channels, stride,
    K: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Every input gathers from the windows that chose it, in a fixed order."""
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    c = tl.program_id(1) * C + tl.arange(0, C)
    first = tl.program_id(2).to(tl.int64) * height * width
    row, column = pixel // width, pixel % width
    live = (pixel < height * width)[:, None] & (c < channels)[None, :]
    total = tl.zeros((P, C), tl.float32)
    for tap in range(K * K):
        line, place = row - (tap // K - K // 2), column - (tap % K - K // 2)
        there = (line >= 0) & (line < height) & (place >= 0) & (place < width)
        mask = live & there[:, None]
        window = (first + line * width + place)[:, None]
        chosen = tl.load(taps + window * channels + c[None, :], mask, 255).to(tl.int32) == tap
        total += tl.load(dy + window * stride + c[None, :], mask & chosen, 0.0).to(tl.float32)
    target = (first + pixel)[:, None] * channels + c[None, :]
    tl.store(dx + target, total.to(dx.dtype.element_ty), live)
