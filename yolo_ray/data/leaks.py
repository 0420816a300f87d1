"""Photos of validation that training sees too: the model is then judged by what it knows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from yolo_ray.data.records import Records
from yolo_ray.data.storage import is_plain, read_bytes

TAIL_BYTES = (
    4096  # compressed pixels end there, while the beginnings of photos of one camera are alike
)
Key = tuple[int, int, int]  # bytes of the file, height, width


def shared_photos(train: Records, val: Records) -> list[tuple[str, str]]:
    """``(photo of val, photo of train)`` that are one file or have the same content, in the order of val.

    Only files of equal length and size in pixels are opened, and read to the end only where their
    last bytes agree. A file that has gone meanwhile is nobody's twin.
    """
    there, here = _by_key(train), _by_key(val)
    known = set(map(str, train.paths))
    twins = {path: path for path in map(str, val.paths) if path in known}
    unsure = {key: paths for key, paths in here.items() if key in there}
    unsure = {key: [path for path in paths if path not in twins] for key, paths in unsure.items()}
    unsure = {key: paths for key, paths in unsure.items() if paths}
    tails = _prints(_all(unsure) + _all(there, unsure), whole=False)
    seen = {(key, tails[path]) for key in unsure for path in there[key]}
    likely = {
        key: [path for path in paths if tails[path] and (key, tails[path]) in seen]
        for key, paths in unsure.items()
    }
    ends = {(key, tails[path]) for key, paths in likely.items() for path in paths}
    same = {key: [p for p in there[key] if (key, tails[p]) in ends] for key in likely}
    prints = _prints(_all(likely) + _all(same), whole=True)
    first: dict[bytes, str] = {}
    for path in _all(same):
        first.setdefault(prints[path], path)
    for path in _all(likely):
        if prints[path] and prints[path] in first:
            twins[path] = first[prints[path]]
    return [(str(path), twins[str(path)]) for path in val.paths if str(path) in twins]


def _all(groups: dict[Key, list[str]], keys: Iterable[Key] | None = None) -> list[str]:
    """The paths of those keys, in order."""
    return [path for key in (groups if keys is None else keys) for path in groups[key]]


def _by_key(records: Records) -> dict[Key, list[str]]:
    groups: dict[Key, list[str]] = {}
    rows = zip(records.num_bytes.tolist(), records.sizes.tolist(), records.paths, strict=True)
    for num_bytes, (height, width), path in rows:
        groups.setdefault((num_bytes, height, width), []).append(str(path))
    return groups


def _prints(paths: Iterable[str], *, whole: bool) -> dict[str, bytes]:
    """Digest of each file, or of its last bytes; empty if it cannot be read."""
    paths = list(paths)
    with ThreadPoolExecutor(max_workers=16) as pool:  # the work is reading, as in load_records
        return dict(zip(paths, pool.map(_digest if whole else _tail, paths), strict=True))


def _tail(path: str) -> bytes:
    try:
        if not is_plain(path):
            return read_bytes(path, -TAIL_BYTES)
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _digest(path: str) -> bytes:
    try:
        if not is_plain(path):
            return hashlib.sha256(read_bytes(path)).digest()
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b""
