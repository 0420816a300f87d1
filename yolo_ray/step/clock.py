"""How long the device works on steps, and how long it stands idle between them."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Marks the beginning and end of steps in the device's own stream of work; the host never waits for them.

    A host that runs ahead waits for photos without harm: only the gap between two steps on the device is lost.

    Attributes:
        busy_ms, idle_ms: within steps and between them, since ``restart``, as of the last ``collect``.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Begin anew; what lies before the next step counts for nothing."""
        self.busy_ms = self.idle_ms = 0.0
        self._begins: list[Any] = []
        self._ends: list[Any] = []
        self._last: Any = None  # end of the step that was counted last

    def begin(self) -> None:
        """A step's work is enqueued from here on."""
        self._begins.append(self._now())

    def end(self) -> None:
        """All of it is."""
        self._ends.append(self._now())

    def collect(self) -> None:
        """Add up what was marked; the device must have come to the last mark, which is the end of a step."""
        for begin, end in zip(self._begins, self._ends, strict=True):
            if self._last is not None:
                self.idle_ms += self._between(self._last, begin)
            self.busy_ms += self._between(begin, end)
            self._last = end
        self._begins, self._ends = [], []

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) if self.is_gpu else 1000 * (second - first)

    def _now(self) -> Any:
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
