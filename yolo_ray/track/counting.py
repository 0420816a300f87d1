"""How far a long preparation is: one live line on a terminal, elsewhere a line now and then, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from yolo_ray.track.progress import duration

QUIET_S = 2.0  # a terminal is told nothing of what takes no longer
LIVE_PERIOD_S = 0.2
PLAIN_PERIOD_S = 10.0  # of lines that stay


@contextmanager
def counted(
    what: str, total: int, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """Yields ``done``, to be called with the number of photos done since the last call.

    The line on a terminal goes away at the end.
    """
    console = console or Console(stderr=True)
    first_s, period_s = (QUIET_S, LIVE_PERIOD_S) if console.is_terminal else (PLAIN_PERIOD_S,) * 2
    begin, count = time.monotonic(), 0
    due = begin + first_s
    # stdout stays the pipeline's own
    live = Live(console=console, transient=True, redirect_stdout=False, auto_refresh=False)

    def done(number: int) -> None:
        nonlocal count, due
        count, now = count + number, time.monotonic()
        if now < due:
            return
        due = now + period_s
        line = Text(count_text(what, count, total, now - begin), no_wrap=True, overflow="ellipsis")
        if console.is_terminal:
            live.start()  # again and again is as good as once
            live.update(line, refresh=True)
        else:
            console.print(line, soft_wrap=True)

    try:
        yield done
    finally:
        live.stop()


def count_text(what: str, count: int, total: int, seconds: float) -> str:
    """``reading labels: 1 204 224 of 10 000 000 photos, 35 000/s, ETA 04:11``."""
    rate = count / max(seconds, 1e-9)
    eta_s = (total - count) / rate if count else None
    return f"{what}: {_grouped(count)} of {_grouped(total)} photos, {_grouped(rate)}/s, ETA {duration(eta_s)}"


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")
