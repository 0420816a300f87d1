"""Where cache files lie on a node, whether they fit, and who removes the ones in memory."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from yolo_ray.data.cache import SUFFIX, CacheFile, make_file

CacheKind = Literal["off", "memory", "disk"]
SHARED_MEMORY = Path("/dev/shm")
# What a cache may take of what is free: the rest is for the workers, or for other files.
_SHARE = {"memory": 0.8, "disk": 0.95}
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system (POSIX)
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class CachePlace:
    """Where a run's cache files are, on every node alike.

    Attributes:
        folder: of ``disk``; None: the user's cache folder.
        spare_bytes: of memory, left to Ray's object store, which lies in /dev/shm too and takes its pages late: a
            node whose shared memory runs out then loses its raylet.
    """

    kind: CacheKind
    files: tuple[CacheFile, ...]
    folder: str | None = None
    spare_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all files, full."""
        return sum(file.num_bytes for file in self.files)

    def path_of(self, file: CacheFile) -> Path:
        """Of one file, on this node."""
        return self.path / file.name

    @property
    def path(self) -> Path:
        """The folder on this node."""
        if self.kind == "memory":
            return SHARED_MEMORY / f"yolo_ray-{os.getuid()}"
        if self.folder:
            return Path(self.folder).expanduser()
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return home / "yolo_ray" / "photos"


def amount(num_bytes: int) -> str:
    """Bytes for people."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB"


def make_room(place: CachePlace) -> str:
    """Make the files that are missing on this node; why that cannot be, in one sentence, or an empty text.

    They are sparse: what is counted is what they still lack against what is free, before any photo is read.
    """
    try:
        _own_folder(place)
        lacking = sum(max(0, f.num_bytes - _held_bytes(place.path_of(f))) for f in place.files)
        usable = int(_SHARE[place.kind] * _free_bytes(place))
        if lacking > usable:
            return _too_small(place, lacking, usable)
        for file in place.files:
            make_file(place.path_of(file), file.num_bytes)
    except OSError as error:
        remedy = "set data.cache_dir to a folder that can be written"
        if place.kind == "memory":
            remedy = "set data.cache=disk"
        return (
            f"data.cache={place.kind} is left out on {socket.gethostname()}: {place.path} cannot be used "
            f"({error.strerror or error}); {remedy}"
        )
    return ""


def held_bytes(place: CachePlace) -> int:
    """What the files take on this node now."""
    return sum(_held_bytes(place.path_of(file)) for file in place.files)


@contextmanager
def held(place: CachePlace) -> Iterator[None]:
    """While inside, no ``sweep`` of another run's removes this run's files in memory from this node.

    A shared lock, which the kernel drops when the process ends, however it ends: no process id has to be
    remembered or trusted.
    """
    with ExitStack() as files:
        for file in place.files if place.kind == "memory" else ():
            with suppress(OSError):  # no room for it here
                files.enter_context(_locked(place.path_of(file), file.num_bytes))
        yield


def _locked(path: Path, num_bytes: int) -> IO[bytes]:
    while True:
        opened = open(path, "rb")
        fcntl.flock(opened, fcntl.LOCK_SH)
        if os.fstat(opened.fileno()).st_nlink:
            return opened
        opened.close()  # swept between the two lines
        make_file(path, num_bytes)


def sweep(place: CachePlace, *, keep: bool) -> None:
    """Remove files in memory that no run holds from this node; with ``keep`` not those of ``place``.

    So a file goes when its run ends, and one whose run was killed goes when the next run begins, unless that run
    has use for it: what lies there is right, or is decoded again. The disk cache stays.
    """
    if place.kind != "memory":
        return
    kept = {file.name for file in place.files} if keep else set()
    for path in place.path.glob(f"*{SUFFIX}"):
        if path.name not in kept:
            with suppress(OSError), open(path, "rb") as file:  # locked, or removed by another
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def others_bytes(place: CachePlace) -> int:
    """What caches of other data or sizes take in the folder of this one."""
    own = {file.name for file in place.files}
    return sum(_held_bytes(p) for p in place.path.glob(f"*{SUFFIX}") if p.name not in own)


def _own_folder(place: CachePlace) -> None:
    """Make the folder, the user's alone. In /dev/shm, which all write to, nobody else's is taken in its place."""
    if place.kind == "memory" and not SHARED_MEMORY.is_dir():
        raise FileNotFoundError(f"this system has no {SHARED_MEMORY}")
    place.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = os.lstat(place.path)
    if place.kind == "memory" and (
        not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid()
    ):
        raise PermissionError("it belongs to another user")


def _held_bytes(path: Path) -> int:
    try:
        return os.stat(path).st_blocks * _BLOCK_BYTES
    except OSError:  # there is none
        return 0


def _free_bytes(place: CachePlace) -> int:
    free = shutil.disk_usage(place.path).free
    if place.kind == "disk":
        return free
    available = psutil.virtual_memory().available
    return max(0, min(free, available, *_container_bytes()) - place.spare_bytes)


def _container_bytes() -> list[int]:
    """What the memory limit of this container (cgroup v2 or v1) leaves; nothing where there is none."""
    root = Path("/sys/fs/cgroup")
    for limit, used, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError, KeyError):  # not that version, or no limit ("max")
            top = int((root / limit).read_text())
            stats = (root / used).with_name("memory.stat").read_text().splitlines()
            # Pages of files that were read once are given back before anything is killed.
            given_back = int(dict(line.split() for line in stats)[inactive])
            return [max(0, top - int((root / used).read_text()) + given_back)]
    return []


def _too_small(place: CachePlace, lacking: int, usable: int) -> str:
    other = "data.cache=disk" if place.kind == "memory" else "data.cache_dir to a larger disk"
    lack, can, missing = (amount(num_bytes) for num_bytes in (lacking, usable, lacking - usable))
    return (
        f"data.cache={place.kind} is left out on {socket.gethostname()}: the photos need {lack} in {place.path} and "
        f"{can} can be taken, {missing} too little; free as much, or set {other} or a smaller imgsz"
    )
