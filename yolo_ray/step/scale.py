"""The factor on the loss that keeps float16 gradients in range: found and kept on the device.

Source: Mixed Precision Training (arXiv 1710.03740), with the dynamic rule that torch.amp.GradScaler documents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST_TOTAL = 1024.0  # first factor times photos of the batch: a step's sums grow with its photos
GROWTH_STEPS = 2000  # good steps in a row after which twice the factor is tried
SMALLEST, LARGEST = 2.0**-14, 2.0**16


class LossScale:
    """Doubles after 2000 good steps, halves at each that overflows; always 1 where not needed.

    Attributes:
        state: float32 [2]: the factor and the good steps in a row; the same on every rank, since all see
            the reduced gradient.
        is_active: whether the precision needs it.
    """

    def __init__(self, precision: str, batch: int, device: torch.device) -> None:
        self.is_active = precision == "fp16"
        first = 2.0 ** round(math.log2(FIRST_TOTAL / batch)) if self.is_active else 1.0
        self.state = torch.tensor([first, 0.0], device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """What to differentiate instead of ``loss``."""
        return loss * self.state[0] if self.is_active else loss

    def divisor(self, divisor: Tensor) -> Tensor:
        """What to divide the gradient by instead of ``divisor``."""
        return divisor * self.state[0] if self.is_active else divisor

    def follow(self, ok: Tensor) -> None:
        """Learn whether the gradient of this step was finite, 0-dim bool."""
        if not self.is_active:
            return
        factor, good = self.state
        grows = good + 1 >= GROWTH_STEPS
        bigger = torch.where(grows, factor * 2, factor)
        factor = torch.where(ok, bigger, factor / 2).clamp(SMALLEST, LARGEST)
        good = torch.where(ok & ~grows, good + 1, torch.zeros_like(good))
        self.state.copy_(torch.stack((factor, good)))
