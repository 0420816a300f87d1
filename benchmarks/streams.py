"""Photos a second of several ways to bring decoded photos to the training loop, side by side in one process.

    python benchmarks/streams.py --data PATH/data.yaml --cpus 16 --batch 16 --imgsz 640 --seconds 20

Each way decodes the same plan's steps and hands them to the photo ring (on the GPU if there is one); all of its
processes share ``--cpus`` cores, the consumer's too. ``core`` is one core that only decodes. The clock starts with the
first photos, and the first third of the time does not count: processes start and chunks grow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import ray
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from yolo_ray.augment.transforms import build_transform
from yolo_ray.cluster.preflight import MAX_CHUNK_BYTES
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.batch import PhotoRing
from yolo_ray.data.pipeline import StreamLimits, start_readers, train_photos
from yolo_ray.data.plan import Plan
from yolo_ray.data.reading import Reading, resized_photo
from yolo_ray.data.records import load_records
from yolo_ray.data.tasks import put_photo

EPOCHS = 10_000  # more than any run here reaches
Steps = Iterator[Any]  # uint8 [b,S,S,3] of one step after the other


def decode(plan: Plan, step: int) -> np.ndarray:
    """The photos of one step, decoded in this process."""
    cv2.setNumThreads(1)  # as training does; more threads would be cores that --cpus does not count
    transform = _transform()
    images, _, seeds = plan.images_at(step)
    photos = np.empty((plan.batch, plan.imgsz, plan.imgsz, 3), np.uint8)
    for out, image, seed in zip(photos, images.tolist(), seeds.tolist(), strict=True):
        photo = resized_photo(plan.records, image, Reading(plan.imgsz))
        put_photo(plan, image, photo, transform, seed, out)
    return photos


_KEPT: list[Any] = []


def _transform() -> Any:
    if not _KEPT:
        _KEPT.append(build_transform(True))
    return _KEPT[0]


def one_core(plan: Plan, cpus: int) -> Steps:
    """This process alone."""
    for step in range(plan.total_steps):
        yield decode(plan, step)


def ray_chunks(plan: Plan, cpus: int) -> Steps:
    """What training does: Ray Data, materialised a chunk ahead, on a GPU in a process of its own."""
    limits = StreamLimits(float(cpus), 1.0, MAX_CHUNK_BYTES, apart=torch.cuda.is_available())
    start_readers(limits, True)
    slots, steps = range(plan.batch), range(plan.total_steps)
    for item in train_photos(ray.put(plan), slots, steps, True, Reading(plan.imgsz), limits, print):
        yield item.photos


def ray_stream(plan: Plan, cpus: int) -> Steps:
    """Ray Data as one long dataset, its own iterator."""
    handle = ray.put(plan)

    def task(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        local = ray.get(handle)
        return {"photo": np.concatenate([decode(local, int(step)) for step in rows["id"]])}

    dataset = ray.data.range(50_000, override_num_blocks=50_000)
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    mapped = dataset.map_batches(cast(Any, task), batch_size=1, num_cpus=1)
    for columns in mapped.iter_batches(batch_size=plan.batch, prefetch_batches=4):
        yield columns["photo"]


def ray_tasks(plan: Plan, cpus: int) -> Steps:
    """A window of Ray tasks, one a step, without Ray Data."""
    handle = ray.put(plan)
    task = ray.remote(decode).options(num_cpus=1)
    window: deque[ray.ObjectRef] = deque()
    for step in range(plan.total_steps):
        window.append(task.remote(handle, step))
        if len(window) > 2 * cpus:
            yield ray.get(window.popleft())


class _Decoder:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def decode(self, step: int) -> np.ndarray:
        return decode(self.plan, step)


def ray_actors(plan: Plan, cpus: int) -> Steps:
    """A pool of actors that keep the plan, two steps waiting at each."""
    handle = ray.put(plan)
    actor: Any = ray.remote(_Decoder).options(num_cpus=1)
    actors = [actor.remote(handle) for _ in range(cpus)]
    window: deque[ray.ObjectRef] = deque()
    for step in range(plan.total_steps):
        window.append(actors[step % cpus].decode.remote(step))
        if len(window) > 2 * cpus:
            yield ray.get(window.popleft())


class _StepSet(IterableDataset[torch.Tensor]):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        torch.set_num_threads(1)
        for step in range(info.id, self.plan.total_steps, info.num_workers):
            yield torch.from_numpy(decode(self.plan, step))


def torch_loader(plan: Plan, cpus: int) -> Steps:
    """torch's DataLoader, a process a core, pinned."""
    loader = DataLoader(
        _StepSet(plan), batch_size=None, num_workers=cpus, prefetch_factor=2,
        pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    yield from loader


WAYS: dict[str, Callable[[Plan, int], Steps]] = {
    "core": one_core,
    "torch": torch_loader,
    "ray_chunks": ray_chunks,
    "ray_tasks": ray_tasks,
    "ray_actors": ray_actors,
    "ray_stream": ray_stream,
}


def measure(way: str, plan: Plan, arguments: argparse.Namespace) -> dict[str, Any]:
    """Photos a second that reach the ring, and the CPU seconds of this process for each second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ring = PhotoRing(plan.batch, plan.imgsz, plan.window, device)
    begin = time.perf_counter()
    counted, since, busy = 0, begin, time.process_time()
    stream = WAYS[way](plan, arguments.cpus)
    for step, photos in enumerate(stream):
        ring.put(step, photos)
        counted += len(photos)
        now = time.perf_counter()
        if step == 0:
            begin = since = now
        if since == begin and now - begin > arguments.seconds / 3:
            counted, since, busy = 0, now, time.process_time()
        if now - begin > arguments.seconds:
            break
    seconds = time.perf_counter() - since
    used = time.process_time() - busy
    close = getattr(stream, "close", None)
    if close is not None:
        close()
    return {
        "way": way,
        "photos_per_s": round(counted / seconds, 1),
        "own_cpu": round(used / seconds, 2),
    }


def main(argv: list[str]) -> int:
    """Measure each way and print a line for it; the last line is all of it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cpus", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--imgsz", type=int, default=640)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(
        1
    )  # as in a worker, where Ray sets it; spinning threads would take the readers' cores
    # Processes inherit it: no way may use cores beside those it was given.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cpus])
    records = load_records(arguments.data, "train", max_bad=0.01)
    plan = Plan(
        records, seed=0, epochs=EPOCHS, batch=arguments.batch, imgsz=arguments.imgsz,
        augment=AugmentConfig(),
    )  # fmt: skip
    root = Path(__file__).resolve().parents[1]
    environment = {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    ray.init(
        address="local", num_cpus=arguments.cpus, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": environment | {"NO_ALBUMENTATIONS_UPDATE": "1"}},
    )  # fmt: skip
    rows = []
    for way in arguments.ways:
        try:
            rows.append(measure(way, plan, arguments))
        except Exception as error:  # one way that fails must not hide the others
            rows.append({"way": way, "failed": f"{type(error).__name__}: {error}"[:300]})
        print(json.dumps(rows[-1]), flush=True)
    print(
        json.dumps({"cpus": arguments.cpus, "batch": plan.batch, "imgsz": plan.imgsz, "rows": rows})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
