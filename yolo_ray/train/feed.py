"""From the plan and a stream of photos to the batches of a step; knows neither Ray nor files."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

from yolo_ray.data.batch import Batch, Encoded, PhotoRing
from yolo_ray.data.plan import KeptBoxes, Plan, slots_of

QUEUE_STEPS = 4
RECENT_STEPS = 200


class StepPhotosLike(Protocol):
    """What a stream of photos yields; see data/pipeline.py."""

    @property
    def step(self) -> int:
        """The global step."""
        ...

    @property
    def ids(self) -> np.ndarray:
        """Record ids int64 [b] of this worker's rows."""
        ...

    @property
    def photos(self) -> np.ndarray | tuple[Encoded, ...]:
        """uint8 [b,S,S,3], the resized photo at the top left; or b photos for ``Feed``'s decoder."""
        ...

    @property
    def kept(self) -> KeptBoxes:
        """Boxes that albumentations changed."""
        ...

    @property
    def read_ms(self) -> float:
        """What they took of the CPU that read them."""
        ...


Decode = Callable[[tuple[Encoded, ...]], Tensor]
PhotoSource = Callable[[range], Iterator[StepPhotosLike]]
_Staged = tuple[StepPhotosLike, Tensor]  # the latter: its photos, ready to be copied to the device


class Feed:
    """Batches of this worker's slots, in order, from any step.

    Attributes:
        wait_s: seconds the training loop waited for photos since ``restart``.
        ids: record ids int64 [b] of the last batch's own photos.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        workers: int,
        source: PhotoSource,
        ring: PhotoRing,
        decode: Decode | None = None,
    ) -> None:
        """``decode``: what turns photos that come encoded into uint8 [b,S,S,3] on the device."""
        self.plan, self.workers, self.source, self.ring = plan, workers, source, ring
        self.decode = decode
        self.slots = slots_of(rank, workers, plan.batch)
        self.ids = np.empty(0, dtype=np.int64)
        self.restart()

    def restart(self) -> None:
        """Count anew."""
        self.wait_s = 0.0
        self._photo_ms: deque[float] = deque(maxlen=RECENT_STEPS)
        self.ring.copied_ms()

    @property
    def photos_per_cpu(self) -> float:
        """Photos that one CPU reads a second: the median of the latest steps, 0 before the first.

        The first reads of a fresh process are slow, and do not move it.
        """
        return 1000 / statistics.median(self._photo_ms) if self._photo_ms else 0.0

    def batches(self, first_step: int) -> Generator[tuple[int, Batch]]:
        """``(step, batch)`` from ``first_step`` to the end; the photos of the mosaic's window come first."""
        if first_step >= self.plan.total_steps:
            return
        steps = range(first_step - (self.plan.window - 1), self.plan.total_steps)
        kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for photos, staged in _ahead(self._staged(steps), self._waited):
            images, _, _ = self.plan.images_at(photos.step)
            # The rows themselves say who they are: a stream that slipped by one row must never train.
            assert np.array_equal(images[self.slots], photos.ids), "the stream left the plan"
            self.ring.put(photos.step, staged)
            self._photo_ms.append(photos.read_ms / len(photos.ids))
            kept |= photos.kept
            kept = {
                key: value for key, value in kept.items() if key[0] > photos.step - self.plan.window
            }
            if photos.step >= first_step:
                self.ids = photos.ids
                yield photos.step, self._batch(photos.step, kept)

    def _staged(self, steps: range) -> Iterator[_Staged]:
        # In the thread that pulls: copying a batch into pinned memory takes longer than launching a step.
        for photos in self.source(steps):
            if isinstance(photos.photos, tuple):
                assert self.decode is not None, "encoded photos and no decoder"
                yield photos, self.decode(photos.photos)
            else:
                yield photos, self.ring.stage(photos.photos)

    def _batch(self, step: int, kept: KeptBoxes) -> Batch:
        planned = self.plan.at(step, kept or None)
        return self.ring.batch(planned, self.slots, self.plan.capacity_at(step, self.workers))

    def _waited(self, seconds: float) -> None:
        self.wait_s += seconds


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Puller:
    """A thread that pulls items into a bounded queue: None at the end, _Failed for an error."""

    def __init__(self, items: Iterator[_Staged]) -> None:
        self.items = items
        self.buffer: queue.Queue[_Staged | _Failed | None] = queue.Queue(QUEUE_STEPS)
        self.stopped = threading.Event()
        threading.Thread(target=self._pull, name="photos", daemon=True).start()

    def _pull(self) -> None:
        try:
            for item in self.items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:  # handed to the training thread, which raises it
            self._put(_Failed(error))

    def _put(self, item: _Staged | _Failed | None) -> bool:
        """Whether there was a place before the consumer went away."""
        while not self.stopped.is_set():
            try:
                self.buffer.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False


def _ahead(items: Iterator[_Staged], waited: Callable[[float], None]) -> Iterator[_Staged]:
    """``items``, pulled a few ahead so that waiting for photos and training overlap."""
    puller = _Puller(items)
    try:
        while True:
            begin = time.perf_counter()
            item = puller.buffer.get()
            waited(time.perf_counter() - begin)
            if item is None:
                return
            if isinstance(item, _Failed):
                raise item.error
            yield item
    finally:
        puller.stopped.set()
