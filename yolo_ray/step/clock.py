"""How long the device works on steps, and how long it stands idle between them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import torch

RECENT = 200


class StepClock:
    """Marks the beginning and end of steps in the device's own stream of work; the host never waits for them.

    A host that runs ahead waits for photos without harm: only the gap between two steps on the device is lost.

    Attributes:
        steps: counted since ``restart``, as of the last ``collect``, like what follows.
        busy_ms, idle_ms: within steps and between them.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Begin anew; what lies before the next step counts for nothing."""
        self.steps = 0
        self.busy_ms = self.idle_ms = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
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
        """Add up the steps that were marked and that the device has ended."""
        done = 0
        for begin, end in zip(self._begins, self._ends, strict=True):
            if self.is_gpu and not end.query():
                break
            done += 1
            if self._last is not None:
                self.idle_ms += self._between(self._last, begin)
            step_ms = self._between(begin, end)
            self.steps += 1
            self.busy_ms += step_ms
            self._recent.append(step_ms)
            self._last = end
        self._begins, self._ends = self._begins[done:], self._ends[done:]

    @property
    def step_ms(self) -> float:
        """The median of the latest steps, 0 before the first: steps that compile do not move it."""
        return statistics.median(self._recent) if self._recent else 0.0

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) if self.is_gpu else 1000 * (second - first)

    def _now(self) -> Any:
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
