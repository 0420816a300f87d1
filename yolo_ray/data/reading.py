"""From a record to its resized photo: from the node's cache if it is there, else decoded (and put there)."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import numpy as np

from yolo_ray.augment.images import PhotoError, read_jpeg, read_photo, resize_photo, resized_size
from yolo_ray.data.batch import Encoded
from yolo_ray.data.cache import PhotoCache, cache_file, stamp_of
from yolo_ray.data.records import Records
from yolo_ray.data.room import CachePlace, make_room
from yolo_ray.data.storage import use_access
from yolo_ray.errors import UserError


@dataclass(frozen=True)
class Reading:
    """How the tasks of a run read photos; small, and pickled with every task.

    Attributes:
        imgsz: the longest side of a photo as it is given out, px.
        fast_decode: decode a JPEG at 1/2, 1/4 or 1/8 of its size where that still covers the resized photo.
        cache: where resized photos are kept on every node; None: nowhere.
        refused: names of hosts that have no room for it, which the user knows.
        encoded: training's JPEGs are given out as they are, for the device to decode.
    """

    imgsz: int
    fast_decode: bool = False
    cache: CachePlace | None = None
    refused: tuple[str, ...] = ()
    encoded: bool = False


def resized_photo(records: Records, index: int, reading: Reading) -> np.ndarray:
    """Photo ``index``, uint8 [h', w', 3] RGB with the longest side imgsz, the caller's own.

    Raises:
        UserError: it can no longer be read.
    """
    cache = _OPENED.of(records, reading)
    if cache is None:
        return _decode(records, index, reading)
    stamp = stamp_of(records, index)
    photo = cache.get(index, stamp)
    if photo is None:
        photo = _decode(records, index, reading)
        cache.put(index, stamp, photo)
    return photo


def encoded_photo(records: Records, index: int, reading: Reading) -> Encoded:
    """Photo ``index`` for the device to decode.

    Raises:
        UserError: it can no longer be read.
    """
    path = str(records.paths[index])
    height, width = (int(side) for side in records.sizes[index])
    use_access(records.access)
    try:
        data = read_jpeg(path, (height, width))
    except PhotoError as error:
        raise gone(error) from error
    if data is not None:
        return Encoded(path, data)
    photo = _decode(records, index, reading)  # rare, so it may be read twice
    return Encoded(path, photo.tobytes(), photo.shape[:2])


def new_trouble() -> str:
    """Why this process does without a cache, or adds nothing more to it, told once; empty when all is well."""
    return _OPENED.trouble()


def reduction(size: tuple[int, int], imgsz: int) -> int:
    """8, 4, 2 or 1: the smallest part of (height, width) px, rounded up, that still covers the resized photo."""
    height, width = (int(side) for side in resized_size(size[0], size[1], imgsz))
    for part in (8, 4, 2):
        if -(-size[0] // part) >= height and -(-size[1] // part) >= width:
            return part
    return 1


def _decode(records: Records, index: int, reading: Reading) -> np.ndarray:
    """Decoded and resized anew; the photo was judged good when the run began."""
    path = str(records.paths[index])
    use_access(records.access)
    height, width = (int(side) for side in records.sizes[index])
    try:
        part = reduction((height, width), reading.imgsz) if reading.fast_decode else 1
        photo = read_photo(path, part)
        if part > 1 and photo.shape[:2] == (-(-height // part), -(-width // part)):
            return resize_photo(photo, reading.imgsz, full=(height, width))
        if part > 1 and photo.shape[:2] != (height, width):  # replaced since the run began
            photo = read_photo(path)
        return resize_photo(photo, reading.imgsz)
    except PhotoError as error:
        raise gone(error) from error


def gone(error: PhotoError) -> UserError:
    """What to say of a photo that was judged good when the run began."""
    return UserError(
        f"{error}: it could be read when the run began; put it back, or take it out of the data set"
    )


class _Opened:
    """The cache files that this process has open: a task process serves many tasks of one run."""

    def __init__(self) -> None:
        self.caches: dict[tuple[str, Reading], PhotoCache | None] = {}
        self.untold: list[str] = []
        self.told: set[int] = set()

    def of(self, records: Records, reading: Reading) -> PhotoCache | None:
        """The cache of these records, opened when first asked for; None where there is none or no room."""
        if reading.cache is None:
            return None
        key = (records.digest, reading)
        cache = self.caches.get(key)
        if cache is not None and cache.is_gone:  # cleared, or swept between two runs
            cache.close()
            del self.caches[key]
        if key not in self.caches:
            self.caches[key] = self._open(records, reading, reading.cache)
        return self.caches[key]

    def _open(self, records: Records, reading: Reading, place: CachePlace) -> PhotoCache | None:
        if socket.gethostname() in reading.refused:
            return None
        file = cache_file(records, reading.imgsz, fast_decode=reading.fast_decode)
        path = place.path_of(file)
        try:
            if not path.is_file() or path.stat().st_size != file.num_bytes:
                if reason := make_room(place):
                    self.untold.append(reason)
                    return None
            return PhotoCache(path, records, reading.imgsz)
        except OSError as error:
            self.untold.append(f"{path} cannot be used ({error.strerror}): photos are decoded anew")
            return None

    def trouble(self) -> str:
        """One sentence not told before, or an empty text."""
        for (_, reading), cache in self.caches.items():
            if cache is not None and cache.trouble and id(cache) not in self.told:
                self.told.add(id(cache))
                assert reading.cache is not None
                self.untold.append(_full(reading.cache, cache.trouble))
        return self.untold.pop(0) if self.untold else ""


def _full(place: CachePlace, reason: str) -> str:
    return (
        f"nothing more is added to the cache of photos in {place.path} on {socket.gethostname()} ({reason}): photos "
        "that are not in it are decoded anew each time; free room there"
    )


_OPENED = _Opened()
