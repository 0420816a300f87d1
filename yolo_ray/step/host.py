"""Tensors of the device on their way to the host, while the device goes on."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """What some tensors hold once the work enqueued so far is done."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Enqueue the copies of tensors of one device."""
        self._copies: dict[str, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None
        for name, tensor in tensors.items():
            if not tensor.is_cuda:
                self._copies[name] = tensor.detach().clone()
                continue
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copies[name] = host.copy_(tensor.detach(), non_blocking=True)
            self._arrived = self._arrived or torch.cuda.Event()
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> dict[str, Tensor]:
        """The copies; waits for the device to come so far. Any thread may ask."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
