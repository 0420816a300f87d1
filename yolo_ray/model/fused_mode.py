"""While it is entered, torch's layers on channels-last activations are ours; needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from yolo_ray.model.fused_conv import WeightLane, convolve
from yolo_ray.model.fused_head import HeadLanes
from yolo_ray.model.fused_layers import are_rows, concatenate, split


@contextmanager
def fused_layers(lane: WeightLane, heads: HeadLanes) -> Iterator[None]:
    """Inside, a network's forward pass is built for the fastest captured step."""
    lane.begin()
    with heads.entered(), FusedLayers(lane):
        yield


class FusedLayers(TorchFunctionMode):
    """Takes over the convolutions, concatenations and splits that it can do better, hands on all else."""

    def __init__(self, lane: WeightLane) -> None:
        super().__init__()
        self.lane = lane
        self.ours: dict[Any, Callable[..., Tensor | tuple[Tensor, ...] | None]] = {
            torch.conv2d: self._conv2d,
            torch.cat: _cat,
            torch.Tensor.chunk: _chunk,
            torch.Tensor.split: _split,
        }

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Ours where there is one and it can; torch's otherwise."""
        kwargs = kwargs or {}
        ours = self.ours.get(func)
        result = ours(*args, **kwargs) if ours is not None else None
        return func(*args, **kwargs) if result is None else result

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        pairs = tuple(_pair(value) for value in (stride, padding, dilation))
        if (
            not weight.requires_grad
            or input.dtype != weight.dtype
            or not input.is_cuda
            or "" in pairs
        ):
            return None
        return convolve(input, weight, bias, (*pairs, groups), self.lane)


def _pair(value: Any) -> Any:
    """An option of a convolution as a pair; empty for a padding that is named."""
    if isinstance(value, str):
        return ""
    return (value, value) if isinstance(value, int) else tuple(value)


def _are_ours(tensors: Any) -> bool:
    return tensors[0].is_cuda and are_rows(tensors)


def _cat(tensors: Any, dim: int = 0) -> Tensor | None:
    return concatenate(*tensors) if dim == 1 and _are_ours(tensors) else None


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...] | None:
    if dim != 1 or not _are_ours([x]) or x.shape[1] % chunks:
        return None
    return split(x, [x.shape[1] // chunks] * chunks)


def _split(x: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor, ...] | None:
    if dim != 1 or isinstance(sizes, int) or not _are_ours([x]):
        return None
    return split(x, sizes)
