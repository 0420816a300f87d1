"""Records: what a split holds, as flat arrays, every photo and label judged before training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from yolo_ray.config.address import is_remote, parent_of
from yolo_ray.data.formats import DataYaml, Split, label_path, load_data_yaml
from yolo_ray.data.judging import BadRecord, Judged, join_judged, judge_photos
from yolo_ray.data.listing import list_photos
from yolo_ray.data.packs import load_index, packed_entry
from yolo_ray.data.storage import access_of
from yolo_ray.data.texts import Texts
from yolo_ray.errors import UserError

NAMED_IN_MESSAGE = 3
RUN = 4096  # photos that are judged together
# Runs of photos and the number of classes -> what each run came to, in order
Judge = Callable[[Sequence[Sequence[str]], int], Iterator[Judged]]


@dataclass(frozen=True)
class Records:
    """Usable photos of a split, sorted by path; boxes of photo i are rows offsets[i]:offsets[i+1].

    paths [N], absolute, or places as in data/storage.py; sizes [N,2] int32 (height, width) px
    as decoded; offsets [N+1] int64;
    boxes [M,4] float32 xyxy fractions inside [0,1]; classes [M] int32; names by class id; digest:
    sha256 of all that (paths relative) and the file sizes; bad: photos left out; counts: what was
    noticed, namely duplicates and clipped (boxes); num_bytes [N] int64:
    the file sizes; access: the environment that remote photos are read with, empty for local ones.
    It may hold secrets and is never shown. tails uint32 [N]: ``judging.tail_sum`` of the files; empty
    where nobody looked, as in a pack.
    """

    paths: Sequence[str]
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
    tails: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))

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


def load_records(
    data_yaml: str | Path, split: Split, *, max_bad: float, judge: Judge | None = None
) -> Records:
    """Read and judge a split of a YOLO-format data.yaml. No file is written.

    Bad photos (corrupt, truncated, bad labels) are left out and listed up to the share
    ``max_bad``. Raises UserError above it, for a class id out of range, and for a split that is
    missing or has no photos, no label files or no boxes. A packed split was judged when it was packed.
    ``judge`` looks at runs of photos somewhere else, ``judge_photos`` for each, in order.
    """
    data = load_data_yaml(data_yaml)
    index = packed_entry(data, split)
    if index is not None:
        return _unpack(data, split, index, max_bad)
    photos = list_photos(data, split)
    runs = [photos[start : start + RUN] for start in range(0, len(photos), RUN)]
    judged = join_judged((judge or judge_here)(runs, len(data.names)))
    _refuse_mistakes(judged)
    _refuse_too_many(data, split, judged.bad, judged.total, max_bad)
    _refuse_unlabelled(data, split, judged)
    return build_records(data, judged)


def judge_here(runs: Sequence[Sequence[str]], num_classes: int) -> Iterator[Judged]:
    """One after the other, in this process."""
    return (judge_photos(run, num_classes) for run in runs)


def _unpack(data: DataYaml, split: Split, place: str, max_bad: float) -> Records:
    """Records of a packed split; no photo is opened."""
    index = load_index(place)
    bad = tuple(BadRecord(*one) for one in index.bad)
    _refuse_too_many(data, split, bad, len(index.photos) + len(bad), max_bad)
    arrays = {name: index.arrays[name] for name in ("sizes", "offsets", "boxes", "classes")}
    num_bytes = index.arrays["num_bytes"]
    if _digest(_lines(index.photos, num_bytes), arrays, index.names) != index.digest:
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
        paths=Texts(places),
        **arrays,
        names=data.names,
        digest=_digest(_lines(index.photos, num_bytes), arrays, data.names),
        bad=bad,
        counts=index.counts,
        num_bytes=num_bytes,
        access=access_of(places),
    )


def _refuse_mistakes(judged: Judged) -> None:
    if judged.mistakes:
        first, *others = judged.mistakes
        more = f" ({len(others)} more label files like it)" if others else ""
        raise UserError(first + more)


def _refuse_unlabelled(data: DataYaml, split: Split, judged: Judged) -> None:
    if not judged.labelled:
        raise UserError(
            f"{data.file}: none of the {len(judged.paths)} photos of split '{split}' has a label file, "
            f"{label_path(judged.paths[0])} for one; put the labels there"
        )
    if not len(judged.boxes):
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


def build_records(data: DataYaml, judged: Judged) -> Records:
    """The usable photos of a judged split."""
    arrays = {
        "sizes": judged.sizes,
        "offsets": np.concatenate([[0], np.cumsum(judged.lengths)]).astype(np.int64),
        "boxes": judged.boxes,
        "classes": judged.classes,
    }
    for array in arrays.values():
        array.setflags(write=False)
    lines = _relative_lines(judged.paths, judged.num_bytes, data.root)
    return Records(
        paths=judged.paths,
        **arrays,
        names=data.names,
        digest=_digest(lines, arrays, data.names),
        bad=judged.bad,
        counts={"duplicates": judged.duplicates, "clipped": judged.clipped},
        num_bytes=judged.num_bytes,
        access=access_of(judged.paths if judged.paths.hold("://") else ()),
        tails=judged.tails,
    )


def relative_name(photo: str, root: str) -> str:
    """A photo's place below the data set's folder, the same on a disk and in a store."""
    below = photo.removeprefix(root.rstrip("/") + "/")
    if below != photo and "//" not in f"/{below}" and "/." not in f"/{below}":
        return below  # nothing to simplify: the slow way of the last line is for the few
    if is_remote(photo) != is_remote(root):
        return photo
    return Path(os.path.relpath(photo, root)).as_posix()


def _lines(photos: Iterable[str], num_bytes: np.ndarray) -> Iterator[bytes]:
    """What the digest knows of photos: relative name and length."""
    for photo, length in zip(photos, num_bytes.tolist(), strict=True):
        yield os.fsencode(f"{photo}\0{length}\0")


def _relative_lines(paths: Texts, num_bytes: np.ndarray, root: str) -> Iterator[bytes]:
    """``_lines`` of the ``relative_name`` of each path, a run at a time where all names are plain."""
    folder = os.fsencode(root.rstrip("/") + "/")
    for start in range(0, len(paths), RUN):
        stop = start + RUN
        names = paths.encoded(start, stop)
        below = [name[len(folder) :] for name in names if name.startswith(folder)]
        together = b"/" + b"\0/".join(below)
        if len(below) == len(names) and b"//" not in together and b"/." not in together:
            lengths = num_bytes[start:stop].tolist()
            yield b"".join(b"%b\0%d\0" % one for one in zip(below, lengths, strict=True))
        else:
            few = (relative_name(os.fsdecode(name), root) for name in names)
            yield from _lines(few, num_bytes[start:stop])


def _digest(
    lines: Iterable[bytes],
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
) -> str:
    """sha256, the same wherever the data set lies and on machines of either byte order."""
    total = hashlib.sha256()
    for some in lines:
        total.update(some)
    for name in ("sizes", "offsets", "boxes", "classes"):
        little = np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<"))
        total.update(f"{name}{little.shape}\0".encode())
        total.update(little.data)
    total.update("\0".join(names).encode())
    return total.hexdigest()
