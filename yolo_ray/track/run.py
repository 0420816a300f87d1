"""The tracked run: results.csv, pictures and MLflow. MLflow itself is behind client.py.

The driver begins and ends a run (:func:`start_run`, :func:`finish`); the tracker in between is
pickled to rank 0, which writes. Run ids are explicit everywhere: MLflow's active run is not used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from yolo_ray.track import outbox, pictures, table
from yolo_ray.track.client import (
    Sender,
    absolute_uri,
    access_of,
    connect,
    connect_to_run,
    create_run,
    find_experiment,
    go_on,
    metric_names,
    usable,
)
from yolo_ray.track.outbox import Operation, Outbox

CLOSE_S = 30.0

Status = Literal["FINISHED", "FAILED", "KILLED"]


class NullRun:
    """A run without MLflow (``mlflow.enabled=false``): results.csv and pictures only."""

    def __init__(self, run_dir: Path, names: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        self.names = tuple(names)
        self.warn: Callable[[str], None] = print_warning

    def __reduce__(self) -> tuple[Any, ...]:
        return NullRun, (self.run_dir, self.names)

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Do nothing: metrics by step are MLflow's."""

    def row(self, values: Mapping[str, float], *, epoch: int) -> None:
        """Write the line of an epoch to results.csv; a full disk is a warning."""
        try:
            table.append_row(self.run_dir / "results.csv", values, epoch=epoch)
        except OSError as error:
            self.warn(f"results.csv is not written: {error}")

    def photos(
        self,
        name: str,
        images: np.ndarray,
        boxes: list[np.ndarray],
        classes: list[np.ndarray],
        *,
        step: int,
    ) -> None:
        """Draw uint8 [n,S,S,3] images and xyxy pixel boxes [k,4] into ``<name>.jpg``."""
        self.draw(name, images, boxes, classes)

    def draw(
        self, name: str, images: np.ndarray, boxes: list[np.ndarray], classes: list[np.ndarray]
    ) -> Path | None:
        """Like ``photos``; the picture's path, None when the disk refused it."""
        path = self.run_dir / f"{name}.jpg"
        try:
            pictures.draw_grid(images, boxes, classes, self.names, path)
        except OSError as error:
            self.warn(f"{path} is not written: {error}")
            return None
        return path

    def file(self, path: Path, folder: str) -> None:
        """Do nothing: the file is in the run's folder already."""

    def close(self) -> None:
        """Do nothing: nothing waits."""


class RunTracker:
    """A run in MLflow. Picklable; the client and its thread begin with the first call.

    Attributes: ``uri`` and ``run_id`` of the run, ``run_dir``, ``names`` of the classes, and
    ``warn``, which is told once when the server is away (default: a line on stderr; not pickled).
    No method waits for the server or raises when it is away: see :class:`outbox.Outbox`.
    """

    def __init__(
        self,
        uri: str,
        run_id: str,
        run_dir: Path,
        names: Sequence[str] = (),
        access: Mapping[str, str] | None = None,
    ) -> None:
        self._access = access_of(os.environ) if access is None else dict(access)
        self.uri = uri
        self.run_id = run_id
        self._local = NullRun(run_dir, names)
        self._outbox: Outbox | None = None
        self._by_step: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return RunTracker, (self.uri, self.run_id, self.run_dir, self.names, self._access)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self._local.run_dir

    @property
    def names(self) -> tuple[str, ...]:
        """Class names by id, for labels in pictures."""
        return self._local.names

    @property
    def warn(self) -> Callable[[str], None]:
        """Called with one sentence, from any thread."""
        return self._local.warn

    @warn.setter
    def warn(self, warn: Callable[[str], None]) -> None:
        self._local.warn = warn

    def metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Log values at a global step; names MLflow does not take are respelled."""
        self._by_step.update(values)
        self._log(values, step)

    def row(self, values: Mapping[str, float], *, epoch: int) -> None:
        """One line of results.csv, and metrics by epoch.

        A name that :meth:`metrics` logs by step is left out of the latter: one curve, one x axis.
        """
        self._local.row(values, epoch=epoch)
        self._log({k: v for k, v in values.items() if k not in self._by_step}, epoch)

    def photos(
        self,
        name: str,
        images: np.ndarray,
        boxes: list[np.ndarray],
        classes: list[np.ndarray],
        *,
        step: int,
    ) -> None:
        """Draw uint8 [n,S,S,3] images and xyxy boxes [k,4] px into ``<name>.jpg``; log it."""
        path = self._local.draw(name, images, boxes, classes)
        if path is not None:
            self.file(path, "pictures")

    def file(self, path: Path, folder: str) -> None:
        """Log a file as it is when its turn comes, into ``folder`` of the run ("" for its top)."""
        self._put({"kind": "file", "path": str(path.resolve()), "folder": folder})

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Deliver what waits; what is left after ``timeout_s`` is in ``mlflow_pending.jsonl``."""
        if self._outbox is not None:
            self._outbox.close(timeout_s)
            self._outbox = None

    def end(self, status: Status, reason: str | None) -> None:
        """See :func:`finish`."""
        time_ms = _now_ms()
        self._put({"kind": "status", "status": status, "reason": reason, "time_ms": time_ms})
        self.close()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if values:
            now = _now_ms()
            spelled = zip(metric_names(values), values.values(), strict=True)
            entries = [[name, float(value), now, int(step)] for name, value in spelled]
            self._put({"kind": "metrics", "values": entries})

    def _put(self, operation: Operation) -> None:
        if self._outbox is None:
            os.environ.update(self._access)  # MLflow reads it there
            self._outbox = Outbox(Sender(self.uri), _pending(self.run_dir), self._warn_once)
        self._outbox.put({"run_id": self.run_id, **operation})

    def _warn_once(self, text: str) -> None:
        self.warn(text)


def start_run(
    run_dir: Path,
    *,
    uri: str | None,
    experiment: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
    names: Sequence[str] = (),
    run_id: str | None = None,
) -> RunTracker:
    """Begin a run named like its folder, or go on with ``run_id``; called by the driver.

    Without ``uri`` it is ``mlflow.db`` beside the run's folder, artifacts in ``mlartifacts`` there.
    The code's git commit and the versions of torch, ray, ultralytics and yolo_ray become tags
    besides ``tags``. Going on, parameters that have changed become tags ``changed.<name>``, and
    what an earlier process could not deliver is delivered.
    Raises UserError, within about 15 seconds, if the server or database cannot be used, or does not hold ``run_id``.
    """
    run_dir = run_dir.resolve()
    uri = absolute_uri(uri, run_dir.parent)
    all_tags = {**code_tags(), **{name: str(value) for name, value in tags.items()}}
    with usable(uri):
        if run_id is None:
            client = connect(uri, create=True)
            experiment_id = find_experiment(client, uri, experiment, run_dir.parent)
            run_id = create_run(client, experiment_id, run_dir.name, params, all_tags)
        else:
            client = connect_to_run(uri, run_id)
            outbox.replay(_pending(run_dir), Sender(uri, client), print_warning)
            go_on(client, run_id, params, all_tags)
    return RunTracker(uri, run_id, run_dir, names)


def finish(tracker: RunTracker | NullRun, status: Status, reason: str | None = None) -> None:
    """End the run; called by the driver, after rank 0 has closed its tracker or died.

    Delivers what rank 0 could not. A run that has ended keeps its first status, so a ``finally``
    may call it again. Never raises for a server that is away: the status then waits in the run's
    folder.
    """
    if isinstance(tracker, RunTracker):
        tracker.end(status, reason)


def replay_pending(tracker: RunTracker) -> int:
    """Deliver ``mlflow_pending.jsonl`` of a run now; the number of entries.

    Raises what the client raises if the server is still away; then nothing is lost.
    """
    return outbox.replay(_pending(tracker.run_dir), Sender(tracker.uri), tracker.warn)


def code_tags() -> dict[str, str]:
    """Versions of what decides the numbers; the git commit of this code if it is checked out."""
    tags = {
        f"version.{name}": _version(name) for name in ("torch", "ray", "ultralytics", "yolo_ray")
    }
    here = Path(__file__)
    # a copy inside site-packages may lie in a repository of the user's: that commit is not ours
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return tags
    tags["mlflow.source.git.commit"] = _git(here.parent, "rev-parse", "HEAD") or "none"
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    tags["git.dirty"] = str(bool(changed)).lower()
    return tags


def print_warning(text: str) -> None:
    """The default of ``warn``."""
    print(f"Warning: {text}", file=sys.stderr, flush=True)


def _pending(run_dir: Path) -> Path:
    return run_dir / "mlflow_pending.jsonl"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git in a folder; None without git, outside a repository or after 10 s."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
