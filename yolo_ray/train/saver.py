"""A run's checkpoints and weights, written by a thread while training goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yolo_ray.config.schema import TrainConfig
from yolo_ray.model.build import Detector, blank_network, save_weights
from yolo_ray.model.saving import link_or_copy, replaced
from yolo_ray.step.graph import Step
from yolo_ray.train.checkpoint import Progress, Snapshot, disk_explained, save_checkpoint


@dataclass
class Saver:
    """One save at a time: whoever comes next waits for it, and is told what it met."""

    config: TrainConfig
    folder: Path  # the run's
    detector: Detector
    data_digest: str
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="saver")
    )
    _writing: Future[None] | None = None
    _blank: Any = None  # what the weights are written as; built before the thread needs it

    def save(
        self, step: Step, progress: Progress, *, epoch: int | None = None, is_best: bool = False
    ) -> None:
        """Begin to write a checkpoint of this moment and, after the ``epoch`` of that number, the weights.

        Raises:
            UserError: the disk refused the save before; this one is tried all the same.
        """
        try:
            self.wait()
        finally:
            if epoch is not None and self._blank is None:
                self._blank = blank_network(self.detector)
            snapshot = Snapshot(step, progress)
            self._writing = self._pool.submit(self._write, snapshot, epoch, is_best)

    def check(self) -> None:
        """Hear of a save that has ended, without waiting for one that has not.

        Raises:
            UserError: the disk refused.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until all is on the disk.

        Raises:
            UserError: the disk refused.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """End the thread; what it is writing is finished."""
        self._pool.shutdown()

    def _write(self, snapshot: Snapshot, epoch: int | None, is_best: bool) -> None:
        values: dict[str, Any] = self.config.flat()
        state = snapshot.state(values, self.data_digest)
        with disk_explained(self.folder):
            if epoch is not None:
                args = values | {"imgsz": self.config.imgsz, "task": "detect", "epoch": epoch}
                weights = snapshot.weights()
                for name in ("last.pt", "best.pt") if is_best else ("last.pt",):
                    path = self.folder / "weights" / name
                    save_weights(path, self.detector, weights, args, blank=self._blank)
            keep, folder = self.config.checkpoint.keep, self.folder / "checkpoints"
            path = save_checkpoint(state, folder, keep=keep)
            if is_best:
                with replaced(path.with_name("best.pt")) as best:
                    link_or_copy(path, best)
