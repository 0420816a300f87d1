"""What tests/unit/test_kernels.py runs under Triton's interpreter, one check a process."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.unit.test_device import SIDE, batch_of, in_pairs, make_scene
from yolo_ray.augment.device import augment
from yolo_ray.augment.fused import fused_images
from yolo_ray.data.batch import Batch
from yolo_ray.model import assign, fused_assign, fused_layers, fused_loss, loss
from yolo_ray.model.boxes import boxes_from_distances, make_anchors
from yolo_ray.model.norm import desynchronise, fuse

MOTION = [
    [7, 1.0, 0, 0, 0.5, 0.5],
    [30, 0.6, 4, -6, 0.45, 0.6],
    [-10, 1.5, 0, 10, 0.5, 0.4],
    [170, 0.3, 2, 3, 0.9, 0.1],
    [0, 1, 0, 0, 0.5, 0.5],
]
HSV = [[0.01, 1.3, 0.8], [0, 1, 1], [-0.3, 0.5, 1.2], [0.5, 1.7, 0.6], [-1, 0.9, 1.4]]


class Conv(nn.Module):
    """As Ultralytics' module of that name."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


def close(ours: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    gap = (ours.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9)
    assert gap <= tolerance, gap.item()


def pixels() -> None:
    gains, unmixed = torch.tensor(HSV), torch.full((5,), 4096.0)
    scene = make_scene(MOTION, [True, True, False, False, True], flips=True)
    for side in (SIDE, SIDE // 2, SIDE * 3 // 2):  # the map stays: a larger image sees more canvas
        same_pixels(batch_of(scene, gains, unmixed, side))
    scene = make_scene([*MOTION, *MOTION[::-1]], [True, False] * 5, flips=True)
    weights = torch.tensor([4096.0, 1, 1234, 2048, 4095])
    for side in (SIDE, SIDE * 3 // 4):
        same_pixels(batch_of(in_pairs(scene), gains, weights, side))


def same_pixels(batch: Batch) -> None:
    wanted = augment(batch) / 255
    assert wanted.shape == (5, 3, batch.side, batch.side)
    assert torch.equal(fused_images(batch, torch.float32, 3), wanted)
    wide = fused_images(batch, torch.float32, 8)
    assert torch.equal(wide[:, :3], wanted) and not wide[:, 3:].any()


def norm() -> None:
    x = torch.randn(3, 3, 9, 7) + 1
    for channels, act in ((16, nn.SiLU()), (80, nn.SiLU()), (6, nn.Identity())):
        conv = Conv(channels, act)
        assert conv.bn.running_mean is not None
        nn.init.normal_(conv.bn.running_mean)
        nn.init.uniform_(conv.bn.weight, 0.5, 2)
        plain = nn.Sequential(conv)
        fused = copy.deepcopy(plain)
        assert fuse(fused) == 1
        dy = torch.randn(3, 9, 7, channels * 2).permute(0, 3, 1, 2)[:, :channels]
        results = []
        for net in (plain, fused):
            leaf = x.clone().requires_grad_()
            y = net(leaf)
            results.append(
                [y, *torch.autograd.grad(y, [leaf, *net.parameters()], dy), *net.buffers()]
            )
        for wanted, ours in zip(*results, strict=True):
            close(ours, wanted)
        assert desynchronise(fused) == 1
        assert type(fused[0].act) is type(act) and type(fused[0].bn) is nn.BatchNorm2d
        close(fused.eval()(x), plain.eval()(x))


def class_loss() -> None:
    logits = torch.randn(2, 5, 200, requires_grad=True)
    classes, weight = torch.randint(0, 5, (2, 200)), torch.rand(2, 200) * (torch.rand(2, 200) < 0.3)
    values = [f(logits, classes, weight) for f in (loss.TORCH_TERMS.classes, fused_loss.class_loss)]
    wanted, ours = (torch.autograd.grad(value * 3, logits)[0] for value in values)
    close(values[1].detach(), values[0].detach())
    close(ours, wanted)


def box_terms() -> None:
    raw, wanted = torch.randn(2, 64, 200, requires_grad=True), torch.rand(2, 4, 200) * 17 - 1
    by_distance, by_dfl = torch.randn(2, 4, 200), torch.randn(2, 200)
    results = []
    for compute in (loss.TORCH_TERMS.distances_and_dfl, fused_loss.distances_and_dfl):
        distances, dfl = compute(raw, wanted, 16)
        total = (distances * by_distance).sum() + (dfl * by_dfl).sum()
        results.append([distances.detach(), dfl.detach(), *torch.autograd.grad(total, raw)])
    for expected, ours in zip(*results, strict=True):
        close(ours, expected)
    close(fused_loss.decoded_distances(raw, 16), results[0][0])


def layers() -> None:
    x = torch.randn(2, 48, 9, 11).contiguous(memory_format=torch.channels_last)

    def compute(pool: Callable[[Tensor], Tensor], cat: Callable[..., Tensor]) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = cat(leaf.chunk(2, 1)[1], pool(leaf), leaf[:, :5], pool(pool(leaf)))
        weight = torch.linspace(-1, 1, y.numel()).view_as(y)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaf)]

    wanted = compute(
        lambda t: nn.functional.max_pool2d(t, 5, 1, 2), lambda *parts: torch.cat(parts, 1)
    )
    ours = compute(lambda t: fused_layers.max_pool(t, 5), fused_layers.concatenate)
    assert torch.equal(ours[0], wanted[0])
    close(ours[1], wanted[1])


class NumpyMath:
    """The interpreter has no device library: its one function that is needed, by numpy."""

    @staticmethod
    def atan(x: Any) -> Any:
        """Inverse tangent of an interpreted tensor."""
        handle = copy.copy(x.handle)
        handle.data = np.arctan(x.handle.data)
        return type(x)(handle, x.type)


def claims() -> None:
    setattr(fused_assign, "libdevice", NumpyMath)  # noqa: B010 (a type checker refuses it)
    points, strides = make_anchors(128, (8, 16, 32))
    scores = torch.randn(3, 5, len(points))
    boxes = boxes_from_distances(torch.rand(3, 4, len(points)) * 4, points, strides)
    low = torch.rand(40, 2) * 100
    corners = torch.cat((low, low + torch.rand(40, 2) * 60), 1)
    index, live = torch.randint(0, 3, (40,)), torch.rand(40) < 0.8
    truth = assign.Truth(corners, torch.randint(0, 5, (40,)), index, live)
    anchors = assign._Anchors(scores, boxes, points)
    for small in (32, 1024):  # with the first some boxes take the kernel for large ones
        setattr(fused_assign, "SMALL", small)  # noqa: B010 (a type checker refuses it)
        row, claimed = assign._owners(anchors, truth, 10, 16, 1024)
        ours = assign._owner_rows(*fused_assign.fused_claims(*anchors, truth, 10, 16), 40)
        _, align = assign._alignment_of_owner(anchors, truth, row)
        learns = claimed & (align > 0)
        assert learns.sum() > 50
        assert torch.equal(ours[1] & (align > 0), learns)
        assert torch.equal(ours[0][learns], row[learns])


CHECKS = {f.__name__: f for f in (pixels, norm, class_loss, box_terms, layers, claims)}

if __name__ == "__main__":
    torch.manual_seed(0)
    CHECKS[sys.argv[1]]()
    print("equal")
