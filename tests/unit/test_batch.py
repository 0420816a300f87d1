"""The photo ring and its batches: right photos, fixed shapes, the same on any worker count."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import torch

from yolo_ray.augment.device import augment
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.batch import TENSORS, Batch, PhotoRing
from yolo_ray.data.geometry import resized_extents
from yolo_ray.data.plan import Plan, slots_of
from yolo_ray.data.records import Records
from yolo_ray.errors import UserError

SIDE, COUNT, BATCH = 32, 10, 4


def make_plan(sides: tuple[int, ...] = (SIDE,), mixup: float = 0.0) -> Plan:
    rng = np.random.default_rng(1)
    corners = np.sort(rng.random((COUNT * 3, 2, 2)), axis=1)
    records = Records(
        paths=[str(i) for i in range(COUNT)],
        sizes=rng.integers(20, 40, (COUNT, 2)).astype(np.int32),
        offsets=np.arange(COUNT + 1, dtype=np.int64) * 3,
        boxes=corners.reshape(-1, 4).astype(np.float32),
        classes=rng.integers(0, 3, COUNT * 3).astype(np.int32),
        names=("a", "b", "c"),
        digest="",
        bad=(),
    )
    config = AugmentConfig(degrees=10, shear=3, mosaic=0.8, mixup=mixup, close_mosaic=1)
    plan = Plan(records, seed=0, epochs=2, batch=BATCH, imgsz=SIDE, augment=config)
    return plan.with_sides(sides)


def photos_of(plan: Plan, step: int, slots: range) -> np.ndarray:
    """What the data stream gives: noise that depends on the photo alone, at the top left."""
    images = plan.images_at(step)[0][list(slots)]
    photos = np.full((len(slots), SIDE, SIDE, 3), 114, np.uint8)
    for photo, image in zip(photos, images, strict=True):
        width, height = resized_extents(plan.records.sizes[image], SIDE).astype(int)
        noise = np.random.default_rng(int(image)).integers(0, 256, (height, width, 3))
        photo[:height, :width] = noise
    return photos


def batches_of(plan: Plan, rank: int, workers: int, steps: range) -> list[Batch]:
    slots = slots_of(rank, workers, BATCH)
    ring = PhotoRing(len(slots), SIDE, plan.window)
    batches = []
    for step in range(steps.start - plan.window + 1, steps.stop):
        ring.put(step, photos_of(plan, step, slots))
        if step in steps:
            batch = ring.batch(plan.at(step), slots, plan.capacity_at(step, workers))
            batches.append(dataclasses.replace(batch, photos=batch.photos.clone()))
    return batches


def global_hashes(workers: int, steps: range, plan: Plan) -> list[str]:
    """One hash a step of the pixels and boxes of the whole batch, put together from the shards."""
    shards = [batches_of(plan, rank, workers, steps) for rank in range(workers)]
    hashes = []
    for parts in zip(*shards, strict=True):
        digest = hashlib.sha256()
        for part in parts:
            assert part.side == parts[0].side and part.side in plan.sides
            digest.update(augment(part).numpy().tobytes())
        starts = [slots_of(rank, workers, BATCH).start for rank in range(workers)]
        truth = (
            torch.cat([part.boxes[part.valid] for part in parts]),
            torch.cat([part.classes[part.valid] for part in parts]),
            torch.cat(
                [p.image_index[p.valid] + start for p, start in zip(parts, starts, strict=True)]
            ),
        )
        for values in truth:
            digest.update(values.numpy().tobytes())
        hashes.append(digest.hexdigest())
    return hashes


PLANS = [make_plan(), make_plan(sides=(16, SIDE, 48)), make_plan(sides=(24, SIDE), mixup=0.6)]


@pytest.mark.parametrize("plan", PLANS)
def test_two_epochs_are_bit_equal_for_1_2_and_4_workers(plan):
    steps = range(plan.total_steps)
    one = global_hashes(1, steps, plan)
    assert len(set(one)) == len(steps) == 6
    assert global_hashes(2, steps, plan) == one
    assert global_hashes(4, steps, plan) == one


@pytest.mark.parametrize("plan", PLANS)
def test_a_resume_gives_the_same_batches(plan):
    steps = range(plan.total_steps)
    assert global_hashes(2, range(4, steps.stop), plan) == global_hashes(2, steps, plan)[4:]


@pytest.mark.parametrize("plan", PLANS)
def test_picks_point_at_the_photos_of_the_plan(plan):
    slots = range(1, 3)
    for step, batch in enumerate(batches_of(plan, 0, 1, range(3))):
        planned = plan.at(step)
        for slot in slots:
            for quadrant, age in enumerate(planned.ages[slot].tolist()):
                expected = photos_of(plan, step - age, range(slot, slot + 1))[0]
                found = batch.photos[batch.picks[slot, quadrant]].permute(1, 2, 0).numpy()
                np.testing.assert_array_equal(found, expected)


def test_shapes_are_fixed_and_padding_is_not_valid():
    plan = make_plan()
    slots = slots_of(1, 2, BATCH)
    batch = batches_of(plan, 1, 2, range(1))[0]
    planned = plan.at(0)
    count = int(np.isin(planned.slots, slots).sum())
    assert batch.photos.shape == ((plan.window + 2) * 2, 3, SIDE, SIDE)
    assert batch.picks.shape == (2, 4) and batch.picks.dtype == torch.int64
    assert batch.boxes.shape == (plan.capacity_at(0, 2), 4)
    assert batch.valid.sum() == count > 0 and batch.valid[:count].all()
    assert not batch.boxes[count:].any() and not batch.image_index[count:].any()
    assert batch.image_index[batch.valid].max() < 2
    moved = batch.to("meta")
    assert all(getattr(moved, name).is_meta for name in TENSORS) and moved.side == SIDE
    assert len(TENSORS) == len(dataclasses.fields(Batch)) - 1


def test_a_photo_missing_from_the_ring_is_our_error():
    plan = make_plan()
    ring = PhotoRing(BATCH, SIDE, plan.window)
    ring.put(0, photos_of(plan, 0, range(BATCH)))
    with pytest.raises(AssertionError, match="the ring holds step"):
        ring.batch(plan.at(0), range(BATCH), plan.capacity_at(0, 1))


def test_too_many_boxes_name_the_transform_only_when_boxes_moved():
    plan = make_plan()
    ring = PhotoRing(BATCH, SIDE, plan.window)
    for step in range(-7, 1):
        ring.put(step, photos_of(plan, step, range(BATCH)))
    many = (np.tile(np.array([[0, 0, 1, 1]], np.float32), (500, 1)), np.zeros(500, np.int64))
    with pytest.raises(UserError, match="remove the transform that adds boxes"):
        ring.batch(plan.at(0, {(0, 0): many}), range(BATCH), 16)
    with pytest.raises(AssertionError, match="capacity"):
        ring.batch(plan.at(0), range(BATCH), 1)
