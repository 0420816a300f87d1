"""What holds a run up, and what to do about it, in one sentence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from yolo_ray.config.schema import DataConfig
from yolo_ray.step.clock import StepClock
from yolo_ray.train.feed import Feed
from yolo_ray.train.meter import Meter

TOLERATED_WAIT = 0.05  # of an epoch
CALIBRATION_S = 10  # of the first epoch, until reading and training can be compared
CALIBRATION_STEPS = 60  # the first of them are read by processes that have just begun


@dataclass(frozen=True)
class EpochSpeed:
    """Where the time of an epoch's steps went, on one worker.

    Attributes:
        steps, batch: how many, and photos of the global batch.
        wall_ms: from the epoch's beginning to the end of its last step.
        busy_ms, idle_ms: of the device, within steps and between them.
        step_ms: the median of the latest steps on the device.
        host_wait_ms: that the host waited for photos; it may run ahead of the device, so this need not be lost.
        copy_ms: photos on their way to the device, beside the steps.
        photos_per_cpu: that one CPU reads a second; 0 when none were read.
        utilization: of the GPU, 0 to 1, as its driver counts it; None where it cannot be asked.
    """

    steps: int
    batch: int
    wall_ms: float
    busy_ms: float
    idle_ms: float
    step_ms: float
    host_wait_ms: float
    copy_ms: float = 0.0
    photos_per_cpu: float = 0.0
    utilization: float | None = None

    @property
    def data_wait_ms(self) -> float:
        """That the device stood still for want of photos."""
        return min(self.host_wait_ms, self.idle_ms)

    @property
    def data_wait_share(self) -> float:
        """Of the epoch's steps, 0 to 1."""
        return min(self.data_wait_ms / self.wall_ms, 1.0) if self.wall_ms > 0 else 0.0

    @property
    def images_per_s(self) -> float:
        """Photos of the global batch a second, waiting included."""
        return 1000 * self.steps * self.batch / self.wall_ms if self.wall_ms > 0 else 0.0

    @property
    def could_per_s(self) -> float:
        """Photos of the global batch a second if the device never waited."""
        return 1000 * self.batch / self.step_ms if self.step_ms > 0 else 0.0

    def row(self) -> dict[str, float]:
        """Columns of results.csv, milliseconds a step."""
        steps = max(self.steps, 1)
        row = {
            "time/step_ms": self.wall_ms / steps,
            "time/device_ms": self.busy_ms / steps,
            "time/copy_ms": self.copy_ms / steps,
            "time/data_wait_ms": self.data_wait_ms / steps,
            "speed/data_wait_share": self.data_wait_share,
            "speed/images_per_s": self.images_per_s,
            "speed/photos_per_cpu": self.photos_per_cpu,
        }
        if self.utilization is not None:
            row["speed/gpu_utilization"] = self.utilization
        return row


def supply_sentence(speed: EpochSpeed, *, data_cpus: float) -> str:
    """How many CPUs keep the device busy; empty while that is not known."""
    if not speed.could_per_s or not speed.photos_per_cpu:
        return ""
    needed = math.ceil(speed.could_per_s / speed.photos_per_cpu)
    kept = "keeps" if needed == 1 else "keep"
    sentence = (
        f"a step takes {speed.step_ms:.1f} ms on the GPU, enough for {speed.could_per_s:.0f} photos/s; one CPU reads "
        f"{speed.photos_per_cpu:.0f} photos/s: {_cpus(needed)} {kept} the GPU busy, reading has {data_cpus:g}"
    )
    if needed > data_cpus:
        sentence += "; see cluster.data_cpus and data.cache"
    return sentence


def wait_advice(speed: EpochSpeed, *, data_cpus: float, data: DataConfig) -> str:
    """What to change when the device waits for photos; empty when it hardly does."""
    if speed.data_wait_share <= TOLERATED_WAIT or not speed.could_per_s:
        return ""
    needed = math.ceil(data_cpus * speed.could_per_s / speed.images_per_s)
    remedies = [f"give about {_cpus(needed)} to reading photos (cluster.data_cpus)"]
    if data.cache == "off":
        undecoded = "data.decode=cpu with " if data.decode == "gpu" else ""
        remedies.insert(0, f"set {undecoded}data.cache=memory or disk")
    return (
        f"the device waited for photos during {speed.data_wait_share:.0%} of the epoch: {data_cpus:g} CPUs read "
        f"{speed.images_per_s:.0f} photos/s, its steps could take {speed.could_per_s:.0f}; {', or '.join(remedies)}"
    )


def _cpus(count: int) -> str:
    return f"{count} CPU{'s' if count != 1 else ''}"


class Speedometer:
    """Measures the steps of an epoch on one worker and says, once each, what they need.

    Sentences are about GPUs: a CPU that trains takes what reading leaves.
    """

    def __init__(
        self,
        device: torch.device,
        feed: Feed,
        meter: Meter,
        *,
        batch: int,
        data_cpus: float,
        data: DataConfig,
    ) -> None:
        """``batch``: photos of a global step; ``data_cpus``: of all workers, to read photos."""
        self.clock, self.feed, self.meter = StepClock(device), feed, meter
        self.batch, self.data_cpus, self.data = batch, data_cpus, data
        self.is_supply_told = self.is_wait_told = False
        self.restart()

    def restart(self) -> None:
        """An epoch begins."""
        self.begin_time = time.perf_counter()
        self.copy_ms = 0.0
        self.clock.restart()
        self.feed.restart()
        self.meter.restart()

    def collect(self) -> None:
        """Take in what was measured of the steps that the device has ended."""
        self.clock.collect()
        self.copy_ms += self.feed.ring.copied_ms()

    def speed(self) -> EpochSpeed:
        """Of the epoch until now."""
        feed, clock = self.feed, self.clock
        return EpochSpeed(
            steps=clock.steps, batch=self.batch,
            wall_ms=1000 * (time.perf_counter() - self.begin_time),
            busy_ms=clock.busy_ms, idle_ms=clock.idle_ms, step_ms=clock.step_ms,
            host_wait_ms=1000 * feed.wait_s, copy_ms=self.copy_ms,
            photos_per_cpu=feed.photos_per_cpu, utilization=self.meter.mean(),
        )  # fmt: skip

    def tell_supply(self, tell: Callable[[str], None], *, is_over: bool) -> None:
        """Once, after the first seconds or the first epoch: how many CPUs keep the GPU busy."""
        if self.is_supply_told or not self.clock.is_gpu:
            return
        speed = self.speed()
        is_early = speed.wall_ms < 1000 * CALIBRATION_S or speed.steps < CALIBRATION_STEPS
        if is_early and not is_over:
            return
        self.is_supply_told = True
        if sentence := supply_sentence(speed, data_cpus=self.data_cpus):
            tell(sentence)

    def tell_wait(self, warn: Callable[[str], None]) -> None:
        """Once, after an epoch: that the GPU waits for photos."""
        if self.is_wait_told or not self.clock.is_gpu:
            return
        if advice := wait_advice(self.speed(), data_cpus=self.data_cpus, data=self.data):
            self.is_wait_told = True
            warn(advice)
