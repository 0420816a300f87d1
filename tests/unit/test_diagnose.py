"""Where an epoch's time went, and the sentence about it."""

from __future__ import annotations

import pytest
import torch

from yolo_ray.step.clock import StepClock
from yolo_ray.train.diagnose import EpochSpeed, wait_advice


def make_speed(**changes: float) -> EpochSpeed:
    values = {"steps": 100, "batch": 16, "wall_ms": 2000.0, "busy_ms": 800.0, "idle_ms": 1100.0}
    return EpochSpeed(**({**values, "host_wait_ms": 1000.0} | changes))  # pyright: ignore[reportArgumentType]


def test_steps_and_the_gaps_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 5.1, 5.4, 5.7, 6.0, 6.2])  # begin and end of three steps
    monkeypatch.setattr("yolo_ray.step.clock.time.perf_counter", lambda: next(times))
    clock = StepClock(torch.device("cpu"))
    for steps in (2, 1):
        for _ in range(steps):
            clock.begin()
            clock.end()
        clock.collect()
    assert clock.busy_ms == pytest.approx(100 + 300 + 200)
    assert clock.idle_ms == pytest.approx(300 + 300), (
        "across a collect too, but not before the first"
    )
    clock.restart()
    assert clock.busy_ms == clock.idle_ms == 0


def test_only_what_the_device_lost_is_a_wait() -> None:
    assert make_speed().data_wait_share == 0.5
    assert make_speed(idle_ms=20.0).data_wait_ms == 20, "the host ran ahead"
    assert make_speed(host_wait_ms=20.0).data_wait_ms == 20, "the device waited for something else"
    row = make_speed().row()
    assert row["time/step_ms"] == 20 and row["time/device_ms"] == 8
    assert row["speed/images_per_s"] == 800


def test_the_advice_names_cause_and_remedy() -> None:
    told = wait_advice(make_speed(), data_cpus=6, cache="off")
    assert "50% of the epoch: 6 CPUs read 800 photos/s, its steps could take 2000" in told
    assert "set data.cache=memory or disk, or give about 15 CPUs" in told
    assert "data.cache" not in wait_advice(make_speed(), data_cpus=6, cache="disk")


@pytest.mark.parametrize("changes", [{"host_wait_ms": 90.0}, {"busy_ms": 0.0}])
def test_no_advice_without_a_wait(changes: dict[str, float]) -> None:
    assert not wait_advice(make_speed(**changes), data_cpus=6, cache="off")
