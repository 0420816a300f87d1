"""Greedy class-aware suppression of a whole batch by one Triton kernel; needs a GPU.

Legend: b images, N candidates of all images, T candidates of a tile, K kept boxes of a chunk.
One program an image walks through its candidates from the best down and ends when enough are kept, which is
usually long before the last. The overlap is computed as torchvision's CPU kernel does, to the last bit.
"""

# Kernels are Triton's language: their values and launches have no Python types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, CHUNK, WARPS = 512, 8, 8


def suppress_together(
    boxes_N4: Tensor, classes_N: Tensor, counts_b: Tensor, *, iou: float, max_det: int
) -> tuple[Tensor, Tensor]:
    """Which boxes of every image stay: places int64 [b,max_det] in N, and how many int64 [b].

    The candidates of image 0 come first, then those of image 1; those of one image by descending
    score. ``counts_b`` int64 [b, 2]: how many an image has, and how many of them (its best) take
    part. A box goes when a better one of its class overlaps it by more than ``iou``. Places beyond
    the number of an image are 0. Nothing is read on the host.
    """
    images, boxes_N4 = len(counts_b), boxes_N4.contiguous()
    starts_b = counts_b[:, 0].cumsum(0) - counts_b[:, 0]
    picks = torch.zeros(images, max_det, dtype=torch.int64, device=boxes_N4.device)
    kept = torch.zeros(images, dtype=torch.int64, device=boxes_N4.device)
    _greedy_kernel[(images,)](
        boxes_N4, classes_N, starts_b, counts_b, picks, kept, max_det, _rounded_down(iou),
        T=TILE, K=CHUNK, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return picks, kept


def _rounded_down(value: float) -> float:
    """The largest float32 up to ``value``: no float32 lies between, so comparing with either is the same."""
    near = np.float32(value)
    return float(near if float(near) <= value else np.nextafter(near, np.float32(-np.inf)))


@triton.jit
def _overlap(left, top, right, bottom, area, left2, top2, right2, bottom2, area2):  # noqa: PLR0913
    width = tl.maximum(tl.minimum(right, right2) - tl.maximum(left, left2), 0.0)
    height = tl.maximum(tl.minimum(bottom, bottom2) - tl.maximum(top, top2), 0.0)
    shared = width * height
    return tl.div_rn(shared, area + area2 - shared)


@triton.jit
def _greedy_kernel(  # noqa: PLR0913 (a kernel's tensors are plain arguments)
    boxes, classes, starts, counts, picks, kept, max_det, iou, T: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    image = tl.program_id(0)
    start = tl.load(starts + image)
    count = tl.load(counts + 2 * image + 1).to(tl.int32)
    out = picks + image.to(tl.int64) * max_det
    lane, slot = tl.arange(0, T), tl.arange(0, K)
    found = 0
    tile = 0
    while (tile < count) & (found < max_det):
        row = start + tile + lane
        live = tile + lane < count
        left = tl.load(boxes + 4 * row, live, 0.0)
        top = tl.load(boxes + 4 * row + 1, live, 0.0)
        right = tl.load(boxes + 4 * row + 2, live, 0.0)
        bottom = tl.load(boxes + 4 * row + 3, live, 0.0)
        kind = tl.load(classes + row, live, -1)
        area = (right - left) * (bottom - top)
        chunk = 0
        while chunk < found:  # what the boxes kept in earlier tiles drive out
            there = chunk + slot < found
            pick = tl.load(out + chunk + slot, there, 0)
            left2 = tl.load(boxes + 4 * pick, there, 0.0)[:, None]
            top2 = tl.load(boxes + 4 * pick + 1, there, 0.0)[:, None]
            right2 = tl.load(boxes + 4 * pick + 2, there, 0.0)[:, None]
            bottom2 = tl.load(boxes + 4 * pick + 3, there, 0.0)[:, None]
            kind2 = tl.load(classes + pick, there, -2)[:, None]
            area2 = (right2 - left2) * (bottom2 - top2)
            share = _overlap(
                left[None, :], top[None, :], right[None, :], bottom[None, :], area[None, :],
                left2, top2, right2, bottom2, area2,
            )  # fmt: skip
            gone = (share > iou) & (kind[None, :] == kind2)
            live = live & (tl.max(gone.to(tl.int32), 0) == 0)
            chunk += K
        best = tl.min(tl.where(live, lane, T), 0)
        while (best < T) & (found < max_det):  # the best that is left stays, and drives out others
            pick = start + tile + best
            tl.store(out + found, pick)
            found += 1
            left2 = tl.load(boxes + 4 * pick)
            top2 = tl.load(boxes + 4 * pick + 1)
            right2 = tl.load(boxes + 4 * pick + 2)
            bottom2 = tl.load(boxes + 4 * pick + 3)
            kind2 = tl.load(classes + pick)
            area2 = (right2 - left2) * (bottom2 - top2)
            share = _overlap(
                left, top, right, bottom, area, left2, top2, right2, bottom2, area2
            )  # fmt: skip
            gone = (share > iou) & (kind == kind2)
            live = live & (gone == 0) & (lane > best)
            best = tl.min(tl.where(live, lane, T), 0)
        tl.debug_barrier()  # one thread wrote the picks, all read them in the next tile
        tile += T
    tl.store(kept + image, found)
