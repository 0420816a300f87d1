"""Every photo and label file of a split looked at, in runs that may be judged anywhere and come back as flat arrays."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from yolo_ray.augment.images import PhotoError, photo_size, size_in
from yolo_ray.config.address import is_remote
from yolo_ray.data.formats import PHOTO_SUFFIXES, LabelError, Labels, label_path, load_labels
from yolo_ray.data.storage import StorageError, is_plain, read_bytes, use_access
from yolo_ray.data.texts import Texts
from yolo_ray.errors import UserError

DISK_READERS, NETWORK_READERS = 16, 64  # a store answers in tens of ms, however many ask
TRIAL = 32  # photos that show whether a disk lets its readers wait
TAIL_BYTES = 4096  # compressed pixels end there; the beginnings of photos of one camera are alike


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

    paths [N]; sizes int32 [N,2] (height, width) px; num_bytes and lengths int64 [N]: of the file, and boxes;
    tails uint32 [N]: ``tail_sum`` of the file; boxes float32 [M,4] xyxy fractions; classes int32 [M]; labelled: how
    many have a label file; duplicates, clipped: boxes; bad: photos to leave out; mistakes: sentences, each of which
    stops everything.
    """

    paths: Texts
    sizes: np.ndarray
    num_bytes: np.ndarray
    lengths: np.ndarray
    tails: np.ndarray
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
    judged = _each_judged(photos, partial(_judge, num_classes=num_classes))
    good = [one for one in judged if one.bad is None and one.mistake is None]
    labels = [one.labels for one in good if one.labels is not None]
    return Judged(
        paths=Texts(one.path for one in good),
        sizes=np.array([one.size for one in good], np.int32).reshape(-1, 2),
        num_bytes=np.array([one.size_bytes for one in good], np.int64),
        lengths=np.array(
            [0 if one.labels is None else len(one.labels.boxes) for one in good], np.int64
        ),
        tails=np.array([one.tail for one in good], np.uint32),
        boxes=np.concatenate([np.zeros((0, 4), np.float32), *(one.boxes for one in labels)]),
        classes=np.concatenate([np.zeros(0, np.int32), *(one.classes for one in labels)]),
        labelled=len(labels),
        duplicates=sum(one.duplicates for one in labels),
        clipped=sum(one.clipped for one in labels),
        bad=tuple(one.bad for one in judged if one.bad is not None),
        mistakes=tuple(one.mistake for one in judged if one.mistake is not None),
    )


def judge_apart(
    photos: Sequence[str], num_classes: int, access: dict[str, str]
) -> Judged | UserError:
    """``judge_photos`` for a process on any node; a UserError comes back as a result.

    Ray keeps only the text of what a task raises. ``access``: of ``storage.access_of`` on the driver.
    """
    use_access(access)
    try:
        return judge_photos(photos, num_classes)
    except UserError as mistake:
        return mistake


def _each_judged(photos: Sequence[str], judge: Callable[[str], _Photo]) -> list[_Photo]:
    """In order, by as many threads as there is waiting to hide.

    A disk that answers at once is read fastest by one: 16 fight for the interpreter, which makes 1 700 photos/s of
    4 600.
    """
    readers, first = NETWORK_READERS, []
    if not any(is_remote(photo) for photo in photos):
        wall, cpu = time.perf_counter(), time.thread_time()
        first = [judge(photo) for photo in photos[:TRIAL]]
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        readers = min(DISK_READERS, int(wall / max(cpu, 1e-9)))
    rest = photos[len(first) :]
    if readers < 2:
        return first + [judge(photo) for photo in rest]
    with ThreadPoolExecutor(max_workers=readers) as pool:
        return first + list(pool.map(judge, rest))


def tail_sum(photo: str, content: bytes | None = None) -> int:
    """CRC-32 of a photo file's last bytes; ``content``: all of it, where it is here already.

    Raises:
        OSError: it cannot be read.
    """
    if content is None and is_plain(photo):
        return _end_of(photo)[1]
    return zlib.crc32(read_bytes(photo, -TAIL_BYTES) if content is None else content[-TAIL_BYTES:])


def _end_of(photo: str) -> tuple[int, int]:
    """Bytes of a file on a disk, and the ``tail_sum`` of it."""
    with open(photo, "rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        return length, zlib.crc32(os.pread(file.fileno(), TAIL_BYTES, max(0, length - TAIL_BYTES)))


def join_judged(parts: Iterable[Judged]) -> Judged:
    """One after the other, copied as they come; at least one."""
    arrays: dict[str, _Growing] = {}
    content, ends = _Growing(), _Growing()
    sums = dict.fromkeys(("labelled", "duplicates", "clipped"), 0)
    bad: list[BadRecord] = []
    mistakes: list[str] = []
    for part in parts:
        more, places = part.paths.flat
        ends.add(places + content.length)
        content.add(more)
        for name in ("sizes", "num_bytes", "lengths", "tails", "boxes", "classes"):
            arrays.setdefault(name, _Growing()).add(getattr(part, name))
        for name in sums:
            sums[name] += getattr(part, name)
        bad += part.bad
        mistakes += part.mistakes
    whole: dict[str, Any] = {name: array.taken() for name, array in arrays.items()} | sums
    paths = Texts.from_flat(content.taken(), ends.taken())
    return Judged(paths=paths, **whole, bad=tuple(bad), mistakes=tuple(mistakes))


class _Growing:
    """An array that takes rows at its end. The system moves its pages: it is never there twice."""

    def __init__(self) -> None:
        self.length = 0
        self._array: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        """Copy ``rows``, which have the shape and type of those before."""
        if self._array is None:
            self._array = np.empty((0, *rows.shape[1:]), rows.dtype)
        stop = self.length + len(rows)
        if stop > len(self._array):
            self._array.resize((stop + stop // 8, *rows.shape[1:]), refcheck=False)
        self._array[self.length : stop] = rows
        self.length = stop

    def taken(self) -> np.ndarray:
        """All of it; nothing is added afterwards."""
        assert self._array is not None, "at least one part"
        self._array.resize((self.length, *self._array.shape[1:]), refcheck=False)
        return self._array


@dataclass(frozen=True)
class _Photo:
    """What one photo came to: usable, bad, or a mistake that stops everything."""

    path: str
    size: tuple[int, int] = (0, 0)
    size_bytes: int = 0
    tail: int = 0
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
            return _Photo(photo, photo_size(photo), *_end_of(photo), labels)
        data = _bytes_of(photo)  # once: each request costs more than its bytes
        return _Photo(photo, size_in(photo, data), len(data), tail_sum(photo, data), labels)
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
