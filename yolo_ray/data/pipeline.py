"""Ray Data as the way photos flow: (step, slot) numbers in, decoded uint8 photos out. The only import of ray.data.

Every worker streams its own slots: a dataset of row numbers, one block a step, whose tasks call the pure plan and
decode on any node of the cluster. Nothing is split by Ray, so no row is ever dropped or moved to another worker, and a
restart at step k is a dataset that starts at k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import ray
import ray.data

from yolo_ray.augment.images import Transform, build_transform, letterbox, read_photo, resize_photo
from yolo_ray.data.batch import KeptBoxes
from yolo_ray.data.plan import Plan
from yolo_ray.data.records import Records

# A dataset's blocks are all listed when it starts: bounded chunks keep that short for any length of run.
CHUNK_STEPS = 1024
PREFETCH_STEPS = 3

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class StreamLimits:
    """What the decode tasks of one worker may take."""

    cpus: float  # of all its concurrent tasks together
    task_cpus: float  # of one task


@dataclass(frozen=True)
class StepPhotos:
    """This worker's rows of one step: ids int64 [b], photos uint8 [b,S,S,3] at the top left, moved boxes by slot."""

    step: int
    ids: np.ndarray
    photos: np.ndarray
    kept: KeptBoxes


@lru_cache(maxsize=4)
def _fetch(handle: ray.ObjectRef) -> Any:
    """The object once per worker process, not once per task."""
    return ray.get(handle)


def start_dataset(rows: int, batch: int, limits: StreamLimits, task: Any) -> ray.data.Dataset:
    """``rows`` numbers in blocks of ``batch``, in order, through ``task`` within the limits."""
    dataset = ray.data.range(rows, override_num_blocks=max(1, rows // batch))
    context = dataset.context
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources(cpu=limits.cpus)
    return dataset.map_batches(
        task, batch_size=batch, num_cpus=limits.task_cpus, zero_copy_batch=True, udf_modifying_row_count=False
    )


class _TrainTask:
    """Row numbers of one step -> its photos. Pickled small: the plan travels once, through the object store."""

    def __init__(self, plan: ray.ObjectRef, slots: range, first_step: int, albumentations: Any) -> None:
        self.plan, self.slots, self.first_step = plan, slots, first_step
        self.albumentations = albumentations

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        plan: Plan = _fetch(self.plan)
        transform = _transform(repr(self.albumentations), self.albumentations)
        out: dict[str, list[Any]] = {"id": [], "photo": [], "step": [], "slot": [], "boxes": []}
        for number in rows["id"].tolist():
            step = self.first_step + number // len(self.slots)
            slot = self.slots[number % len(self.slots)]
            images, _, seeds = plan.images_at(step)
            photo, boxes = _train_photo(plan, int(images[slot]), transform, int(seeds[slot]))
            for key, value in zip(out, (int(images[slot]), photo, step, slot, boxes), strict=True):
                out[key].append(value)
        columns = {key: np.asarray(out[key]) for key in ("id", "photo", "step", "slot")}
        if transform.moves_boxes:
            columns["boxes"] = _ragged(out["boxes"])
        return columns


def _ragged(parts: list[np.ndarray]) -> np.ndarray:
    column = np.empty(len(parts), dtype=object)
    column[:] = parts
    return column


_TRANSFORMS: dict[str, Transform] = {}


def _transform(key: str, option: Any) -> Transform:
    if key not in _TRANSFORMS:  # building a chain costs more than running it; a task process keeps it
        _TRANSFORMS[key] = build_transform(option)
    return _TRANSFORMS[key]


def _train_photo(plan: Plan, index: int, transform: Transform, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One decoded, resized, user-augmented photo on its SxS canvas, and its boxes float32 [k,5] (class last)."""
    photo = resize_photo(read_photo(str(plan.records.paths[index])), plan.imgsz)
    boxes, classes = plan.records.boxes_of(index)
    photo, boxes, keep = transform(photo, boxes, classes, seed)
    canvas = np.full((plan.imgsz, plan.imgsz, 3), 114, dtype=np.uint8)
    canvas[: photo.shape[0], : photo.shape[1]] = photo
    return canvas, np.column_stack([boxes, classes[keep]]).astype(np.float32)


def train_photos(
    plan_handle: ray.ObjectRef,
    slots: range,
    steps: range,
    albumentations: Any,
    limits: StreamLimits,
) -> Iterator[StepPhotos]:
    """The worker's photos of ``steps`` (negative ones are the mosaic's forerunners), in order."""
    rows_per_step = len(slots)
    for start in range(steps.start, steps.stop, CHUNK_STEPS):
        count = min(CHUNK_STEPS, steps.stop - start)
        task = _TrainTask(plan_handle, slots, start, albumentations)
        dataset = start_dataset(count * rows_per_step, rows_per_step, limits, task)
        batches = dataset.iter_batches(
            batch_size=rows_per_step, batch_format="numpy", prefetch_batches=PREFETCH_STEPS
        )
        for step, columns in enumerate(cast(Iterator[Columns], batches), start):
            assert (columns["step"] == step).all() and (columns["slot"] == slots).all(), "rows out of order"
            kept = {}
            if "boxes" in columns:
                kept = {
                    (step, slot): (rows[:, :4], rows[:, 4].astype(np.int64))
                    for slot, rows in zip(slots, columns["boxes"], strict=True)
                }
            yield StepPhotos(step, columns["id"], columns["photo"], kept)


class _EvalTask:
    """Row numbers of one evaluation batch -> letterboxed photos; ids beyond the list are gray padding."""

    def __init__(self, records: ray.ObjectRef, ids: np.ndarray, imgsz: int) -> None:
        self.records, self.ids, self.imgsz = records, ids, imgsz

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        records: Records = _fetch(self.records)
        photos = np.full((len(rows["id"]), self.imgsz, self.imgsz, 3), 114, dtype=np.uint8)
        ids = np.full(len(rows["id"]), -1, dtype=np.int64)
        for place, number in enumerate(rows["id"].tolist()):
            if number < len(self.ids):
                ids[place] = self.ids[number]
                photos[place], _ = letterbox(read_photo(str(records.paths[ids[place]])), self.imgsz)
        return {"id": ids, "photo": photos}


def eval_photos(
    records_handle: ray.ObjectRef, ids: np.ndarray, *, imgsz: int, batch: int, limits: StreamLimits
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``(ids [batch], photos uint8 [batch,S,S,3])``; the last batch is padded with id -1. No ids, no batches."""
    if len(ids) == 0:
        return
    rows = -(-len(ids) // batch) * batch
    dataset = start_dataset(rows, batch, limits, _EvalTask(records_handle, ids, imgsz))
    batches = dataset.iter_batches(batch_size=batch, batch_format="numpy", prefetch_batches=1)
    for columns in cast(Iterator[Columns], batches):
        yield columns["id"], columns["photo"]
