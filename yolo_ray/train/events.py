"""The event log of a run: one JSON object a line, written by rank 0, followed by the driver."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import SupportsFloat


class EventLog:
    """Appends events to a file; never raises for a full or lost disk, training goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = False
        self._warned = False

    def write(self, kind: str, **values: object) -> None:
        """Append one event, e.g. ``write("step", epoch=1, box=0.5)``.

        A line is one ``write`` on an append-only descriptor, so lines of several writers never
        mix. Numbers of numpy and torch are turned into Python's.
        """
        line = json.dumps({"kind": kind, **values}, default=_plain).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                print(f"Warning: progress is not written to {self._path}: {error}", file=sys.stderr)

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if not self._started and _torn(descriptor):
                line = b"\n" + line  # the writer before us was killed in the middle of a line
            os.write(descriptor, line)
            self._started = True
        finally:
            os.close(descriptor)


class NullEventLog:
    """The event log of every rank but 0."""

    def write(self, kind: str, **values: object) -> None:
        """Do nothing."""


def _torn(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _plain(value: object) -> float | str:
    return float(value) if isinstance(value, SupportsFloat) else str(value)
