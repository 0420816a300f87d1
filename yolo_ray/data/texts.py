"""Many strings in two flat arrays: small, and shared by all processes of a node."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, overload

import numpy as np

_ODD = np.uint64(0x9E3779B97F4A7C15)  # times it, every bit reaches the higher ones
AT_ONCE = 2**18


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
        shifts = np.cumsum([0, *(len(part._bytes) for part in parts)])
        ends = [part._ends + shift for part, shift in zip(parts, shifts[:-1], strict=True)]
        nothing = cls()
        return cls.from_flat(
            np.concatenate([nothing._bytes, *(part._bytes for part in parts)]),
            np.concatenate([nothing._ends, *ends]),
        )

    @classmethod
    def from_flat(cls, content: np.ndarray, ends: np.ndarray) -> Texts:
        """Made of what ``flat`` gives."""
        texts = cls()
        texts._bytes, texts._ends = content, ends
        return texts

    @property
    def flat(self) -> tuple[np.ndarray, np.ndarray]:
        """All bytes uint8, and where each text ends in them, int64 [N]."""
        return self._bytes, self._ends

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return self._bytes.nbytes + self._ends.nbytes

    def __len__(self) -> int:
        """How many."""
        return len(self._ends)

    def encoded(self, start: int, stop: int) -> list[bytes]:
        """Texts ``start`` to ``stop`` - 1 as bytes: ten times as fast as one by one."""
        first = int(self._ends[start - 1]) if start else 0
        ends = (self._ends[start:stop] - first).tolist()
        content = self._bytes[first : first + ends[-1] if ends else first].tobytes()
        return [content[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def hold(self, part: str) -> bool:
        """False where ``part`` is in none of them."""
        return re.search(re.escape(os.fsencode(part)), self._bytes.data) is not None

    def hashes(self) -> np.ndarray:
        """uint64 [N], the same for equal texts; different ones hardly ever agree."""
        ends = np.concatenate([np.zeros(1, np.int64), self._ends])
        some = [ends[first : first + AT_ONCE + 1] for first in range(0, len(self), AT_ONCE)]
        found = [_hashes(self._bytes[part[0] : part[-1]], part - part[0]) for part in some]
        return np.concatenate([np.zeros(0, np.uint64), *found])

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


def _hashes(content: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """uint64 [N] of the N texts between ``bounds`` of ``content``, eight bytes of each at a time."""
    starts, lengths = bounds[:-1], np.diff(bounds)
    # Eight bytes at any place, read as one number; what lies behind a text's end is shifted out.
    padded = np.concatenate([content, np.zeros(8, np.uint8)])
    words = np.ndarray(len(padded) - 7, np.dtype("<u8"), padded, strides=(1,))
    found = lengths.astype(np.uint64) * _ODD
    for begin in range(0, int(lengths.max(initial=0)), 8):
        rows = np.flatnonzero(lengths > begin)
        left = np.minimum(lengths[rows] - begin, 8).astype(np.uint64)
        mixed = (found[rows] ^ (words[starts[rows] + begin] << (64 - 8 * left))) * _ODD
        found[rows] = mixed ^ (mixed >> np.uint64(29))
    return found
