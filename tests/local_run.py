"""A training run without Ray: the same parts, one process a rank, photos read in the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from yolo_ray.augment.images import read_photo, resize_photo
from yolo_ray.config.schema import AugmentConfig, OptimConfig
from yolo_ray.data.batch import PhotoRing
from yolo_ray.data.plan import Plan, slots_of
from yolo_ray.data.records import Records
from yolo_ray.model.build import Detector, build_detector
from yolo_ray.model.freeze import freeze_layers
from yolo_ray.model.loss import head_gains_at
from yolo_ray.model.norm import freeze_statistics, synchronise
from yolo_ray.step.flat import FlatModel
from yolo_ray.step.reduce import distributed_reduce, no_reduce
from yolo_ray.step.schedule import ResolvedOptim, Schedule
from yolo_ray.step.train_step import StepOptions, TrainStep
from yolo_ray.train.feed import Feed


@dataclass
class LocalPhotos:
    """What data/pipeline.py yields."""

    step: int
    ids: np.ndarray
    photos: np.ndarray
    kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
    read_ms: float = 1.0


def read_steps(plan: Plan, slots: range, steps: range) -> Iterator[LocalPhotos]:
    """The worker's photos of ``steps``, decoded here and now."""
    for step in steps:
        ids = plan.images_at(step)[0][slots.start : slots.stop]
        canvases = np.full((len(ids), plan.imgsz, plan.imgsz, 3), 114, np.uint8)
        for canvas, index in zip(canvases, ids, strict=True):
            photo = resize_photo(read_photo(str(plan.records.paths[index])), plan.imgsz)
            canvas[: photo.shape[0], : photo.shape[1]] = photo
        yield LocalPhotos(step, ids, canvases, {})


@dataclass
class LocalOptions:
    """A small run."""

    model: str = "yolo11n.yaml"
    imgsz: int = 64
    batch: int = 8
    epochs: int = 2
    optimizer: str = "SGD"
    frozen_norm: bool = False
    double: bool = False
    micro_batch: int | None = None
    freeze: int | tuple[int, ...] | None = None
    sides: tuple[int, ...] = ()  # of multi_scale
    augment: AugmentConfig = field(default_factory=lambda: AugmentConfig(close_mosaic=0))


def make_plan(records: Records, options: LocalOptions) -> Plan:
    plan = Plan(
        records, seed=3, epochs=options.epochs, batch=options.batch, imgsz=options.imgsz,
        augment=options.augment,
    )  # fmt: skip
    return plan.with_sides(options.sides or (options.imgsz,))


class LocalRun:
    """One rank's step, schedule and feed."""

    def __init__(
        self, records: Records, options: LocalOptions, rank: int = 0, workers: int = 1
    ) -> None:
        self.options = options
        reduce = distributed_reduce if workers > 1 else no_reduce
        self.plan = make_plan(records, options)
        self.detector: Detector = build_detector(
            options.model, records.names, imgsz=options.imgsz, seed=1
        )
        freeze_layers(self.detector, options.freeze)
        self.detector.train()
        if options.frozen_norm:
            freeze_statistics(self.detector.net)
        else:
            synchronise(self.detector.net, reduce)
        step_options = StepOptions(
            batch=options.batch, gains=(7.5, 0.5, 1.5), clip_norm=10.0,
            optimizer=options.optimizer, momentum=0.9, micro_batch=options.micro_batch,
        )  # fmt: skip
        flat = FlatModel(self.detector, muon=options.optimizer == "MuSGD")
        self.step = TrainStep(self.detector, flat, step_options, reduce)
        optim = OptimConfig(nbs=options.batch * 2)
        self.schedule = Schedule(
            optim, ResolvedOptim(options.optimizer, 0.01, 0.9, 0.1),
            epochs=options.epochs, steps_per_epoch=self.plan.steps_per_epoch, batch=options.batch,
        )  # fmt: skip
        slots = slots_of(rank, workers, options.batch)
        ring = PhotoRing(len(slots), options.imgsz, self.plan.window)
        self.feed = Feed(
            self.plan, rank=rank, workers=workers, ring=ring,
            source=lambda steps: read_steps(self.plan, slots, steps),
        )  # fmt: skip

    def train(self, first: int, stop: int) -> None:
        """Steps ``first`` to ``stop - 1``."""
        stream = self.feed.batches(first)
        for step, batch in stream:
            if step >= stop:
                break
            epoch = step // self.plan.steps_per_epoch
            gains = head_gains_at(epoch, self.options.epochs, self.step.num_heads)
            self.step.set_controls(self.schedule.at(step), gains)
            self.step(batch, update=self.schedule.is_update(step))
        stream.close()


def on_ranks(workers: int, work: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """``work(rank, workers, *args)`` in gloo processes; what each returned, by rank."""
    store = folder / f"store_{workers}_{len(list(folder.iterdir()))}"
    spawn(_rank, args=(workers, str(store), work, str(folder), args), nprocs=workers, join=True)
    return [
        torch.load(folder / f"rank_{rank}_of_{workers}.pt", weights_only=False)
        for rank in range(workers)
    ]


def _rank(
    rank: int, workers: int, store: str, work: Callable[..., Any], folder: str, args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    try:
        result = work(rank, workers, *args)
        torch.save(result, Path(folder) / f"rank_{rank}_of_{workers}.pt")
    finally:
        dist.destroy_process_group()
