"""Photos of validation that training sees too: the model is then judged by what it knows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from yolo_ray.data.judging import tail_sum
from yolo_ray.data.records import Records
from yolo_ray.data.storage import is_plain, read_bytes
from yolo_ray.data.texts import Texts

READERS = 16  # the work is reading
Found = TypeVar("Found")
_MIX = np.uint64(0x9E3779B97F4A7C15)


def shared_photos(train: Records, val: Records) -> list[tuple[str, str]]:
    """``(photo of val, photo of train)`` that are one file or have the same content, in the order of val.

    Only files of equal length, size in pixels and last bytes are opened. A file that has gone meanwhile is nobody's
    twin.
    """
    twins = _of_one_path(train, val)
    known = np.fromiter(twins, np.int64, len(twins))
    twins |= _of_one_content(train, val, np.setdiff1d(np.arange(len(val)), known))
    return [(str(val.paths[row]), twins[row]) for row in sorted(twins)]


def _of_one_path(train: Records, val: Records) -> dict[int, str]:
    """Photos of both splits by path: row of val, and the path."""
    theirs, ours = (_texts(records).hashes() for records in (train, val))
    there, here = (np.flatnonzero(alike).tolist() for alike in _alike(theirs, ours))
    known = {str(train.paths[row]) for row in there}
    return {row: path for row in here if (path := str(val.paths[row])) in known}


def _alike(theirs: np.ndarray, ours: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of theirs are among ours, and which of ours among theirs. Only ours, the fewer ones, are sorted."""
    known, places = np.unique(ours, return_inverse=True)
    at = np.searchsorted(known, theirs)
    at[at == len(known)] = 0
    alike = known[at] == theirs if len(known) else np.zeros(len(theirs), bool)
    met = np.zeros(len(known), bool)
    met[at[alike]] = True
    return alike, met[places]


def _texts(records: Records) -> Texts:
    return records.paths if isinstance(records.paths, Texts) else Texts(map(str, records.paths))


def _of_one_content(train: Records, val: Records, here: np.ndarray) -> dict[int, str]:
    """The first training photo with the content of each of these rows of val that has one."""
    there = np.arange(len(train))
    known = _knows_tails(train) and _knows_tails(val)
    for key in (_tails,) if known else (_shapes, _tails):
        theirs, ours = _alike(key(train, there), key(val, here))
        there, here = there[theirs], here[ours]
        if not len(here):
            return {}
    first: dict[bytes, str] = {}
    for row, content in _read(train, there, _digest):
        first.setdefault(content, str(train.paths[row]))
    return {row: first[content] for row, content in _read(val, here, _digest) if content in first}


def _knows_tails(records: Records) -> bool:
    return len(records.tails) == len(records)


def _shapes(records: Records, rows: np.ndarray) -> np.ndarray:
    """Bytes of the file, height and width of these photos, as one number each."""
    numbers = records.sizes[rows].astype(np.uint64)
    lengths = records.num_bytes[rows].astype(np.uint64)
    return (lengths << np.uint64(32)) + (numbers[:, 0] << np.uint64(16)) + numbers[:, 1]


def _tails(records: Records, rows: np.ndarray) -> np.ndarray:
    """The same with the last bytes of the files, which are read where judging did not (in a pack)."""
    if _knows_tails(records):
        tails = records.tails[rows].astype(np.uint64)
    else:
        tails = np.zeros(len(rows), np.uint64)  # also of one that cannot be read, which is no twin
        found = dict(_read(records, rows, tail_sum))
        tails[:] = [found.get(row, 0) for row in rows.tolist()]
    return (_shapes(records, rows) * _MIX) ^ tails


def _read(
    records: Records, rows: np.ndarray, read: Callable[[str], Found]
) -> Iterator[tuple[int, Found]]:
    """``read`` of each of these photos that can be read, with its row, in order."""

    def one(row: int) -> Found | None:
        try:
            return read(str(records.paths[row]))
        except OSError:
            return None

    with ThreadPoolExecutor(max_workers=READERS) as pool:
        for row, found in zip(rows.tolist(), pool.map(one, rows.tolist()), strict=True):
            if found is not None:
                yield row, found


def _digest(path: str) -> bytes:
    if not is_plain(path):
        return hashlib.sha256(read_bytes(path)).digest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
