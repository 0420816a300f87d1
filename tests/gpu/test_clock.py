"""The clock of steps on a real GPU."""

from __future__ import annotations

import time

import pytest
import torch

from tests.gpu.steps import CUDA
from yolo_ray.step.clock import StepClock

pytestmark = pytest.mark.gpu
CYCLES = 50_000_000  # some 30 ms


def test_a_host_that_runs_ahead_costs_nothing() -> None:
    clock = StepClock(CUDA)
    for _ in range(3):
        clock.begin()
        torch.cuda._sleep(CYCLES)
        clock.end()
        time.sleep(0.005)  # the device is still busy
    torch.cuda.synchronize()
    clock.collect()
    assert clock.busy_ms > 30 and clock.idle_ms < 0.2 * clock.busy_ms
    busy = clock.busy_ms
    time.sleep(2 * busy / 1000)
    clock.begin()
    torch.cuda._sleep(CYCLES)
    clock.end()
    torch.cuda.synchronize()
    clock.collect()
    assert clock.idle_ms > busy, "the device stood still"


def test_a_step_that_still_runs_is_counted_later() -> None:
    clock = StepClock(CUDA)
    clock.begin()
    clock.end()
    torch.cuda.synchronize()
    clock.begin()
    torch.cuda._sleep(CYCLES)
    clock.end()
    clock.collect()
    assert clock.steps == 1, "the device is in the second"
    torch.cuda.synchronize()
    clock.collect()
    assert clock.steps == 2 and clock.busy_ms > 5
