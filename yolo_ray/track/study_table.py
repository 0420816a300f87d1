"""The table of a study's trials on stderr while it runs: live on a terminal, a line for what happens elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from yolo_ray.study.trials import BASELINE, Trial, best_of

PERIOD_S = 1.0
MOST_ROWS = 30  # the newest; a terminal has no more
STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red"}


class StudyTable:
    """Shows trials while the context is open; reads them, and changes nothing."""

    def __init__(
        self, trials: Mapping[int, Trial], num_samples: int, console: Console | None = None
    ) -> None:
        self._trials, self._num_samples = trials, num_samples
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="table", daemon=True)
        self._told: dict[int, tuple[str, str, float | None]] = {}

    def __enter__(self) -> StudyTable:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, redirect_stdout=False, auto_refresh=False, transient=True
            )
            self._live.start()
        for trial in self._trials.values():  # of before a resume
            self._told[trial.number] = _news(trial)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if self._live is not None:
            self._live.stop()
        self._tell()
        if self._console.is_terminal and self._trials:
            self._console.print(trials_table(list(self._trials.values()), self._num_samples))

    def say(self, text: str) -> None:
        """A sentence above the table."""
        self._console.print(Text(text), soft_wrap=True)

    def _follow(self) -> None:
        while not self._stop.wait(PERIOD_S):
            if self._live is None:
                self._tell()
            else:
                table = trials_table(list(self._trials.values()), self._num_samples)
                self._live.update(table, refresh=True)

    def _tell(self) -> None:
        """A line for each trial that has begun, ended or taken over another's state."""
        if self._console.is_terminal:
            return
        for trial in list(self._trials.values()):
            news = _news(trial)
            if self._told.get(trial.number) != news:
                self._told[trial.number] = news
                self._console.print(Text(line_of(trial)), soft_wrap=True)


def line_of(trial: Trial) -> str:
    """A trial in a line: what it is, how it stands, what it tries."""
    value = (
        "" if trial.value is None else f", objective {trial.value:.4f} after epoch {trial.epoch}"
    )
    reason = f" ({trial.reason})" if trial.reason else ""
    what = (
        "baseline" if trial.number == BASELINE and not trial.donors else options_text(trial.options)
    )
    donors = f", from trial {trial.donors[-1]['donor']}" if trial.donors else ""
    return f"trial {trial.label} {trial.state}{value}{donors}{reason}: {what}"


def trials_table(trials: Iterable[Trial], num_samples: int) -> Table:
    """The newest trials; the best is bold."""
    trials = sorted(trials, key=lambda trial: trial.number)
    best = best_of(trials)
    done = sum(trial.state != "running" for trial in trials)
    table = Table(title=f"{done} of {num_samples} trials", title_justify="left")
    for heading in ("trial", "state", "epoch", "objective", "options"):
        table.add_column(heading, overflow="fold" if heading == "options" else "ellipsis")
    for trial in trials[-MOST_ROWS:]:
        value = "" if trial.value is None else f"{trial.value:.4f}"
        options = (
            "baseline"
            if trial.number == BASELINE and not trial.donors
            else options_text(trial.options)
        )
        table.add_row(
            trial.label, Text(trial.state, STYLES[trial.state]), str(trial.epoch), value, options,
            style="bold" if trial is best else "",
        )  # fmt: skip
    return table


def options_text(options: Mapping[str, Any]) -> str:
    """``lr0=0.00321 mosaic=0.5``."""
    return " ".join(
        f"{name.rpartition('.')[2]}={value:.4g}"
        if isinstance(value, float)
        else f"{name.rpartition('.')[2]}={value}"
        for name, value in options.items()
    )


def _news(trial: Trial) -> tuple[str, str, float | None]:
    return trial.state, trial.folder, trial.value if trial.state != "running" else None
