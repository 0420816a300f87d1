"""Photos a second on one core: decoded anew, decoded reduced, and from the cache in memory and on disk.

    python benchmarks/data.py --photos FOLDER --imgsz 640 [--enlarge 4000] [--stream]

Nothing is written beside the photos. ``--enlarge`` measures copies whose longest side was made that many px, for a
folder of small photos. A row is the median of ``--rounds`` passes over the photos, whose files lie in the page cache.
The disk row is measured again with the cache file's pages dropped before each pass. ``--stream`` measures the whole way
through Ray Data into this process instead, on all cores, without albumentations.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import ray

from yolo_ray.augment.images import photo_size, read_photo, write_photo
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.cache import cache_file, make_file
from yolo_ray.data.pipeline import StreamLimits, train_photos
from yolo_ray.data.plan import Plan
from yolo_ray.data.reading import Reading, new_trouble, resized_photo
from yolo_ray.data.records import Records
from yolo_ray.data.room import CachePlace


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--enlarge", type=int, default=0)
    parser.add_argument("--limit", type=int, default=200, help="photos at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream", action="store_true")
    return parser.parse_args(argv)


def records_of(paths: list[Path]) -> Records:
    """Records without labels."""
    count = len(paths)
    sizes = np.array([photo_size(path) for path in paths], np.int32)
    return Records(
        [str(path) for path in paths], sizes, np.zeros(count + 1, np.int64),
        np.zeros((0, 4), np.float32), np.zeros(0, np.int32), ("none",), f"benchmark {paths[0]}",
    )  # fmt: skip


def enlarged(paths: list[Path], side: int, folder: Path) -> list[Path]:
    """Copies with the longest side ``side``, bicubic, JPEG quality 92."""
    copies = []
    for path in paths:
        photo = read_photo(path)
        ratio = side / max(photo.shape[:2])
        size = (round(photo.shape[1] * ratio), round(photo.shape[0] * ratio))
        copies.append(folder / f"{path.stem}.jpg")
        write_photo(copies[-1], cv2.resize(photo, size, interpolation=cv2.INTER_CUBIC), quality=92)
    return copies


def rate(
    records: Records, reading: Reading, rounds: int, before: Callable[[], None] = lambda: None
) -> list[float]:
    """Photos a second of each pass; ``before`` each."""
    rates = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        for index in range(len(records)):
            resized_photo(records, index, reading)
        rates.append(len(records) / (time.perf_counter() - start))
    return rates


def show(name: str, rates: list[float]) -> None:
    """A row of the table."""
    print(f"| {name} | {statistics.median(rates):.0f} | {min(rates):.0f}-{max(rates):.0f} |")


def dropped(path: Path) -> None:
    """Write a file out and drop its pages."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_rows(records: Records, kind: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Rows of one kind of cache: filling, and full."""
    file = cache_file(records, arguments.imgsz, fast_decode=False)
    place = CachePlace("disk", (file,), str(folder))  # a folder of our own, in memory too
    reading = Reading(arguments.imgsz, cache=place)
    show(f"cache={kind}, filling it", rate(records, reading, 1))
    show(f"cache={kind}, full", rate(records, reading, arguments.rounds))
    if kind == "disk":
        path = place.path_of(file)
        show(
            "cache=disk, full, its pages dropped",
            rate(records, reading, arguments.rounds, lambda: dropped(path)),
        )
    assert not new_trouble()
    make_file(place.path_of(file), 0)


def differences(records: Records, imgsz: int) -> None:
    """What reduced decoding changes, in gray levels."""
    means, largest = [], 0
    for index in range(len(records)):
        slow, fast = (
            resized_photo(records, index, Reading(imgsz, fast)).astype(int)
            for fast in (False, True)
        )
        means.append(np.abs(slow - fast).mean())
        largest = max(largest, int(np.abs(slow - fast).max()))
    print(
        f"fast_decode changes a value by {np.mean(means):.2f} of 255 on average, {largest} at most"
    )


def stream_rates(records: Records, reading: Reading, rounds: int) -> list[float]:
    """Photos a second of steps of 16 photos out of Ray Data, for each round; the starts of chunks included."""
    epochs = 4
    plan = Plan(records, seed=0, epochs=epochs, batch=16, imgsz=reading.imgsz, augment=AugmentConfig())  # fmt: skip
    handle = ray.put(plan)
    limits = StreamLimits(os.cpu_count() or 1, 1.0, 2**28)
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        steps = range(plan.total_steps)
        count = sum(
            len(photos.ids)
            for photos in train_photos(handle, range(16), steps, False, reading, limits, print)
        )
        rates.append(count / (time.perf_counter() - start))
    return rates


def stream(records: Records, folder: Path, arguments: argparse.Namespace) -> None:
    """Rows of the whole way: decoded anew, and from a full cache."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    print(f"| {os.cpu_count()} cores, through Ray Data | photos/s | min-max |\n|---|---|---|")
    plain = Reading(arguments.imgsz)
    file = cache_file(records, arguments.imgsz, fast_decode=False)
    full = Reading(arguments.imgsz, cache=CachePlace("disk", (file,), str(folder)))
    rate(records, full, 1)
    stream_rates(records, full, 1)  # Ray starts its processes
    show("decoded anew", stream_rates(records, plain, arguments.rounds))
    show("cache=memory, full", stream_rates(records, full, arguments.rounds))


def main(argv: list[str]) -> None:
    """Measure and print a table."""
    arguments = parse(argv)
    cv2.setNumThreads(1)
    found = sorted(p for p in arguments.photos.rglob("*") if p.suffix.lower() in (".jpg", ".png"))
    found = found[: arguments.limit]
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        if arguments.enlarge:
            found = enlarged(found, arguments.enlarge, Path(disk))
        records = records_of(found)
        height, width = np.median(records.sizes, axis=0).astype(int)
        print(f"{len(records)} photos, median {width}x{height} px, imgsz={arguments.imgsz}\n")
        if arguments.stream:
            return stream(records, Path(memory), arguments)
        print("| one core | photos/s | min-max |\n|---|---|---|")
        plain, fast = Reading(arguments.imgsz), Reading(arguments.imgsz, fast_decode=True)
        show("read, decode, resize", rate(records, plain, arguments.rounds))
        show("the same, fast_decode", rate(records, fast, arguments.rounds))
        cached_rows(records, "memory", Path(memory), arguments)
        cached_rows(records, "disk", Path(disk) / "cache", arguments)
        print()
        differences(records, arguments.imgsz)


if __name__ == "__main__":
    main(sys.argv[1:])
