"""What a study shows and leaves behind: the parent run in MLflow, a nested run a trial, the table, the pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolo_ray.config.schema import TrainConfig
from yolo_ray.config.space import Domain
from yolo_ray.config.tune import TuneConfig
from yolo_ray.study.results import BEST, TABLE
from yolo_ray.study.sampling import importances
from yolo_ray.study.trials import BASELINE, JOURNAL, Journal, Trial, best_of
from yolo_ray.track import study_pictures
from yolo_ray.track.counting import counted
from yolo_ray.track.observer import RUN_FILE, RunObserver
from yolo_ray.track.run import NullRun, RunTracker, Status, finish, start_run
from yolo_ray.track.study_table import StudyTable

PARENT_TAG = "mlflow.parentRunId"


class TrialObserver(RunObserver):
    """Tracks one trial below its study's run; shows nothing, the study's table does."""

    def __init__(self, parent: str | None, number: int, options: Mapping[str, Any]) -> None:
        self._tags = {"trial": str(number)}
        if parent is not None:
            self._tags[PARENT_TAG] = parent
        self._tags |= {f"sampled.{name}": json.dumps(value) for name, value in options.items()}

    @contextmanager
    def _quiet(self) -> Iterator[Callable[[int], None]]:
        yield lambda count: None

    def counted(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show nothing."""
        return self._quiet()

    def start(
        self, config: TrainConfig, folder: Path, names: tuple[str, ...], tags: dict[str, str]
    ) -> RunTracker | NullRun:
        """Create or reopen the trial's run, nested in the study's."""
        return super().start(config, folder, names, tags | self._tags)

    @contextmanager
    def follow(self, folder: Path) -> Iterator[None]:
        """Show nothing."""
        yield


@dataclass(frozen=True)
class TrialObservers:
    """Makes the observers of a study's trials, in their processes."""

    parent: str | None

    def trial(self, number: int, options: Mapping[str, Any]) -> TrialObserver:
        """The observer of one trial."""
        return TrialObserver(self.parent, number, options)


class StudyObserver:
    """Plugs tracking, table and pictures into a study."""

    def __init__(self) -> None:
        self._tracker: RunTracker | NullRun | None = None

    def counted(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how far something long is; the context is told of each so many photos."""
        return counted(what, total)

    def start(
        self, config: TuneConfig, folder: Path, tags: dict[str, str]
    ) -> tuple[TrialObservers, str | None]:
        """Create the parent run, or reopen the one that the folder names.

        Raises:
            UserError: the tracking server or database cannot be used.
        """
        if not config.mlflow.enabled:
            self._tracker = NullRun(folder)
            return TrialObservers(None), None
        known = folder / RUN_FILE
        run_id = json.loads(known.read_text())["run_id"] if known.exists() else None
        tracker = start_run(
            folder, uri=config.mlflow.uri, experiment=config.mlflow.experiment, params=config.flat(),
            tags=tags, run_id=run_id,
        )  # fmt: skip
        known.write_text(json.dumps({"uri": tracker.uri, "run_id": tracker.run_id}))
        self._tracker = tracker
        return TrialObservers(tracker.run_id), tracker.uri

    @contextmanager
    def follow(
        self, trials: Mapping[int, Trial], num_samples: int
    ) -> Iterator[Callable[[str], None]]:
        """Show the table while the context is open."""
        with StudyTable(trials, num_samples) as table:
            yield table.say

    def end_trial(self, folder: Path, status: Status, reason: str) -> None:
        """End a trial's run that its own process could not end; one that has ended keeps its status."""
        known = folder / RUN_FILE
        if not known.is_file():
            return
        run = json.loads(known.read_text())
        finish(RunTracker(run["uri"], run["run_id"], folder), status, reason or None)

    def finish(
        self, folder: Path, space: Mapping[str, Domain], status: Status, reason: str | None
    ) -> None:
        """Draw the pictures, log results, end the parent run, whatever the pictures come to."""
        tracker = self._tracker
        assert tracker is not None, "a study begins before it ends"
        try:
            trials = list(Journal(folder / JOURNAL).trials.values())
            _log_trials(tracker, trials)
            for path in _draw(tracker, folder, trials, space):
                tracker.file(path, "pictures")
            for name in (BEST, TABLE):
                if (folder / name).exists():
                    tracker.file(folder / name, "")
        finally:
            tracker.close()
            finish(tracker, status, reason)


def _log_trials(tracker: RunTracker | NullRun, trials: list[Trial]) -> None:
    """The objective by trial number, and the best of all."""
    for trial in trials:
        if trial.value is not None:
            tracker.metrics({"objective": trial.value, **trial.metrics}, step=trial.number)
    best = best_of(trials)
    if best is not None and best.value is not None:
        tracker.metrics({"best/objective": best.value, "best/trial": best.number}, step=len(trials))
    first = next((t for t in trials if t.number == BASELINE and t.value is not None), None)
    if first is not None and first.value is not None:
        tracker.metrics({"baseline/objective": first.value}, step=0)


def _draw(
    tracker: RunTracker | NullRun, folder: Path, trials: list[Trial], space: Mapping[str, Domain]
) -> list[Path]:
    """The pictures that were drawn; a disk that refuses is a warning."""
    drawn: list[Path] = []
    if best_of(trials) is None:
        return drawn
    try:
        for name, draw in (
            ("history.png", lambda path: study_pictures.draw_history(trials, path)),
            ("curves.png", lambda path: study_pictures.draw_learning(trials, path)),
            ("parallel.png", lambda path: study_pictures.draw_parallel(trials, space, path)),
            ("importance.png", lambda path: study_pictures.draw_importance(importances(trials, space), path)),
        ):  # fmt: skip
            draw(folder / name)
            drawn.append(folder / name)
    except OSError as error:
        tracker.warn(f"a picture is not written: {error}")
    return drawn
