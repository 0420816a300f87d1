"""How busy a GPU is, as its driver counts it."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

PERIOD_S = 0.25  # the driver's own window is a sixth of a second to a second


class Meter(Protocol):
    """What measures utilisation, or does not."""

    def restart(self) -> None:
        """Forget what was measured."""
        ...

    def mean(self) -> float | None:
        """Mean utilisation since ``restart``, 0 to 1; None when nothing was measured."""
        ...

    def close(self) -> None:
        """Measure no more."""
        ...


class NoMeter:
    """Where there is no GPU, or another rank's is watched."""

    def restart(self) -> None:
        """Do nothing."""

    def mean(self) -> float | None:
        """Nothing."""
        return None

    def close(self) -> None:
        """Do nothing."""


class GpuMeter:
    """Asks NVML in a thread of its own: the share of time in which at least one kernel ran.

    Where NVML cannot be asked (no permission, a slice of a card) it measures nothing.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin to watch ``device``, a CUDA device."""
        self.device = device
        self.stopped = threading.Event()
        self.restart()
        self.thread = threading.Thread(target=self._watch, name="gpu-meter", daemon=True)
        self.thread.start()

    def restart(self) -> None:
        """Forget what was measured."""
        self.samples: list[int] = []

    def mean(self) -> float | None:
        """Mean utilisation since ``restart``, 0 to 1; None when nothing was measured."""
        samples = self.samples
        return sum(samples) / len(samples) / 100 if samples else None

    def close(self) -> None:
        """Measure no more."""
        self.stopped.set()

    def _watch(self) -> None:
        while not self.stopped.wait(PERIOD_S):
            try:
                self.samples.append(torch.cuda.utilization(self.device))
            # NVML's errors have no class in common with those of torch, and a number less stops no training.
            except Exception:
                return
