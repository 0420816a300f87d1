"""What holds a run up, and what to do about it, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

TOLERATED_WAIT = 0.05  # of an epoch


@dataclass(frozen=True)
class EpochSpeed:
    """Where the time of an epoch's steps went, on one worker.

    Attributes:
        steps, batch: how many, and photos of the global batch.
        wall_ms: from the epoch's beginning to the end of its last step.
        busy_ms, idle_ms: of the device, within steps and between them.
        host_wait_ms: that the host waited for photos; it may run ahead of the device, so this need not be lost.
    """

    steps: int
    batch: int
    wall_ms: float
    busy_ms: float
    idle_ms: float
    host_wait_ms: float

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

    def row(self) -> dict[str, float]:
        """Columns of results.csv, milliseconds a step."""
        steps = max(self.steps, 1)
        return {
            "time/step_ms": self.wall_ms / steps,
            "time/device_ms": self.busy_ms / steps,
            "time/data_wait_ms": self.data_wait_ms / steps,
            "speed/data_wait_share": self.data_wait_share,
            "speed/images_per_s": self.images_per_s,
        }


def wait_advice(speed: EpochSpeed, *, data_cpus: float, cache: str) -> str:
    """What to change when the device waits for photos; empty when it hardly does."""
    if speed.data_wait_share <= TOLERATED_WAIT or speed.busy_ms <= 0:
        return ""
    could = 1000 * speed.steps * speed.batch / speed.busy_ms
    needed = data_cpus * could / speed.images_per_s
    remedies = [f"give about {needed:.0f} CPUs to reading photos"]
    if cache == "off":
        remedies.insert(0, "set data.cache=memory or disk")
    return (
        f"the device waited for photos during {speed.data_wait_share:.0%} of the epoch: {data_cpus:g} CPUs read "
        f"{speed.images_per_s:.0f} photos/s, its steps could take {could:.0f}; {', or '.join(remedies)}"
    )
