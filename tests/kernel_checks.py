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
from yolo_ray.augment.images import resize_photo
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
    inner = logits.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    value = loss.TORCH_TERMS.classes(logits, classes, weight)
    wanted = torch.autograd.grad(value * 3, logits)[0]
    for layout in (logits, inner):  # anchors innermost, then classes
        ours = fused_loss.class_loss(layout, classes, weight)
        close(ours.detach(), value.detach())
        grad = torch.autograd.grad(ours * 3, layout)[0]
        assert grad.stride() == layout.stride()
        close(grad, wanted)


def make_truth() -> assign.Truth:
    low = torch.rand(40, 2) * 100
    corners = torch.cat((low, low + torch.rand(40, 2) * 60), 1)
    index, live = torch.randint(0, 3, (40,)), torch.rand(40) < 0.8
    return assign.Truth(corners, torch.randint(0, 5, (40,)), index, live)


def box_terms() -> None:
    """Boxes, both sums and their gradient, with and without bins, in both layouts."""
    setattr(fused_loss, "libdevice", NumpyMath)  # noqa: B010 (a type checker refuses it)
    grid = make_anchors(128, (8, 16, 32))
    truth, anchors = make_truth(), len(grid[0])
    row = torch.randint(0, 40, (3, anchors))
    weight = torch.rand(3, anchors) * (torch.rand(3, anchors) < 0.1)
    weight[1] = 0
    for reg_max in (16, 1):
        raw = (torch.randn(3, 4 * reg_max, anchors) + 1).requires_grad_()
        inner = raw.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        assigned = assign.Assignment(row, weight)
        results = []
        for terms, layout in ((loss.TORCH_TERMS, raw), (FUSED, raw), (FUSED, inner)):
            sums = terms.boxes(layout, assigned, truth.boxes, (grid, reg_max, 128))
            grad = torch.autograd.grad((sums * torch.tensor([7.5, 1.5])).sum(), layout)[0]
            assert grad.stride() == layout.stride()
            boxes = terms.decode(layout, grid, reg_max)
            results.append([boxes, sums.detach(), grad])
        for wanted, *ours in zip(*results, strict=True):
            assert wanted.norm() > 0
            for value in ours:
                close(value, wanted)


def layers() -> None:
    x = torch.randn(2, 48, 9, 11).contiguous(memory_format=torch.channels_last)

    def compute(
        pool: Callable[[Tensor], Tensor], cat: Callable[..., Tensor], split: Callable[..., Any]
    ) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        first, second = split(leaf, (16, 32))
        y = cat(second, pool(leaf), leaf[:, :5], first, pool(pool(leaf)))
        weight = torch.linspace(-1, 1, y.numel()).view_as(y)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaf)]

    wanted = compute(
        lambda t: nn.functional.max_pool2d(t, 5, 1, 2),
        lambda *parts: torch.cat(parts, 1),
        lambda t, widths: t.split(widths, 1),
    )
    ours = compute(
        lambda t: fused_layers.max_pool(t, 5), fused_layers.concatenate, fused_layers.split
    )
    assert torch.equal(fused_layers.dense(x[:, 16:]), x[:, 16:].contiguous())
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


def a_claim_of_nothing() -> None:
    """A box that overlaps no prediction claims nothing, so it disputes nothing."""
    points, strides = make_anchors(64, (8, 16, 32))
    boxes = torch.cat((points - strides[:, None], points + strides[:, None]), 1)[None]
    boxes = (
        boxes + torch.randn_like(boxes) * 0.3
    )  # no two alike: topk's choice of equals is its own
    boxes[0, 0] = torch.tensor([40.0, 40.0, 60.0, 60.0])  # far from the box that holds its centre
    corners = torch.tensor([[0.0, 0, 9, 9], [0, 0, 60, 60], [34, 34, 62, 62]])
    truth = assign.Truth(
        corners, torch.zeros(3).long(), torch.zeros(3).long(), torch.ones(3).bool()
    )
    anchors = assign._Anchors(torch.zeros(1, 1, len(points)), boxes, points)
    wanted = assign.assign(*anchors, truth, assign.ONE_TO_MANY, min_side=16)
    row, weight = fused_assign.fused_assign(anchors, truth, 10, False, 16)
    learns = wanted.weight > 0
    close(weight, wanted.weight)
    assert torch.equal(row[learns], wanted.row[learns])


def assignment() -> None:
    """Rows and weights, for both rules, also of predictions that are no boxes."""
    setattr(fused_assign, "libdevice", NumpyMath)  # noqa: B010 (a type checker refuses it)
    a_claim_of_nothing()
    points, strides = make_anchors(128, (8, 16, 32))
    scores, truth = torch.randn(3, 5, len(points)), make_truth()
    for distances in (torch.rand(3, 4, len(points)) * 4, torch.randn(3, 4, len(points)) * 2):
        boxes = boxes_from_distances(distances, points, strides)
        anchors = assign._Anchors(scores, boxes, points)
        for rule in (assign.ONE_TO_MANY, assign.ONE_TO_ONE):
            wanted = assign.assign(*anchors, truth, rule, min_side=16)
            for small in (32, 1024):  # with the first some boxes take the kernel for large ones
                setattr(fused_assign, "SMALL", small)  # noqa: B010 (as above)
                row, weight = fused_assign.fused_assign(anchors, truth, rule.topk, rule.single, 16)
                learns = wanted.weight > 0
                assert learns.sum() > 10
                close(weight, wanted.weight)
                assert torch.equal(row[learns], wanted.row[learns])


FUSED = loss._fused_terms()


def resize() -> None:
    from yolo_ray.augment.fused_resize import resize_photos

    rng, side = np.random.default_rng(0), 32
    for shape in ((32, 20), (9, 5), (61, 77), (40, 40), (100, 31), (31, 32)):
        photo = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
        resized = resize_photo(photo, side)
        height, width = resized.shape[:2]
        first = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        out = resize_photos([torch.from_numpy(first), torch.from_numpy(photo)], side)[1].numpy()
        gap = np.abs(out[:height, :width].astype(int) - resized).max()
        assert gap <= (0 if shape[0] == 32 or shape[1] == 32 else 1), (shape, gap)
        assert (out[height:] == 114).all() and (out[:, width:] == 114).all()


PARTS = (pixels, norm, class_loss, box_terms, layers, assignment, resize)
CHECKS = {part.__name__: part for part in PARTS}

if __name__ == "__main__":
    torch.manual_seed(0)
    CHECKS[sys.argv[1]]()
    print("equal")
