"""The plan: purity, order, mosaic partners, boxes, capacities and slots."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.geometry import build_affine, invert
from yolo_ray.data.plan import MIX_STEPS, Plan, PlanStep, bucket_of, slots_of
from yolo_ray.data.records import Records
from yolo_ray.data.sides import sides_of
from yolo_ray.errors import UserError

SIDE = 64
STILL = AugmentConfig(
    hsv_h=0, hsv_s=0, hsv_v=0, translate=0, scale=0, fliplr=0, mosaic=0, close_mosaic=0
)
LIVELY = AugmentConfig(degrees=20, shear=5, flipud=0.5, mosaic=0.7, close_mosaic=1)


def make_records(count: int, seed: int = 0, boxes_each: int = 5) -> Records:
    rng = np.random.default_rng(seed)
    box_counts = rng.integers(0, boxes_each + 1, count)
    corners = np.sort(rng.random((box_counts.sum(), 2, 2)), axis=1)
    return Records(
        paths=[f"/photos/{i}.jpg" for i in range(count)],
        sizes=rng.integers(40, 90, (count, 2)).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(box_counts)]).astype(np.int64),
        boxes=corners.reshape(-1, 4).astype(np.float32),
        classes=rng.integers(0, 3, box_counts.sum()).astype(np.int32),
        names=("a", "b", "c"),
        digest="",
        bad=(),
    )


def make_plan(
    count: int = 23, batch: int = 6, augment: AugmentConfig = LIVELY, **kwargs: Any
) -> Plan:
    options: dict[str, Any] = {"seed": 3, "epochs": 4, "imgsz": SIDE} | kwargs
    return Plan(make_records(count), batch=batch, augment=augment, **options)


def assert_same(one: PlanStep, other: PlanStep) -> None:
    for field in dataclasses.fields(PlanStep):
        np.testing.assert_array_equal(
            getattr(one, field.name), getattr(other, field.name), err_msg=field.name
        )


@pytest.mark.parametrize(("count", "batch"), [(23, 6), (24, 6), (3, 8), (1, 1)])
def test_every_photo_once_an_epoch_fills_aside(count, batch):
    plan = make_plan(count, batch)
    orders = []
    for epoch in range(-1, 2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        parts = [plan.images_at(step) for step in steps]
        images = np.concatenate([part[0] for part in parts])
        fill = np.concatenate([part[1] for part in parts])
        assert sorted(images[~fill]) == list(range(count))
        assert not fill[:count].any() and fill[count:].all()
        np.testing.assert_array_equal(images[fill], np.resize(images[~fill], fill.sum()))
        orders.append(images[~fill].tolist())
    assert count < 5 or len({tuple(order) for order in orders}) == 3


def test_any_step_is_the_same_from_a_fresh_plan():
    walked = make_plan()
    steps = [walked.at(step) for step in range(-7, walked.total_steps)]
    for step in (-7, -1, 0, 5, 13):
        assert_same(make_plan().at(step), steps[step + 7])
    assert not np.array_equal(make_plan(seed=4).at(5).inverse, steps[12].inverse)
    assert make_plan(seed=2**100).at(0).step == 0


def test_images_at_agrees_with_at():
    plan = make_plan()
    for step in (-3, 0, 3):
        whole = plan.at(step)
        for quick, full in zip(
            plan.images_at(step), (whole.images, whole.fill, whole.seeds), strict=True
        ):
            np.testing.assert_array_equal(quick, full)


def test_partners_are_three_older_photos_of_the_slot():
    plan = make_plan()
    planned = plan.at(4)
    mosaic = planned.canvas == 2 * SIDE
    assert 0 < mosaic.sum() < 6
    assert (planned.ages[~mosaic] == 0).all() and (planned.extents[~mosaic, 1:] == 0).all()
    assert (planned.ages[mosaic, 0] == 0).all()
    for slot in np.flatnonzero(mosaic):
        ages = planned.ages[slot, 1:].tolist()
        assert len(set(ages)) == 3 and min(ages) >= 1 and max(ages) < plan.window
        for age, extent in zip(ages, planned.extents[slot, 1:], strict=True):
            height, width = plan.records.sizes[plan.images_at(4 - age)[0][slot]]
            ratio = SIDE / max(height, width)
            assert extent.tolist() == [np.ceil(width * ratio), np.ceil(height * ratio)]


def test_mosaic_photos_touch_at_a_centre_in_the_middle_of_the_canvas():
    planned = make_plan(augment=AugmentConfig(close_mosaic=0)).at(2)
    ends = planned.origins + planned.extents
    assert (planned.centre >= SIDE / 2).all() and (planned.centre < SIDE * 1.5).all()
    np.testing.assert_array_equal(ends[:, 0], planned.centre)
    np.testing.assert_array_equal(planned.origins[:, 3], planned.centre)
    np.testing.assert_array_equal(planned.origins[:, 1, 0], planned.centre[:, 0])
    np.testing.assert_array_equal(ends[:, 1, 1], planned.centre[:, 1])
    np.testing.assert_array_equal(ends[:, 2, 0], planned.centre[:, 0])
    np.testing.assert_array_equal(planned.origins[:, 2, 1], planned.centre[:, 1])


def test_the_last_epochs_have_no_mosaic():
    plan = make_plan(augment=AugmentConfig(mosaic=1, close_mosaic=2), epochs=4)
    last = 2 * plan.steps_per_epoch
    assert (plan.at(last - 1).canvas == 2 * SIDE).all()
    assert all((plan.at(step).canvas == SIDE).all() for step in range(last, plan.total_steps))


def test_without_augmentation_boxes_are_only_letterboxed():
    plan = make_plan(augment=STILL)
    planned = plan.at(1)
    np.testing.assert_allclose(planned.inverse, np.tile(np.eye(2, 3), (6, 1, 1)), atol=1e-6)
    np.testing.assert_array_equal(planned.hsv, np.tile([0, 1, 1], (6, 1)))
    for slot in range(6):
        boxes, _ = plan.records.boxes_of(planned.images[slot])
        moved = boxes * np.tile(planned.extents[slot, 0], 2) + np.tile(planned.origins[slot, 0], 2)
        moved = moved[((moved[:, 2:] - moved[:, :2]) > 2).all(axis=1)]
        np.testing.assert_allclose(planned.boxes[planned.slots == slot], moved, atol=1e-4)
        pad = SIDE - planned.extents[slot, 0]
        assert (planned.origins[slot, 0] == np.floor(pad / 2)).all()


@pytest.mark.parametrize(("option", "axis"), [("fliplr", 0), ("flipud", 1)])
def test_flips_mirror_boxes_and_pixels(option, axis):
    plain = make_plan(augment=STILL).at(0)
    flipped = make_plan(augment=STILL.model_copy(update={option: 1.0})).at(0)
    mirrored = plain.boxes.copy()
    mirrored[:, [axis, axis + 2]] = SIDE - plain.boxes[:, [axis + 2, axis]]
    np.testing.assert_allclose(flipped.boxes, mirrored, atol=1e-4)
    pixel = np.array([3.0, 5.0, 1.0])
    mirror = pixel.copy()
    mirror[axis] = SIDE - 1 - pixel[axis]
    np.testing.assert_allclose(flipped.inverse @ pixel, plain.inverse @ mirror, atol=1e-4)


def test_boxes_lie_inside_and_in_slot_order():
    plan = make_plan(boxes := 40, augment=LIVELY)
    steps = [plan.at(step) for step in range(plan.total_steps)]
    for planned in steps:
        assert (planned.boxes >= 0).all() and (planned.boxes <= SIDE).all()
        assert ((planned.boxes[:, 2:] - planned.boxes[:, :2]) > 2).all()
        assert (np.diff(planned.slots) >= 0).all()
        assert len(planned.boxes) == len(planned.classes) == len(planned.slots)
    assert sum(len(planned.boxes) for planned in steps) > boxes


def test_draws_cover_their_ranges():
    config = AugmentConfig(mosaic=0.3, fliplr=0.2, close_mosaic=0)
    steps = [make_plan(64, 64, config, epochs=20).at(step) for step in range(16)]
    assert np.mean([step.canvas == 2 * SIDE for step in steps]) == pytest.approx(0.3, abs=0.05)
    hsv = np.concatenate([step.hsv for step in steps])
    np.testing.assert_allclose(hsv.min(axis=0), [-0.015, 0.3, 0.6], atol=0.02)
    np.testing.assert_allclose(hsv.max(axis=0), [0.015, 1.7, 1.4], atol=0.02)
    inverse = np.concatenate([step.inverse for step in steps])
    assert np.mean(inverse[:, 0, 0] < 0) == pytest.approx(0.2, abs=0.05)
    scale = 1 / np.abs(inverse[:, 0, 0])
    assert 0.5 <= scale.min() < 0.55 and 1.45 < scale.max() <= 1.5


def test_sides_are_few_multiples_of_the_stride_around_imgsz():
    assert sides_of(640, 0, 32) == (640,)
    assert sides_of(640, 0.5, 32) == (320, 480, 640, 800, 960)
    assert sides_of(640, 0.05, 32) == (608, 640, 672)
    assert sides_of(640, 0.1, 32) == (576, 608, 640, 672, 704)
    assert sides_of(640, 0.5, 64) == (320, 448, 640, 832, 960)
    assert sides_of(640, 0.5, 16) == sides_of(640, 0.5, 32)
    assert sides_of(128, 1, 32) == (64, 128, 192, 256)
    assert sides_of(32, 1, 32) == (32, 64)
    with pytest.raises(UserError, match=r"multi_scale=0.04 .* multi_scale=0.05 or more"):
        sides_of(640, 0.04, 32)


def test_every_side_is_drawn_once_for_a_whole_batch_and_nothing_else_changes():
    sides = (SIDE // 2, SIDE, SIDE * 2)
    plain = make_plan(epochs=20)
    plan = plain.with_sides(sides)
    seen = []
    for step in range(plan.total_steps):
        fixed, varied = plain.at(step), plan.at(step)
        ratio = varied.side / SIDE
        seen.append(varied.side)
        assert fixed.side == SIDE
        names = {field.name for field in dataclasses.fields(PlanStep)} - {"side"}
        for name in names - {"inverse", "boxes"} if ratio != 1 else names:
            np.testing.assert_array_equal(getattr(varied, name), getattr(fixed, name), name)
        np.testing.assert_allclose(varied.boxes, fixed.boxes * ratio, rtol=1e-6)
        assert plan.capacity_at(step, 2) == plain.capacity_at(step, 2)
        # The image's corners (pixel edges) show the same places of the canvas.
        for corner in (0, 1):
            there = np.array([*[corner * varied.side - 0.5] * 2, 1.0])
            here = np.array([*[corner * SIDE - 0.5] * 2, 1.0])
            np.testing.assert_allclose(varied.inverse @ there, fixed.inverse @ here, atol=1e-3)
    shares = [seen.count(side) / len(seen) for side in sides]
    assert all(0.15 < share < 0.55 for share in shares), shares
    assert_same(plan.at(5), make_plan(epochs=20).with_sides(sides).at(5))


# Of the plan at commit 73c25cf, before the first option that came later.
OLD_STREAM = "6630bce627ab83e7"


def test_new_options_leave_old_streams_alone():
    digest = hashlib.sha256()
    for step in (-3, 0, 7):
        planned = make_plan().at(step)
        for name in ("images", "seeds", "ages", "centre", "hsv"):  # exact on every machine
            digest.update(getattr(planned, name).tobytes())
        digest.update((planned.inverse[:, :, :2] < 0).tobytes())  # flips, the last of the old draws
    assert digest.hexdigest()[:16] == OLD_STREAM


MIXING = LIVELY.model_copy(update={"mixup": 0.4})


def test_mixup_only_adds_a_second_image():
    """The slots' own images stay as they are; boxes of the second come behind them."""
    plain, plan = make_plan(60, 8), make_plan(60, 8, MIXING)
    mixed = added = 0
    for step in range(plan.total_steps):
        one, two = plain.at(step), plan.at(step)
        for name in ("images", "fill", "seeds", "hsv", "side"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name), name)
        for name in ("ages", "origins", "extents", "centre", "canvas", "inverse"):
            own = getattr(one, name).reshape(8, -1)
            both = getattr(two, name).reshape(8, -1)
            assert both.shape[1] == 2 * own.shape[1]
            np.testing.assert_array_equal(both[:, : own.shape[1]], own, name)
        assert (np.diff(two.slots) >= 0).all() and (one.mix == MIX_STEPS).all()
        for slot in range(8):
            own, both = one.boxes[one.slots == slot], two.boxes[two.slots == slot]
            np.testing.assert_array_equal(both[: len(own)], own)
            assert two.mix[slot] < MIX_STEPS or len(both) == len(own)
            added += len(both) - len(own)
        mixed += (two.mix < MIX_STEPS).sum()
        assert step < 3 * plan.steps_per_epoch or (two.mix == MIX_STEPS).all(), "it is closed"
    assert mixed > 40 and added > 50
    assert_same(plan.at(4), make_plan(60, 8, MIXING).at(4))


def test_the_second_image_shares_flips_and_no_photo():
    plan = make_plan(60, 8, MIXING)
    mirrored = 0
    for step in range(12):
        planned = plan.at(step)
        for slot in range(8):
            own, other = (set(part.tolist()) for part in np.split(planned.ages[slot], 2))
            assert not own & other and own | other <= set(range(plan.window)) and 0 in own
            diagonals = planned.inverse[
                slot, [0, 1, 2, 3], [0, 1, 0, 1]
            ]  # no turn beyond 20 degrees
            np.testing.assert_array_equal(np.sign(diagonals[:2]), np.sign(diagonals[2:]))
            mirrored += diagonals[0] < 0
        assert not np.array_equal(planned.inverse[:, :2], planned.inverse[:, 2:])
    assert 20 < mirrored < 76


def test_the_second_image_is_a_photo_of_the_window():
    plan = make_plan(augment=STILL.model_copy(update={"mixup": 1.0}))
    planned = plan.at(5)
    for slot in range(6):
        wanted = []
        for quadrant in (0, 4):
            index = plan.images_at(5 - planned.ages[slot, quadrant])[0][slot]
            boxes, _ = plan.records.boxes_of(index)
            extent, origin = planned.extents[slot, quadrant], planned.origins[slot, quadrant]
            moved = boxes * np.tile(extent, 2) + np.tile(origin, 2)
            wanted.append(moved[((moved[:, 2:] - moved[:, :2]) > 2).all(axis=1)])
            assert extent.max() == SIDE
        found = planned.boxes[planned.slots == slot]
        np.testing.assert_allclose(found, np.concatenate(wanted), atol=1e-4)


def test_mixing_ratios_are_those_of_ultralytics():
    config = AugmentConfig(mixup=0.3, close_mosaic=0)
    mix = np.concatenate([make_plan(64, 64, config, epochs=40).at(step).mix for step in range(40)])
    mixed = mix[mix < MIX_STEPS] / MIX_STEPS
    assert len(mixed) / len(mix) == pytest.approx(0.3, abs=0.03)
    assert (mix == np.round(mix)).all() and mix.dtype == np.float32
    assert mixed.mean() == pytest.approx(0.5, abs=0.01)  # Beta(32, 32)
    assert mixed.std() == pytest.approx((4 * 65) ** -0.5, abs=0.006)
    drawn = np.sort(np.random.default_rng(0).beta(32, 32, 100_000))
    quantiles = np.quantile(drawn, [0.05, 0.25, 0.75, 0.95])
    np.testing.assert_allclose(np.quantile(mixed, [0.05, 0.25, 0.75, 0.95]), quantiles, atol=0.015)


def test_kept_boxes_reach_the_second_image():
    plan = make_plan(augment=STILL.model_copy(update={"mixup": 1.0}))
    planned = plan.at(9)
    step = 9 - int(planned.ages[2, 4])
    whole = (np.array([[0.0, 0, 1, 1]], np.float32), np.array([7]))
    nothing = (np.empty((0, 4), np.float32), np.empty(0, np.int64))
    replaced = plan.at(9, {(step, 2): whole, (9, 4): nothing})
    assert replaced.slots[replaced.classes == 7].tolist() == [2]
    extent, origin = planned.extents[2, 4], planned.origins[2, 4]
    found = replaced.boxes[replaced.classes == 7]
    np.testing.assert_allclose(found, [[*origin, *(origin + extent)]], atol=1e-4)
    own = len(plan.records.boxes_of(planned.images[2])[0])
    assert (replaced.slots == 2).sum() <= own + 1
    everything = {(9 - age, slot): nothing for age in range(8) for slot in range(6)}
    assert len(plan.at(9, everything).boxes) == 0


def test_affine_inverse_and_singular_shear():
    motion = np.array([[30, 1.2, 5, -8, 0.4, 0.6], [0, 1, 45, 45, 0.5, 0.5]])
    affine = build_affine(motion, np.zeros((2, 2), bool), np.array([128.0, 64.0]), SIDE)
    there = affine.forward[0] @ [10.0, 20.0, 1.0]
    np.testing.assert_allclose(affine.inverse[0] @ [*there, 1.0], [10, 20])
    np.testing.assert_allclose(affine.forward[0] @ [64, 64, 1], [0.4 * SIDE, 0.6 * SIDE])
    assert np.isfinite(invert(np.array([[[1.0, 1, 0], [1, 1, 0]]]))).all()
    assert np.isfinite(affine.inverse).all()


def test_kept_boxes_replace_a_photo_wherever_it_is_used():
    plan = make_plan(augment=STILL.model_copy(update={"mosaic": 1.0, "translate": 0.0}))
    step = 9
    plain = plan.at(step)
    older = step - int(plain.ages[2, 1])
    whole = (np.array([[0.0, 0, 1, 1]], np.float32), np.array([7]))
    nothing = (np.empty((0, 4), np.float32), np.empty(0, np.int64))
    recorded = plan.records.boxes_of(plain.images[0])
    kept = {(step, 0): recorded, (older, 2): whole, (step, 4): nothing, (older, 3): whole}
    if older in step - plain.ages[3]:
        del kept[(older, 3)]
    planned = plan.at(step, kept)
    assert planned.moved and not plain.moved
    for slot in (0, 1, 3, 5):
        np.testing.assert_array_equal(
            planned.boxes[planned.slots == slot], plain.boxes[plain.slots == slot]
        )
    sevens = planned.slots[planned.classes == 7].tolist()
    assert set(sevens) <= {2}
    assert (planned.slots == 4).sum() <= (plain.slots == 4).sum()
    assert (np.diff(planned.slots) >= 0).all()
    everything = {(step - age, slot): nothing for age in range(8) for slot in range(6)}
    assert len(plan.at(step, everything).boxes) == 0
    assert_same(plan.at(step), plain)


@pytest.mark.parametrize("augment", [LIVELY, LIVELY.model_copy(update={"mixup": 0.4})])
def test_capacity_holds_the_fullest_rank_and_moves_boxes_counts_sources(augment):
    plan = make_plan(60, 8, augment)
    loose = make_plan(60, 8, augment, moves_boxes=True)
    for step in range(plan.total_steps):
        planned = plan.at(step)
        for workers in (1, 2, 3, 8):
            counts = [
                np.isin(planned.slots, slots_of(rank, workers, 8)).sum() for rank in range(workers)
            ]
            assert plan.capacity_at(step, workers) == bucket_of(max(counts))
            assert loose.capacity_at(step, workers) >= plan.capacity_at(step, workers)
    planned = plan.at(3)
    ages, canvas = planned.ages.reshape(8, -1, 4), planned.canvas.reshape(8, -1)
    shown = 1 + (planned.mix < MIX_STEPS)
    sources = sum(
        len(plan.records.boxes_of(plan.images_at(3 - age)[0][slot])[0])
        for slot in range(8)
        for image in range(shown[slot])
        for age in ages[slot, image, : 4 if canvas[slot, image] > SIDE else 1]
    )
    assert shown.sum() > 8 or not augment.mixup
    assert loose.capacity_at(3, 1) == bucket_of(sources)


def test_buckets():
    counts = (0, 16, 17, 24, 25, 33, 49, 65, 1000)
    assert [bucket_of(count) for count in counts] == [16, 16, 24, 24, 32, 48, 64, 96, 1024]


@pytest.mark.parametrize(("workers", "batch"), [(1, 1), (3, 8), (4, 4), (5, 16)])
def test_slots_are_contiguous_and_even(workers, batch):
    parts = [slots_of(rank, workers, batch) for rank in range(workers)]
    assert [slot for part in parts for slot in part] == list(range(batch))
    assert {len(part) for part in parts} <= {batch // workers, -(-batch // workers)}
