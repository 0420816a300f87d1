"""Many strings in two flat arrays: small, and shared by all processes of a node."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, overload

import numpy as np


class Texts(Sequence[str]):
    """An immutable sequence of strings; file names of any bytes survive, as ``os.fsencode`` has it."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Copy ``texts``."""
        parts = [os.fsencode(text) for text in texts]
        self._bytes = np.frombuffer(b"".join(parts), np.uint8)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        """One after the other."""
        whole = cls()
        shifts = np.cumsum([0, *(len(part._bytes) for part in parts)])
        ends = [part._ends + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
        whole._bytes = np.concatenate([whole._bytes, *(part._bytes for part in parts)])
        whole._ends = np.concatenate([whole._ends, *ends])
        return whole

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return self._bytes.nbytes + self._ends.nbytes

    def __len__(self) -> int:
        """How many."""
        return len(self._ends)

    @overload
    def __getitem__(self, index: SupportsIndex) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Texts: ...
    def __getitem__(self, index: SupportsIndex | slice) -> str | Texts:
        """One of them, or some.

        Raises:
            IndexError: there are fewer.
        """
        if isinstance(index, slice):
            return Texts(self[place] for place in range(*index.indices(len(self))))
        place = operator.index(index)
        place += len(self) * (place < 0)
        if not 0 <= place < len(self):
            raise IndexError(f"{index} of {len(self)} texts")
        start = self._ends[place - 1] if place else 0
        return os.fsdecode(self._bytes[start : self._ends[place]].tobytes())

    def __eq__(self, other: object) -> bool:
        """Whether the same strings are in the same order."""
        if not isinstance(other, Texts):
            return NotImplemented
        return np.array_equal(self._ends, other._ends) and np.array_equal(self._bytes, other._bytes)

    __hash__ = None  # pyright: ignore[reportAssignmentType]
