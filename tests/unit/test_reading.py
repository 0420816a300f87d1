"""How a photo is read: with and without cache, reduced where that is enough; room and its refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from yolo_ray.augment.images import letterbox, read_photo, resize_photo, resized_size
from yolo_ray.cluster.caching import reading_of
from yolo_ray.config.load import load
from yolo_ray.config.schema import PhotosConfig
from yolo_ray.data import room
from yolo_ray.data.cache import PhotoCache, cache_file
from yolo_ray.data.reading import Reading, new_trouble, reduction, resized_photo
from yolo_ray.data.records import Records, load_records
from yolo_ray.data.room import CachePlace, held, make_room, others_bytes, sweep
from yolo_ray.errors import UserError

Maker = Callable[..., Path]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def records(tiny_dataset: Maker) -> Records:
    return load_records(tiny_dataset(train=6, size=(60, 90)), "train", max_bad=0.0)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(room, "SHARED_MEMORY", folder)
    return folder


def place_of(kind: room.CacheKind, records: Records, folder: Path | None = None) -> CachePlace:
    file = cache_file(records, 64, fast_decode=False)
    return CachePlace(kind, (file,), str(folder) if folder else None)


def photos(records: Records, reading: Reading) -> list[np.ndarray]:
    return [resized_photo(records, index, reading) for index in range(len(records))]


# ----------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_pixels_are_the_same_with_a_cache(
    records: Records, memory: Path, tmp_path: Path, kind: room.CacheKind
) -> None:
    plain = photos(records, Reading(64))
    for index, photo in enumerate(plain):
        decoded = read_photo(str(records.paths[index]))
        np.testing.assert_array_equal(photo, resize_photo(decoded, 64))
        np.testing.assert_array_equal(letterbox(photo, 64)[0], letterbox(decoded, 64)[0])
        assert letterbox(photo, 64)[1] == letterbox(decoded, 64)[1]
    reading = Reading(64, cache=place_of(kind, records, tmp_path / "cache"))
    for _ in ("cold", "warm"):
        for ours, theirs in zip(photos(records, reading), plain, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert len(list((memory if kind == "memory" else tmp_path / "cache").rglob("*.photos"))) == 1
    assert new_trouble() == ""


def test_the_second_time_no_photo_is_decoded(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(64, cache=place_of("disk", records, tmp_path / "cache"))
    first = photos(records, reading)
    monkeypatch.setattr("yolo_ray.data.reading.read_photo", lambda *_: pytest.fail("decoded"))
    for ours, theirs in zip(photos(records, reading), first, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_photo_that_has_gone_is_told_although_it_is_cached(
    records: Records, tmp_path: Path
) -> None:
    reading = Reading(64, cache=place_of("disk", records, tmp_path / "cache"))
    photos(records, reading)
    os.unlink(records.paths[0])
    with pytest.raises(UserError, match=r"no such file.*could be read when the run began"):
        resized_photo(records, 0, reading)


def test_a_cache_that_is_cleared_meanwhile_is_made_again(records: Records, tmp_path: Path) -> None:
    place = place_of("disk", records, tmp_path / "cache")
    first = photos(records, Reading(64, cache=place))
    shutil.rmtree(tmp_path / "cache")
    for ours, theirs in zip(photos(records, Reading(64, cache=place)), first, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(list((tmp_path / "cache").iterdir())) == 1 and new_trouble() == ""


def test_a_full_disk_ends_the_adding_with_a_sentence(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Reading(64, cache=place_of("disk", records, tmp_path / "cache"))
    before = photos(records, reading)[:2]

    def full(self: PhotoCache, content: np.ndarray, offset: int) -> None:
        raise OSError(28, "No space left on device")

    shutil.rmtree(tmp_path / "cache")
    other = Reading(64, cache=place_of("disk", records, tmp_path / "other"))
    resized_photo(records, 0, other)
    monkeypatch.setattr(PhotoCache, "_write", full)
    for _ in range(2):
        for ours, theirs in zip(photos(records, other)[:2], before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    sentence = new_trouble()
    assert "No space left on device" in sentence and "decoded anew" in sentence
    assert "\n" not in sentence and new_trouble() == ""


def test_a_really_full_file_system_falls_back(records: Records, tmp_path: Path) -> None:
    """A limit on file size refuses a write as a full disk does, in a process of its own."""
    program = """
import resource, signal, sys
from pathlib import Path
from yolo_ray.data.cache import PhotoCache, cache_file, make_file, stamp_of
from yolo_ray.data.reading import Reading, new_trouble, resized_photo
from yolo_ray.data.records import load_records
from yolo_ray.data.room import CachePlace
records = load_records(sys.argv[1], "train", max_bad=0)
file = cache_file(records, 64, fast_decode=False)
folder = Path(sys.argv[2]); folder.mkdir()
make_file(folder / file.name, file.num_bytes)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = file.num_bytes // 2
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
reading = Reading(64, cache=CachePlace("disk", (file,), str(folder)))
for _ in range(2):
    for index in range(len(records)):
        assert (resized_photo(records, index, reading) == resized_photo(records, index, Reading(64))).all()
there = [PhotoCache(folder / file.name, records, 64).get(i, stamp_of(records, i)) is not None for i in range(6)]
print(sum(there), new_trouble())
"""
    data = Path(records.paths[0]).parents[2] / "data.yaml"
    command = [sys.executable, "-c", program, str(data), str(tmp_path / "cache")]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    count, sentence = done.stdout.split(maxsplit=1)
    assert 0 < int(count) < 6 and "nothing more is added" in sentence


# ------------------------------------------------------------------------------------------ room


def test_too_little_room_is_told_with_what_is_missing(
    records: Records, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 1000))
    for kind, remedy in (
        ("disk", "data.cache_dir to a larger disk"),
        ("memory", "data.cache=disk"),
    ):
        place = place_of(kind, records, tmp_path / "cache")  # pyright: ignore[reportArgumentType]
        sentence = make_room(place)
        assert "too little" in sentence and remedy in sentence and "\n" not in sentence
        assert not list(tmp_path.rglob("*.photos"))
        reading = Reading(64, cache=place)
        np.testing.assert_array_equal(photos(records, reading)[0], photos(records, Reading(64))[0])
        assert new_trouble() == sentence


def test_what_is_filled_already_needs_no_room(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of("disk", records, tmp_path / "cache")
    photos(records, Reading(64, cache=place))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 1000))
    assert make_room(place) == ""


def test_memory_is_bounded_by_what_the_machine_has(
    records: Records, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of("memory", records)
    assert make_room(place) == ""
    assert "too little" in make_room(replace(place, spare_bytes=2**60))
    monkeypatch.setattr(room, "_container_bytes", lambda: [100])
    assert "too little" in make_room(place)


def test_a_folder_that_cannot_be_written_is_told(records: Records, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = place_of("disk", records, tmp_path / "file" / "cache")
    sentence = make_room(place)
    assert "cannot be used" in sentence and "set data.cache_dir" in sentence
    reading = Reading(64, cache=place)
    np.testing.assert_array_equal(photos(records, reading)[0], photos(records, Reading(64))[0])
    assert new_trouble() == sentence


def test_a_system_without_shared_memory(
    records: Records, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SHARED_MEMORY", memory / "none")
    assert "data.cache=disk" in make_room(place_of("memory", records))


def test_somebody_elses_folder_in_shared_memory_is_not_used(
    records: Records, memory: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    place = place_of("memory", records)
    place.path.symlink_to(tmp_path / "theirs")
    assert "another user" in make_room(place)
    assert not list((tmp_path / "theirs").iterdir())


def test_a_refused_host_reads_without_a_word(records: Records, tmp_path: Path) -> None:
    import socket

    place = place_of("disk", records, tmp_path / "cache")
    photos(records, Reading(64, cache=place, refused=(socket.gethostname(),)))
    assert not (tmp_path / "cache").exists() and new_trouble() == ""


def test_sweep_removes_what_no_run_holds(records: Records, memory: Path) -> None:
    mine = place_of("memory", records)
    other = CachePlace("memory", (cache_file(records, 96, fast_decode=False),))
    for place in (mine, other):
        assert make_room(place) == ""
    with held(other):
        sweep(mine, keep=True)
        assert len(list(memory.rglob("*.photos"))) == 2
        sweep(mine, keep=False)
        assert [path.name for path in memory.rglob("*.photos")] == [other.files[0].name]
    sweep(mine, keep=True)
    assert not list(memory.rglob("*.photos"))


def test_a_killed_holder_holds_nothing(records: Records, memory: Path) -> None:
    place = place_of("memory", records)
    make_room(place)
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); "
        "print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(place.path_of(place.files[0]))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    sweep(place, keep=False)
    assert place.path_of(place.files[0]).exists()
    process.kill()
    process.wait()
    sweep(place, keep=False)
    assert not place.path_of(place.files[0]).exists()


def test_a_disk_cache_stays_and_others_are_counted(records: Records, tmp_path: Path) -> None:
    place = place_of("disk", records, tmp_path / "cache")
    photos(records, Reading(64, cache=place))
    sweep(place, keep=False)
    assert place.path_of(place.files[0]).exists() and others_bytes(place) == 0
    (tmp_path / "cache" / "old.photos").write_bytes(bytes(10_000))
    assert others_bytes(place) >= 10_000


# ---------------------------------------------------------------------------------------- options


def test_reading_of_the_options(records: Records, tmp_path: Path) -> None:
    assert reading_of(PhotosConfig(), 64, records) == Reading(64)
    reading = reading_of(PhotosConfig(cache="memory", fast_decode=True), 64, records, records)
    assert reading.fast_decode and reading.cache is not None and len(reading.cache.files) == 1
    reading = reading_of(PhotosConfig(cache="disk", cache_dir="~/x"), 64, records)
    assert reading.cache is not None and reading.cache.path == Path.home() / "x"
    with pytest.raises(UserError, match=r"cache_dir.*expected a folder on a disk of each node"):
        load(["data=d.yaml", "cache=disk", "cache_dir=s3://bucket/x"])
    among = PhotosConfig(cache="disk", cache_dir=str(Path(records.paths[0]).parent / "c"))
    with pytest.raises(UserError, match="lies among the photos"):
        reading_of(among, 64, records)


# ------------------------------------------------------------------------------------ fast_decode


@pytest.mark.parametrize(
    ("size", "imgsz", "part"),
    [
        ((480, 640), 640, 1), ((960, 1280), 640, 2), ((959, 1279), 640, 2), ((958, 1278), 640, 1),
        ((3000, 4000), 640, 4), ((3840, 5120), 640, 8), ((5120, 100), 640, 8), ((5113, 9), 640, 8),
        ((100, 50), 640, 1),
    ],
)  # fmt: skip
def test_reduction_still_covers_the_resized_photo(
    size: tuple[int, int], imgsz: int, part: int
) -> None:
    assert reduction(size, imgsz) == part
    wanted = resized_size(size[0], size[1], imgsz)
    assert part == 1 or all(
        -(-side // part) >= want for side, want in zip(size, wanted, strict=True)
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_fast_decode_turns_and_sizes_photos_right(tmp_path: Path, orientation: int) -> None:
    y, x = np.mgrid[:303, :501]
    pixels = np.stack([x // 2, y // 2, (x + y) // 4], axis=2).clip(0, 255).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a.jpg"
    Image.fromarray(pixels).save(path, quality=95, exif=exif)
    full = read_photo(path)
    records = one_photo(path, full.shape[:2])
    for imgsz in (64, 96, 128, 250):
        slow = resized_photo(records, 0, Reading(imgsz)).astype(int)
        fast = resized_photo(records, 0, Reading(imgsz, fast_decode=True)).astype(int)
        assert fast.shape == slow.shape
        assert 0 < np.abs(fast - slow).mean() < 2.0, (imgsz, orientation)


def test_fast_decode_leaves_small_photos_and_other_formats_alone(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 500, 3), dtype=np.uint8)
    for name, imgsz in (("a.png", 64), ("a.jpg", 320)):
        Image.fromarray(noise).save(tmp_path / name)
        records = one_photo(tmp_path / name, (300, 500))
        slow = resized_photo(records, 0, Reading(imgsz))
        np.testing.assert_array_equal(
            resized_photo(records, 0, Reading(imgsz, fast_decode=True)), slow
        )


def one_photo(path: Path, size: tuple[int, ...]) -> Records:
    return Records(
        [str(path)], np.array([size], np.int32), np.zeros(2, np.int64),
        np.zeros((0, 4), np.float32), np.zeros(0, np.int32), ("a",), str(path),
    )  # fmt: skip
