"""Photos of many sizes resized into one tensor by one Triton kernel; needs a GPU.

Bilinear as ``images.resize_photo`` (OpenCV's INTER_LINEAR: centres of pixels, no antialiasing); OpenCV rounds its
weights to 1/2048, so a level may differ by one. b photos, S the side of the tensor.
"""

# Kernels are Triton's language: their values and launches have no Python types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from yolo_ray.augment.images import PAD_VALUE, resized_size

BLOCK = 256  # output pixels of one program


def resize_photos(photos: Sequence[Tensor], imgsz: int) -> Tensor:
    """Photos uint8 [h,w,3] on the device -> uint8 [b,S,S,3], each resized at the top left of gray.

    The longest side becomes S = ``imgsz``; a photo that has that size keeps its pixels.
    """
    photos = [photo.contiguous() for photo in photos]
    sizes = [(*photo.shape[:2], *resized_size(*photo.shape[:2], imgsz)) for photo in photos]
    device = photos[0].device
    rows = [[photo.data_ptr(), *map(int, size)] for photo, size in zip(photos, sizes, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    out = torch.empty((len(photos), imgsz, imgsz, 3), dtype=torch.uint8, device=device)
    _resize_kernel[(triton.cdiv(imgsz * imgsz, BLOCK), len(photos))](
        out, table, SIDE=imgsz, GRAY=PAD_VALUE, BLOCK=BLOCK, enable_fp_fusion=False
    )
    return out


@triton.jit
def _line(place, length, new_length):
    """Lower neighbour of output positions on one axis, the upper one, and the weight of the latter."""
    ratio = length.to(tl.float32) / new_length.to(tl.float32)
    source = (place.to(tl.float32) + 0.5) * ratio - 0.5
    source = tl.minimum(tl.maximum(source, 0.0), (length - 1).to(tl.float32))
    low = tl.floor(source)
    first = low.to(tl.int64)
    return first, tl.minimum(first + 1, length - 1), source - low


@triton.jit
def _resize_kernel(out, table, SIDE: tl.constexpr, GRAY: tl.constexpr, BLOCK: tl.constexpr):
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = table + image * 5
    photo = tl.load(row).to(tl.pointer_type(tl.uint8))
    height, width = tl.load(row + 1), tl.load(row + 2)
    new_height, new_width = tl.load(row + 3), tl.load(row + 4)
    y, x = pixel // SIDE, pixel % SIDE
    is_inside = (y < new_height) & (x < new_width)
    top, bottom, down = _line(tl.minimum(y, new_height - 1), height, new_height)
    left, right, across = _line(tl.minimum(x, new_width - 1), width, new_width)
    target = out + image * (SIDE * SIDE * 3) + pixel.to(tl.int64) * 3
    for channel in tl.static_range(3):
        a = tl.load(photo + (top * width + left) * 3 + channel).to(tl.float32)
        b = tl.load(photo + (top * width + right) * 3 + channel).to(tl.float32)
        c = tl.load(photo + (bottom * width + left) * 3 + channel).to(tl.float32)
        d = tl.load(photo + (bottom * width + right) * 3 + channel).to(tl.float32)
        upper, lower = a + (b - a) * across, c + (d - c) * across
        level = tl.floor(upper + (lower - upper) * down + 0.5)
        level = tl.where(is_inside, level, GRAY)
        tl.store(target + channel, level.to(tl.uint8), mask=pixel < SIDE * SIDE)
