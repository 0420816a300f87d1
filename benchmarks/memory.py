"""Memory of reading with the cache in memory, while two workers of one node stream photos.

    python benchmarks/memory.py --data PATH/data.yaml --batches 2000 --batch 8 --imgsz 640

The cache is one file of the node's shared memory that processes read from, so none of them holds a part of it.
``own_mib``: memory that is each process's alone, the least (between two blocks) during the second half of the
first tenth of the batches, and of the last tenth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from yolo_ray.cluster.caching import cached, reading_of
from yolo_ray.config.schema import AugmentConfig, PhotosConfig
from yolo_ray.data.pipeline import StreamLimits, train_photos
from yolo_ray.data.plan import Plan, slots_of
from yolo_ray.data.records import load_records

MIB = 2**20
NAMES: dict[int, str] = {}  # a process is renamed by every task


@ray.remote(num_cpus=0)
def consume(plan: list[Any], rank: int, reading: Any, batches: range) -> int:
    """One of two workers: take its photos and drop them; how many."""
    local: Plan = ray.get(plan[0])
    limits = StreamLimits(1.0, 1.0, 2**27)
    slots = slots_of(rank, 2, local.batch)
    stream = train_photos(plan[0], slots, batches, True, reading, limits, print)
    return sum(len(item.ids) for item in stream)


def own_mib() -> dict[str, float]:
    """MiB that belong to each of this cluster's Python processes alone, by its first name and number."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if process.name().startswith("ray::"):
                name = NAMES.setdefault(process.pid, f"{process.name()} {process.pid}")
                found[name] = process.memory_full_info().uss / MIB
    return found


def main(argv: list[str]) -> int:
    """Stream, watch, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--imgsz", type=int, default=640)
    arguments = parser.parse_args(argv)
    records = load_records(arguments.data, "train", max_bad=0.0)
    epochs = -(-arguments.batches * arguments.batch // len(records))
    augment = AugmentConfig(close_mosaic=0)
    plan = Plan(
        records,
        seed=0,
        epochs=epochs,
        batch=arguments.batch,
        imgsz=arguments.imgsz,
        augment=augment,
    )
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        wanted = reading_of(
            PhotosConfig(cache="memory", cache_dir=folder), arguments.imgsz, records
        )
        with cached(wanted) as (reading, told):
            handle, tenth = ray.put(plan), arguments.batches // 10
            early = _watched(handle, reading, range(tenth))
            _watched(handle, reading, range(tenth, arguments.batches - tenth))
            late = _watched(handle, reading, range(arguments.batches - tenth, arguments.batches))
            files = {str(f): f.stat().st_size // MIB for f in Path("/dev/shm").rglob("*.photos")}
    same = sorted(set(early) & set(late))
    rows = {name: {"early": round(early[name], 1), "late": round(late[name], 1)} for name in same}
    print(json.dumps({"told": told, "cache_files_mib": files, "own_mib": rows}, indent=2))
    return 0


def _watched(handle: ray.ObjectRef, reading: Any, batches: range) -> dict[str, float]:
    """The least that each process held in the second half of the time that two workers took for ``batches``."""
    waiting = streams = [consume.remote([handle], rank, reading, batches) for rank in range(2)]
    samples: list[dict[str, float]] = []
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
        samples.append(own_mib())
    assert sum(ray.get(streams)) > 0
    samples = samples[len(samples) // 2 :]
    names = {name for sample in samples for name in sample}
    return {name: min(sample[name] for sample in samples if name in sample) for name in names}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
