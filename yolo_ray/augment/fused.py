"""``device.augment`` in one Triton kernel, pixel for pixel the same; needs a GPU.

Legend: b photos, S their side, S' that of the images, R photos a row in the ring.
Every operation is the one that device.py does, rounded the same way: division is IEEE division, and
the compiler may not fuse a product and a sum.
"""

# Kernels are Triton's language: their values and launches have no Python types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from yolo_ray.data.batch import Batch

BLOCK = 256  # output pixels of one program
# Adding and taking away 1.5 * 2^23 rounds a float32 below 2^22 to the nearest whole number, ties to
# even.
ROUNDER = tl.constexpr(12582912.0)


def fused_images(batch: Batch, dtype: torch.dtype, channels: int) -> Tensor:
    """The augmented images in 0..1, [b,channels,S',S'] of ``dtype``, channels last in memory.

    ``channels`` is 3, or a larger power of two: the rest is zero.
    """
    side, rows = batch.side, len(batch.picks)
    images = torch.empty((rows, side, side, channels), dtype=dtype, device=batch.photos.device)
    _images_kernel[(triton.cdiv(side * side, BLOCK), rows)](
        images,
        batch.photos,
        batch.picks,
        batch.origins,
        batch.extents,
        batch.centre,
        batch.canvas,
        batch.inverse,
        batch.hsv,
        batch.mix,
        IMAGES=batch.picks.shape[1] // 4,
        PHOTO=batch.photos.shape[-1],
        SIDE=side,
        CHANNELS=channels,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    return images.permute(0, 3, 1, 2)


@triton.jit
def _rounded(value):
    return (value + ROUNDER) - ROUNDER


@triton.jit
def _positions(line, x, y, PHOTO: tl.constexpr):
    """Lower neighbour on one canvas axis (whole float32) and the 256ths beyond it."""
    place = tl.load(line) * x + (tl.load(line + 1) * y + tl.load(line + 2))
    place = tl.minimum(tl.maximum(place * 256.0, -512.0), (2 * PHOTO + 1) * 256.0)
    place = _rounded(place)
    low = tl.floor(place * 0.00390625)
    return low, place - low * 256.0


@triton.jit
def _neighbour(  # noqa: PLR0913 (a kernel's tensors are plain arguments)
    row, x, y, picks, origins, extents, centre, canvas, PHOTO: tl.constexpr
):
    """Offset of a canvas position in the ring's first channel, and whether a photo lies there."""
    right = x >= tl.load(centre + row * 2)
    below = y >= tl.load(centre + row * 2 + 1)
    quadrant = row * 4 + below.to(tl.int32) * 2 + right.to(tl.int32)
    column = x - tl.load(origins + quadrant * 2)
    line = y - tl.load(origins + quadrant * 2 + 1)
    size = tl.load(canvas + row)
    there = (x >= 0) & (x < size) & (y >= 0) & (y < size) & (column >= 0) & (line >= 0)
    there &= column < tl.load(extents + quadrant * 2)
    there &= line < tl.load(extents + quadrant * 2 + 1)
    photo = tl.load(picks + quadrant).to(tl.int64) * (3 * PHOTO * PHOTO)
    return photo + line.to(tl.int32) * PHOTO + column.to(tl.int32), there


@triton.jit
def _composed(  # noqa: PLR0913 (as above)
    image,
    x,
    y,
    inside,
    photos,
    picks,
    origins,
    extents,
    centre,
    canvas,
    inverse,
    PHOTO: tl.constexpr,
):
    """Whole levels of the pixels (x, y) of one image; those not ``inside`` read no photo."""
    low_x, after_x = _positions(inverse + image * 6, x, y, PHOTO)
    low_y, after_y = _positions(inverse + image * 6 + 3, x, y, PHOTO)
    covered = tl.zeros(x.shape, tl.float32)
    red = tl.zeros(x.shape, tl.float32)
    green = tl.zeros(x.shape, tl.float32)
    blue = tl.zeros(x.shape, tl.float32)
    for corner in tl.static_range(4):
        # Branches on the corner are taken when the kernel is compiled.
        offset, there = _neighbour(
            image, low_x + corner % 2, low_y + corner // 2,
            picks, origins, extents, centre, canvas, PHOTO,
        )  # fmt: skip
        weight_x = after_x if corner % 2 == 1 else 256.0 - after_x
        weight_y = after_y if corner // 2 == 1 else 256.0 - after_y
        weight = tl.where(there, weight_x * weight_y, 0.0)
        there &= inside & (weight > 0)
        covered += weight
        red += weight * tl.load(photos + offset, there, 0).to(tl.float32)
        green += weight * tl.load(photos + offset + PHOTO * PHOTO, there, 0).to(tl.float32)
        blue += weight * tl.load(photos + offset + 2 * PHOTO * PHOTO, there, 0).to(tl.float32)
    gray = (65536.0 - covered) * 114.0
    red = _rounded((red + gray) * 0.0000152587890625)
    green = _rounded((green + gray) * 0.0000152587890625)
    blue = _rounded((blue + gray) * 0.0000152587890625)
    return red, green, blue


@triton.jit
def _divided(part, whole, scale: tl.constexpr):
    """``scale * part / whole`` in OpenCV's steps of 1/4096; 0 for 0 / 0."""
    reciprocal = tl.div_rn(tl.full(whole.shape, 1.0, tl.float32), tl.maximum(whole, 1.0))
    return tl.floor((_rounded(reciprocal * (scale * 4096.0)) * part + 2048.0) * 0.000244140625)


@triton.jit
def _coloured(share, full, low):
    return tl.floor(tl.minimum(tl.maximum(share, 0.0), 1.0) * full + low)


@triton.jit
def _recoloured(red, green, blue, turn, saturate, brighten):
    value = tl.maximum(tl.maximum(red, green), blue)
    spread = value - tl.minimum(tl.minimum(red, green), blue)
    saturation = _divided(spread, value, 255.0)
    is_red, is_green = value == red, value == green
    apart = tl.where(is_red, green - blue, tl.where(is_green, blue - red, red - green))
    angle = tl.where(is_red, 0.0, tl.where(is_green, 2.0, 4.0))
    hue = _divided(apart + angle * spread, spread, 30.0)
    hue = (hue + turn * 180.0) + 180.0
    turns = tl.floor(tl.div_rn(hue, tl.full(hue.shape, 180.0, tl.float32)))
    hue = tl.floor(hue - turns * 180.0)
    hue = tl.div_rn(hue, tl.full(hue.shape, 30.0, tl.float32))
    saturation = tl.floor(tl.minimum(tl.maximum(saturation * saturate, 0.0), 255.0))
    saturation = tl.div_rn(saturation, tl.full(hue.shape, 255.0, tl.float32))
    value = tl.floor(tl.minimum(tl.maximum(value * brighten, 0.0), 255.0))
    full = value * saturation
    low = (value - full) + 0.00006103515625  # device.ROUNDING_ERROR
    same = (turn == 0.0) & (saturate == 1.0) & (brighten == 1.0)
    new_red = _coloured(tl.abs(hue - 3.0) - 1.0, full, low)
    new_green = _coloured(2.0 - tl.abs(hue - 2.0), full, low)
    new_blue = _coloured(2.0 - tl.abs(hue - 4.0), full, low)
    return (
        tl.where(same, red, new_red),
        tl.where(same, green, new_green),
        tl.where(same, blue, new_blue),
    )


@triton.jit
def _images_kernel(  # noqa: PLR0913 (as above)
    images,
    photos,
    picks,
    origins,
    extents,
    centre,
    canvas,
    inverse,
    hsv,
    mix,
    IMAGES: tl.constexpr,
    PHOTO: tl.constexpr,
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < SIDE * SIDE
    x, y = (pixel % SIDE).to(tl.float32), (pixel // SIDE).to(tl.float32)
    red, green, blue = _composed(
        row * IMAGES, x, y, inside,
        photos, picks, origins, extents, centre, canvas, inverse, PHOTO,
    )  # fmt: skip
    if IMAGES == 2:
        own = tl.load(mix + row)
        other = 4096.0 - own
        # A row that is not mixed reads nothing of its second image.
        red_2, green_2, blue_2 = _composed(
            row * 2 + 1, x, y, pixel < tl.where(other > 0, SIDE * SIDE, 0),
            photos, picks, origins, extents, centre, canvas, inverse, PHOTO,
        )  # fmt: skip
        red = tl.floor((red * own + red_2 * other) * 0.000244140625)
        green = tl.floor((green * own + green_2 * other) * 0.000244140625)
        blue = tl.floor((blue * own + blue_2 * other) * 0.000244140625)
    turn = tl.load(hsv + row * 3)
    red, green, blue = _recoloured(
        red, green, blue, turn, tl.load(hsv + row * 3 + 1), tl.load(hsv + row * 3 + 2)
    )
    scale = tl.full((BLOCK,), 255.0, tl.float32)
    red, green, blue = tl.div_rn(red, scale), tl.div_rn(green, scale), tl.div_rn(blue, scale)
    place = images + (row.to(tl.int64) * (SIDE * SIDE) + pixel) * CHANNELS
    kind = images.dtype.element_ty
    if CHANNELS == 3:
        tl.store(place, red.to(kind), inside)
        tl.store(place + 1, green.to(kind), inside)
        tl.store(place + 2, blue.to(kind), inside)
    else:
        c = tl.arange(0, CHANNELS)[None, :]
        value = tl.where(c == 0, red[:, None], tl.where(c == 1, green[:, None], blue[:, None]))
        value = tl.where(c < 3, value, 0.0).to(kind)
        tl.store(place[:, None] + c, value, inside[:, None])
