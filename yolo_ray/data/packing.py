"""Write a data set into a few large files: tars of the original photos and labels, and an index of each split."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import yaml
from pydantic import Field

from yolo_ray.config.address import checked_place, is_remote
from yolo_ray.config.options import parse_flat
from yolo_ray.config.schema import Fraction, Section
from yolo_ray.data.formats import DataYaml, Split, label_path, load_data_yaml
from yolo_ray.data.packs import INDEX_SUFFIX, PackIndex, load_index, packed_entry
from yolo_ray.data.records import Records, load_records, relative_name
from yolo_ray.data.storage import read_bytes
from yolo_ray.errors import UserError

SPLITS: tuple[Split, ...] = ("train", "val")
MEBIBYTE = 2**20
READERS, AT_ONCE = 16, 256  # photos in memory at a time
BLOCK_BYTES = tarfile.BLOCKSIZE
OVERHEAD_BYTES = 4 * BLOCK_BYTES  # two headers, a label, the rests of two blocks


class PackConfig(Section):
    """What is packed, and where to."""

    data: str | None = Field(
        default=None, description="YOLO-format data.yaml, a path or an address"
    )
    out: str | None = Field(default=None, description="folder to make, on a disk")
    shard_mb: Annotated[int, Field(ge=1)] = Field(
        default=256, description="a shard is closed when its photos reach that many MiB"
    )
    max_bad: Fraction = Field(
        default=0.01, description="refuse a split with a larger share of bad photos"
    )


@dataclass
class _Shard:
    """A tar that is being written, and where the photos of it lie."""

    path: Path
    file: IO[bytes]
    tar: tarfile.TarFile
    starts: list[int]

    def add(self, name: str, data: bytes) -> int:
        """Append a file; the offset of its first byte. The same data make the same tar, byte for byte."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o644
        self.tar.addfile(info, io.BytesIO(data))
        return self.tar.offset - -(-len(data) // BLOCK_BYTES) * BLOCK_BYTES

    def close(self) -> int:
        """End it, on the disk and not just in the cache; its bytes."""
        self.tar.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self.path.stat().st_size


def parse(argv: Sequence[str]) -> PackConfig:
    """The pack that the arguments ask for.

    Raises:
        UserError: unknown or wrong options, or none of data and out.
    """
    config = parse_flat(PackConfig, argv)
    if not config.data or not config.out:
        raise UserError("pass data=PATH/data.yaml and out=FOLDER")
    if is_remote(checked_place(config.out)):
        raise UserError(
            f"out={config.out}: a pack is written to a disk; copy the folder into the store when it is complete"
        )
    return config


def pack(config: PackConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Make the folder ``config.out``, or find it complete; what is in it, as JSON can say it.

    ``say`` gets a line for each finished shard. The folder appears under its name when all of it is on the disk.

    Raises:
        UserError: bad data, a folder that holds something else, a disk without room.
    """
    assert config.data and config.out
    out = Path(os.path.abspath(Path(checked_place(config.out)).expanduser()))
    data = load_data_yaml(config.data)
    if any(packed_entry(data, split) for split in SPLITS):
        raise UserError(f"{data.file} describes a pack already; train from it, or copy its folder")
    _refuse_folder(out)
    splits: dict[Split, Records] = {
        split: load_records(config.data, split, max_bad=config.max_bad) for split in SPLITS
    }
    ready = _found(out, splits)
    if ready is None:
        with _written(out, sum(_bytes_needed(one) for one in splits.values())) as folder:
            for split, records in splits.items():
                index = _write_split(folder, split, data, records, (config.shard_mb, say))
                _write(folder / f"{split}{INDEX_SUFFIX}", index.to_bytes())
            _write(folder / "data.yaml", _data_yaml(data))
            ready = _found(folder, splits)
        assert ready is not None, "what was written is what was read"
    return {"data": str(out / "data.yaml"), **ready}


def _refuse_folder(out: Path) -> None:
    """Nothing of anybody's is overwritten."""
    indices = [out / f"{split}{INDEX_SUFFIX}" for split in SPLITS]
    if not out.exists() or all(path.is_file() for path in indices):
        return
    if not out.is_dir() or any(out.iterdir()):
        raise UserError(f"out={out} exists and is no pack; choose another out= or remove it")


def _found(out: Path, splits: dict[Split, Records]) -> dict[str, Any] | None:
    """Counts of the pack in ``out``; None if there is none yet."""
    counts: dict[str, Any] = {}
    for split, records in splits.items():
        place = out / f"{split}{INDEX_SUFFIX}"
        if not place.is_file():
            return None
        index = load_index(str(place))
        if index.digest != records.digest:
            raise UserError(f"out={out} is a pack of other data; choose another out= or remove it")
        counts[split] = {
            "photos": len(records),
            "boxes": len(records.classes),
            "left_out": len(records.bad),
            "shards": len(index.shards),
            "bytes": sum(size for _, size in index.shards),
        }
    return counts


def _bytes_needed(records: Records) -> int:
    return int(records.num_bytes.sum()) + OVERHEAD_BYTES * len(records)


@contextmanager
def _written(out: Path, needed: int) -> Iterator[Path]:
    """A hidden folder beside ``out`` that becomes ``out`` when all went well, and is removed when not.

    One that a killed process left is emptied. Two processes never write the same one.
    """
    folder = out.parent / f".{out.name}.packing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends, however
            for path in folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise UserError(
                    f"{out} needs {needed / 2**30:.2f} GiB and its disk has {free / 2**30:.2f} GiB free; free some, or "
                    "pass out= with a folder on another disk"
                )
            yield folder
            if out.exists():
                out.rmdir()  # an empty one, or this refuses
            folder.rename(out)
            (out / "lock").unlink()  # not before: another process would take the folder for its own
            _sync(out.parent)
    except BlockingIOError:
        raise UserError(f"another process is packing into {out}; wait for it, or stop it") from None
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{out} cannot be written ({error.strerror}); free some space or pass another out=; nothing is "
            "left of this try"
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_split(
    folder: Path,
    split: Split,
    data: DataYaml,
    records: Records,
    options: tuple[int, Callable[[str], None]],
) -> PackIndex:
    """The shards of a split; ``options``: MiB of a shard, and who is told of each."""
    shard_mb, say = options
    photos = [relative_name(str(path), data.root) for path in records.paths]
    shards: list[tuple[str, int]] = []
    starts: list[int] = []
    numbers = np.zeros(len(records), np.int32)
    for number, part in enumerate(_parts(records.num_bytes, shard_mb * MEBIBYTE)):
        shard = _open_shard(folder / f"{split}-{number:05d}.tar")
        try:
            _fill(shard, records, photos, part)
            size = shard.close()
        finally:
            with suppress(OSError):  # a full disk refuses what is still in the buffer, again
                shard.file.close()
        shards.append((shard.path.name, size))
        starts += shard.starts
        numbers[part.start : part.stop] = number
        say(f"{shard.path.name}: {part.stop} of the {len(records)} photos of {split} are packed")
    arrays = {
        "shard": numbers,
        "starts": np.array(starts, np.int64),
        "num_bytes": records.num_bytes,
        "sizes": records.sizes,
        "offsets": records.offsets,
        "boxes": records.boxes,
        "classes": records.classes,
    }
    bad = tuple((one.path, one.line, one.reason) for one in records.bad)
    return PackIndex(
        tuple(photos), tuple(shards), arrays, records.names, records.digest, records.counts, bad
    )


def _parts(num_bytes: np.ndarray, limit: int) -> Iterator[range]:
    """Runs of photos, each as long as it takes to reach ``limit`` bytes."""
    start, total = 0, 0
    for place, length in enumerate(num_bytes.tolist()):
        total += length
        if total >= limit:
            yield range(start, place + 1)
            start, total = place + 1, 0
    if start < len(num_bytes):
        yield range(start, len(num_bytes))


def _open_shard(path: Path) -> _Shard:
    file = open(path, "wb")
    return _Shard(path, file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT), [])


def _fill(shard: _Shard, records: Records, photos: Sequence[str], part: range) -> None:
    """Photos and labels of ``part``, in order, read a few hundred at a time."""
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        for first in range(part.start, part.stop, AT_ONCE):
            some = range(first, min(first + AT_ONCE, part.stop))
            paths = [str(records.paths[index]) for index in some]
            for index, (photo, label) in zip(some, pool.map(_contents, paths), strict=True):
                if len(photo) != records.num_bytes[index]:
                    raise UserError(
                        f"{records.paths[index]} changed while it was packed; run again when nothing writes to the data"
                    )
                name = _member_name(photos[index])
                shard.starts.append(shard.add(name, photo))
                if label is not None:
                    shard.add(os.path.splitext(name)[0] + ".txt", label)


def _contents(photo: str) -> tuple[bytes, bytes | None]:
    """The bytes of a photo and of its label file, None without one."""
    try:
        data = read_bytes(photo)
        try:
            return data, read_bytes(label_path(photo))
        except FileNotFoundError:
            return data, None
    except OSError as error:
        raise UserError(
            f"{photo} or its label could be read a moment ago and cannot now ({error}); put it back and run again"
        ) from error


def _member_name(photo: str) -> str:
    """A name that unpacks below the folder one is in, wherever the photo lay."""
    parts = [part for part in photo.replace("://", "/").split("/") if part not in ("", ".")]
    if photo == "/".join(parts) and ".." not in parts:
        return photo
    return "/".join(["outside", *("up" if part == ".." else part for part in parts)])


def _data_yaml(data: DataYaml) -> bytes:
    content = {split: f"{split}{INDEX_SUFFIX}" for split in SPLITS}
    text = yaml.safe_dump(
        {**content, "names": dict(enumerate(data.names))}, sort_keys=False, allow_unicode=True
    )
    return f"# Made by python -m pipelines.pack of {data.file}\n{text}".encode()
