"""Augmentation on the device: pure functions of tensors, fixed shapes, no host reads.

b photos of a batch, S their side, S' that of the images made of them, R photos a row in the ring,
K = 2S the side of the largest canvas.

Every number that decides a pixel is either one correctly rounded operation or an exact integer, so
the pixels are the same to the bit however the rows are spread over workers, threads or devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from yolo_ray.data.batch import GRAY, Batch
from yolo_ray.data.plan import MIX_STEPS

SUBPIXELS = (
    256  # positions are rounded to 1/256 px: weights are whole numbers, their sums exact in float32
)
MARGIN = 2  # canvas positions run from -2 to K + 2; what lies beyond reads the same gray
# OpenCV cuts colours off when it turns them back to RGB; a level is then whole or at least 1/7650
# off, so this keeps float32's own error (3e-5) from costing one level.
ROUNDING_ERROR = 2.0**-14
HUE_TURN = 180.0  # OpenCV's hue of one turn, for 8-bit images


class Scene(NamedTuple):
    """What n images are composed of."""

    photos: Tensor  # uint8 [R*b,3,S,S], each with the resized photo at its top left
    picks: Tensor  # int64 [n,4] row of ``photos`` in each quadrant
    origins: Tensor  # [n,4,2] canvas xy of the photos' top-left corners, whole numbers
    extents: Tensor  # [n,4,2] (w,h) of the photos in pixels
    centre: Tensor  # [n,2] canvas xy where the quadrants meet
    canvas: Tensor  # [n] side of each canvas
    inverse: Tensor  # [n,2,3] output pixel -> canvas pixel


def augment(batch: Batch) -> Tensor:
    """The batch's images, composed and recoloured: float32 [b,3,S',S'], whole numbers in 0..255."""
    scene = Scene(
        batch.photos,
        batch.picks.reshape(-1, 4),
        batch.origins.reshape(-1, 4, 2),
        batch.extents.reshape(-1, 4, 2),
        batch.centre.reshape(-1, 2),
        batch.canvas.reshape(-1),
        batch.inverse.reshape(-1, 2, 3),
    )
    images = compose(scene, batch.side)
    if len(images) > len(batch.hsv):
        images = mix(images, batch.mix)
    return hsv(images, batch.hsv)


def normalised(batch: Batch, dtype: torch.dtype, channels: int = 3) -> Tensor:
    """The batch's images as the network wants them: [b,channels,S',S'] in 0..1.

    On a GPU one kernel does it all, with the same pixels, and the memory is channels last; there
    ``channels`` may be a larger power of two, and the rest is zero.
    """
    if batch.photos.is_cuda:
        from yolo_ray.augment.fused import fused_images  # Triton comes with torch for GPUs only

        return fused_images(batch, dtype, channels)
    assert channels == 3
    return (augment(batch) / 255).to(dtype)


def compose(scene: Scene, side: int) -> Tensor:
    """Mosaic (or letterbox), affine and flip by one bilinear gather; outside every photo is 114.

    An output pixel lies at ``inverse @ (x, y, 1)`` of the canvas (integer pixel coordinates, as
    cv2.warpAffine). Each of its 4 neighbours there belongs to one quadrant, whose photo it reads.

    Returns:
        float32 [n,3,S',S'] with S' = ``side``, whole numbers in 0..255.
    """
    photos, rows = scene.photos, len(scene.picks)
    columns, lines = _offset_tables(scene)
    images = torch.empty((rows, 3, side, side), device=photos.device)
    flat, last = photos.reshape(-1), 2 * photos.shape[-1] + 1
    length = columns.shape[-1]
    starts = torch.arange(rows, device=photos.device, dtype=torch.int32) * (2 * length) + MARGIN
    for part in _parts(rows, photos.device):
        x, weight_x = _neighbours(scene.inverse[part, 0], side, last)
        y, weight_y = _neighbours(scene.inverse[part, 1], side, last)
        start = starts[part, None, None]
        half_x, half_y = scene.centre[part, None, None].to(torch.int32).unbind(-1)
        by_side = [start + (x_i >= half_x) * length for x_i in x]
        by_half = [start + (y_j >= half_y) * length for y_j in y]
        covered = torch.zeros_like(weight_x[0])
        planes = images[part].zero_()
        for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)):
            offset = _look_up(columns, by_half[j] + x[i]) + _look_up(lines, by_side[i] + y[j])
            weight = weight_x[i] * weight_y[j] * (offset >= 0)
            covered += weight
            _add_photo(planes, flat, offset.clamp_(min=0), weight, photos.shape[-1] ** 2)
        planes += ((SUBPIXELS**2 - covered) * GRAY)[:, None]
        planes.div_(SUBPIXELS**2).round_()
    return images


def mix(images: Tensor, weights: Tensor) -> Tensor:
    """Mixup (arXiv 1710.09412): blend the two images of each row, cut off to whole levels.

    Args:
        images: float32 [2b,3,S',S'], a row's own image and its second one in turn, whole numbers in 0..255.
        weights: [b] of the own image, whole 4096ths: every product and sum is exact.

    Returns:
        float32 [b,3,S',S'], whole numbers in 0..255.
    """
    own, second = images.view(len(weights), 2, *images.shape[1:]).unbind(1)
    weight = weights[:, None, None, None]
    return (own * weight).add_(second * (MIX_STEPS - weight)).div_(MIX_STEPS).floor_()


def hsv(images: Tensor, gains: Tensor) -> Tensor:
    """Turn the hue, scale saturation and value, in the 8-bit steps of OpenCV with look-up tables.

    Args:
        images: float32 [b,3,S,S] RGB, whole numbers in 0..255.
        gains: [b,3] hue turn (1 is a full circle), saturation factor, value factor. A row of
            exactly (0, 1, 1) leaves its image as it is.

    Returns:
        float32 [b,3,S,S], whole numbers in 0..255.
    """
    recoloured = torch.empty_like(images)
    for part in _parts(len(images), images.device):
        _recolour(images[part], gains[part, :, None, None], recoloured[part])
    return recoloured


def _parts(rows: int, device: torch.device) -> list[slice]:
    """All rows at once; on a CPU one at a time, whose intermediate planes stay in the cache."""
    size = 1 if device.type == "cpu" else rows
    return [slice(start, start + size) for start in range(0, rows, size)]


def _neighbours(inverse: Tensor, side: int, last: int) -> tuple[list[Tensor], list[Tensor]]:
    """The two canvas positions on one axis around every output pixel, and their weights.

    Args:
        inverse: [n,3] this axis' line of the output -> canvas matrix.
        side: S'.
        last: positions beyond it read the same as it does.

    Returns:
        two int32 [n,S',S'] positions and two float32 [n,S',S'] whole weights that add up to SUBPIXELS.
    """
    pixel = torch.arange(side, device=inverse.device, dtype=torch.float32)
    along_x, along_y, shift = (c[:, None] for c in inverse.unbind(1))
    place = (along_x * pixel)[:, None, :] + (along_y * pixel + shift)[:, :, None]
    place = place.mul_(SUBPIXELS).clamp_(-MARGIN * SUBPIXELS, last * SUBPIXELS).round_()
    low = (place / SUBPIXELS).floor_()
    after = place - low * SUBPIXELS
    low = low.to(torch.int32)
    return [low, low + 1], [SUBPIXELS - after, after]


def _offset_tables(scene: Scene) -> tuple[Tensor, Tensor]:
    """Offsets into the flat ring by canvas column and by line; far below zero outside the photo.

    Canvas pixel (x, y) is ``columns[b, is_below, x] + lines[b, is_right, y]``: which photo a column
    reads depends on whether the line lies below the centre, and the other way round.

    Returns:
        columns and lines, integers [b,2,2S+5], for positions -MARGIN ... 2S + MARGIN.
    """
    photos, picks, origins, extents, centre, canvas, _ = scene
    side = photos.shape[-1]
    # Two OUTSIDE must fit the type, and one must outweigh every offset.
    small = photos.numel() < 2**30
    dtype, outside = (torch.int32, -(2**30)) if small else (torch.int64, -(2**60))
    place = torch.arange(-MARGIN, 2 * side + MARGIN + 1, device=picks.device, dtype=torch.float32)
    on_canvas = ((place >= 0) & (place < canvas[:, None]))[:, None]  # [b,1,L]
    tables = []
    for axis in (0, 1):
        # [b, below, right] for columns; lines see the same quadrants as [b, right, below].
        origin, extent, pick = (
            t.reshape(-1, 2, 2) if axis == 0 else t.reshape(-1, 2, 2).transpose(1, 2)
            for t in (origins[..., axis], extents[..., axis], picks)
        )
        after = (place >= centre[:, axis, None])[:, None]  # [b,1,L]
        inside = place - _choose(after, origin)
        valid = on_canvas & (inside >= 0) & (inside < _choose(after, extent))
        offset = inside.to(dtype)
        if axis == 1:
            offset = offset * side + _choose(after, pick).to(dtype) * (3 * side * side)
        tables.append(offset.masked_fill(~valid, outside))
    return tables[0], tables[1]


def _choose(after: Tensor, pair: Tensor) -> Tensor:
    """``pair[..., 1]`` where ``after``, else ``pair[..., 0]``: [b,1,L] and [b,2,2] -> [b,2,L]."""
    return torch.where(after, pair[..., 1:], pair[..., :1])


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    return table.reshape(-1).index_select(0, index.reshape(-1)).view(index.shape)


def _add_photo(planes: Tensor, flat: Tensor, offset: Tensor, weight: Tensor, area: int) -> None:
    """Add the weighted pixels at ``offset`` [n,S',S'] (of the first channel) to planes [n,3,S',S'].

    ``area`` is that of a photo's channel, S * S.
    """
    for channel in range(3):
        pixels = _look_up(flat[channel * area :], offset)
        planes[:, channel].addcmul_(weight, pixels.to(torch.float32))


def _recolour(images: Tensor, gains: Tensor, out: Tensor) -> None:
    """HSV of [n,3,S,S] by the hexcone model (Smith, 1978) into ``out``; gains [n,3,1,1]."""
    red, green, blue = images.unbind(1)
    hue, saturation, value = _to_hsv(red, green, blue)
    hue = (hue + gains[:, 0] * HUE_TURN).add_(HUE_TURN)  # the gain is at least -1: no negative hue
    hue = hue.sub_((hue / HUE_TURN).floor_().mul_(HUE_TURN)).floor_().div_(HUE_TURN / 6)
    saturation = saturation.mul_(gains[:, 1]).clamp_(0, 255).floor_().div_(255)
    value = (value * gains[:, 2]).clamp_(0, 255).floor_()
    full = value * saturation
    low = value - full + ROUNDING_ERROR
    # How much of the pure hue each channel holds, from the distance to its own angle.
    shares = (
        (hue - 3).abs_().sub_(1),
        2 - (hue - 2).abs_(),
        2 - (hue - 4).abs_(),
    )
    unchanged = (gains[:, 0] == 0) & (gains[:, 1] == 1) & (gains[:, 2] == 1)
    for channel, share in enumerate(shares):
        colour = share.clamp_(0, 1).mul_(full).add_(low).floor_()
        out[:, channel] = torch.where(unchanged, images[:, channel], colour)


def _to_hsv(red: Tensor, green: Tensor, blue: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue 0..180, saturation and value 0..255, rounded to whole numbers as OpenCV's 8-bit ones."""
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    saturation = _divide(spread, value, 255)
    is_red, is_green = value == red, value == green
    apart = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    angle = (4.0 - 2.0 * is_green) * ~is_red  # of the strongest colour, in sixths of a turn
    hue = _divide(apart.add_(angle.mul_(spread)), spread, HUE_TURN / 6)
    return hue, saturation, value


def _divide(part: Tensor, whole: Tensor, scale: float) -> Tensor:
    """``scale * part / whole`` rounded as OpenCV does, by a reciprocal in 1/4096; 0 for 0 / 0.

    All products are whole numbers below 2^24, exact in float32.
    """
    reciprocal = (scale * 4096 / whole.clamp(min=1)).round_()
    return reciprocal.mul_(part).add_(2048).div_(4096).floor_()
