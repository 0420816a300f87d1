"""The kernels on a real GPU: pixels, norms, assignment, losses and layers equal those of the CPU and of torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.steps import (
    CUDA,
    IMGSZ,
)
from yolo_ray.augment.device import augment, normalised
from yolo_ray.data.batch import Batch
from yolo_ray.model.assign import ONE_TO_MANY, ONE_TO_ONE, Truth, assign
from yolo_ray.model.boxes import HeadOutput, boxes_from_distances, make_anchors
from yolo_ray.model.fused_conv import WeightLane
from yolo_ray.model.fused_layers import max_pool
from yolo_ray.model.fused_mode import FusedLayers
from yolo_ray.model.loss import DetectionLoss
from yolo_ray.model.norm import fuse

pytestmark = pytest.mark.gpu


@dataclasses.dataclass
class Heads:
    """What the loss must know of a detector."""

    reg_max: int
    strides: tuple[int, ...]
    dual: bool


def test_pixels_equal_those_of_the_cpu(batches: list[Batch]) -> None:
    for batch in batches:
        here = normalised(batch, torch.float32)
        there = augment(batch.to("cpu")) / 255
        assert torch.equal(here.cpu(), there)
        wide = normalised(batch, torch.bfloat16, 8).cpu()
        assert torch.equal(wide[:, :3], there.bfloat16()) and not wide[:, 3:].any()


@pytest.mark.parametrize("channels", [16, 80, 6])
@pytest.mark.parametrize("silu", [True, False])
def test_fused_norm_equals_torch(channels: int, silu: bool) -> None:
    """Outputs, gradients and statistics, against float64."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03).to(CUDA)
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.uniform_(-1, 1)
    fused = nn.Sequential(copy.deepcopy(plain))
    fuse(fused)
    fused[0].__dict__["act"] = nn.SiLU() if silu else None
    exact = copy.deepcopy(plain).double()
    x = torch.randn(4, channels, 33, 40, device=CUDA).contiguous(memory_format=torch.channels_last)
    # As the backward pass of a concatenation gives it: a part of longer rows.
    dy = torch.randn(4, 33, 40, channels * 2, device=CUDA).permute(0, 3, 1, 2)[:, :channels]
    results = []
    for net, dtype in ((fused, torch.float32), (exact, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        y = net(leaf)
        y = y if net is fused or not silu else nn.functional.silu(y)
        grads = torch.autograd.grad(y, [leaf, *net.parameters()], dy.to(dtype))
        results.append([y.detach(), *grads, *(b.double() for b in net.buffers())])
    for ours, wanted in zip(*results, strict=True):
        assert (ours.double() - wanted).norm() <= 2e-6 * wanted.norm()


def test_assignment_equals_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    for rule in (ONE_TO_MANY, ONE_TO_ONE):
        points, strides = make_anchors(IMGSZ, (8, 16, 32))
        scores = torch.randn(3, 5, len(points))
        boxes = boxes_from_distances(torch.rand(3, 4, len(points)) * 4, points, strides)
        low = torch.rand(40, 2) * 100
        truth = Truth(
            torch.cat((low, low + torch.rand(40, 2) * 60), 1), torch.randint(0, 5, (40,)),
            torch.randint(0, 3, (40,)), torch.rand(40) < 0.8,
        )  # fmt: skip
        there = assign(scores, boxes, points, truth, rule, min_side=16)
        moved = Truth(*(part.to(CUDA) for part in truth))
        here = assign(scores.to(CUDA), boxes.to(CUDA), points.to(CUDA), moved, rule, min_side=16)
        torch.testing.assert_close(here.weight.cpu(), there.weight, rtol=1e-4, atol=1e-6)
        learns = there.weight > 0
        assert learns.sum() > 20
        assert torch.equal(here.row.cpu()[learns], there.row[learns])


def test_fused_loss_equals_that_of_the_cpu() -> None:
    """Items, score sums and the gradients of all raw outputs, for both kinds of box head."""
    torch.manual_seed(0)
    anchors = len(make_anchors(IMGSZ, (8, 16, 32))[0])
    for reg_max, dual in ((16, False), (1, True)):
        loss = DetectionLoss(Heads(reg_max, (8, 16, 32), dual))
        raw = [torch.randn(3, 4 * reg_max + 5, anchors) * 2 for _ in range(1 + dual)]
        low = torch.rand(30, 2) * 100
        boxes = torch.cat((low, low + torch.rand(30, 2) * 60 + 4), 1)
        truth = (
            boxes,
            torch.randint(0, 5, (30,)),
            torch.randint(0, 3, (30,)),
            torch.rand(30) < 0.8,
        )
        results = []
        for device in ("cpu", "cuda"):
            leaves = [part.to(device).requires_grad_() for part in raw]
            heads = [HeadOutput(*leaf.split([4 * reg_max, 5], 1)) for leaf in leaves]
            sums = loss(heads, *(part.to(device) for part in truth), imgsz=IMGSZ)
            grads = torch.autograd.grad(
                (sums.items * torch.tensor([7.5, 0.5, 1.5], device=device)).sum(), leaves
            )
            results.append([part.cpu() for part in (sums.items.detach(), sums.scores, *grads)])
        for there, here in zip(*results, strict=True):
            assert (here - there).norm() <= 1e-5 * there.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_and_concatenation_equal_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 48, 9, 11, device=CUDA, dtype=dtype).contiguous(
        memory_format=torch.channels_last
    )

    def compute(pool: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        half = leaf.chunk(2, 1)[1]
        y = torch.cat((half, pool(leaf), leaf[:, :5], pool(pool(leaf))), 1)
        weight = torch.linspace(-1, 1, y.numel(), device=CUDA, dtype=dtype).view_as(y)
        return [y.detach(), *torch.autograd.grad((y * weight).float().sum(), leaf)]

    wanted = compute(lambda t: nn.functional.max_pool2d(t, 5, 1, 2))
    with FusedLayers(WeightLane(CUDA)):
        found = compute(lambda t: max_pool(t, 5))
    assert torch.equal(found[0], wanted[0])
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert (found[1] - wanted[1]).float().norm() <= tolerance * wanted[1].float().norm()
