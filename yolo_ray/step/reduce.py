"""The one collective of a step: the flat gradient and, behind it, the sums that normalise and report it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

AllReduce = Callable[[Tensor], None]  # sums a tensor over all ranks, in place
BUCKET_ELEMENTS = 8 * 2**20  # 32 MiB of float32 a collective


def no_reduce(tensor: Tensor) -> None:
    """The sum over one rank."""


def distributed_reduce(tensor: Tensor) -> None:
    """The sum over the default process group."""
    dist.all_reduce(tensor)


def reduce_in_buckets(flat: Tensor, reduce: AllReduce) -> None:
    """Sum a flat tensor over the ranks, one collective for each bucket of 32 MiB."""
    for bucket in torch.split(flat, BUCKET_ELEMENTS):
        reduce(bucket)
