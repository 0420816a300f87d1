"""The file of one split's decoded and resized photos, shared by all processes of a node.

Every photo has its place, computed from the records alone, so a process needs nothing from another to find it:

    entries  [N]  checksum, size in bytes and mtime_ns of the photo's file, 24 bytes each
    pixels   photo i at ``offsets[i]``: uint8 [h', w', 3] as ``resize_photo`` gives it, at the start of a page

The file is made at its full length without content (a sparse file) and filled photo by photo, on first use.

No lock, no order of writing and no flag is trusted: an entry counts only if its checksum is that of the pixels that
lie there. So a process killed in the middle, a machine that lost power, a damaged page and a photo that two processes
write at once (the same bytes) all lead to right pixels, or to a photo that is decoded once more. Making the file is
idempotent too: all who find it missing give it the same length.

A stale photo is never served. The name holds the digest of the records (paths, labels, bytes and pixels of every
photo), imgsz, how photos are decoded and by which versions; the entry holds size and time of the file as they were
before it was decoded, and the checksum covers them. A photo that is replaced meets an entry that is not its own.

Photos are copied out by ``preadv`` and not by a memory map. A consumer needs a copy anyway (it pads, and augments in
place), a map of a file on a failing or full disk ends the process with SIGBUS where a read raises OSError, and the
pages are the same page cache: one copy a node.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from yolo_ray.augment.images import DECODERS, resized_size
from yolo_ray.data.records import Records

VERSION = 1  # of the layout and of the checksum
SUFFIX = ".photos"
PAGE_BYTES = 4096
_ENTRY = struct.Struct("<8sqq")  # checksum; bytes and mtime_ns of the photo's file

Stamp = tuple[int, int]  # bytes and mtime_ns of a photo's file


@dataclass(frozen=True)
class CacheFile:
    """One split's file: its name, and its length in bytes. Picklable and small."""

    name: str
    num_bytes: int


class Layout:
    """Where each photo of a split lies: ``heights``, ``widths`` [N] px, resized, and ``offsets`` int64 [N+1] bytes."""

    def __init__(self, records: Records, imgsz: int) -> None:
        self.heights, self.widths = resized_size(records.sizes[:, 0], records.sizes[:, 1], imgsz)
        entries = [len(records) * _ENTRY.size]
        lengths = np.concatenate([entries, self.heights * self.widths * 3])
        self.offsets = np.cumsum(-(-lengths // PAGE_BYTES) * PAGE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return int(self.offsets[-1])

    def shape_of(self, index: int) -> tuple[int, int, int]:
        """Of photo ``index``, resized."""
        return int(self.heights[index]), int(self.widths[index]), 3


def cache_file(records: Records, imgsz: int, *, fast_decode: bool) -> CacheFile:
    """The file of these records, by everything that its pixels depend on."""
    key = f"{records.digest} {imgsz} {fast_decode} {DECODERS} {VERSION}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    return CacheFile(f"{digest}-{imgsz}{SUFFIX}", Layout(records, imgsz).num_bytes)


def stamp_of(records: Records, index: int) -> Stamp:
    """Size and time of a photo's file as it is now; of one that is no local file, the size that was recorded."""
    try:
        status = os.stat(str(records.paths[index]))
        return status.st_size, status.st_mtime_ns
    except (OSError, ValueError):  # a URL, or gone: reading it will tell
        return int(records.num_bytes[index]) if len(records.num_bytes) else 0, 0


def make_file(path: Path, num_bytes: int) -> None:
    """Give the file its length where it has another, keeping what is in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size != num_bytes:
            os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


class PhotoCache:
    """An open cache file; any number of processes may read and fill it.

    Attributes:
        trouble: why photos are no longer added, empty as long as they are. What is there is still read.
    """

    def __init__(self, path: Path, records: Records, imgsz: int) -> None:
        """Open a file that ``make_file`` made. Raises OSError."""
        self.layout = Layout(records, imgsz)
        self.trouble = ""
        self._file = open(path, "r+b", buffering=0)

    @cached_property
    def _descriptor(self) -> int:
        return self._file.fileno()

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed meanwhile; what is added then is lost with this process."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def get(self, index: int, stamp: Stamp) -> np.ndarray | None:
        """A copy of the photo, uint8 [h', w', 3], the caller's own; None where it is missing or damaged."""
        try:
            entry = os.pread(self._descriptor, _ENTRY.size, index * _ENTRY.size)
            if len(entry) < _ENTRY.size or _ENTRY.unpack(entry)[1:] != stamp:
                return None
            photo = np.empty(self.layout.shape_of(index), np.uint8)
            length = os.preadv(
                self._descriptor, [photo.reshape(-1).data], int(self.layout.offsets[index])
            )
        except OSError as error:
            self.trouble = self.trouble or error.strerror or str(error)
            return None
        is_whole = length == photo.nbytes and checksum(photo, index, stamp) == entry[:8]
        return photo if is_whole else None

    def put(self, index: int, stamp: Stamp, photo: np.ndarray) -> None:
        """Write a photo at its place, then its entry. A disk that refuses ends the adding; see ``trouble``."""
        if self.trouble or photo.shape != self.layout.shape_of(index):  # replaced by another size
            return
        photo = np.ascontiguousarray(photo)
        entry = _ENTRY.pack(checksum(photo, index, stamp), *stamp)
        try:
            self._write(photo, int(self.layout.offsets[index]))
            self._write(np.frombuffer(entry, np.uint8), index * _ENTRY.size)
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def _write(self, content: np.ndarray, offset: int) -> None:
        rest = content.reshape(-1).data
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written


def checksum(photo: np.ndarray, index: int, stamp: Stamp) -> bytes:
    """8 bytes that change with any page of the photo, with its index and its stamp.

    Sums of 64-bit words page by page, then a cryptographic hash of the sums: any one wrong word of a page, a missing
    page or one of another photo shows, at 0.06 ms for 640x480 px, where zlib's crc32 takes 1.6 ms, as long as decoding.
    """
    flat = photo.reshape(-1)
    whole = len(flat) // PAGE_BYTES * PAGE_BYTES
    sums = flat[:whole].view("<u8").reshape(-1, PAGE_BYTES // 8).sum(axis=1, dtype=np.uint64)
    total = hashlib.blake2b(struct.pack("<qqq", index, *stamp), digest_size=8)
    total.update(sums.tobytes())
    total.update(flat[whole:].tobytes())
    return total.digest()
