"""Suppression of a whole batch gives what suppression image by image gave, on the CPU and by the GPU's kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchvision.ops import batched_nms

from tests.nms_cases import Case, cases, class_by_class, far_too_many, image_by_image
from tests.unit.test_detect import RULES, crowd
from yolo_ray.model.detect import detect_nms, detect_one_to_one

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", [*cases(), far_too_many()], ids=lambda case: case[0])
def test_a_batch_equals_its_images(case: Case) -> None:
    name, boxes, scores, rules = case
    wanted = image_by_image(boxes, scores, suppress=batched_nms, **rules)
    ours = detect_nms(boxes, scores, **rules)
    assert len(ours) == len(boxes)
    for a, b in zip(ours, wanted, strict=True):
        assert a.shape == b.shape and torch.equal(a, b), name
    assert any(len(a) for a in ours) == (name != "no candidate at all")


@pytest.mark.parametrize("seed", range(4))
def test_broken_coordinates_too(seed: int) -> None:
    """Here torchvision's shifts round the boxes, in the batch as in the single image."""
    boxes, scores = crowd(seed, 3, 150 + 400 * seed, 4)
    wanted = image_by_image(boxes - 30, scores, suppress=batched_nms, **RULES)
    ours = detect_nms(boxes - 30, scores, **RULES)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_without_suppression_the_best_remain(case: Case) -> None:
    name, boxes, scores, rules = case
    cut = {"conf": rules["conf"], "max_det": rules["max_det"]}
    ours = detect_one_to_one(boxes, scores, **cut)
    everything = lambda boxes, *_: torch.arange(len(boxes))  # noqa: E731
    wanted = image_by_image(boxes, scores, suppress=everything, iou=1.0, **cut)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True)), name


def test_the_two_references_agree() -> None:
    """On whole pixels shifting changes nothing: the kernel is held against the one without shifts."""
    for name, boxes, scores, rules in cases():
        with_shift, without = (
            image_by_image(boxes, scores, suppress=suppress, **rules)
            for suppress in (batched_nms, class_by_class)
        )
        assert all(torch.equal(a, b) for a, b in zip(with_shift, without, strict=True)), name


def test_the_kernel_equals_torchvision() -> None:
    """In a process of its own: the interpreter is chosen when the kernel is defined."""
    pytest.importorskip(
        "triton", reason="this build of torch has no Triton, so it has no GPU either"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.suppress_checks"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")
