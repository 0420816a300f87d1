"""Box arithmetic and affine matrices of the plan, vectorised over a whole global batch in float64.

B photos of a batch, 4 quadrants of a mosaic, n boxes, S the square image side. A canvas is the
square that photos lie on before the affine: side 2S with four photos (mosaic), side S with one
(letterbox).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from yolo_ray.augment.images import resized_size

MIN_SIDE_PX = 2.0
MAX_ASPECT = 100.0
MIN_AREA_LEFT = 0.10


@dataclass(frozen=True)
class Layout:
    """Where the photos of a batch lie on their canvases, in canvas pixels."""

    origins: np.ndarray  # [B,4,2] xy of each photo's top-left corner
    extents: np.ndarray  # [B,4,2] (w, h) of each resized photo, 0 for an unused quadrant
    centre: np.ndarray  # [B,2] where the quadrants meet; beyond every canvas without a mosaic
    canvas: np.ndarray  # [B] side of the canvas
    mosaic: np.ndarray  # [B] bool


@dataclass(frozen=True)
class Affine:
    """The random affine of each photo, canvas pixel -> output pixel, and its inverse."""

    forward: np.ndarray  # [B,2,3], flips NOT included
    inverse: np.ndarray  # [B,2,3] output pixel -> canvas pixel, flips folded in
    scale: np.ndarray  # [B] the drawn scale
    flips: np.ndarray  # [B,2] bool: (left-right, up-down)


def resized_extents(sizes: np.ndarray, imgsz: int) -> np.ndarray:
    """(w, h) in px, float64 [...,2], of photos of (h, w) [...,2] after ``resize_photo``."""
    heights, widths = resized_size(sizes[..., 0], sizes[..., 1], imgsz)
    return np.stack([widths, heights], axis=-1).astype(np.float64)


def lay_out(
    extents_B42: np.ndarray, centre_B2: np.ndarray, mosaic_B: np.ndarray, imgsz: int
) -> Layout:
    """Place four unpadded photos around ``centre`` (mosaic), or the first one centred on S x S.

    Quadrants are numbered top-left, top-right, bottom-left, bottom-right. The pad of a centred
    photo is rounded as in Ultralytics' letterbox: an odd pixel goes to the right and the bottom.
    (Ultralytics' training without mosaic centres the photo by its affine, half a pixel off then.)
    """
    corner_is_end_42 = np.array([[1, 1], [0, 1], [1, 0], [0, 0]])
    mosaic_origins_B42 = centre_B2[:, None] - extents_B42 * corner_is_end_42
    single_B42 = extents_B42 * np.array([1, 0, 0, 0])[:, None]
    pad_B42 = np.round((imgsz - single_B42) / 2 - 0.1) * (single_B42 > 0)
    use_mosaic_B11 = mosaic_B[:, None, None]
    return Layout(
        origins=np.where(use_mosaic_B11, mosaic_origins_B42, pad_B42),
        extents=np.where(use_mosaic_B11, extents_B42, single_B42),
        centre=np.where(mosaic_B[:, None], centre_B2, 4.0 * imgsz),
        canvas=np.where(mosaic_B, 2.0 * imgsz, float(imgsz)),
        mosaic=mosaic_B,
    )


def build_affine(
    motion_B6: np.ndarray, flips_B2: np.ndarray, canvas_B: np.ndarray, imgsz: int
) -> Affine:
    """The affine that turns and scales about the canvas' centre, shears, and moves to the output.

    Args:
        motion_B6: angle (degrees, counter-clockwise as seen), scale, shear of x and of y (degrees),
            position of the canvas' centre in the output (x, y as fractions of S).
        flips_B2: bool (left-right, up-down).
        canvas_B: side of each canvas in pixels.
        imgsz: S, side of the output.
    """
    angle_B = np.deg2rad(motion_B6[:, 0])
    scale_B = motion_B6[:, 1]
    shear_B2 = np.tan(np.deg2rad(motion_B6[:, 2:4]))
    cos_B, sin_B = scale_B * np.cos(angle_B), scale_B * np.sin(angle_B)
    # linear = [[1, shear_x], [shear_y, 1]] @ [[cos, sin], [-sin, cos]]
    linear_B22 = np.empty((len(motion_B6), 2, 2))
    linear_B22[:, 0, 0] = cos_B - shear_B2[:, 0] * sin_B
    linear_B22[:, 0, 1] = sin_B + shear_B2[:, 0] * cos_B
    linear_B22[:, 1, 0] = shear_B2[:, 1] * cos_B - sin_B
    linear_B22[:, 1, 1] = shear_B2[:, 1] * sin_B + cos_B
    shift_B2 = motion_B6[:, 4:6] * imgsz - linear_B22.sum(axis=2) * canvas_B[:, None] / 2
    forward_B23 = np.concatenate([linear_B22, shift_B2[:, :, None]], axis=2)
    inverse_B23 = fold_flips(invert(forward_B23), flips_B2, imgsz)
    return Affine(forward_B23, inverse_B23, scale_B, flips_B2)


def invert(affine_B23: np.ndarray) -> np.ndarray:
    """Inverses [B,2,3]; a singular matrix (two shears can cancel) gives a finite one: all zeros."""
    a, b, c, d = (affine_B23[:, i, j] for i in (0, 1) for j in (0, 1))
    determinant_B = a * d - b * c
    factor_B = np.divide(1.0, determinant_B, out=np.zeros_like(a), where=determinant_B != 0)
    linear_B22 = np.stack([d, -b, -c, a], axis=1).reshape(-1, 2, 2) * factor_B[:, None, None]
    shift_B2 = -(linear_B22 * affine_B23[:, None, :, 2]).sum(axis=2)
    return np.concatenate([linear_B22, shift_B2[:, :, None]], axis=2)


def fold_flips(inverse_B23: np.ndarray, flips_B2: np.ndarray, imgsz: int) -> np.ndarray:
    """Read pixel S-1-x instead of x where flipped, so that the device needs one gather only."""
    sign_B12 = np.where(flips_B2, -1.0, 1.0)[:, None, :]
    last_B12 = np.where(flips_B2, imgsz - 1.0, 0.0)[:, None, :]
    folded_B23 = inverse_B23.copy()
    folded_B23[:, :, 2] += (inverse_B23[:, :, :2] * last_B12).sum(axis=2)
    folded_B23[:, :, :2] *= sign_B12
    return folded_B23


def resize_output(
    inverse_B23: np.ndarray, boxes_n4: np.ndarray, imgsz: int, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same output ``side`` px instead of ``imgsz`` px wide: its inverse map and its boxes.

    Pixel x' of the other size shows what lies at (x' + 0.5) * imgsz / side - 0.5 of this one: bilinear
    resizing whose edges meet. Nothing is smoothed when it shrinks, as in Ultralytics.
    """
    if side == imgsz:
        return inverse_B23, boxes_n4
    step = imgsz / side
    resized_B23 = inverse_B23.copy()
    resized_B23[:, :, 2] += inverse_B23[:, :, :2].sum(axis=2) * (step / 2 - 0.5)
    resized_B23[:, :, :2] *= step
    return resized_B23, boxes_n4 * np.float32(side / imgsz)


def transform_boxes(
    fractions_n4: np.ndarray, rows_n: np.ndarray, layout: Layout, affine: Affine, imgsz: int
) -> tuple[np.ndarray, np.ndarray]:
    """Move boxes of the source photos to the output image, clip them and drop what is hardly left.

    Mosaic boxes are first clipped to the canvas (what lies beyond it was never pasted). A box
    survives when both sides exceed 2 px, its aspect ratio stays below 100 and more than a tenth of
    its area (times the drawn scale squared) is left: Ultralytics' criteria.

    Args:
        fractions_n4: xyxy as fractions of the photo.
        rows_n: 4 * slot + quadrant of each box's photo.
        layout, affine: of the batch.
        imgsz: S, side of the output.

    Returns:
        boxes [m,4] float32 xyxy px inside the output, and the indices [m] of the survivors.
    """
    slots_n = rows_n >> 2
    scale_n = affine.scale[slots_n]
    before, low, high = [], [], []  # of x and of y; whole columns, numpy is slow on short rows
    canvas_x = _on_canvas(fractions_n4, rows_n, layout, 0)
    canvas_y = _on_canvas(fractions_n4, rows_n, layout, 1)
    for axis, (start_n, stop_n) in enumerate((canvas_x, canvas_y)):
        by_x_n, by_y_n, shift_n = affine.forward[:, axis].T[:, slots_n]
        ends_x, ends_y = [by_x_n * x for x in canvas_x], [by_y_n * y for y in canvas_y]
        low.append(np.clip(np.minimum(*ends_x) + np.minimum(*ends_y) + shift_n, 0.0, imgsz))
        high.append(np.clip(np.maximum(*ends_x) + np.maximum(*ends_y) + shift_n, 0.0, imgsz))
        before.append((stop_n - start_n) * scale_n)
    alive_n = _survives(before[0], before[1], high[0] - low[0], high[1] - low[1])
    kept_m = np.flatnonzero(alive_n)
    boxes_m4 = np.empty((len(kept_m), 4), np.float32)
    for axis in (0, 1):
        low_m, high_m = low[axis][kept_m], high[axis][kept_m]
        flip_m = affine.flips[slots_n[kept_m], axis]
        boxes_m4[:, axis] = np.where(flip_m, imgsz - high_m, low_m)
        boxes_m4[:, axis + 2] = np.where(flip_m, imgsz - low_m, high_m)
    return boxes_m4, kept_m


def _on_canvas(
    fractions_n4: np.ndarray, rows_n: np.ndarray, layout: Layout, axis: int
) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop [n] of the boxes on one axis of the canvas, clipped to it under a mosaic."""
    extent_n = layout.extents[..., axis].reshape(-1)[rows_n]
    origin_n = layout.origins[..., axis].reshape(-1)[rows_n]
    floor_n = np.where(layout.mosaic, 0.0, -np.inf)[rows_n >> 2]
    limit_n = np.where(layout.mosaic, layout.canvas, np.inf)[rows_n >> 2]
    start_n = np.clip(fractions_n4[:, axis] * extent_n + origin_n, floor_n, limit_n)
    stop_n = np.clip(fractions_n4[:, axis + 2] * extent_n + origin_n, floor_n, limit_n)
    return start_n, stop_n


def _survives(
    before_w_n: np.ndarray, before_h_n: np.ndarray, w_n: np.ndarray, h_n: np.ndarray
) -> np.ndarray:
    shorter_n, longer_n = np.minimum(w_n, h_n), np.maximum(w_n, h_n)
    before_n = before_w_n * before_h_n
    return (
        (before_n > 0)
        & (shorter_n > MIN_SIDE_PX)
        & (w_n * h_n > MIN_AREA_LEFT * before_n)
        & (longer_n < MAX_ASPECT * shorter_n)
    )
