"""Every photo and label file of a split looked at, in runs that may be judged anywhere and come back as flat arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from yolo_ray.augment.images import PhotoError, photo_size, size_in
from yolo_ray.config.address import is_remote
from yolo_ray.data.formats import PHOTO_SUFFIXES, LabelError, Labels, label_path, load_labels
from yolo_ray.data.storage import StorageError, is_plain, read_bytes
from yolo_ray.data.texts import Texts
from yolo_ray.errors import UserError

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
class Judged:
    """What a run of photos came to: N usable ones with M boxes, and the others.

    paths [N]; sizes int32 [N,2] (height, width) px; num_bytes and lengths int64 [N]: of the file, and boxes; boxes
    float32 [M,4] xyxy fractions; classes int32 [M]; labelled: how many have a label file; duplicates, clipped: boxes;
    bad: photos to leave out; mistakes: sentences, each of which stops everything.
    """

    paths: Texts
    sizes: np.ndarray
    num_bytes: np.ndarray
    lengths: np.ndarray
    boxes: np.ndarray
    classes: np.ndarray
    labelled: int = 0
    duplicates: int = 0
    clipped: int = 0
    bad: tuple[BadRecord, ...] = ()
    mistakes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Photos looked at, without those of ``mistakes``."""
        return len(self.paths) + len(self.bad)


def judge_photos(photos: Sequence[str], num_classes: int) -> Judged:
    """Look at photos and their labels; no pixel is decoded.

    Raises:
        StorageError: the store fails, not a photo: the others would wait for it in vain.
    """
    # Threads: the work is file reading; 16 also hide the latency of a network disk.
    readers = NETWORK_READERS if any(is_remote(photo) for photo in photos) else DISK_READERS
    with ThreadPoolExecutor(max_workers=readers) as pool:
        judged = list(pool.map(partial(_judge, num_classes=num_classes), photos))
    good = [one for one in judged if one.bad is None and one.mistake is None]
    labels = [one.labels for one in good if one.labels is not None]
    return Judged(
        paths=Texts(one.path for one in good),
        sizes=np.array([one.size for one in good], np.int32).reshape(-1, 2),
        num_bytes=np.array([one.size_bytes for one in good], np.int64),
        lengths=np.array(
            [0 if one.labels is None else len(one.labels.boxes) for one in good], np.int64
        ),
        boxes=np.concatenate([np.zeros((0, 4), np.float32), *(one.boxes for one in labels)]),
        classes=np.concatenate([np.zeros(0, np.int32), *(one.classes for one in labels)]),
        labelled=len(labels),
        duplicates=sum(one.duplicates for one in labels),
        clipped=sum(one.clipped for one in labels),
        bad=tuple(one.bad for one in judged if one.bad is not None),
        mistakes=tuple(one.mistake for one in judged if one.mistake is not None),
    )


def join_judged(parts: Sequence[Judged]) -> Judged:
    """One after the other; at least one."""
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("sizes", "num_bytes", "lengths", "boxes", "classes")
    }
    sums: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("labelled", "duplicates", "clipped")
    }
    return Judged(
        paths=Texts.joined([part.paths for part in parts]),
        **arrays,
        **sums,
        bad=tuple(one for part in parts for one in part.bad),
        mistakes=tuple(one for part in parts for one in part.mistakes),
    )


@dataclass(frozen=True)
class _Photo:
    """What one photo came to: usable, bad, or a mistake that stops everything."""

    path: str
    size: tuple[int, int] = (0, 0)
    size_bytes: int = 0
    labels: Labels | None = None  # None: no label file
    bad: BadRecord | None = None
    mistake: str | None = None


def _judge(photo: str, *, num_classes: int) -> _Photo:
    label_file = label_path(photo)
    try:
        suffix = os.path.splitext(photo)[1].lower()
        labels = load_labels(label_file, num_classes)
        if suffix not in PHOTO_SUFFIXES:
            raise PhotoError(
                photo, f"format {suffix or 'without suffix'} is not read, save it as JPEG or PNG"
            )
        if is_plain(photo):
            return _Photo(photo, photo_size(photo), os.stat(photo).st_size, labels)
        data = _bytes_of(photo)  # once: each request costs more than its bytes
        return _Photo(photo, size_in(photo, data), len(data), labels)
    except StorageError:
        raise  # the store fails, not this photo: the others would wait for it in vain
    except UserError as error:
        return _Photo(photo, mistake=str(error))
    except PhotoError as error:
        return _Photo(photo, bad=BadRecord(photo, None, error.reason))
    except LabelError as error:
        return _Photo(photo, bad=BadRecord(label_file, error.line, error.reason))


def _bytes_of(photo: str) -> bytes:
    try:
        return read_bytes(photo)
    except FileNotFoundError:
        raise PhotoError(photo, "no such file") from None
