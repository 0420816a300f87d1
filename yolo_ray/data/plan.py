"""The plan: a pure function from a step number to a global batch, so a resume starts anywhere.

B photos of a global batch, N photos of the split, S the image side, W the mosaic window in steps.

The random numbers of a step come from one counter-based generator keyed by (seed, step) and are
drawn as arrays over the whole global batch, in this order: seeds of albumentations, mosaic coin,
mosaic partners, mosaic centre, affine (angle, scale, shear x, shear y, translate x, translate y),
HSV, flips (up-down, left-right), output side. Nothing depends on the worker count. A new option
draws AFTER these, so that old streams stay.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.geometry import (
    Affine,
    Layout,
    build_affine,
    lay_out,
    resize_output,
    resized_extents,
    transform_boxes,
)

if TYPE_CHECKING:
    from yolo_ray.data.records import Records

WINDOW = 8
MIN_CAPACITY = 16
ORDER_STREAM, STEP_STREAM = 0, 1

# (step, slot) of a photo's own row -> boxes [k,4] (fractions), classes [k] after albumentations
KeptBoxes = Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class PlanStep:
    """One GLOBAL batch of B photos: which, how they are composed, and the boxes that result."""

    step: int
    epoch: int
    images: np.ndarray  # [B] int64 record index of each slot's own photo
    fill: np.ndarray  # [B] bool: a further photo that fills the epoch's last batch
    seeds: np.ndarray  # [B] int64, for albumentations of that photo
    ages: np.ndarray  # [B,4] int64 steps back of each mosaic quadrant's photo; 0 is the own photo
    origins: np.ndarray  # [B,4,2] float32 canvas xy of each photo's top-left corner
    extents: np.ndarray  # [B,4,2] float32 (w,h) of each resized photo; 0 for unused quadrants
    centre: np.ndarray  # [B,2] float32 canvas xy where the quadrants meet (far away: no mosaic)
    canvas: np.ndarray  # [B] float32 side of the canvas (2S mosaic, S otherwise)
    inverse: np.ndarray  # [B,2,3] float32 output pixel -> canvas pixel, flips folded in
    hsv: np.ndarray  # [B,3] float32 gains (hue turn, saturation factor, value factor)
    boxes: np.ndarray  # [n,4] float32 xyxy px of the output, clipped and filtered
    classes: np.ndarray  # [n] int64
    slots: np.ndarray  # [n] int64 slot of each box, ascending
    side: int  # S' of the output in px, the same for all photos; S without multi_scale
    moved: bool = False  # boxes of albumentations replaced recorded ones


@dataclass(frozen=True)
class _Draws:
    """Uniform numbers in [0,1) of one step."""

    mosaic_B: np.ndarray
    partners_BA: np.ndarray  # A = W-1 ages
    centre_B2: np.ndarray
    motion_B6: np.ndarray
    hsv_B3: np.ndarray
    flips_B2: np.ndarray  # (up-down, left-right)
    side: float


class Plan:
    """What every step of a run trains on.

    Mosaic partners of (step, slot) are photos of the same slot at the W-1 steps before, three
    different ones (Ultralytics draws from a buffer of recent photos and may repeat one). Steps of
    epoch -1 exist for the partners of the first steps. Every photo appears exactly once an epoch,
    fills aside.
    """

    window = WINDOW

    def __init__(
        self,
        records: Records,
        *,
        seed: int,
        epochs: int,
        batch: int,
        imgsz: int,
        augment: AugmentConfig,
        moves_boxes: bool = False,
    ) -> None:
        """Plan over ``records`` (at least one photo).

        Args:
            records: the training split.
            seed: any non-negative integer.
            epochs: of the whole run; the last ``augment.close_mosaic`` have no mosaic.
            batch: photos of one step over all workers.
            imgsz: S in pixels.
            augment: probabilities and ranges.
            moves_boxes: the user's albumentations may drop or move boxes, so a step's capacity is
                bounded by its source boxes.
        """
        assert len(records) > 0 and batch > 0
        self.records = records
        self._seed = seed
        self._epochs = epochs
        self.batch = batch
        self.imgsz = imgsz
        self.sides: tuple[int, ...] = (imgsz,)
        self._augment = augment
        self._moves_boxes = moves_boxes
        self.steps_per_epoch = -(-len(records) // batch)
        self.total_steps = self.steps_per_epoch * epochs
        self._orders: dict[int, np.ndarray] = {}
        self._latest: PlanStep | None = None  # capacity_at and at are asked in turn

    def with_sides(self, sides: Sequence[int]) -> Plan:
        """The same plan, each step's output as large as one of ``sides`` (px), all equally likely."""
        plan = copy.copy(self)
        plan.sides, plan._latest = tuple(sides), None
        return plan

    def images_at(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Record indices [B], fill [B] and albumentations seeds [B] of the batch's own photos."""
        images_B, fill_B = self._photos_at(step)
        return images_B, fill_B, _draw_seeds(self._generator(STEP_STREAM, step), self.batch)

    def at(self, step: int, kept: KeptBoxes | None = None) -> PlanStep:
        """The global batch of ``step``.

        Args:
            step: global step; may be negative down to -(W-1).
            kept: (step, slot) of a photo's OWN row -> its boxes [k,4] (xyxy fractions) and classes
                [k], which replace the recorded ones wherever that photo is used within the window;
                photos not named keep theirs.
        """
        if kept:
            return self._build(step, kept)
        latest = self._latest
        if latest is None or latest.step != step:
            latest = self._latest = self._build(step, {})
        return latest

    def capacity_at(self, step: int, workers: int) -> int:
        """Box capacity of every rank at ``step``: the bucket that holds the fullest rank's boxes.

        It follows from the records alone, so all ranks agree without talking. When albumentations
        move boxes, all source boxes of the composed photos are counted instead of the survivors.
        """
        if self._moves_boxes:
            per_slot_B = self._source_counts_at(step)
        else:
            per_slot_B = np.bincount(self.at(step).slots, minlength=self.batch)
        ranks = [slots_of(rank, workers, self.batch) for rank in range(workers)]
        return bucket_of(max(int(per_slot_B[slots.start : slots.stop].sum()) for slots in ranks))

    def _build(self, step: int, kept: KeptBoxes) -> PlanStep:
        generator = self._generator(STEP_STREAM, step)
        seeds_B = _draw_seeds(generator, self.batch)
        draws = _draw(generator, self.batch)
        epoch = step // self.steps_per_epoch
        mosaic_B = self._mosaic(epoch, draws)
        ages_B4 = _ages(draws, mosaic_B)
        images_B, fill_B = self._photos_at(step)
        sources_B4 = self._sources(step, ages_B4)
        layout, affine = self._compose(sources_B4, mosaic_B, draws)
        fractions, classes, rows = self._source_boxes(step, sources_B4, ages_B4, mosaic_B, kept)
        boxes, survivors = transform_boxes(fractions, rows, layout, affine, self.imgsz)
        # Boxes were judged at imgsz, as Ultralytics does, and are only then resized with the image.
        side = self.sides[int(draws.side * len(self.sides))]
        inverse_B23, boxes = resize_output(affine.inverse, boxes, self.imgsz, side)
        return PlanStep(
            step=step,
            epoch=epoch,
            images=images_B,
            fill=fill_B,
            seeds=seeds_B,
            ages=ages_B4,
            origins=layout.origins.astype(np.float32),
            extents=layout.extents.astype(np.float32),
            centre=layout.centre.astype(np.float32),
            canvas=layout.canvas.astype(np.float32),
            inverse=inverse_B23.astype(np.float32),
            hsv=self._hsv(draws),
            boxes=boxes,
            classes=classes[survivors].astype(np.int64),
            slots=rows[survivors] >> 2,
            side=side,
            moved=bool(kept),
        )

    def _generator(self, stream: int, number: int) -> np.random.Generator:
        folded = int(number) % 2**64  # numbers may be negative, entropy may not
        entropy = np.random.SeedSequence([self._seed, stream, folded])
        return np.random.Generator(np.random.Philox(entropy))

    def _order(self, epoch: int) -> np.ndarray:
        """The epoch's permutation of all photos, kept for as many epochs as a window can touch."""
        order_N = self._orders.get(epoch)
        if order_N is None:
            order_N = self._generator(ORDER_STREAM, epoch).permutation(len(self.records))
            touched = 2 + self.window // self.steps_per_epoch
            # A new dict each time: a reading thread may plan ahead while the loop plans.
            newest = dict(list(self._orders.items())[1 - touched :])
            self._orders = {**newest, epoch: order_N}
        return order_N

    def _photos_at(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, within = divmod(step, self.steps_per_epoch)
        places_B = within * self.batch + np.arange(self.batch)
        order_N = self._order(epoch)
        return order_N[places_B % len(order_N)], places_B >= len(order_N)

    def _mosaic(self, epoch: int, draws: _Draws) -> np.ndarray:
        closed = epoch >= self._epochs - self._augment.close_mosaic
        return (draws.mosaic_B < self._augment.mosaic) & (not closed)

    def _sources(self, step: int, ages_B4: np.ndarray) -> np.ndarray:
        """Record index [B,4] of the photo in each quadrant."""
        window_WB = np.stack([self._photos_at(step - age)[0] for age in range(self.window)])
        return window_WB[ages_B4, np.arange(self.batch)[:, None]]

    def _compose(
        self, sources_B4: np.ndarray, mosaic_B: np.ndarray, draws: _Draws
    ) -> tuple[Layout, Affine]:
        augment, imgsz = self._augment, self.imgsz
        extents_B42 = resized_extents(self.records.sizes[sources_B4], imgsz)
        margin = -(-imgsz // 2)
        centre_B2 = np.floor(margin + draws.centre_B2 * (2 * imgsz - 2 * margin))
        layout = lay_out(extents_B42, centre_B2, mosaic_B, imgsz)
        middle_6 = np.array([0, 1, 0, 0, 0.5, 0.5])
        reach_6 = np.array([augment.degrees, augment.scale, augment.shear, augment.shear, 0, 0])
        reach_6[4:] = augment.translate
        motion_B6 = middle_6 + _symmetric(draws.motion_B6) * reach_6
        flips_B2 = draws.flips_B2[:, ::-1] < np.array([augment.fliplr, augment.flipud])
        return layout, build_affine(motion_B6, flips_B2, layout.canvas, imgsz)

    def _hsv(self, draws: _Draws) -> np.ndarray:
        gains_3 = np.array([self._augment.hsv_h, self._augment.hsv_s, self._augment.hsv_v])
        return (np.array([0, 1, 1]) + _symmetric(draws.hsv_B3) * gains_3).astype(np.float32)

    def _source_boxes(
        self,
        step: int,
        sources_B4: np.ndarray,
        ages_B4: np.ndarray,
        mosaic_B: np.ndarray,
        kept: KeptBoxes,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fractions [n,4], classes [n] and row (4 * slot + quadrant) [n] of all source boxes."""
        used_B4 = mosaic_B[:, None] | (np.arange(4) == 0)
        rows = np.flatnonzero(used_B4)
        replaced = _replacements(step, rows, ages_B4.reshape(-1), kept)
        recorded = np.array([row for row in rows.tolist() if row not in replaced], dtype=np.int64)
        images = sources_B4.reshape(-1)[recorded]
        starts = self.records.offsets[images]
        counts = self.records.offsets[images + 1] - starts
        first = np.cumsum(counts) - counts
        index_n = np.repeat(starts - first, counts) + np.arange(counts.sum())
        fractions_n4 = self.records.boxes[index_n].astype(np.float64)
        classes_n, rows_n = self.records.classes[index_n], np.repeat(recorded, counts)
        if not replaced:
            return fractions_n4, classes_n, rows_n
        fractions_n4 = np.concatenate([fractions_n4, *(boxes for boxes, _ in replaced.values())])
        classes_n = np.concatenate([classes_n, *(classes for _, classes in replaced.values())])
        lengths = [len(boxes) for boxes, _ in replaced.values()]
        rows_n = np.concatenate([rows_n, np.repeat(list(replaced), lengths)])
        order_n = np.argsort(rows_n, kind="stable")
        return fractions_n4[order_n], classes_n[order_n], rows_n[order_n]

    def _source_counts_at(self, step: int) -> np.ndarray:
        generator = self._generator(STEP_STREAM, step)
        _draw_seeds(generator, self.batch)
        draws = _draw(generator, self.batch)
        mosaic_B = self._mosaic(step // self.steps_per_epoch, draws)
        sources_B4 = self._sources(step, _ages(draws, mosaic_B))
        counts_B4 = self.records.offsets[sources_B4 + 1] - self.records.offsets[sources_B4]
        return np.where(mosaic_B, counts_B4.sum(axis=1), counts_B4[:, 0])


def slots_of(rank: int, workers: int, batch: int) -> range:
    """The slots of one rank: contiguous, floor or ceil of batch / workers of them."""
    assert 0 <= rank < workers <= batch
    return range(rank * batch // workers, (rank + 1) * batch // workers)


def bucket_of(count: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, 128, ... that is not below ``count``."""
    power = MIN_CAPACITY
    while power < count:
        if power * 3 // 2 >= count:
            return power * 3 // 2
        power *= 2
    return power


def _draw_seeds(generator: np.random.Generator, batch: int) -> np.ndarray:
    return (generator.random(batch) * 2**31).astype(np.int64)


def _draw(generator: np.random.Generator, batch: int) -> _Draws:
    return _Draws(
        mosaic_B=generator.random(batch),
        partners_BA=generator.random((batch, WINDOW - 1)),
        centre_B2=generator.random((batch, 2)),
        motion_B6=generator.random((batch, 6)),
        hsv_B3=generator.random((batch, 3)),
        flips_B2=generator.random((batch, 2)),
        side=generator.random(),
    )


def _symmetric(unit: np.ndarray) -> np.ndarray:
    return 2.0 * unit - 1.0


def _ages(draws: _Draws, mosaic_B: np.ndarray) -> np.ndarray:
    """Ages [B,4]: the own photo top-left, as in Ultralytics, and three different older ones."""
    partners_B3 = np.argsort(draws.partners_BA, axis=1, kind="stable")[:, :3] + 1
    ages_B4 = np.concatenate([np.zeros((len(partners_B3), 1), np.int64), partners_B3], axis=1)
    return np.where(mosaic_B[:, None], ages_B4, 0)


def _replacements(
    step: int, rows: np.ndarray, ages: np.ndarray, kept: KeptBoxes
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Rows (4 * slot + quadrant) whose photo is named in ``kept``, with its boxes and classes."""
    if not kept:
        return {}
    keys = {int(row): (step - int(ages[row]), int(row) >> 2) for row in rows}
    return {row: kept[key] for row, key in keys.items() if key in kept}
