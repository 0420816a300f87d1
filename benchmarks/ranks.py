"""One process a GPU (or a gloo process on CPUs) for multigpu.py: a timed step, a gradient, a start and an end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from yolo_ray.augment.device import augment
from yolo_ray.augment.transforms import build_transform
from yolo_ray.bench.measure import Clock
from yolo_ray.bench.scene import make_batches
from yolo_ray.bench.variants import CONTROLS, NAMES, Setting, build_ours, run_step
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.batch import Batch, PhotoRing
from yolo_ray.data.pipeline import StepPhotos
from yolo_ray.data.plan import Plan, slots_of
from yolo_ray.data.reading import Reading, resized_photo
from yolo_ray.data.records import load_records
from yolo_ray.data.tasks import put_photo
from yolo_ray.model.loss import head_gains_at
from yolo_ray.step.graph import GraphedStep
from yolo_ray.step.precision import resolve_precision, set_kernels
from yolo_ray.step.reduce import distributed_reduce, no_reduce
from yolo_ray.train.feed import Feed

BOXES = 20


def case_of(model: str, batch: int, imgsz: int, precision: str = "auto") -> Setting:
    """What the ranks of one measurement share; ``batch`` is the global one."""
    return Setting(model, batch, imgsz, BOXES, precision, "SGD", deterministic=True)


class RanksFailed(RuntimeError):
    """A rank ended with an error, or they did not end in time."""


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any, limit_s: float = 300.0) -> list[Any]:
    """``work(rank, ranks, device, *args)`` in a process a rank; what each returned.

    Raises:
        RanksFailed: see there; all processes have ended then.
    """
    with TemporaryDirectory(prefix="ranks-") as folder:
        context: Any = spawn(_rank, args=(ranks, folder, work, args), nprocs=ranks, join=False)
        end = time.monotonic() + limit_s
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise RanksFailed(f"{ranks} ranks did not end within {limit_s:g} s")
        except ProcessException as error:
            raise RanksFailed(str(error)[-1500:]) from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        files = [Path(folder) / f"{rank}.pt" for rank in range(ranks)]
        return [torch.load(file, weights_only=False) for file in files]  # our own, of a moment ago


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: Any) -> None:
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if is_gpu else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        result = work(rank, ranks, device, *args)
        torch.save(result, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def graphed_step(
    case: Setting, device: torch.device, *, names: tuple[str, ...] = NAMES, alone: bool = False
) -> GraphedStep:
    """The step as training builds it; ``alone``: without any collective, batch statistics of one rank."""
    set_kernels(resolve_precision(case.precision, device), deterministic=case.deterministic)
    step = build_ours(case, device, names=names, reduce=no_reduce if alone else distributed_reduce)
    return GraphedStep(step, mode="require" if device.type == "cuda" else "off")


def step_ms(
    rank: int, ranks: int, device: torch.device, case: Setting, blocks: int
) -> dict[str, list[float]]:
    """Milliseconds a step of every block, with the collectives and without, in one process."""
    rows = len(slots_of(rank, ranks, case.batch))
    batches = make_batches(rows, case.imgsz, BOXES, device)
    clock = Clock(device, None, blocks)
    out = {}
    for name, alone in (("step", False), ("alone", True)):
        step = graphed_step(case, device, alone=alone)
        dist.barrier()
        out[name] = clock.blocks_ms(_caller(step, batches))
        step.release()
    return out


def _caller(step: GraphedStep, batches: list[Batch]) -> Callable[[int], None]:
    return lambda number: run_step(step, batches[number % len(batches)])


def _read(plan: Plan, slots: range, steps: range) -> Iterator[StepPhotos]:
    transform = build_transform(False)
    for step in steps:
        images, _, seeds = plan.images_at(step)
        photos = np.empty((len(slots), plan.imgsz, plan.imgsz, 3), np.uint8)
        for out, slot in zip(photos, slots, strict=True):
            image = int(images[slot])
            photo = resized_photo(plan.records, image, Reading(plan.imgsz))
            put_photo(plan, image, photo, transform, int(seeds[slot]), out)
        yield StepPhotos(step, images[slots.start : slots.stop], photos, {}, 1.0)


def gradient(
    rank: int, ranks: int, device: torch.device, case: Setting, data: Path
) -> dict[str, Any]:
    """The gradient of the first global batch, from the first weights, and a digest of each slot's sample."""
    records = load_records(data, "train", max_bad=0.01)
    augmentation = AugmentConfig(close_mosaic=0)
    plan = Plan(records, seed=0, epochs=1, batch=case.batch, imgsz=case.imgsz, augment=augmentation)
    slots = slots_of(rank, ranks, case.batch)
    ring = PhotoRing(len(slots), case.imgsz, plan.window, device)
    feed = Feed(
        plan, rank=rank, workers=ranks, ring=ring, source=lambda steps: _read(plan, slots, steps)
    )
    stream = feed.batches(0)
    _, batch = next(stream)
    images = augment(batch)
    samples = {}
    for row, slot in enumerate(slots):
        mine = batch.valid & (batch.image_index == row)
        parts = (images[row], batch.boxes[mine], batch.classes[mine])
        content = b"".join(part.float().cpu().numpy().tobytes() for part in parts)
        samples[slot] = hashlib.sha256(content).hexdigest()
    step = graphed_step(case, device, names=records.names)
    step.set_controls(CONTROLS, head_gains_at(0, 100, step.num_heads))
    step(batch, update=False)
    found = {"gradient": step.pending.cpu(), "samples": samples}
    step.release()
    stream.close()
    return found


def start_and_end(rank: int, ranks: int, device: torch.device, case: Setting) -> int:
    """Capture, replay three times, release; the caller destroys the process group. How many replays there were."""
    rows = len(slots_of(rank, ranks, case.batch))
    batches = make_batches(rows, case.imgsz, BOXES, device)
    step = graphed_step(case, device)
    for number in range(3):
        run_step(step, batches[number])
    replays = step.replays
    step.release()
    return replays
