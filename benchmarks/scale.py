"""Ten million photos: build the index, look for photos of both splits, plan, shuffle and start anywhere.

Made-up records, no file is read.

python benchmarks/scale.py --photos 10000000 --batch 64
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil

from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.formats import DataYaml
from yolo_ray.data.judging import Judged, join_judged
from yolo_ray.data.leaks import shared_photos
from yolo_ray.data.plan import Plan
from yolo_ray.data.records import RUN, Records, build_records
from yolo_ray.data.texts import Texts

ROOT = "/data/photos"
STEPS = 200


def make_run(start: int, stop: int) -> Judged:
    """What judging photos ``start`` to ``stop`` would give: six boxes a photo on average."""
    generator, count = np.random.default_rng(start), stop - start
    lengths = generator.integers(0, 13, count)
    corners = np.sort(generator.random((int(lengths.sum()), 2, 2), np.float32), axis=1)
    return Judged(
        paths=Texts(
            f"{ROOT}/images/{number // 1000:05d}/{number:08d}.jpg" for number in range(start, stop)
        ),
        sizes=np.tile(np.array([480, 640], np.int32), (count, 1)),
        num_bytes=generator.integers(10_000, 200_000, count),
        lengths=lengths,
        boxes=corners.reshape(-1, 4),
        classes=generator.integers(0, 80, len(corners), dtype=np.int32),
        tails=generator.integers(0, 2**32, count, dtype=np.uint32),
        labelled=count,
    )


def make_records(start: int, stop: int) -> tuple[Records, float]:
    """Records of photos ``start`` to ``stop``, joined as the runs come, and the seconds without making those up."""
    data = DataYaml(
        file=f"{ROOT}/data.yaml", root=ROOT, names=tuple(map(str, range(80))), splits={}
    )
    making = 0.0

    def runs() -> Iterator[Judged]:
        nonlocal making
        for first in range(start, stop, RUN):
            begin = time.perf_counter()
            run = make_run(first, min(first + RUN, stop))
            making += time.perf_counter() - begin
            yield run

    begin = time.perf_counter()
    records = build_records(data, join_judged(runs()))
    return records, time.perf_counter() - begin - making


def peak_mb() -> float:
    """The most memory that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main(argv: list[str]) -> int:
    """Print one line of JSON: seconds, milliseconds a step, memory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--photos", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=64)
    arguments = parser.parse_args(argv)
    process, total = psutil.Process(), arguments.photos
    records, seconds = make_records(0, total)
    result = {"photos": total, "boxes": len(records.boxes), "index_s": seconds}
    names = ("paths", "sizes", "offsets", "boxes", "classes", "num_bytes", "tails")
    size = sum(getattr(records, name).nbytes for name in names)
    result |= {"index_mb": size / 2**20, "bytes_a_photo": size / total}
    result |= {"index_peak_mb": peak_mb()}
    val, _ = make_records(total, total + total // 20)
    begin = time.perf_counter()
    assert shared_photos(records, val) == []
    result |= {"leaks_s": time.perf_counter() - begin}
    del val
    before = process.memory_info().rss
    plan = Plan(
        records, seed=0, epochs=300, batch=arguments.batch, imgsz=640, augment=AugmentConfig()
    )
    steps = np.random.default_rng(0).integers(0, plan.total_steps, STEPS).tolist()
    for name, call in (("images_at", plan.images_at), ("at", plan.at)):
        begin = time.perf_counter()
        for step in steps:
            call(step)
        result[f"{name}_ms"] = 1000 * (time.perf_counter() - begin) / STEPS
    result |= {"plan_mb": (process.memory_info().rss - before) / 2**20}
    result |= {"rss_mb": process.memory_info().rss / 2**20, "peak_mb": peak_mb()}
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
