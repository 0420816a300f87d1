"""Files of tensors that are old or new and never torn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save_atomically(payload: Any, path: Path) -> None:
    """Write to a temporary name, flush to the disk, rename: a crash leaves the old file or the new one.

    Raises:
        OSError: the disk is full or read-only; the temporary file is gone and the old file untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
