"""Anchor grids, box decoding and complete IoU: pure functions of tensors.

Shapes: B images, A anchors (all levels, finest first, row by row), C classes, R = reg_max bins,
D = 4 * R raw distances. Boxes are xyxy in pixels of the network's input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-7


class HeadOutput(NamedTuple):
    """Raw output of one head: ``boxes`` [B, 4*reg_max, A] and ``scores`` [B, C, A] (logits)."""

    boxes: Tensor
    scores: Tensor


def make_anchors(
    imgsz: int,
    strides: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Centres of all grid cells in PIXELS [A,2] (x, y) and their strides [A] in pixels.

    Made on the device without a copy from the host, so it may stand inside a captured graph.
    """
    points, sizes = [], []
    for stride in strides:
        side = imgsz // stride
        centre = (torch.arange(side, device=device, dtype=dtype) + 0.5) * stride
        grid_y, grid_x = torch.meshgrid(centre, centre, indexing="ij")
        points.append(torch.stack((grid_x, grid_y), -1).view(-1, 2))
        sizes.append(torch.full((side * side,), float(stride), device=device, dtype=dtype))
    return torch.cat(points), torch.cat(sizes)


def expected_distances(boxes_BDA: Tensor, reg_max: int) -> Tensor:
    """Distances left, top, right, bottom in STRIDES, [B,4,A].

    With reg_max > 1 the expectation of a distribution over 0 ... reg_max - 1 (Generalized Focal
    Loss, arXiv 2006.04388); with reg_max 1 the raw value, as in YOLO26.
    """
    if reg_max == 1:
        return boxes_BDA
    batch, _, anchors = boxes_BDA.shape
    share = boxes_BDA.reshape(batch, 4, reg_max, anchors).softmax(2)
    # A product and a sum, not a matmul: TF32 would round the bins.
    bins = torch.arange(reg_max, device=share.device, dtype=share.dtype)
    return (share * bins[:, None]).sum(2)


def boxes_from_distances(distances_B4A: Tensor, points_A2: Tensor, strides_A: Tensor) -> Tensor:
    """Boxes xyxy px [B,A,4] from distances in strides; a view of memory laid out [B,4,A]."""
    reach = distances_B4A * strides_A
    points_2A = points_A2.T
    return torch.cat((points_2A - reach[:, :2], points_2A + reach[:, 2:]), 1).movedim(1, 2)


def distances_from_boxes(boxes_BA4: Tensor, points_A2: Tensor, strides_A: Tensor) -> Tensor:
    """Distances left, top, right, bottom in strides [B,4,A] of boxes xyxy px [B,A,4]."""
    low = points_A2 - boxes_BA4[..., :2]
    high = boxes_BA4[..., 2:] - points_A2
    return (torch.cat((low, high), -1) / strides_A[:, None]).movedim(2, 1)


def decode_boxes(boxes_BDA: Tensor, points_A2: Tensor, strides_A: Tensor, reg_max: int) -> Tensor:
    """Boxes xyxy px [B,A,4] of a head's raw ``boxes`` [B, 4*reg_max, A]."""
    return boxes_from_distances(expected_distances(boxes_BDA, reg_max), points_A2, strides_A)


def dfl_loss(boxes_BDA: Tensor, target_B4A: Tensor, reg_max: int) -> Tensor:
    """Distribution focal loss of every anchor, mean of its four sides, [B,A].

    ``target_B4A`` are distances in strides. Cross-entropy against the two bins next to the target,
    weighted by nearness (Generalized Focal Loss, arXiv 2006.04388, equation 6). The weights add up
    to one, so the loss is logsumexp(x) - sum(weight * x) and needs no gather.
    """
    batch, _, anchors = boxes_BDA.shape
    logits = boxes_BDA.reshape(batch, 4, reg_max, anchors)
    target = target_B4A.clamp(0, reg_max - 1 - 0.01).unsqueeze(2)
    bins = torch.arange(reg_max, device=logits.device, dtype=logits.dtype)
    nearness = functional.relu(1 - (bins[:, None] - target).abs())
    return (logits.logsumexp(2) - (logits * nearness).sum(2)).mean(1)


def ciou(first: Tensor, second: Tensor) -> Tensor:
    """Complete IoU of boxes xyxy [..., 4], broadcast against each other, without the last axis.

    IoU - centre distance^2 / enclosing diagonal^2 - alpha * v, alpha without gradient
    (Distance-IoU Loss, arXiv 1911.08287).
    """
    left1, top1, right1, bottom1 = first.unbind(-1)
    left2, top2, right2, bottom2 = second.unbind(-1)
    width1, height1 = right1 - left1, bottom1 - top1 + EPS
    width2, height2 = right2 - left2, bottom2 - top2 + EPS
    shared_width = (torch.minimum(right1, right2) - torch.maximum(left1, left2)).clamp(min=0)
    shared_height = (torch.minimum(bottom1, bottom2) - torch.maximum(top1, top2)).clamp(min=0)
    shared = shared_width * shared_height
    iou = shared / (width1 * height1 + width2 * height2 - shared + EPS)

    hull_width = torch.maximum(right1, right2) - torch.minimum(left1, left2)
    hull_height = torch.maximum(bottom1, bottom2) - torch.minimum(top1, top2)
    diagonal2 = hull_width.square() + hull_height.square() + EPS
    centre2 = (left2 + right2 - left1 - right1).square() + (
        top2 + bottom2 - top1 - bottom1
    ).square()
    shape = (width2 / height2).atan() - (width1 / height1).atan()
    v = (4 / math.pi**2) * shape.square()
    with torch.no_grad():
        alpha = v / (1 - iou + v + EPS)
    return iou - (centre2 / (4 * diagonal2) + alpha * v)
