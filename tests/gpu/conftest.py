"""Kernels whose results can be compared bit by bit, and batches for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.steps import (
    BATCH,
    BOXES,
    CUDA,
    IMGSZ,
)
from yolo_ray.bench.scene import make_batches
from yolo_ray.data.batch import Batch
from yolo_ray.step.precision import set_kernels


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    set_kernels("fp32", deterministic=True)
    yield
    set_kernels("fp32", deterministic=False)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return make_batches(BATCH, IMGSZ, BOXES, CUDA)
