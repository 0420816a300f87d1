"""The cache file: right pixels or a miss, whatever was killed, torn, damaged, shared or replaced."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from yolo_ray.augment.images import read_photo, resize_photo, write_photo
from yolo_ray.data.cache import PhotoCache, cache_file, checksum, make_file, stamp_of
from yolo_ray.data.reading import Reading, resized_photo
from yolo_ray.data.records import Records, load_records
from yolo_ray.data.room import CachePlace

Maker = Callable[..., Path]
IMGSZ = 64


@pytest.fixture
def data(tiny_dataset: Maker) -> Path:
    """Photos of three shapes."""
    data = tiny_dataset(train=9, size=(60, 90))
    for number, size in enumerate([(90, 60), (64, 64), (100, 33)]):
        path = data.parent / "images" / "train" / f"{number:04d}.jpg"
        noise = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
        write_photo(path, noise)
    return data


@pytest.fixture
def records(data: Path) -> Records:
    return load_records(data, "train", max_bad=0.0)


def expected(records: Records, index: int) -> np.ndarray:
    return resize_photo(read_photo(str(records.paths[index])), IMGSZ)


def opened(records: Records, folder: Path) -> PhotoCache:
    file = cache_file(records, IMGSZ, fast_decode=False)
    make_file(folder / file.name, file.num_bytes)
    return PhotoCache(folder / file.name, records, IMGSZ)


def fill(records: Records, cache: PhotoCache) -> None:
    for index in range(len(records)):
        cache.put(index, stamp_of(records, index), expected(records, index))


def path_in(folder: Path) -> Path:
    (path,) = folder.glob("*.photos")
    return path


def reading_in(folder: Path, records: Records) -> Reading:
    file = cache_file(records, IMGSZ, fast_decode=False)
    return Reading(IMGSZ, cache=CachePlace("disk", (file,), str(folder)))


def right_or_missing(records: Records, cache: PhotoCache) -> list[bool]:
    """Per photo whether it is there; what is there must be right."""
    there = []
    for index in range(len(records)):
        photo = cache.get(index, stamp_of(records, index))
        if photo is not None:
            np.testing.assert_array_equal(photo, expected(records, index))
        there.append(photo is not None)
    return there


def test_a_photo_comes_back_as_it_was(records: Records, tmp_path: Path) -> None:
    cache = opened(records, tmp_path)
    assert not any(right_or_missing(records, cache))
    fill(records, cache)
    assert all(right_or_missing(records, cache))
    assert all(right_or_missing(records, opened(records, tmp_path)))
    assert os.stat(path_in(tmp_path)).st_mode & 0o777 == 0o600


def test_what_is_given_out_is_the_callers_own(records: Records, tmp_path: Path) -> None:
    cache = opened(records, tmp_path)
    fill(records, cache)
    photo = cache.get(0, stamp_of(records, 0))
    assert photo is not None
    photo[:] = 0  # as albumentations may
    assert all(right_or_missing(records, cache))


def test_the_name_depends_on_everything_the_pixels_depend_on(data: Path, records: Records) -> None:
    names = {
        cache_file(records, size, fast_decode=fast).name
        for size in (64, 96)
        for fast in (False, True)
    }
    write_photo(data.parent / "images" / "train" / "0003.jpg", np.zeros((60, 90, 3), np.uint8))
    names.add(cache_file(load_records(data, "train", max_bad=0), 64, fast_decode=False).name)
    assert len(names) == 5


def test_every_changed_byte_is_detected(records: Records, tmp_path: Path) -> None:
    cache = opened(records, tmp_path)
    fill(records, cache)
    content = path_in(tmp_path).read_bytes()
    for index in range(len(records)):
        start = int(cache.layout.offsets[index])
        last = start + int(np.prod(cache.layout.shape_of(index))) - 1
        for place in (start, start + 4096, last, index * 24, index * 24 + 23):
            damaged = bytearray(content)
            damaged[place] ^= 1
            path_in(tmp_path).write_bytes(damaged)
            there = right_or_missing(records, opened(records, tmp_path))
            assert there == [other != index for other in range(len(records))], place


def test_a_damaged_photo_is_decoded_and_put_back(records: Records, tmp_path: Path) -> None:
    cache = opened(records, tmp_path)
    fill(records, cache)
    with open(path_in(tmp_path), "r+b") as file:
        file.seek(int(cache.layout.offsets[4]) + 100)
        file.write(bytes(4096))
    assert not right_or_missing(records, cache)[4]
    photo = resized_photo(records, 4, reading_in(tmp_path, records))
    np.testing.assert_array_equal(photo, expected(records, 4))
    assert all(right_or_missing(records, opened(records, tmp_path)))


@pytest.mark.parametrize("size", [0, 5, 4096 + 5000])
def test_a_cut_file_gets_its_length_back(records: Records, tmp_path: Path, size: int) -> None:
    fill(records, opened(records, tmp_path))
    os.truncate(path_in(tmp_path), size)
    cache = opened(records, tmp_path)
    assert not all(right_or_missing(records, cache))
    fill(records, cache)
    assert all(right_or_missing(records, cache))


def test_pixels_without_entry_and_entry_without_pixels_are_misses(
    records: Records, tmp_path: Path
) -> None:
    """What a lost machine may leave, in either order."""
    cache = opened(records, tmp_path)
    fill(records, cache)
    whole = path_in(tmp_path).read_bytes()
    start = int(cache.layout.offsets[0])
    for torn in (bytes(start) + whole[start:], whole[:start] + bytes(len(whole) - start)):
        path_in(tmp_path).write_bytes(torn)
        assert not any(right_or_missing(records, opened(records, tmp_path)))


def test_a_replaced_photo_is_never_served(data: Path, records: Records, tmp_path: Path) -> None:
    """Same length, same sizes, same labels: the digest of the records is the same; the time is not."""
    path = data.parent / "images" / "train" / "0005.bmp"
    path.with_suffix(".jpg").unlink()
    write_photo(path, np.full((60, 90, 3), 10, np.uint8))
    (data.parent / "labels" / "train" / "0005.txt").touch()
    before = load_records(data, "train", max_bad=0.0)
    fill(before, opened(before, tmp_path))
    write_photo(path, np.full((60, 90, 3), 200, np.uint8))
    os.utime(path, ns=(0, time.time_ns() + 10**9))
    after = load_records(data, "train", max_bad=0.0)
    assert after.digest == before.digest
    photo = resized_photo(after, 5, reading_in(tmp_path, after))
    assert (photo == 200).all()
    assert all(right_or_missing(after, opened(after, tmp_path)))


def test_a_photo_of_another_size_is_not_put(records: Records, tmp_path: Path) -> None:
    cache = opened(records, tmp_path)
    cache.put(0, (1, 2), np.zeros((64, 64, 3), np.uint8))
    assert cache.get(0, (1, 2)) is None and not cache.trouble


def test_checksum_sees_index_and_stamp() -> None:
    photo = np.arange(64 * 48 * 3, dtype=np.uint8).reshape(48, 64, 3)
    sums = {checksum(photo, i, (size, 5)) for i in (0, 1) for size in (7, 8)}
    sums |= {checksum(photo[::-1].copy(), 0, (7, 5)), checksum(photo, 0, (7, 6))}
    assert len(sums) == 6


# ------------------------------------------------------------------------------ several processes

PROGRAM = """
import hashlib, sys
from pathlib import Path
import numpy as np
from yolo_ray.data.cache import cache_file
from yolo_ray.data.reading import Reading, resized_photo
from yolo_ray.data.records import load_records
from yolo_ray.data.room import CachePlace
data, folder, first, stride = sys.argv[1:]
records = load_records(data, "train", max_bad=0.0)
place = CachePlace("disk", (cache_file(records, 64, fast_decode=False),), folder)
reading = Reading(64, cache=place)
for index in range(int(first), len(records), int(stride)):
    photo = resized_photo(records, index, reading)
    print(index, hashlib.sha256(photo.tobytes()).hexdigest(), flush=True)
"""


def reader(data: Path, folder: Path, first: int = 0, stride: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, data, folder, first, stride]
    return subprocess.Popen([str(part) for part in command], text=True, stdout=subprocess.PIPE)


def hashes_of(processes: list[subprocess.Popen[str]]) -> list[dict[int, str]]:
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        rows = (line.split() for line in output.splitlines())
        found.append({int(index): digest for index, digest in rows})
    return found


def truth(records: Records) -> dict[int, str]:
    return {
        index: hashlib.sha256(expected(records, index).tobytes()).hexdigest()
        for index in range(len(records))
    }


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_one_file_cold_and_warm(
    data: Path, records: Records, tmp_path: Path, processes: int
) -> None:
    folder = tmp_path / "cache"
    for _ in ("cold", "warm"):
        parts = [reader(data, folder, first, processes) for first in range(processes)]
        joined = {key: value for part in hashes_of(parts) for key, value in part.items()}
        assert joined == truth(records)
    assert all(right_or_missing(records, opened(records, folder)))


def test_two_processes_that_fill_at_once(data: Path, records: Records, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    both = hashes_of([reader(data, folder), reader(data, folder)])
    assert both == [truth(records), truth(records)]
    assert all(right_or_missing(records, opened(records, folder)))


@pytest.mark.parametrize("lines", [1, 4, 7])
def test_kill_9_while_filling(data: Path, records: Records, tmp_path: Path, lines: int) -> None:
    folder = tmp_path / "cache"
    process = reader(data, folder)
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sum(right_or_missing(records, opened(records, folder))) >= lines - 1
    assert hashes_of([reader(data, folder)]) == [truth(records)]
    assert all(right_or_missing(records, opened(records, folder)))


def test_kill_9_between_any_two_writes(records: Records, tmp_path: Path) -> None:
    """Each half-done write of a photo over another's remains, with and without its entry."""
    old = opened(records, tmp_path)
    fill(records, old)
    whole = path_in(tmp_path).read_bytes()
    start, length = int(old.layout.offsets[2]), int(np.prod(old.layout.shape_of(2)))
    for done in range(0, length, 1111):
        torn = bytearray(whole)
        torn[start + done : start + length] = b"\x55" * (length - done)
        path_in(tmp_path).write_bytes(torn)
        assert not right_or_missing(records, opened(records, tmp_path))[2]


def test_a_second_process_does_not_hold_the_cache_in_its_own_memory(tmp_path: Path) -> None:
    """Private pages of a process that reads 200 MB of cached photos, before and after."""
    program = """
import re, sys
import numpy as np
from pathlib import Path
from yolo_ray.data.cache import PhotoCache, make_file
from yolo_ray.data.records import Records
n = 200
records = Records([f"/none/{i}.jpg" for i in range(n)], np.full((n, 2), 600, np.int32),
                  np.zeros(n + 1, np.int64), np.zeros((0, 4), np.float32), np.zeros(0, np.int32), ("a",), "d")
path = Path(sys.argv[1])
from yolo_ray.data.cache import Layout
make_file(path, Layout(records, 600).num_bytes)
cache = PhotoCache(path, records, 600)
def pss():
    return int(re.search(r"^Pss: +(\\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)[1])
photo = np.random.default_rng(0).integers(0, 255, (600, 600, 3), dtype=np.uint8)
if sys.argv[2] == "fill":
    for i in range(n):
        cache.put(i, (1, i), photo)
assert cache.get(0, (1, 0)) is not None
before = pss()
for i in range(n):
    assert (cache.get(i, (1, i)) == photo).all()
print(pss() - before, path.stat().st_blocks // 2)
"""
    for role in ("fill", "read"):
        command = [sys.executable, "-c", program, str(tmp_path / "x.photos"), role]
        done = subprocess.run(command, text=True, capture_output=True, check=True)
        grown_kb, cache_kb = (int(word) for word in done.stdout.split())
        assert cache_kb > 200_000 and grown_kb < 20_000
