"""Clocks: what a call costs the device, the host and the memory."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import (
    DeviceType,  # what the profiler gives; torch has no public name for it
)

WARM_UP = {"cuda": 8, "cpu": 1}
FEWEST, MOST = 5, 30  # steps of a block on a GPU
BLOCK_S = 0.6
HOST_STEPS = {"cuda": 10, "cpu": 1}
Call = Callable[[int], None]


@dataclass(frozen=True)
class Clock:
    """How long to time: ``steps`` of a block (None: by the device), and ``blocks``."""

    device: torch.device
    steps: int | None
    blocks: int

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object]) -> float:
        """Wall time of an action and of what it gave the device, s."""
        self.wait()
        begin = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - begin

    def blocks_ms(self, call: Call) -> list[float]:
        """Milliseconds a step of every block after a warm-up: by CUDA events, on a CPU by wall time."""
        warm = WARM_UP[self.device.type]
        spent_s = self.seconds(lambda: [call(number) for number in range(warm)])
        steps = self.steps or self._steps_for(spent_s / warm)
        return [self._block_ms(call, steps) for _ in range(self.blocks)]

    def host_ms(self, call: Call) -> float:
        """Milliseconds in which a call returns, with nothing waiting on the device: the median of ten.

        Where the step itself waits for the device, as Ultralytics' loss does, that wait is part of it.
        """
        times = []
        for number in range(HOST_STEPS[self.device.type]):
            self.wait()
            begin = time.perf_counter()
            call(number)
            times.append((time.perf_counter() - begin) * 1e3)
        self.wait()
        return statistics.median(times)

    def _steps_for(self, step_s: float) -> int:
        if self.device.type == "cpu":
            return 2
        return max(FEWEST, min(MOST, int(BLOCK_S / max(step_s, 1e-6))))

    def _block_ms(self, call: Call, steps: int) -> float:
        def block() -> None:
            for number in range(steps):
                call(number)

        if self.device.type == "cpu":
            return self.seconds(block) * 1e3 / steps
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        begin.record()
        block()
        end.record()
        self.wait()
        return begin.elapsed_time(end) / steps


def profile(call: Call, *, top: int, title: str, steps: int = 3) -> dict[str, Any]:
    """What one step makes of a GPU: ms of kernels, the host's launches, graph launches, copies to the device.

    Prints the ``top`` kernels by time.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings(), torch.profiler.profile(activities=activities) as profiler:
        warnings.simplefilter("ignore")
        for number in range(steps):
            call(number)
        torch.cuda.synchronize()
    launches = graphs = copies = 0
    kernels: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.key] = (event.self_device_time_total / 1e3 / steps, event.count // steps)
            copies += event.count if event.key.startswith("Memcpy HtoD") else 0
        elif "Launch" in event.key or "MemcpyAsync" in event.key or "MemsetAsync" in event.key:
            launches += event.count
            graphs += event.count if "GraphLaunch" in event.key else 0
    if top:
        print(f"--- {title}: {sum(n for _, n in kernels.values())} kernels", file=sys.stderr)
        for key, (ms, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:top]:
            print(f"{ms:8.3f} ms {count:5d} x {key[:110]}", file=sys.stderr)
    return {
        "kernel_ms": round(sum(ms for ms, _ in kernels.values()), 3),
        "launches": round(launches / steps),
        "graph_launches": round(graphs / steps, 2),
        "h2d_copies": round(copies / steps, 2),
    }
