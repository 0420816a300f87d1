"""What the loop tells the world: a protocol that track/ implements and a null object for other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np


class Tracker(Protocol):
    """Where metrics, pictures and files go. No method may raise for a tracking failure: training goes on."""

    def metrics(self, values: dict[str, float], *, step: int) -> None: ...

    def row(self, values: dict[str, float], *, epoch: int) -> None:
        """One line of results.csv."""
        ...

    def photos(
        self, name: str, images: np.ndarray, boxes: list[np.ndarray], classes: list[np.ndarray], *, step: int
    ) -> None:
        """A grid picture of uint8 [n,S,S,3] images with their xyxy boxes [k,4] and class ids [k]."""
        ...

    def file(self, path: Path, folder: str) -> None: ...

    def close(self) -> None:
        """Hand over everything that still waits."""
        ...


class NullTracker:
    """The tracker of every rank but 0."""

    def metrics(self, values: dict[str, float], *, step: int) -> None: ...

    def row(self, values: dict[str, float], *, epoch: int) -> None: ...

    def photos(
        self, name: str, images: np.ndarray, boxes: list[np.ndarray], classes: list[np.ndarray], *, step: int
    ) -> None: ...

    def file(self, path: Path, folder: str) -> None: ...

    def close(self) -> None: ...
