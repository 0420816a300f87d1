"""The event log, its follower, and what is drawn of it."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from yolo_ray.track import counting
from yolo_ray.track.progress import Event, Progress, duration, follow, header_text, live_line
from yolo_ray.train.events import EventLog, NullEventLog

STEP: dict[str, Any] = {
    "kind": "step", "epoch": 3, "epochs": 50, "step": 20, "steps": 100, "images_per_s": 812.4,
    "box": 1.2345, "cls": 0.9876, "dfl": 1.1, "lr": 0.00951, "data_wait": 0.034, "eta_s": 3723.0,
}  # fmt: skip
VAL: dict[str, Any] = {
    "kind": "val", "epoch": 3, "val/map50": 0.5123, "val/map50_95": 0.3012, "val/precision": 0.7,
    "val/recall": 0.61,
}  # fmt: skip


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def console(*, terminal: bool, width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def output(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def draw(screen: Console, *events: Event, period_s: float = 0.0) -> str:
    with Progress(screen, plain_period_s=period_s) as progress:
        for event in events:
            progress.handle(event)
    return output(screen)


# --- writing


def test_events_are_lines_of_json_also_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("step", epoch=1, box=np.float32(0.5), lr=float("nan"))
    with path.open("a") as file:
        file.write('{"kind": "st')
    log = EventLog(path)
    log.write("note", text="two\nlines")
    log.write("note", text="é")
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["box"] == 0.5
    assert lines[1] == '{"kind": "st'
    assert [json.loads(line)["text"] for line in lines[2:]] == ["two\nlines", "é"]
    NullEventLog().write("note", text="nothing")


def test_event_log_without_a_folder_warns_once(tmp_path: Path, capsys: Any) -> None:
    log = EventLog(tmp_path / "gone" / "events.jsonl")
    log.write("note", text="a")
    log.write("note", text="b")
    assert capsys.readouterr().err.count("progress is not written") == 1


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(n: int) -> None:
        log = EventLog(path)
        for _ in range(100):
            log.write("note", text=str(n) * 500)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert sorted({text[0]: texts.count(text) for text in texts}.values()) == [100] * 4


# --- following


def test_follower_waits_for_the_file_and_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path, stop = tmp_path / "events.jsonl", threading.Event()
    seen: list[Event] = []
    thread = follow(path, seen.append, stop)
    time.sleep(0.3)
    path.write_bytes('{"kind": "note", "text": "é'.encode()[:-1])  # cut inside a letter
    time.sleep(0.5)
    assert not seen
    with path.open("ab") as file:
        file.write("é".encode()[-1:] + b'"}\nno json\n[1]\n{"kind": "val"}\n{"kind": "torn')
    assert until(lambda: len(seen) == 2)
    assert seen == [{"kind": "note", "text": "é"}, {"kind": "val"}]
    path.write_text('{"kind": "new"}\n')  # truncated: a shorter file
    assert until(lambda: len(seen) == 3)
    EventLog(path).write("last")
    stop.set()
    thread.join(5)
    assert [event["kind"] for event in seen[2:]] == ["new", "last"]


def test_follower_skips_what_a_run_before_the_resume_wrote(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("old")
    kinds = {}
    for from_start in (False, True):
        seen: list[Event] = []
        stop = threading.Event()
        thread = follow(path, seen.append, stop, from_start=from_start)
        EventLog(path).write("new")
        stop.set()
        thread.join(5)
        kinds[from_start] = [event["kind"] for event in seen]
    assert kinds == {False: ["new"], True: ["old", "new", "new"]}


# --- drawing


def test_plain_lines_of_steps_and_a_table_of_epochs() -> None:
    text = draw(
        console(terminal=False, width=40), STEP, VAL, {**STEP, "epoch": 4}, STEP | {"epoch": 5}
    )
    assert text.splitlines() == [
        "epoch 3/50  step 20/100  812 img/s  box 1.234  cls 0.988  dfl 1.100  lr 0.009510"
        "  data wait 3%  ETA 1:02:03",
        "    epoch     box     cls     dfl       lr  img/s   mAP50 mAP50-95      P      R",
        "     3/50  1.2345  0.9876  1.1000 0.009510    812  0.5123   0.3012  0.700  0.610",
        text.splitlines()[0].replace("3/50", "4/50"),
        "     4/50  1.2345  0.9876  1.1000 0.009510    812       -        -      -      -",
        text.splitlines()[0].replace("3/50", "5/50"),
        "     5/50  1.2345  0.9876  1.1000 0.009510    812       -        -      -      -",
    ]


def test_plain_step_lines_are_rare() -> None:
    steps = [STEP | {"step": step} for step in range(100)]
    text = draw(console(terminal=False), *steps, VAL, period_s=30.0)
    assert len(text.splitlines()) == 2  # the header and the epoch


def test_terminal_shows_one_live_line_and_keeps_the_table() -> None:
    screen = console(terminal=True, width=140)
    text = draw(screen, STEP, VAL, {"kind": "note", "text": "[b]raw[/b]"}, {"kind": "unknown"})
    for part in ("epoch 3/50", "step 20/100", "ETA 1:02:03", "[b]raw[/b]", "━"):
        assert part in text
    assert text.count(header_text()) == 1
    assert "     3/50  1.2345  0.9876  1.1000 0.009510    812  0.5123" in text


def test_live_line_fits_a_narrow_terminal() -> None:
    for width in (30, 60, 114, 200):
        screen = console(terminal=False, width=width)
        screen.print(live_line(STEP, width))
        (line,) = output(screen).splitlines()
        assert len(line) <= width
        assert ("ETA 1:02:03" in line) == (width >= 114)


def test_missing_values_and_warnings_draw() -> None:
    warning = {"kind": "warning", "text": "server away"}
    text = draw(console(terminal=False), {"kind": "step", "epoch": 1}, warning, {"kind": "val"})
    assert "Warning: server away" in text
    assert "epoch 1/?" in text
    assert not draw(console(terminal=False))


def test_progress_goes_to_stderr_by_default(capfd: Any) -> None:
    with Progress() as progress:
        progress.handle(VAL)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "0.3012" in captured.err


def test_an_interrupted_epoch_is_not_drawn_as_done() -> None:
    screen = console(terminal=False)
    try:
        with Progress(screen) as progress:
            progress.handle(STEP)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert "3/50" not in output(screen)


def test_durations() -> None:
    assert [duration(s) for s in (None, 0, 59.6, 3600, float("nan"))] == [
        "-", "00:00", "01:00", "1:00:00", "-",
    ]  # fmt: skip


# --- what is counted before a run


def counting_of(
    screen: Console, steps: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The lines after photos done at these seconds."""
    now = 100.0
    monkeypatch.setattr(counting, "time", SimpleNamespace(monotonic=lambda: now))
    with counting.counted("reading labels", 1_000_000, screen) as done:
        for seconds, number in steps:
            now = 100.0 + seconds
            done(number)
    return [line.strip() for line in output(screen).splitlines()]


def test_counting_prints_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(float(second), 4096) for second in range(1, 25)]
    assert counting_of(console(terminal=False), steps, monkeypatch) == [
        "reading labels: 40 960 of 1 000 000 photos, 4 096/s, ETA 03:54",
        "reading labels: 81 920 of 1 000 000 photos, 4 096/s, ETA 03:44",
    ]
    assert counting_of(console(terminal=False), steps[:9], monkeypatch) == [], "small sets: silent"


def test_counting_on_a_terminal_is_one_line_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counting_of(console(terminal=True), [(0.5, 4096), (1.9, 4096)], monkeypatch) == []
    screen = console(terminal=True, width=40)
    steps = [(2.0, 4096), (2.1, 4096), (2.3, 4096)]
    text = "".join(counting_of(screen, steps, monkeypatch))
    assert "reading labels: 4 096 of 1 000 000 phot" in text and "labels: 12 288 of" in text
    assert "labels: 8 192 of" not in text, "not more often than every 0.2 s"
    assert text.endswith("\x1b[1A\x1b[2K"), "and wiped out"
