"""Where an epoch's time went, and the sentence about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from yolo_ray.config.schema import DataConfig
from yolo_ray.data.batch import Encoded, PhotoRing
from yolo_ray.step.clock import StepClock
from yolo_ray.train.diagnose import EpochSpeed, Speedometer, supply_sentence, wait_advice
from yolo_ray.train.feed import Feed
from yolo_ray.train.meter import GpuMeter, NoMeter


def make_speed(**changes: float) -> EpochSpeed:
    values = {"steps": 100, "batch": 16, "wall_ms": 2000.0, "busy_ms": 800.0, "idle_ms": 1100.0}
    values |= {"step_ms": 8.0, "copy_ms": 30.0, "photos_per_cpu": 210.0}
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
    assert clock.steps == 3 and clock.step_ms == pytest.approx(200)
    clock.restart()
    assert clock.busy_ms == clock.idle_ms == clock.steps == clock.step_ms == 0


def test_only_what_the_device_lost_is_a_wait() -> None:
    assert make_speed().data_wait_share == 0.5
    assert make_speed(idle_ms=20.0).data_wait_ms == 20, "the host ran ahead"
    assert make_speed(host_wait_ms=20.0).data_wait_ms == 20, "the device waited for something else"
    row = make_speed().row()
    assert row["time/step_ms"] == 20 and row["time/device_ms"] == 8
    assert row["time/copy_ms"] == 0.3 and row["speed/photos_per_cpu"] == 210
    assert row["speed/images_per_s"] == 800
    assert "speed/gpu_utilization" not in row
    assert make_speed(utilization=0.93).row()["speed/gpu_utilization"] == 0.93


def test_the_advice_names_cause_and_remedy() -> None:
    told = wait_advice(make_speed(), data_cpus=6, data=DataConfig())
    assert "50% of the epoch: 6 CPUs read 800 photos/s, its steps could take 2000" in told
    assert "set data.cache=memory or disk, or give about 15 CPUs" in told
    assert "data.cache" not in wait_advice(make_speed(), data_cpus=6, data=DataConfig(cache="disk"))
    told = wait_advice(make_speed(), data_cpus=6, data=DataConfig(decode="gpu"))
    assert "set data.decode=cpu with data.cache=memory or disk, or" in told, (
        "they exclude each other"
    )


@pytest.mark.parametrize("changes", [{"host_wait_ms": 90.0}, {"step_ms": 0.0}])
def test_no_advice_without_a_wait(changes: dict[str, float]) -> None:
    assert not wait_advice(make_speed(**changes), data_cpus=6, data=DataConfig())


def test_how_many_cpus_keep_the_gpu_busy() -> None:
    told = supply_sentence(make_speed(), data_cpus=6)
    assert (
        "8.0 ms on the GPU, enough for 2000 photos/s; one CPU reads 210 photos/s: 10 CPUs keep"
        in told
    )
    assert told.endswith("reading has 6; see cluster.data_cpus and data.cache")
    assert supply_sentence(make_speed(photos_per_cpu=4000.0), data_cpus=6).endswith(
        "1 CPU keeps the GPU busy, reading has 6"
    )
    assert not supply_sentence(make_speed(photos_per_cpu=0.0), data_cpus=6)


def test_each_sentence_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    feed: Any = SimpleNamespace(
        ring=PhotoRing(1, 8, 8), wait_s=0.0, photos_per_cpu=0.0, restart=lambda: None
    )
    meter = Speedometer(
        torch.device("cpu"), feed, NoMeter(), batch=16, data_cpus=2, data=DataConfig()
    )
    told: list[str] = []
    meter.tell_supply(told.append, is_over=True)
    meter.tell_wait(told.append)
    assert not told, "a CPU that trains has nothing to be kept busy with"
    meter.clock.is_gpu = True
    monkeypatch.setattr(meter, "speed", lambda: make_speed())
    meter.tell_supply(told.append, is_over=False)
    assert not told, "two seconds are too short"
    for _ in range(2):
        meter.tell_supply(told.append, is_over=True)
        meter.tell_wait(told.append)
    assert len(told) == 2 and "keep the GPU busy" in told[0] and "the device waited" in told[1]


def test_a_meter_adds_up_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([90, 100])
    monkeypatch.setattr("yolo_ray.train.meter.PERIOD_S", 0.001)
    monkeypatch.setattr("torch.cuda.utilization", lambda device: next(answers))  # then it raises
    meter = GpuMeter(cast(Any, "cuda:0"))
    meter.thread.join(5)
    assert not meter.thread.is_alive() and meter.mean() == 0.95
    meter.restart()
    assert meter.mean() is None


def test_slow_first_reads_do_not_count() -> None:
    plan: Any = SimpleNamespace(
        batch=4, window=1, total_steps=5, at=lambda *_: None, capacity_at=lambda *_: 0,
        images_at=lambda step: (np.arange(4), None, None),
    )  # fmt: skip
    ring: Any = SimpleNamespace(
        stage=lambda photos: photos,
        put=lambda *_: None,
        batch=lambda *_: None,
        copied_ms=lambda: 0.0,
    )

    def read(steps: range) -> Any:
        for step in steps:
            read_ms = 4000.0 if step < 2 else 8.0
            yield SimpleNamespace(
                step=step, ids=np.arange(4), photos=None, kept={}, read_ms=read_ms
            )

    feed = Feed(plan, rank=0, workers=1, source=read, ring=ring)
    assert feed.photos_per_cpu == 0
    assert len(list(feed.batches(0))) == 5 and feed.photos_per_cpu == 500
    feed.restart()
    assert feed.photos_per_cpu == 0


def test_encoded_photos_go_through_the_decoder_on_their_way_to_the_ring() -> None:
    plan: Any = SimpleNamespace(
        batch=2, window=1, total_steps=3, at=lambda *_: None, capacity_at=lambda *_: 0,
        images_at=lambda step: (np.arange(2), None, None),
    )  # fmt: skip
    put: list[tuple[int, Any]] = []
    ring: Any = SimpleNamespace(
        put=lambda step, photos: put.append((step, photos)),
        batch=lambda *_: None,
        copied_ms=lambda: 0.0,
    )

    def read(steps: range) -> Any:
        for step in steps:
            photos = tuple(Encoded(f"{step}.jpg", bytes([step, slot])) for slot in range(2))
            yield SimpleNamespace(step=step, ids=np.arange(2), photos=photos, kept={}, read_ms=1.0)

    def decode(photos: tuple[Encoded, ...]) -> Any:
        return [list(photo.data) for photo in photos]

    feed = Feed(plan, rank=0, workers=1, source=read, ring=ring, decode=decode)
    assert len(list(feed.batches(0))) == 3
    assert put == [(step, [[step, 0], [step, 1]]) for step in range(3)]
