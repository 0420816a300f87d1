"""A study's memory: an append-only journal of its trials, and what it adds up to.

Everything that search and early stopping know follows from these lines, so a study whose driver was killed goes on
from them: nothing else is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from yolo_ray.errors import UserError

State = Literal["running", "finished", "stopped", "failed"]
JOURNAL = "journal.jsonl"
BASELINE = 0  # the number of the trial with the options as they were given


@dataclass
class Trial:
    """One training run of a study.

    Attributes:
        number: 0 is the baseline.
        options: what was sampled, by dotted name; empty for the baseline.
        folder: of the newest attempt, relative to the study's.
        state: ``running`` also after the driver was killed, until the study goes on.
        reports: the objective by epoch, counted from 1.
        value: the best objective so far; None before the first report.
        metrics: of the epoch of that value.
        reason: why it failed or was stopped.
        donors: of population-based training: who it took its state from, and after which epoch.
    """

    number: int
    options: dict[str, Any]
    folder: str
    state: State = "running"
    reports: dict[int, float] = field(default_factory=dict)
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    donors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """Epochs reported; 0 before the first."""
        return max(self.reports, default=0)

    @property
    def label(self) -> str:
        """What it is called for people and in file names."""
        return f"{self.number:03d}"


class Journal:
    """The trials of a study, and the file that they are read back from.

    Not for several processes: the driver alone writes it.

    Raises:
        UserError: the file is damaged. A torn line is not: a driver may be killed while it writes one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[int, Trial] = {}
        for event in read_events(path):
            try:
                apply(self.trials, event)
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path} is damaged: {json.dumps(event)[:120]} belongs to no trial that it began; put back a copy "
                    "of the file, or begin a new study"
                ) from error

    def write(self, kind: str, number: int, **values: Any) -> Trial:
        """Append one event, on the disk before anything is done about it; the trial that it concerns.

        Raises:
            UserError: the disk refuses.
        """
        event = {"kind": kind, "number": number, **values}
        line = json.dumps(event, default=float).encode() + b"\n"
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a driver was killed in the middle of a line
                os.write(descriptor, line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}): free some space, then go on with "
                f"resume={self.path.parent}"
            ) from error
        return apply(self.trials, event)

    def best(self) -> Trial | None:
        """The trial with the largest objective; None before the first report."""
        return best_of(self.trials.values())


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a journal; a torn line is left out, a missing file has none."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def read_trials(folder: Path) -> list[Trial]:
    """The trials of a study's folder.

    Raises:
        UserError: it is not the folder of a study.
    """
    if not (folder / JOURNAL).is_file():
        raise UserError(
            f"{folder} is not the folder of a study (no {JOURNAL} in it): pass runs/NAME"
        )
    return list(Journal(folder / JOURNAL).trials.values())


def apply(trials: dict[int, Trial], event: Mapping[str, Any]) -> Trial:
    """Take one event in; the trial that it concerns."""
    number = int(event["number"])
    if event["kind"] == "trial":
        trials[number] = Trial(number, dict(event["options"]), str(event["folder"]))
        return trials[number]
    trial = trials[number]
    match event["kind"]:
        case "report":
            trial.reports[int(event["epoch"])] = float(event["objective"])
            # The best so far: equal to the last one where the epoch gained nothing.
            if trial.value is None or event["objective"] > trial.value:
                trial.value, trial.metrics = float(event["objective"]), dict(event["metrics"])
        case "exploit":
            trial.options, trial.folder = dict(event["options"]), str(event["folder"])
            trial.donors.append({"donor": int(event["donor"]), "epoch": int(event["epoch"])})
        case "end":
            trial.state, trial.reason = event["state"], str(event.get("reason", ""))
    return trial


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """The trial with the largest objective, the earlier one of two; a failed one counts for what it reached."""
    known = [trial for trial in trials if trial.value is not None]
    return max(known, key=lambda trial: (trial.value or 0.0, -trial.number), default=None)
