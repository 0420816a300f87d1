"""Records: what a split holds, as flat arrays, every photo and label judged before training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from yolo_ray.augment.images import PhotoError, photo_size, size_in
from yolo_ray.config.address import is_remote, parent_of
from yolo_ray.data.formats import (
    PHOTO_SUFFIXES,
    DataYaml,
    LabelError,
    Labels,
    Split,
    label_path,
    load_data_yaml,
    load_labels,
)
from yolo_ray.data.listing import list_photos
from yolo_ray.data.packs import load_index, packed_entry
from yolo_ray.data.storage import StorageError, access_of, is_plain, read_bytes
from yolo_ray.errors import UserError

NAMED_IN_MESSAGE = 3
DISK_READERS, NETWORK_READERS = 16, 64  # a store answers in tens of ms, however many ask


@dataclass(frozen=True)
class BadRecord:
    """Why a photo is left out: the file at fault (photo or label), its line if any, the reason."""

    path: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        """file:line: reason."""
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: {self.reason}"


@dataclass(frozen=True)
class Records:
    """Usable photos of a split, sorted by path; boxes of photo i are rows offsets[i]:offsets[i+1].

    paths [N] str, absolute, or places as in data/storage.py; sizes [N,2] int32 (height, width) px
    as decoded; offsets [N+1] int64;
    boxes [M,4] float32 xyxy fractions inside [0,1]; classes [M] int32; names by class id; digest:
    sha256 of all that (paths relative) and the file sizes; bad: photos left out; counts: what was
    noticed, namely duplicates and clipped (boxes); num_bytes [N] int64:
    the file sizes; access: the environment that remote photos are read with, empty for local ones.
    It may hold secrets and is never shown.
    """

    paths: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray
    names: tuple[str, ...]
    digest: str
    bad: tuple[BadRecord, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    num_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    access: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Number of photos."""
        return len(self.paths)

    @property
    def num_empty(self) -> int:
        """Photos without a box (background), with a label file or without."""
        return int((np.diff(self.offsets) == 0).sum())

    def boxes_of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Boxes [n,4] and classes [n] of one photo (views)."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.boxes[rows], self.classes[rows]


@dataclass(frozen=True)
class _Judged:
    """What one photo came to: usable, bad, or a mistake that stops everything."""

    path: str
    size: tuple[int, int] = (0, 0)
    size_bytes: int = 0
    labels: Labels | None = None  # None: no label file
    bad: BadRecord | None = None
    mistake: str | None = None


def load_records(data_yaml: str | Path, split: Split, *, max_bad: float) -> Records:
    """Read and judge a split of a YOLO-format data.yaml. No file is written.

    Bad photos (corrupt, truncated, bad labels) are left out and listed up to the share
    ``max_bad``. Raises UserError above it, for a class id out of range, and for a split that is
    missing or has no photos, no label files or no boxes. A packed split was judged when it was packed.
    """
    data = load_data_yaml(data_yaml)
    index = packed_entry(data, split)
    if index is not None:
        return _unpack(data, split, index, max_bad)
    photos = list_photos(data, split)
    # Threads: the work is file reading; 16 also hide the latency of a network disk.
    readers = NETWORK_READERS if any(is_remote(photo) for photo in photos) else DISK_READERS
    with ThreadPoolExecutor(max_workers=readers) as pool:
        judged = list(pool.map(partial(_judge, num_classes=len(data.names)), photos))
    _refuse_mistakes(judged)
    good = [one for one in judged if one.bad is None]
    bad = tuple(one.bad for one in judged if one.bad is not None)
    _refuse_too_many(data, split, bad, len(judged), max_bad)
    _refuse_unlabelled(data, split, good)
    return _flatten(data, good, bad)


def _judge(photo: str, *, num_classes: int) -> _Judged:
    label_file = label_path(photo)
    try:
        suffix = os.path.splitext(photo)[1].lower()
        labels = load_labels(label_file, num_classes)
        if suffix not in PHOTO_SUFFIXES:
            raise PhotoError(
                photo, f"format {suffix or 'without suffix'} is not read, save it as JPEG or PNG"
            )
        if is_plain(photo):
            return _Judged(photo, photo_size(photo), os.stat(photo).st_size, labels)
        data = _bytes_of(photo)  # once: each request costs more than its bytes
        return _Judged(photo, size_in(photo, data), len(data), labels)
    except StorageError:
        raise  # the store fails, not this photo: the others would wait for it in vain
    except UserError as error:
        return _Judged(photo, mistake=str(error))
    except PhotoError as error:
        return _Judged(photo, bad=BadRecord(photo, None, error.reason))
    except LabelError as error:
        return _Judged(photo, bad=BadRecord(label_file, error.line, error.reason))


def _unpack(data: DataYaml, split: Split, place: str, max_bad: float) -> Records:
    """Records of a packed split; no photo is opened."""
    index = load_index(place)
    bad = tuple(BadRecord(*one) for one in index.bad)
    _refuse_too_many(data, split, bad, len(index.photos) + len(bad), max_bad)
    arrays = {name: index.arrays[name] for name in ("sizes", "offsets", "boxes", "classes")}
    num_bytes = index.arrays["num_bytes"]
    if _digest(index.photos, num_bytes, arrays, index.names) != index.digest:
        raise UserError(f"{place} is damaged (its digest differs); copy it again, or pack anew")
    if len(data.names) != len(index.names):
        raise UserError(
            f"{data.file} names {len(data.names)} classes, {place} has {len(index.names)}; correct 'names:'"
        )
    for array in (*arrays.values(), num_bytes):
        array.setflags(write=False)
    folder = parent_of(place) if is_remote(place) else os.path.dirname(place)
    places = index.places(folder)
    return Records(
        paths=np.array(places),
        **arrays,
        names=data.names,
        digest=_digest(index.photos, num_bytes, arrays, data.names),
        bad=bad,
        counts=index.counts,
        num_bytes=num_bytes,
        access=access_of(places),
    )


def _bytes_of(photo: str) -> bytes:
    try:
        return read_bytes(photo)
    except FileNotFoundError:
        raise PhotoError(photo, "no such file") from None


def _refuse_mistakes(judged: Sequence[_Judged]) -> None:
    mistakes = [one.mistake for one in judged if one.mistake is not None]
    if mistakes:
        more = f" ({len(mistakes) - 1} more label files like it)" if len(mistakes) > 1 else ""
        raise UserError(mistakes[0] + more)


def _refuse_unlabelled(data: DataYaml, split: Split, good: Sequence[_Judged]) -> None:
    if all(one.labels is None for one in good):
        raise UserError(
            f"{data.file}: none of the {len(good)} photos of split '{split}' has a label file, "
            f"{label_path(good[0].path)} for one; put the labels there"
        )
    if not any(one.labels is not None and len(one.labels.boxes) for one in good):
        raise UserError(
            f"{data.file}: no label file of split '{split}' holds a box; label some photos"
        )


def _refuse_too_many(
    data: DataYaml, split: Split, bad: Sequence[BadRecord], total: int, max_bad: float
) -> None:
    if len(bad) <= max_bad * total and len(bad) < total:
        return
    named = "; ".join(str(one) for one in bad[:NAMED_IN_MESSAGE])
    more = f"; and {len(bad) - NAMED_IN_MESSAGE} more" if len(bad) > NAMED_IN_MESSAGE else ""
    if len(bad) == total:
        raise UserError(
            f"{data.file}: all {total} photos of split '{split}' are bad ({named}{more}); fix them"
        )
    raise UserError(
        f"{data.file}: {len(bad)} of the {total} photos of split '{split}' are bad, more than "
        f"data.max_bad={max_bad:g} allows ({named}{more}); fix them, or raise data.max_bad"
    )


def _flatten(data: DataYaml, good: Sequence[_Judged], bad: tuple[BadRecord, ...]) -> Records:
    labels = [one.labels for one in good if one.labels is not None]
    lengths = [0 if one.labels is None else len(one.labels.boxes) for one in good]
    arrays = {
        "sizes": np.array([one.size for one in good], np.int32).reshape(-1, 2),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "boxes": np.concatenate([one.boxes for one in labels]),
        "classes": np.concatenate([one.classes for one in labels]),
    }
    for array in arrays.values():
        array.setflags(write=False)
    counts = {
        "duplicates": sum(one.duplicates for one in labels),
        "clipped": sum(one.clipped for one in labels),
    }
    num_bytes = np.array([one.size_bytes for one in good], np.int64)
    photos = [relative_name(one.path, data.root) for one in good]
    return Records(
        paths=np.array([one.path for one in good]),
        **arrays,
        names=data.names,
        digest=_digest(photos, num_bytes, arrays, data.names),
        bad=bad,
        counts=counts,
        num_bytes=num_bytes,
        access=access_of(one.path for one in good),
    )


def relative_name(photo: str, root: str) -> str:
    """A photo's place below the data set's folder, the same on a disk and in a store."""
    if is_remote(photo) != is_remote(root):
        return photo
    return Path(os.path.relpath(photo, root)).as_posix()


def _digest(
    photos: Sequence[str],
    num_bytes: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
) -> str:
    """sha256, the same wherever the data set lies and on machines of either byte order."""
    total = hashlib.sha256()
    for photo, length in zip(photos, num_bytes.tolist(), strict=True):
        total.update(os.fsencode(f"{photo}\0{length}\0"))
    for name in ("sizes", "offsets", "boxes", "classes"):
        little = arrays[name].astype(arrays[name].dtype.newbyteorder("<"))
        total.update(f"{name}{little.shape}\0".encode() + little.tobytes())
    total.update("\0".join(names).encode())
    return total.hexdigest()
