"""Live progress: follows the event log of a run and draws it on stderr, rich or plain."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Event = Mapping[str, Any]

PLAIN_PERIOD_S = 30.0
POLL_S = 0.2

# heading, width, decimals (None: an integer)
COLUMNS: tuple[tuple[str, int, int | None], ...] = (
    ("epoch", 9, None),
    ("box", 8, 4),
    ("cls", 8, 4),
    ("dfl", 8, 4),
    ("lr", 9, 6),
    ("img/s", 7, None),
    ("mAP50", 8, 4),
    ("mAP50-95", 9, 4),
    ("P", 7, 3),
    ("R", 7, 3),
)
VALIDATION = {
    "mAP50": "map50",
    "mAP50-95": "map50_95",
    "P": "precision",
    "R": "recall",
}


def follow(
    path: Path,
    render: Callable[[Event], None],
    stop: threading.Event,
    *,
    from_start: bool = False,
) -> threading.Thread:
    """Start a thread that calls ``render`` with every event appended to ``path`` from now on.

    The file need not exist yet; half-written lines wait for their rest, lines that are no JSON
    object are skipped, a truncated file is read from its start. After ``stop`` is set, what is
    there is read to its end and the thread ends: join it before using what it drew.
    ``from_start`` also reads the events that are there already (those of the run before a resume).
    """
    offset = 0 if from_start else _size(path)
    arguments = (path, render, stop, offset)
    thread = threading.Thread(target=_tail, args=arguments, name="progress", daemon=True)
    thread.start()
    return thread


class Progress:
    """Draws events; use it as a context manager and hand ``handle`` to :func:`follow`.

    On a terminal one live line shows the epoch that runs, and every finished epoch stays as a line
    of a table. Elsewhere the table is printed plainly, and a step line at most every
    ``plain_period_s`` seconds. All of it goes to ``console``, stderr by default: stdout is the
    pipeline's result. Epochs and steps are shown as they are written: they count from 1.
    """

    def __init__(
        self, console: Console | None = None, *, plain_period_s: float = PLAIN_PERIOD_S
    ) -> None:
        self._console = console or Console(stderr=True)
        self._period_s = plain_period_s
        self._live: Live | None = None
        self._printed_at = time.monotonic()
        self._step: dict[str, Any] = {}  # the newest step of an epoch whose row is not printed yet
        self._header_printed = False

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            # stdout stays the pipeline's own: only stderr is drawn above the live line
            live = Live(
                console=self._console, transient=True, redirect_stdout=False, auto_refresh=False
            )
            live.start()
            self._live = live
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish_epoch({})  # the last epoch, when it was not evaluated
        if self._live is not None:
            self._live.stop()
            self._live = None

    def handle(self, event: Event) -> None:
        """Draw one event; kinds that are not known are left to newer versions."""
        match event.get("kind"):
            case "step":
                self._on_step(event)
            case "val":
                self._finish_epoch(event)
            case "note":
                self._print(Text(str(event.get("text", ""))))
            case "warning":
                self._print(Text(f"Warning: {event.get('text', '')}", style="yellow"))

    def _on_step(self, event: Event) -> None:
        if self._step and self._step.get("epoch") != event.get("epoch"):
            self._finish_epoch({})
        self._step = dict(event)
        if self._live is not None:
            self._live.update(live_line(event, self._console.width), refresh=True)
        elif time.monotonic() - self._printed_at >= self._period_s:
            self._print(Text(step_text(event)))

    def _finish_epoch(self, validation: Event) -> None:
        if not self._step and not validation:
            return
        if not self._header_printed:
            self._header_printed = True
            self._print(Text(header_text(), style="bold"))
        step, self._step = self._step, {}
        self._print(Text(row_text(step, validation)))
        if self._live is not None:
            self._live.update("", refresh=True)

    def _print(self, text: Text) -> None:
        self._printed_at = time.monotonic()
        self._console.print(text, soft_wrap=True)


def header_text() -> str:
    """The headings of the table of epochs, aligned with :func:`row_text`."""
    return "".join(heading.rjust(width) for heading, width, _ in COLUMNS)


def row_text(step: Event, validation: Event) -> str:
    """One finished epoch: its newest losses, its metrics, ``-`` for what there is not.

    Losses in ``validation`` (``train/box``: means over the epoch) go before those of the step.
    """
    epoch = validation.get("epoch", step.get("epoch", 0))
    epochs = validation.get("epochs", step.get("epochs"))
    cells = [f"{epoch}/{epochs}" if epochs else f"{epoch}"]
    for heading, _, decimals in COLUMNS[1:]:
        if heading in VALIDATION:
            value = _first(validation, f"val/{VALIDATION[heading]}", VALIDATION[heading])
        elif heading == "img/s":
            value = _first(validation, "speed/images_per_s") or step.get("images_per_s")
        else:
            value = _first(validation, f"train/{heading}") or step.get(heading)
        cells.append(_cell(value, decimals))
    return "".join(cell.rjust(width) for cell, (_, width, _) in zip(cells, COLUMNS, strict=True))


def step_text(event: Event) -> str:
    """The plain line of one step."""
    parts = [
        f"epoch {event.get('epoch', 0)}/{event.get('epochs', '?')}",
        f"step {event.get('step', 0)}/{event.get('steps', '?')}",
        f"{_cell(event.get('images_per_s'), None)} img/s",
        *(f"{name} {_cell(event.get(name), 3)}" for name in ("box", "cls", "dfl")),
        f"lr {_cell(event.get('lr'), 6)}",
        f"data wait {_share(event.get('data_wait'))}",
        f"ETA {duration(event.get('eta_s'))}",
    ]
    return "  ".join(parts)


def live_line(event: Event, width: int) -> Table:
    """The live line of one step, never more than ``width`` characters; the bar gives way first."""
    parts = step_text(event).split("  ")
    text = Text.assemble((parts[0], "bold cyan"), "  ", "  ".join(parts[1:]))
    text.no_wrap, text.overflow = True, "ellipsis"
    bar_width = min(24, width - text.cell_len - 3)
    line = Table.grid(padding=(0, 1))
    if bar_width >= 6:
        bar = ProgressBar(
            total=max(1, int(event.get("steps") or 1)),
            completed=int(event.get("step") or 0),
            width=bar_width,
        )
        line.add_row(bar, text)
    else:
        line.add_row(text)
    return line


def duration(seconds: float | None) -> str:
    """``1:02:03`` or ``02:03``; ``-`` when it is not known."""
    if seconds is None or not 0 <= seconds < float("inf"):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _first(event: Event, *names: str) -> Any:
    return next((event[name] for name in names if event.get(name) is not None), None)


def _cell(value: float | None, decimals: int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if decimals is None else f"{value:.{decimals}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not there yet, or a network disk that is away for a moment
        return 0


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


def _tail(path: Path, render: Callable[[Event], None], stop: threading.Event, offset: int) -> None:
    rest = b""
    while True:
        last = stop.is_set()  # asked before reading: what was written before stop is still read
        if _size(path) < offset:
            offset, rest = 0, b""
        data = _read_from(path, offset)
        offset += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for event in filter(None, map(_parse, lines)):
            render(event)
        if last:
            return
        stop.wait(POLL_S)


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
