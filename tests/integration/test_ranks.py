"""The same global batch on 1, 2 and 4 gloo ranks: same gradient, same photos, same evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.local_run import LocalOptions, LocalRun, on_ranks
from yolo_ray.augment.device import augment
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.plan import slots_of
from yolo_ray.data.records import Records, load_records

PLAIN = AugmentConfig(mosaic=0.0, close_mosaic=0, scale=0.0, translate=0.0)
RANKS = (1, 2, 4)


def uneven(records: Records, batch: int) -> Records:
    """The same photos; the labels of the first two slots' photos of step 0 are gone: a rank of four has none."""
    plan_ids = LocalRun(records, LocalOptions(batch=batch, augment=PLAIN)).plan.images_at(0)[0][:2]
    keep = np.ones(len(records.boxes), bool)
    counts = np.diff(records.offsets)
    for index in plan_ids:
        keep[records.offsets[index] : records.offsets[index + 1]] = False
        counts[index] = 0
    offsets = np.concatenate([[0], np.cumsum(counts)])
    fields = {
        **vars(records),
        "offsets": offsets,
        "boxes": records.boxes[keep],
        "classes": records.classes[keep],
    }
    return Records(**fields)


def gradient(
    rank: int, workers: int, records: Records, frozen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    run = LocalRun(records, LocalOptions(frozen_norm=frozen, augment=PLAIN), rank, workers)
    _, batch = next(iter(run.feed.batches(0)))
    run.step.set_controls(run.schedule.at(0), (1.0,))
    run.step(batch, update=False)
    return run.step.pending, run.step.flat.buffers.clone(), batch.valid.sum()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "synchronised"])
def test_gradient_of_a_global_batch_is_the_same(
    frozen: bool, tiny_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    records = uneven(load_records(tiny_dataset(train=8, size=64), "train", max_bad=0.0), 8)
    results = {workers: on_ranks(workers, gradient, tmp_path, records, frozen) for workers in RANKS}
    reference, buffers, _ = results[1][0]
    assert reference.norm() > 0
    assert min(int(valid) for _, _, valid in results[4]) == 0, "one rank must have no box"
    for workers in RANKS[1:]:
        for ours, ours_buffers, _ in results[workers]:
            assert (ours - reference).norm() / reference.norm() < 1e-5
            assert (ours_buffers - buffers).norm() / buffers.norm() < 1e-5
        first = results[workers][0][0]
        assert all(torch.equal(first, other[0]) for other in results[workers]), (
            "ranks must agree bit for bit"
        )


def hashes(rank: int, workers: int, records: Records) -> list[dict[int, str]]:
    """By step: slot -> digest of its pixels and boxes, for two epochs with every augmentation on."""
    options = LocalOptions(
        batch=5, augment=AugmentConfig(close_mosaic=1, degrees=10, shear=3, flipud=0.5)
    )
    run = LocalRun(records, options, rank, workers)
    out = []
    for _, batch in run.feed.batches(0):
        images = augment(batch)
        digests = {}
        for row, slot in enumerate(slots_of(rank, workers, options.batch)):
            mine = batch.valid & (batch.image_index == row)
            parts = (images[row], batch.boxes[mine], batch.classes[mine])
            digests[slot] = hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest()
        out.append(digests)
    return out


def test_pixels_and_boxes_of_every_batch_are_the_same(
    tiny_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    records = load_records(tiny_dataset(train=13, size=(60, 90)), "train", max_bad=0.0)
    joined = []
    for workers in RANKS:
        parts = on_ranks(workers, hashes, tmp_path, records)
        joined.append(
            [
                {k: v for part in parts for k, v in part[step].items()}
                for step in range(len(parts[0]))
            ]
        )
    assert len(joined[0]) == 6 and all(len(step) == 5 for step in joined[0])
    assert joined[0] == joined[1] == joined[2]


def weights_after(rank: int, workers: int, records: Records) -> Tensor:
    run = LocalRun(records, LocalOptions(augment=PLAIN), rank, workers)
    run.train(0, 2)
    return run.step.flat.state


def test_ranks_hold_equal_weights_after_steps(
    tiny_dataset: Callable[..., Path], tmp_path: Path
) -> None:
    records = load_records(tiny_dataset(train=8, size=64), "train", max_bad=0.0)
    first, second = on_ranks(2, weights_after, tmp_path, records)
    assert torch.equal(first, second)
