"""What the loop tells the world: a protocol track/ implements, a null object for other ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np


class Tracker(Protocol):
    """Where metrics, pictures and files go.

    No method waits for a server, and none raises for a tracking failure: training goes on.
    """

    @property
    def warn(self) -> Callable[[str], None]:
        """Told once when the tracking server is away."""
        ...

    @warn.setter
    def warn(self, warn: Callable[[str], None]) -> None: ...

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        """Values at a global step, counted from 1."""
        ...

    def row(self, values: dict[str, float], *, epoch: int) -> None:
        """One line of results.csv; the lines of this and later epochs are replaced."""
        ...

    def photos(
        self,
        name: str,
        images: np.ndarray,
        boxes: list[np.ndarray],
        classes: list[np.ndarray],
        *,
        step: int,
    ) -> None:
        """A grid of uint8 [n,S,S,3] images with their xyxy boxes [k,4] px and class ids [k]."""
        ...

    def file(self, path: Path, folder: str) -> None:
        """A file of the run, to be kept in ``folder`` of the tracking run."""
        ...

    def close(self) -> None:
        """Hand over everything that still waits."""
        ...


class NullTracker:
    """The tracker of every rank but 0."""

    def __init__(self) -> None:
        self.warn: Callable[[str], None] = lambda text: None

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        """Do nothing."""

    def row(self, values: dict[str, float], *, epoch: int) -> None:
        """Do nothing."""

    def photos(
        self,
        name: str,
        images: np.ndarray,
        boxes: list[np.ndarray],
        classes: list[np.ndarray],
        *,
        step: int,
    ) -> None:
        """Do nothing."""

    def file(self, path: Path, folder: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
