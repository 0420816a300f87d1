"""What the tasks that read photos do: (step, slot) numbers in, photos out. Pickled small, run on any node."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import ray

from yolo_ray.augment.images import letterbox
from yolo_ray.augment.transforms import Transform, build_transform
from yolo_ray.data.batch import GRAY, Encoded
from yolo_ray.data.plan import Plan
from yolo_ray.data.reading import Reading, encoded_photo, new_trouble, resized_photo
from yolo_ray.data.records import Records
from yolo_ray.errors import UserError

# A process that is ready waits as long, so that each of the tasks starts one of its own.
READY_S = 1.0

Columns = dict[str, np.ndarray]


@lru_cache(maxsize=4)
def _fetch(handle: ray.ObjectRef) -> Any:
    """The object once per worker process, not once per task."""
    return ray.get(handle)


class Reported:
    """A task whose UserError travels as data: Ray keeps only the text of an exception's causes.

    So does a sentence for the user about the process it ran in.
    """

    def __init__(self, task: Callable[[Columns], Columns]) -> None:
        self.task = task

    def __call__(self, rows: Columns) -> Columns:
        """The columns of the task, or why there are none."""
        try:
            columns = self.task(rows)
            if trouble := new_trouble():
                columns["trouble"] = np.full(len(rows["id"]), trouble)
            return columns
        except UserError as mistake:
            return {"id": rows["id"], "mistake": np.full(len(rows["id"]), str(mistake))}


class TrainTask:
    """Row numbers of one step -> its photos. Pickled small: the plan travels once, through the object store."""

    def __init__(
        self,
        plan: ray.ObjectRef,
        slots: range,
        first_step: int,
        albumentations: Any,
        reading: Reading,
    ) -> None:
        self.plan, self.slots, self.first_step = plan, slots, first_step
        self.albumentations, self.reading = albumentations, reading

    def __call__(self, rows: Columns) -> Columns:
        """The photos of the rows whose numbers are in the column ``id``."""
        plan: Plan = _fetch(self.plan)
        begin = time.perf_counter()
        transform = _transform(repr(self.albumentations), self.albumentations)
        steps, places = np.divmod(rows["id"], len(self.slots))
        steps, slots = self.first_step + steps, self.slots.start + places
        planned = {step: plan.images_at(step) for step in np.unique(steps).tolist()}
        pairs = list(zip(steps.tolist(), slots.tolist(), strict=True))
        ids = np.array([int(planned[step][0][slot]) for step, slot in pairs])
        if self.reading.encoded:
            columns = encoded_columns([encoded_photo(plan.records, i, self.reading) for i in ids])
        else:
            seeds = [int(planned[step][2][slot]) for step, slot in pairs]
            columns = self._decoded(plan, ids, seeds, transform)
        mean_ms = 1000 * (time.perf_counter() - begin) / len(ids)
        columns |= {"id": ids, "step": steps, "slot": slots}
        return columns | {"read_ms": np.full(len(ids), mean_ms)}

    def _decoded(
        self, plan: Plan, ids: np.ndarray, seeds: list[int], transform: Transform
    ) -> Columns:
        # Each photo is written where it will be read: on many cores copies cost more than decoding.
        photos = np.empty((len(ids), plan.imgsz, plan.imgsz, 3), np.uint8)
        boxes = []
        for row, (index, seed) in enumerate(zip(ids.tolist(), seeds, strict=True)):
            photo = resized_photo(plan.records, index, self.reading)
            boxes.append(put_photo(plan, index, photo, transform, seed, photos[row]))
        return {"photo": photos} | ({"boxes": _ragged(boxes)} if transform.moves_boxes else {})


def encoded_columns(photos: list[Encoded]) -> Columns:
    """Photos that the device shall decode, as columns of a block."""
    shapes = np.array([photo.shape or (0, 0) for photo in photos], np.int64).reshape(-1, 2)
    paths = np.array([photo.path for photo in photos])
    files = _ragged([photo.data for photo in photos])
    return {"path": paths, "file": files, "height": shapes[:, 0], "width": shapes[:, 1]}


def encoded_photos(columns: Columns) -> tuple[Encoded, ...]:
    """What ``encoded_columns`` was made of."""
    shapes = zip(columns["height"].tolist(), columns["width"].tolist(), strict=True)
    photos = zip(columns["path"].tolist(), columns["file"], shapes, strict=True)
    return tuple(Encoded(path, data, shape if all(shape) else None) for path, data, shape in photos)


def _ragged(parts: list[Any]) -> np.ndarray:
    column = np.empty(len(parts), dtype=object)
    column[:] = parts
    return column


_TRANSFORMS: dict[str, Transform] = {}


def _transform(key: str, option: Any) -> Transform:
    if (
        key not in _TRANSFORMS
    ):  # building a chain costs more than running it; a task process keeps it
        _TRANSFORMS[key] = build_transform(option)
    return _TRANSFORMS[key]


def put_photo(
    plan: Plan, index: int, photo: np.ndarray, transform: Transform, seed: int, out: np.ndarray
) -> np.ndarray:
    """The user's augmentation of a resized photo, put into ``out`` uint8 [S,S,3]; its boxes float32 [k,5]."""
    boxes, classes = plan.records.boxes_of(index)
    photo, boxes, keep = transform(photo, boxes, classes, seed)
    height, width = photo.shape[:2]
    out[:height, :width] = photo
    out[height:] = GRAY
    out[:height, width:] = GRAY
    return np.column_stack([boxes, classes[keep]]).astype(np.float32)


class EvalTask:
    """Row numbers of one evaluation batch -> letterboxed photos; ids beyond the list are gray padding."""

    def __init__(self, records: ray.ObjectRef, ids: np.ndarray, reading: Reading) -> None:
        self.records, self.ids, self.reading = records, ids, reading

    def __call__(self, rows: Columns) -> Columns:
        """The photos of the rows whose numbers are in the column ``id``."""
        records: Records = _fetch(self.records)
        imgsz = self.reading.imgsz
        photos = np.full((len(rows["id"]), imgsz, imgsz, 3), GRAY, dtype=np.uint8)
        ids = np.full(len(rows["id"]), -1, dtype=np.int64)
        for place, number in enumerate(rows["id"].tolist()):
            if number < len(self.ids):
                ids[place] = self.ids[number]
                photo = resized_photo(records, int(ids[place]), self.reading)
                photos[place], _ = letterbox(photo, imgsz)  # only pads: the photo has its size
        return {"id": ids, "photo": photos}


def get_ready(albumentations: Any) -> None:
    """Import everything, in a process that will read photos."""
    _transform(repr(albumentations), albumentations)
    time.sleep(READY_S)
