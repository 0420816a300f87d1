"""The plan: a pure function from a step number to a global batch, so a resume starts anywhere.

B photos of a global batch, N photos of the split, S the image side, W the mosaic window in steps, L
images of a slot (1, or 2 with mixup), I = B * L images, a slot's own first.

Every random number is one of ``draws``; nothing depends on the worker count.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.draws import (
    MIX_STREAM,
    ORDER_STREAM,
    STEP_STREAM,
    WINDOW,
    Draws,
    draw,
    draw_mix,
    draw_seeds,
    generator_of,
)
from yolo_ray.data.geometry import (
    Affine,
    Layout,
    build_affine,
    lay_out,
    resize_output,
    resized_extents,
    transform_boxes,
)
from yolo_ray.data.shuffle import Shuffle

if TYPE_CHECKING:
    from yolo_ray.data.records import Records

MIN_CAPACITY = 16
# Above it an epoch's order is computed, not kept: every process that decodes would keep eight bytes a photo.
LARGEST_KEPT_ORDER = 2**18
MIX_STEPS = 4096  # a blend counts in 4096ths: products with 8-bit pixels are exact in float32

# (step, slot) of a photo's own row -> boxes [k,4] (fractions), classes [k] after albumentations
KeptBoxes = Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class PlanStep:
    """One GLOBAL batch of B photos: which, how they are composed, and the boxes that result.

    With mixup the second image of a slot lies behind its own: [B,8], [B,8,2], [B,4], [B,2], [B,4,3].
    """

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
    mix: np.ndarray  # [B] float32 weight of the slot's own image, whole 4096ths; 4096: not mixed
    boxes: np.ndarray  # [n,4] float32 xyxy px of the output, clipped and filtered
    classes: np.ndarray  # [n] int64
    slots: np.ndarray  # [n] int64 slot of each box, ascending
    side: int  # S' of the output in px, the same for all photos; S without multi_scale
    moved: bool = False  # boxes of albumentations replaced recorded ones


@dataclass(frozen=True)
class _Images:
    """What a step's numbers decide about its I images."""

    seeds_B: np.ndarray
    draws: Draws  # of the slots' own images
    mix_B: np.ndarray  # as PlanStep
    shown_I: np.ndarray  # bool: not a second image whose slot is not mixed
    mosaic_I: np.ndarray  # bool
    ages_I4: np.ndarray
    centre_I2: np.ndarray  # uniform
    motion_I6: np.ndarray  # uniform
    flips_I2: np.ndarray  # uniform


class Plan:
    """What every step of a run trains on.

    Mosaic partners of (step, slot) are photos of the same slot at the W-1 steps before, three
    different ones (Ultralytics draws from a buffer of recent photos and may repeat one). Steps of
    epoch -1 exist for the partners of the first steps. Every photo appears exactly once an epoch,
    fills aside. The second image of mixup is made of the steps that the first one leaves over.
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
        self._orders: dict[int, np.ndarray | Shuffle] = {}
        self._latest: PlanStep | None = None  # capacity_at and at are asked in turn

    def with_sides(self, sides: Sequence[int]) -> Plan:
        """The same plan, each step's output as large as one of ``sides`` (px), all equally likely."""
        plan = copy.copy(self)
        plan.sides, plan._latest = tuple(sides), None
        return plan

    def images_at(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Record indices [B], fill [B] and albumentations seeds [B] of the batch's own photos."""
        images_B, fill_B = self._photos_at(step)
        return images_B, fill_B, draw_seeds(self._generator(STEP_STREAM, step), self.batch)

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
        images = self._composed_at(step)
        images_B, fill_B = self._photos_at(step)
        sources_I4 = self._sources(step, images.ages_I4)
        layout, affine = self._compose(sources_I4, images)
        fractions, classes, rows = self._source_boxes(step, sources_I4, images, kept)
        boxes, survivors = transform_boxes(fractions, rows, layout, affine, self.imgsz)
        # Boxes were judged at imgsz, as Ultralytics does, and are only then resized with the image.
        side = self.sides[int(images.draws.side * len(self.sides))]
        inverse_I23, boxes = resize_output(affine.inverse, boxes, self.imgsz, side)
        return PlanStep(
            step=step,
            epoch=step // self.steps_per_epoch,
            images=images_B,
            fill=fill_B,
            seeds=images.seeds_B,
            ages=self._by_slot(images.ages_I4),
            origins=self._by_slot(layout.origins.astype(np.float32)),
            extents=self._by_slot(layout.extents.astype(np.float32)),
            centre=self._by_slot(layout.centre.astype(np.float32)),
            canvas=self._by_slot(layout.canvas.astype(np.float32)),
            inverse=self._by_slot(inverse_I23.astype(np.float32)),
            hsv=self._hsv(images.draws),
            mix=images.mix_B,
            boxes=boxes,
            classes=classes[survivors].astype(np.int64),
            slots=self._slot_of(rows[survivors]),
            side=side,
            moved=bool(kept),
        )

    def _generator(self, stream: int, number: int) -> np.random.Generator:
        return generator_of(self._seed, stream, number)

    def _by_slot(self, values_I: np.ndarray) -> np.ndarray:
        """[I,k,...] as [B,L*k,...], [I] as [B,L]; unchanged where L is 1."""
        if len(values_I) == self.batch:
            return values_I
        return values_I.reshape(self.batch, -1, *values_I.shape[2:])

    def _slot_of(self, rows_n: np.ndarray) -> np.ndarray:
        """Slot [n] of rows 4 * image + quadrant."""
        return rows_n // (8 if self._augment.mixup else 4)

    def _order(self, epoch: int) -> np.ndarray | Shuffle:
        """The epoch's permutation of all photos, kept for as many epochs as a window can touch."""
        order_N = self._orders.get(epoch)
        if order_N is None:
            generator, photos = self._generator(ORDER_STREAM, epoch), len(self.records)
            is_small = photos <= LARGEST_KEPT_ORDER
            order_N = generator.permutation(photos) if is_small else Shuffle(photos, generator)
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

    def _composed_at(self, step: int) -> _Images:
        generator = self._generator(STEP_STREAM, step)
        seeds_B, draws = draw_seeds(generator, self.batch), draw(generator, self.batch)
        is_open = step // self.steps_per_epoch < self._epochs - self._augment.close_mosaic
        # The own photo, then the others in any order: four for the first image, four for the second.
        ages_BW = np.zeros((self.batch, WINDOW), np.int64)
        ages_BW[:, 1:] = np.argsort(draws.partners_BA, axis=1, kind="stable") + 1
        mosaic_B = (draws.mosaic_B < self._augment.mosaic) & is_open
        first = _Images(
            seeds_B=seeds_B,
            draws=draws,
            mix_B=np.full(self.batch, MIX_STEPS, np.float32),
            shown_I=np.ones(self.batch, np.bool_),
            mosaic_I=mosaic_B,
            ages_I4=_ages(ages_BW[:, :4], mosaic_B),
            centre_I2=draws.centre_B2,
            motion_I6=draws.motion_B6,
            flips_I2=draws.flips_B2,
        )
        return self._mixed(step, first, ages_BW[:, 4:], is_open) if self._augment.mixup else first

    def _mixed(self, step: int, first: _Images, ages_B4: np.ndarray, is_open: bool) -> _Images:
        """Those images and a second one for each slot, of the photos of ages [B,4]."""
        mix = draw_mix(self._generator(MIX_STREAM, step), self.batch)
        mixed_B = (mix.coin_B < self._augment.mixup) & is_open
        mosaic_B = (mix.image.mosaic_B < self._augment.mosaic) & is_open
        ratio_B = np.where(mixed_B, np.round(mix.ratio_B * MIX_STEPS), MIX_STEPS)
        return _Images(
            seeds_B=first.seeds_B,
            draws=first.draws,
            mix_B=ratio_B.astype(np.float32),
            shown_I=_in_turn(first.shown_I, mixed_B),
            mosaic_I=_in_turn(first.mosaic_I, mosaic_B),
            ages_I4=_in_turn(first.ages_I4, _ages(ages_B4, mosaic_B)),
            centre_I2=_in_turn(first.centre_I2, mix.image.centre_B2),
            motion_I6=_in_turn(first.motion_I6, mix.image.motion_B6),
            flips_I2=_in_turn(first.flips_I2, first.flips_I2),  # Ultralytics flips the blend
        )

    def _sources(self, step: int, ages_I4: np.ndarray) -> np.ndarray:
        """Record index [I,4] of the photo in each quadrant."""
        window_WB = np.stack([self._photos_at(step - age)[0] for age in range(self.window)])
        return window_WB[ages_I4, self._slot_of(4 * np.arange(len(ages_I4)))[:, None]]

    def _compose(self, sources_I4: np.ndarray, images: _Images) -> tuple[Layout, Affine]:
        augment, imgsz = self._augment, self.imgsz
        extents_I42 = resized_extents(self.records.sizes[sources_I4], imgsz)
        margin = -(-imgsz // 2)
        centre_I2 = np.floor(margin + images.centre_I2 * (2 * imgsz - 2 * margin))
        layout = lay_out(extents_I42, centre_I2, images.mosaic_I, imgsz)
        middle_6 = np.array([0, 1, 0, 0, 0.5, 0.5])
        reach_6 = np.array([augment.degrees, augment.scale, augment.shear, augment.shear, 0, 0])
        reach_6[4:] = augment.translate
        motion_I6 = middle_6 + _symmetric(images.motion_I6) * reach_6
        flips_I2 = images.flips_I2[:, ::-1] < np.array([augment.fliplr, augment.flipud])
        return layout, build_affine(motion_I6, flips_I2, layout.canvas, imgsz)

    def _hsv(self, draws: Draws) -> np.ndarray:
        gains_3 = np.array([self._augment.hsv_h, self._augment.hsv_s, self._augment.hsv_v])
        return (np.array([0, 1, 1]) + _symmetric(draws.hsv_B3) * gains_3).astype(np.float32)

    def _source_boxes(
        self,
        step: int,
        sources_I4: np.ndarray,
        images: _Images,
        kept: KeptBoxes,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Fractions [n,4], classes [n] and row (4 * image + quadrant) [n] of all source boxes."""
        used_I4 = images.shown_I[:, None] & (images.mosaic_I[:, None] | (np.arange(4) == 0))
        rows = np.flatnonzero(used_I4)
        ages = images.ages_I4.reshape(-1)[rows]
        replaced = _replacements(step - ages, self._slot_of(rows), rows, kept)
        recorded = np.array([row for row in rows.tolist() if row not in replaced], dtype=np.int64)
        photos = sources_I4.reshape(-1)[recorded]
        starts = self.records.offsets[photos]
        counts = self.records.offsets[photos + 1] - starts
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
        """Boxes [B] of all photos that each slot shows, whatever becomes of them."""
        images = self._composed_at(step)
        sources_I4 = self._sources(step, images.ages_I4)
        counts_I4 = self.records.offsets[sources_I4 + 1] - self.records.offsets[sources_I4]
        counts_I = np.where(images.mosaic_I, counts_I4.sum(axis=1), counts_I4[:, 0])
        return (counts_I * images.shown_I).reshape(self.batch, -1).sum(axis=1)


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


def _symmetric(unit: np.ndarray) -> np.ndarray:
    return 2.0 * unit - 1.0


def _in_turn(one_B: np.ndarray, two_B: np.ndarray) -> np.ndarray:
    """[I,...]: the first of ``one``, the first of ``two``, the second of ``one``, ..."""
    return np.stack([one_B, two_B], axis=1).reshape(-1, *one_B.shape[1:])


def _ages(ages_B4: np.ndarray, mosaic_B: np.ndarray) -> np.ndarray:
    """Ages [B,4]: the image's own photo top-left, as in Ultralytics; without mosaic it alone."""
    return np.where(mosaic_B[:, None], ages_B4, ages_B4[:, :1])


def _replacements(
    steps: np.ndarray, slots: np.ndarray, rows: np.ndarray, kept: KeptBoxes
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Rows whose photo, by its step and slot, is named in ``kept``, with its boxes and classes."""
    if not kept:
        return {}
    keys = zip(steps.tolist(), slots.tolist(), strict=True)
    return {row: kept[key] for row, key in zip(rows.tolist(), keys, strict=True) if key in kept}
