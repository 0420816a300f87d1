"""Batch norm and SiLU in one: Triton kernels over channels-last activations; needs a GPU.

Legend: N rows (images x pixels), C channels, x and y [N,C] in memory, in bfloat16 or float32.
torch runs batch norm, then SiLU, and keeps what lies between for the backward pass. Here the
forward reads x twice and writes y, the backward reads x and dy twice and writes dx, all arithmetic
is float32, and only x is kept. Sums are folded in a fixed order: the same input gives the same bits.
Source: Batch Normalization (arXiv 1502.03167).
"""

# Kernels are Triton's language: their values and launches have no Python types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

TILE, WARPS = 2048, 4  # elements of one load, and the warps that do it
PROGRAMS = 528  # four for each of 132 multiprocessors
FOLD_ROWS, FOLD_CHANNELS = 128, 8
Reduce = Callable[[Tensor], object]


@lru_cache
def chained(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that begin with ``_after_the_last``: Hopper starts them before the last one ends.

    Source: programmatic dependent launch, CUDA C++ Programming Guide.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


class NormState:
    """What a batch norm layer brings to its kernels; ``reduce`` None: one worker."""

    def __init__(self, layer: Any, reduce: Reduce | None, *, silu: bool) -> None:
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.tracked, self.eps, self.momentum = layer.num_batches_tracked, layer.eps, layer.momentum
        self.reduce, self.silu = reduce, silu


class FusedNorm(Function):
    """``FusedNorm.apply(x [B,C,H,W], weight, bias, state)``; updates the running statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, state: NormState) -> Tensor:
        """Normalise by this batch's statistics (of all workers), then SiLU if asked for."""
        x = x.contiguous(memory_format=torch.channels_last)
        channels, rows = x.shape[1], x.numel() // x.shape[1]
        options, grid, per_program = _plan(rows, channels, x.device)
        partial = torch.empty((grid[0], 2, channels), device=x.device)
        _statistics_kernel[grid](
            x, state.running_mean, partial, rows, channels, per_program, **options
        )
        # Sums about the running mean, the number of rows, and that mean, which changes below.
        sums = torch.empty(3 * channels + 1, device=x.device)
        _fold_kernel[(triton.cdiv(channels, FOLD_CHANNELS),)](
            partial, state.running_mean, sums, rows, channels, grid[0],
            R=FOLD_ROWS, C=FOLD_CHANNELS, **chained(x.device),
        )  # fmt: skip
        if state.reduce is not None:
            state.reduce(sums[: 2 * channels + 1])
        y = torch.empty_like(x)
        _normalise_kernel[_tiles(rows, grid[1], options)](
            x, y, sums, weight, bias, state.running_mean, state.running_var, state.tracked,
            rows, channels, state.eps, state.momentum, SILU=state.silu, **options,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, sums)
        ctx.state = state
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias; those of weight and bias are this worker's share."""
        x, weight, bias, sums = ctx.saved_tensors
        state: NormState = ctx.state
        dy, stride = rows_of_channels(gradients[0])
        channels, rows = x.shape[1], x.numel() // x.shape[1]
        options, grid, per_program = _plan(rows, channels, x.device)
        partial = torch.empty((grid[0], 2, channels), device=x.device)
        common = (sums, weight, bias)
        _gradient_sums_kernel[grid](
            x, dy, *common, partial, rows, channels, stride, per_program, state.eps,
            SILU=state.silu, **options,
        )  # fmt: skip
        totals = torch.empty(2 * channels, device=x.device)
        dweight, dbias = torch.empty_like(weight), torch.empty_like(bias)
        _fold_gradients_kernel[(triton.cdiv(channels, FOLD_CHANNELS),)](
            partial, sums, totals, dweight, dbias, channels, grid[0], state.eps,
            R=FOLD_ROWS, C=FOLD_CHANNELS, **chained(x.device),
        )  # fmt: skip
        if state.reduce is not None:
            state.reduce(totals)
        dx = torch.empty_like(x)
        _gradient_kernel[_tiles(rows, grid[1], options)](
            x,
            dy,
            *common,
            totals,
            dx,
            rows,
            channels,
            stride,
            state.eps,
            SILU=state.silu,
            **options,
        )
        return dx, dweight, dbias, None


def _plan(
    rows: int, channels: int, device: torch.device
) -> tuple[dict[str, Any], tuple[int, int], int]:
    """Tile shape, grid of the reductions and the rows of each of their programs."""
    width = channels & -channels  # the largest power of two that divides the channels
    even = width >= 8
    width = min(width, 64) if even else min(triton.next_power_of_2(channels), 64)
    height = TILE // width
    blocks = triton.cdiv(channels, width)
    programs = max(1, min(PROGRAMS // blocks, triton.cdiv(rows, height)))
    per_program = triton.cdiv(triton.cdiv(rows, programs), height) * height
    grid = (triton.cdiv(rows, per_program), blocks)
    options = {"R": height, "C": width, "EVEN": even, "num_warps": WARPS} | chained(device)
    return options, grid, per_program


def _tiles(rows: int, blocks: int, options: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(rows, options["R"]), blocks


def rows_of_channels(dy: Tensor) -> tuple[Tensor, int]:
    """The gradient as rows of dense channels and the distance of two rows.

    A part of a concatenation is one already, with longer rows: it needs no copy.
    """
    stride = dy.stride(3)
    is_rows = dy.stride(1) == 1 and dy.stride(2) == stride * dy.shape[3]
    if is_rows and dy.stride(0) == dy.stride(2) * dy.shape[2]:
        return dy, stride
    return dy.contiguous(memory_format=torch.channels_last), dy.shape[1]


@triton.jit
def _after_the_last(CHAINED: tl.constexpr):
    """What the last kernel wrote is there from here on; the next one may be made ready."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _channels(channels, C: tl.constexpr, EVEN: tl.constexpr):
    c = tl.program_id(1) * C + tl.arange(0, C)
    live = tl.full((C,), 1, tl.int1) if EVEN else c < channels
    return c, live


@triton.jit
def _moments(sums, c, live, channels, eps):
    """Mean and inverse deviation of the whole batch."""
    count = tl.load(sums + 2 * channels)
    offset = tl.load(sums + c, live, 0.0) / count
    mean = tl.load(sums + 2 * channels + 1 + c, live, 0.0) + offset
    variance = tl.load(sums + channels + c, live, 0.0) / count - offset * offset
    variance = tl.maximum(variance, 0.0)
    return mean, variance, 1.0 / tl.sqrt(variance + eps), count


@triton.jit
def _statistics_kernel(  # noqa: PLR0913 (a kernel's tensors are plain arguments)
    x, shift, partial, rows, channels, per_program,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    _after_the_last(CHAINED)
    c, live = _channels(channels, C, EVEN)
    centre = tl.load(shift + c, live, 0.0)[None, :]
    first = tl.zeros((R, C), tl.float32)
    second = tl.zeros((R, C), tl.float32)
    begin = tl.program_id(0) * per_program
    for start in range(begin, tl.minimum(begin + per_program, rows), R):
        r = start + tl.arange(0, R)
        mask = (r < rows)[:, None] & live[None, :]
        value = tl.load(x + r[:, None].to(tl.int64) * channels + c[None, :], mask, 0.0)
        value = tl.where(mask, value.to(tl.float32) - centre, 0.0)
        first += value
        second += value * value
    place = partial + tl.program_id(0) * 2 * channels + c
    tl.store(place, tl.sum(first, 0), live)
    tl.store(place + channels, tl.sum(second, 0), live)


@triton.jit
def _folded(partial, c, live, channels, programs, R: tl.constexpr, C: tl.constexpr):
    first = tl.zeros((R, C), tl.float32)
    second = tl.zeros((R, C), tl.float32)
    for start in range(0, programs, R):
        r = start + tl.arange(0, R)
        mask = (r < programs)[:, None] & live[None, :]
        place = partial + r[:, None] * 2 * channels + c[None, :]
        first += tl.load(place, mask, 0.0)
        second += tl.load(place + channels, mask, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _fold_kernel(  # noqa: PLR0913 (as above)
    partial, shift, sums, rows, channels, programs, R: tl.constexpr, C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    _after_the_last(CHAINED)
    c = tl.program_id(0) * C + tl.arange(0, C)
    live = c < channels
    first, second = _folded(partial, c, live, channels, programs, R, C)
    tl.store(sums + c, first, live)
    tl.store(sums + channels + c, second, live)
    tl.store(sums + 2 * channels + 1 + c, tl.load(shift + c, live, 0.0), live)
    tl.store(sums + 2 * channels, rows.to(tl.float32), tl.program_id(0) == 0)


@triton.jit
def _normalise_kernel(  # noqa: PLR0913 (as above)
    x, y, sums, weight, bias, running_mean, running_var, tracked, rows, channels, eps, momentum,
    SILU: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    _after_the_last(CHAINED)
    c, live = _channels(channels, C, EVEN)
    mean, variance, inverse, count = _moments(sums, c, live, channels, eps)
    scale = tl.load(weight + c, live, 0.0) * inverse
    offset = tl.load(bias + c, live, 0.0) - mean * scale
    r = tl.program_id(0) * R + tl.arange(0, R)
    mask = (r < rows)[:, None] & live[None, :]
    place = r[:, None].to(tl.int64) * channels + c[None, :]
    z = tl.load(x + place, mask, 0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    tl.store(y + place, z.to(y.dtype.element_ty), mask)
    if tl.program_id(0) == 0:
        # As torch: the running variance is the unbiased one, of the count over all workers.
        unbiased = variance * (count / tl.maximum(count - 1.0, 1.0))
        old_mean, old_var = tl.load(running_mean + c, live), tl.load(running_var + c, live)
        tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), live)
        tl.store(running_var + c, old_var + momentum * (unbiased - old_var), live)
        if tl.program_id(1) == 0:
            tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def _dz(  # noqa: PLR0913 (as above)
    x, dy, place, dplace, mask, mean, scale, offset, SILU: tl.constexpr
):  # fmt: skip
    """Gradient before SiLU, and x about its mean."""
    value = tl.load(x + place, mask, 0.0).to(tl.float32)
    grad = tl.load(dy + dplace, mask, 0.0).to(tl.float32)
    if SILU:
        z = value * scale[None, :] + offset[None, :]
        share = 1.0 / (1.0 + tl.exp(-z))
        grad = grad * share * (1.0 + z * (1.0 - share))
    return tl.where(mask, grad, 0.0), value - mean[None, :]


@triton.jit
def _gradient_sums_kernel(  # noqa: PLR0913 (as above)
    x, dy, sums, weight, bias, partial, rows, channels, stride, per_program, eps,
    SILU: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    _after_the_last(CHAINED)
    c, live = _channels(channels, C, EVEN)
    mean, _, inverse, _ = _moments(sums, c, live, channels, eps)
    scale = tl.load(weight + c, live, 0.0) * inverse
    offset = tl.load(bias + c, live, 0.0) - mean * scale
    first = tl.zeros((R, C), tl.float32)
    second = tl.zeros((R, C), tl.float32)
    begin = tl.program_id(0) * per_program
    for start in range(begin, tl.minimum(begin + per_program, rows), R):
        r = start + tl.arange(0, R)
        mask = (r < rows)[:, None] & live[None, :]
        wide = r[:, None].to(tl.int64)
        place, dplace = wide * channels + c[None, :], wide * stride + c[None, :]
        grad, centred = _dz(x, dy, place, dplace, mask, mean, scale, offset, SILU)
        first += grad
        second += grad * centred
    place = partial + tl.program_id(0) * 2 * channels + c
    tl.store(place, tl.sum(first, 0), live)
    tl.store(place + channels, tl.sum(second, 0), live)


@triton.jit
def _fold_gradients_kernel(  # noqa: PLR0913 (as above)
    partial, sums, totals, dweight, dbias, channels, programs, eps,
    R: tl.constexpr, C: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    _after_the_last(CHAINED)
    c = tl.program_id(0) * C + tl.arange(0, C)
    live = c < channels
    first, second = _folded(partial, c, live, channels, programs, R, C)
    _, _, inverse, _ = _moments(sums, c, live, channels, eps)
    tl.store(totals + c, first, live)
    tl.store(totals + channels + c, second, live)
    tl.store(dweight + c, second * inverse, live)
    tl.store(dbias + c, first, live)


@triton.jit
def _gradient_kernel(  # noqa: PLR0913 (as above)
    x, dy, sums, weight, bias, totals, dx, rows, channels, stride, eps,
    SILU: tl.constexpr, R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    _after_the_last(CHAINED)
    c, live = _channels(channels, C, EVEN)
    mean, _, inverse, count = _moments(sums, c, live, channels, eps)
    scale = tl.load(weight + c, live, 0.0) * inverse
    offset = tl.load(bias + c, live, 0.0) - mean * scale
    r = tl.program_id(0) * R + tl.arange(0, R)
    mask = (r < rows)[:, None] & live[None, :]
    wide = r[:, None].to(tl.int64)
    place, dplace = wide * channels + c[None, :], wide * stride + c[None, :]
    grad, centred = _dz(x, dy, place, dplace, mask, mean, scale, offset, SILU)
    flat = tl.load(totals + c, live, 0.0) / count
    slope = tl.load(totals + channels + c, live, 0.0) / count * inverse * inverse
    grad = (grad - flat[None, :] - centred * slope[None, :]) * scale[None, :]
    tl.store(dx + place, grad.to(dx.dtype.element_ty), mask)
