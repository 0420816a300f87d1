"""Convolutions whose weight gradients are computed beside the rest of the backward pass; needs a GPU.

Nobody needs a weight gradient before the step's end. A captured step therefore forks it off to a second
stream: kernels that fill only a part of the card run two at a time, and fast ones hide the memory's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from yolo_ray.model.fused_layers import dense

DEPTH = 12  # weight gradients under way at once: each keeps an activation and its gradient alive
Gradients = tuple[Tensor, Tensor | None]  # of weight and bias


class WeightLane:
    """A second stream for weight gradients; outside a capture they are computed in line.

    Attributes:
        home: the stream that forks; convolutions on others run side by side already.
    """

    def __init__(self, device: torch.device) -> None:
        self.home = torch.cuda.current_stream(device)
        self.stream = torch.cuda.Stream(device)
        self._under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self._begun: set[int] = set()

    def beside(
        self, weight: Tensor, compute: Callable[[], Gradients], *read: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """``compute()`` on the second stream; ``read`` are the tensors of the current stream that it reads.

        Its results may be used after ``join``. A weight that is used twice has its gradients added up by
        autograd at once, so the second is computed in line.
        """
        current = torch.cuda.current_stream()
        if current != self.home or not torch.cuda.is_current_stream_capturing():
            return compute()
        if weight.data_ptr() in self._begun:
            self.join()
            return compute()
        self._begun.add(weight.data_ptr())
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            gradients = compute()
            done = torch.cuda.Event()
            done.record()
        # Memory of ``read`` may be used again only by work that comes after ``done``.
        self._under_way.append((done, read))
        while len(self._under_way) > DEPTH:
            self._under_way.popleft()[0].wait(current)
        return gradients

    def begin(self) -> None:
        """The current stream forks from now on; what a failed capture left behind is forgotten."""
        self.home = torch.cuda.current_stream()
        self._under_way.clear()
        self._begun.clear()

    def join(self) -> None:
        """The current stream waits for all weight gradients."""
        while self._under_way:
            self._under_way.popleft()[0].wait(torch.cuda.current_stream())
        self._begun.clear()


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], lane: WeightLane
) -> Tensor:
    """``torch.conv2d`` of a channels-last x in the weight's dtype.

    ``geometry``: stride, padding, dilation (pairs) and groups.
    """
    return _Convolution.apply(x, weight, bias, geometry, lane)


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Any, ...],
        lane: WeightLane,
    ) -> Tensor:
        x = dense(x)  # once, for the forward pass and for the weight gradient
        ctx.save_for_backward(x, weight)
        ctx.bias_sizes, ctx.bias_dtype = (
            (None, None) if bias is None else ([*bias.shape], bias.dtype)
        )
        *pairs, groups = geometry
        ctx.arguments = (*map(list, pairs), False, [0, 0], groups)
        ctx.lane = lane
        narrow = None if bias is None else bias.to(x.dtype)
        return torch.ops.aten.convolution(x, weight, narrow, *ctx.arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dense(gradients[0])

        def differentiate(*mask: bool) -> tuple[Any, Any, Any]:
            return torch.ops.aten.convolution_backward(
                dy, x, weight, ctx.bias_sizes, *ctx.arguments, list(mask)
            )

        def compute() -> Gradients:
            _, dweight, dbias = differentiate(False, True, ctx.bias_dtype is not None)
            # Widened here: what autograd did to it would not wait for this stream.
            return dweight, None if dbias is None else dbias.to(ctx.bias_dtype)

        dweight, dbias = ctx.lane.beside(weight, compute, x, dy)
        dx = differentiate(True, False, False)[0] if ctx.needs_input_grad[0] else None
        return dx, dweight, dbias, None, None
