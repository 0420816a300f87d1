"""What a training run shows and leaves behind: the MLflow run, the progress display, the last pictures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from yolo_ray.augment.images import PhotoError, read_photo
from yolo_ray.config.schema import TrainConfig
from yolo_ray.errors import UserError
from yolo_ray.track import pictures
from yolo_ray.track.counting import counted
from yolo_ray.track.progress import Progress, follow
from yolo_ray.track.run import NullRun, RunTracker, Status, finish, start_run

RUN_FILE = "mlflow.json"
EVALUATION_FILE = "evaluation.npz"  # written by the loop for the best weights
MAX_PICTURED = 8


class RunObserver:
    """Plugs tracking and progress into a launch."""

    def counted(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how far something long is; the context is told of each so many photos."""
        return counted(what, total)

    def start(
        self, config: TrainConfig, folder: Path, names: tuple[str, ...], tags: dict[str, str]
    ) -> RunTracker | NullRun:
        """Create the tracking run, or reopen the one that the folder names.

        Raises:
            UserError: the tracking server or database cannot be used, or the folder not be written.
        """
        if not config.mlflow.enabled:
            return NullRun(folder, names)
        known = folder / RUN_FILE
        run_id = json.loads(known.read_text())["run_id"] if known.exists() else None
        tracker = start_run(
            folder,
            uri=config.mlflow.uri,
            experiment=config.mlflow.experiment,
            params=config.flat(),
            tags=tags,
            names=names,
            run_id=run_id,
        )
        try:
            known.write_text(json.dumps({"uri": tracker.uri, "run_id": tracker.run_id}))
        except OSError as error:
            finish(tracker, "FAILED", str(error))
            raise UserError(
                f"{known} cannot be written ({error.strerror}): free some space or make it writable"
            ) from error
        return tracker

    @contextmanager
    def follow(self, folder: Path) -> Iterator[None]:
        """Show the events that rank 0 writes, while the context is open."""
        stop = threading.Event()
        with Progress() as progress:
            thread = follow(folder / "events.jsonl", progress.handle, stop)
            try:
                yield
            finally:
                stop.set()
                thread.join(timeout=10)

    def finish(
        self, tracker: RunTracker | NullRun, folder: Path, status: Status, reason: str | None
    ) -> None:
        """Draw the last pictures, hand over the weights, end the tracking run, whatever the pictures come to."""
        try:
            if (folder / "results.csv").exists():
                _draw_last(tracker, folder)
            for name in ("best.pt", "last.pt"):
                if (folder / "weights" / name).exists():
                    tracker.file(folder / "weights" / name, "weights")
        finally:
            tracker.close()
            finish(tracker, status, reason)


def _draw_last(tracker: RunTracker | NullRun, folder: Path) -> None:
    """Curves of the run, and the best evaluation's predictions; a disk or photo that fails is a warning."""
    drawn: list[Path] = []
    try:
        pictures.draw_curves(folder / "results.csv", folder / "results.png")
        drawn.append(folder / "results.png")
        if (folder / EVALUATION_FILE).exists():
            drawn += _draw_evaluation(folder, tracker.names)
    except (OSError, PhotoError) as error:
        tracker.warn(f"a picture is not written: {error}")
    for path in drawn:
        tracker.file(path, "pictures")


def _draw_evaluation(folder: Path, names: tuple[str, ...]) -> list[Path]:
    with np.load(folder / EVALUATION_FILE, allow_pickle=False) as saved:
        data = {key: saved[key] for key in saved.files}
    curves: Any = SimpleNamespace(
        **{key: data[key] for key in data if key not in ("truth", "found")}
    )
    pictures.draw_pr(curves, names, folder / "pr_curves.png")
    paths = data["paths"][:MAX_PICTURED].tolist()
    truth = [data["truth"][data["truth"][:, 0] == index] for index in range(len(paths))]
    found = [data["found"][data["found"][:, 0] == index] for index in range(len(paths))]
    mean_f1 = np.nan_to_num(curves.f1).mean(0)
    pictures.draw_predictions(
        [read_photo(path) for path in paths],
        [(rows[:, 1:5], rows[:, 5].astype(int)) for rows in truth],
        [(rows[:, 1:5], rows[:, 5].astype(int), rows[:, 6]) for rows in found],
        names,
        folder / "predictions.jpg",
        # What a user would deploy: the confidence where precision and recall balance best.
        min_score=float(curves.confidence[int(mean_f1.argmax())]),
    )
    return [folder / "pr_curves.png", folder / "predictions.jpg"]
