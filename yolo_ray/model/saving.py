"""Files that are old or new and never torn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def save_atomically(payload: Any, path: Path) -> None:
    """Tensors and plain values in torch's format; see ``replaced``.

    Raises:
        OSError: the disk is full or read-only; the temporary file is gone and the old file untouched.
    """
    # Given the name, torch would raise RuntimeError for a full disk.
    with replaced(path) as temporary, open(temporary, "wb") as file:
        torch.save(payload, file)


def link_or_copy(path: Path, place: Path) -> None:
    """A second name for a file that nobody writes into, which costs nothing; a copy where there is no such thing."""
    try:
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; afterwards flushed to the disk and renamed.

    A crash leaves the old file or the new one. What is raised inside leaves the old one, and no temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
