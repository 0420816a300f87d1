"""Packed data sets: the index of a split, which says where in which tar every photo lies and what is on it.

A shard is a plain tar, so that any tool unpacks it; the index is a NumPy archive of flat arrays, so that a million
photos are ready in seconds and each is one ranged read of a file or of an object in a store.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from yolo_ray.config.address import checked_place, is_remote, join, parent_of
from yolo_ray.data.formats import DataYaml, Split
from yolo_ray.data.storage import packed_place, read_bytes, size_of
from yolo_ray.errors import UserError

INDEX_SUFFIX = ".index.npz"
FORMAT = 1  # raise it when the arrays change
ARRAYS = ("shard", "starts", "num_bytes", "sizes", "offsets", "boxes", "classes")


@dataclass(frozen=True)
class PackIndex:
    """A packed split of N photos with M boxes.

    photos: their places relative to the data set they came from, in the order of Records; shards: file name and bytes;
    shard int32 [N]: which of them holds a photo; starts, num_bytes int64 [N]: its first byte there and how many;
    sizes, offsets, boxes, classes: as in Records; names: class names; digest: of the Records; counts and bad (path,
    line, reason): what was noticed and left out when it was packed.
    """

    photos: tuple[str, ...]
    shards: tuple[tuple[str, int], ...]
    arrays: Mapping[str, np.ndarray]
    names: tuple[str, ...]
    digest: str
    counts: Mapping[str, int]
    bad: tuple[tuple[str, int | None, str], ...]

    def to_bytes(self) -> bytes:
        """What ``load_index`` reads."""
        meta = {"format": FORMAT, "shards": self.shards, "names": self.names, "digest": self.digest}
        meta |= {"counts": dict(self.counts), "bad": self.bad}
        names = _as_array(b"\0".join(os.fsencode(photo) for photo in self.photos))
        arrays: dict[str, Any] = {name: self.arrays[name] for name in ARRAYS}
        file = io.BytesIO()
        np.savez(file, meta=_as_array(json.dumps(meta).encode()), photos=names, **arrays)
        return file.getvalue()

    def places(self, folder: str) -> list[str]:
        """Where each photo is read, the pack lying in ``folder``."""
        shards = [_beside(folder, name) for name, _ in self.shards]
        spans = (self.arrays[name].tolist() for name in ("starts", "num_bytes", "shard"))
        return [
            packed_place(photo, start, length, shards[shard])
            for photo, start, length, shard in zip(self.photos, *spans, strict=True)
        ]


def _as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def _beside(folder: str, name: str) -> str:
    is_address = is_remote(folder) or is_remote(name)
    return join(folder, name) if is_address else os.path.join(folder, name)


def packed_entry(data: DataYaml, split: Split) -> str | None:
    """The index that data.yaml names for a split, None where it names photos.

    Raises:
        UserError: an index beside other entries.
    """
    entries: tuple[str, ...] = data.splits.get(split, ())
    if not any(entry.endswith(INDEX_SUFFIX) for entry in entries):
        return None
    if len(entries) != 1:
        raise UserError(
            f"{data.file}: '{split}:' names an index beside other entries; pack all photos into one, or unpack them"
        )
    return _beside(data.root, checked_place(entries[0]))


def load_index(place: str) -> PackIndex:
    """Read an index and look whether its shards are there and whole; no photo is read.

    Raises:
        UserError: the index or a shard is missing, damaged or of another version.
    """
    try:
        content = read_bytes(place)
    except FileNotFoundError:
        raise UserError(f"{place} is not there; pack the data again, or copy all of it") from None
    except OSError as error:
        raise UserError(f"{place} cannot be read ({error.strerror}); make it readable") from error
    index = _parsed(place, content)
    folder = parent_of(place) if is_remote(place) else os.path.dirname(place)
    with ThreadPoolExecutor(max_workers=16) as pool:
        sizes = pool.map(lambda shard: _size(_beside(folder, shard[0])), index.shards)
        for (name, expected), found in zip(index.shards, sizes, strict=True):
            if found != expected:
                state = "is not there" if found is None else f"has {found} bytes"
                raise UserError(
                    f"{_beside(folder, name)} {state}, {place} knows it with {expected}; copy the pack again, or pack "
                    "anew"
                )
    return index


def _size(place: str) -> int | None:
    try:
        return size_of(place)
    except FileNotFoundError:
        return None


def _parsed(place: str, content: bytes) -> PackIndex:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as saved:
            meta: dict[str, Any] = json.loads(saved["meta"].tobytes())
            if meta["format"] != FORMAT:
                raise UserError(
                    f"{place} is of format {meta['format']}, this version reads {FORMAT}; pack anew"
                )
            blob, arrays = saved["photos"].tobytes(), {name: saved[name] for name in ARRAYS}
    except UserError:  # a ValueError, too
        raise
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{place} is damaged ({' '.join(str(error).split())[:80]}); copy it again, or pack anew"
        ) from error
    photos = tuple(os.fsdecode(name) for name in blob.split(b"\0"))
    if not all(len(arrays[name]) == len(photos) for name in ("shard", "starts", "num_bytes")):
        raise UserError(f"{place} is damaged (its arrays differ in length); pack anew")
    return PackIndex(
        photos=photos,
        shards=tuple((str(name), int(size)) for name, size in meta["shards"]),
        arrays=arrays,
        names=tuple(meta["names"]),
        digest=meta["digest"],
        counts=meta["counts"],
        bad=tuple((path, line, reason) for path, line, reason in meta["bad"]),
    )
