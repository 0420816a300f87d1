"""Delivery to the tracking server: one background thread, and a file for what cannot be delivered.

An operation is a JSON object: ``{"run_id", "kind": "metrics" | "file" | "status", ...}``.
Delivering one twice changes nothing (metrics carry their time, files overwrite), so a crash in
between is harmless.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Operation = dict[str, Any]
Send = Callable[[Operation], None]  # raises Refused, or anything else when the server is away

MAX_METRICS = 1000  # MLflow's limit for one batch
MAX_WAITING = 10_000  # operations in memory; more than that go to the file
GATHER_S = 0.5
FIRST_RETRY_S = 2.0
LAST_RETRY_S = 60.0


class Refused(Exception):
    """The server answered and will never take this operation: trying again is of no use."""


class Outbox:
    """Hands operations to ``send`` in order, in its own thread; ``put`` never waits or raises.

    While the server is away, operations are appended to ``pending`` (so a killed process loses none
    of them) and tried again with growing pauses. ``warn`` is called once for a server that is
    away and once for operations that are refused or lost.
    """

    def __init__(self, send: Send, pending: Path, warn: Callable[[str], None]) -> None:
        self._send = send
        self._pending = pending
        self._warn = warn
        self._warned: set[str] = set()
        self._queue: queue.Queue[Operation] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards _in_hand and the pending file
        self._in_hand: list[Operation] = []
        self._away = pending.exists()  # first deliver what an earlier process left
        self._pause_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Queue one operation; a full queue goes to the pending file."""
        try:
            self._queue.put_nowait(operation)
        except queue.Full:
            with self._lock:
                self._keep([operation])

    def close(self, timeout_s: float) -> bool:
        """Deliver what waits, for about ``timeout_s`` at most; True if nothing is left."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():  # a hanging server: keep what the thread still holds
            with self._lock:
                self._keep([*self._in_hand, *self._drain()])
                self._in_hand = []
        return not self._pending.exists()

    def _work(self) -> None:
        while True:
            closing = self._closing.is_set()
            operations = self._gather(0.0 if closing else GATHER_S)
            self._deliver(merge(operations))
            if closing and self._queue.empty():
                if self._pending.exists():
                    self._retry()
                return

    def _gather(self, wait_s: float) -> list[Operation]:
        self._closing.wait(wait_s)
        with self._lock:
            self._in_hand = self._drain()
            return self._in_hand

    def _drain(self) -> list[Operation]:
        drained = []
        while True:
            try:
                drained.append(self._queue.get_nowait())
            except queue.Empty:
                return drained

    def _deliver(self, operations: list[Operation]) -> None:
        if self._away and time.monotonic() >= self._retry_at:
            self._retry()
        for index, operation in enumerate(operations):
            if self._away or not self._try(operation):
                with self._lock:
                    if self._in_hand:  # else close() gave up on us and has kept them already
                        self._keep(operations[index:])
                break
        with self._lock:
            self._in_hand = []

    def _retry(self) -> None:
        try:
            replay(self._pending, self._send, self._refused, self._lock)
        except Exception as error:
            self._lose(error)
        else:
            self._away, self._pause_s = False, FIRST_RETRY_S

    def _try(self, operation: Operation) -> bool:
        """Send one operation; False if the server is away."""
        try:
            self._send(operation)
        except Refused as error:
            self._refused(str(error))
        except Exception as error:
            self._lose(error)
            return False
        return True

    def _lose(self, error: Exception) -> None:
        """The server is away: whatever the client library raised for it."""
        self._away = True
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(LAST_RETRY_S, 2 * self._pause_s)
        self._warn_once(
            "away",
            f"the tracking server does not answer ({short(error)}); training goes on, what it "
            f"misses waits in {self._pending} and is delivered later",
        )

    def _refused(self, reason: str) -> None:
        self._warn_once(
            "refused", f"the tracking server refused an entry, it is left out: {reason}"
        )

    def _keep(self, operations: list[Operation]) -> None:
        """Append to the pending file; the lock is held."""
        self._away = True
        try:
            append(self._pending, operations)
        except OSError as error:
            self._warn_once("lost", f"entries for the tracking server are lost: {error}")

    def _warn_once(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            self._warn(text)


def merge(operations: Iterable[Operation]) -> list[Operation]:
    """Join neighbouring metrics of a run into batches the server takes, order kept."""
    merged: list[Operation] = []
    for operation in operations:
        last = merged[-1] if merged else {}
        same = all(operation[key] == last.get(key) for key in ("kind", "run_id"))
        if operation["kind"] != "metrics":
            merged.append(operation)
        elif same and len(last["values"]) + len(operation["values"]) <= MAX_METRICS:
            last["values"].extend(operation["values"])
        else:
            values = operation["values"]
            pieces = [values[at : at + MAX_METRICS] for at in range(0, len(values), MAX_METRICS)]
            merged += [{**operation, "values": list(piece)} for piece in pieces]
    return merged


def append(pending: Path, operations: list[Operation]) -> None:
    """Append operations to the pending file. Raises OSError."""
    text = "".join(json.dumps(operation) + "\n" for operation in operations)
    with pending.open("a", encoding="utf-8") as file:
        file.write(text)


def replay(
    pending: Path, send: Send, refused: Callable[[str], None], lock: threading.Lock | None = None
) -> int:
    """Deliver the pending file in order and take out what was delivered; the number of entries.

    Raises whatever ``send`` raises but Refused; then the file holds the entries that are left.
    """
    if not pending.exists():
        return 0
    lines = pending.read_text(encoding="utf-8").splitlines(keepends=True)
    operations = merge(filter(None, map(_parse, lines)))
    done = 0
    try:
        for operation in operations:
            try:
                send(operation)
            except Refused as error:
                refused(str(error))
            done += 1
    finally:
        with lock or threading.Lock():
            _shorten(pending, len(lines), operations[done:])
    return done


def _shorten(pending: Path, read: int, left: list[Operation]) -> None:
    """Replace the first ``read`` lines by ``left``; lines added meanwhile stay."""
    added = pending.read_text(encoding="utf-8").splitlines(keepends=True)[read:]
    text = "".join(json.dumps(operation) + "\n" for operation in left) + "".join(added)
    if not text:
        pending.unlink()
        return
    temporary = pending.with_name(f".{pending.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(pending)


def _parse(line: str) -> Operation | None:
    try:
        operation = json.loads(line)
    except ValueError:  # the last line of a killed process
        return None
    return operation if isinstance(operation, dict) else None


def short(error: BaseException) -> str:
    """The first line of an error, cut to a readable length."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return line if len(line) <= 200 else line[:197] + "..."
