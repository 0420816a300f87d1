"""The few output sides that ``multi_scale`` trains on."""

from __future__ import annotations

from yolo_ray.errors import UserError

MIN_STRIDE = 32  # Ultralytics' grid is never finer


def sides_of(imgsz: int, multi_scale: float, stride: int) -> tuple[int, ...]:
    """Ascending sides in px, at most 5, evenly spread over imgsz * (1 +- multi_scale); imgsz is one.

    Few, since each costs a GPU graphs of its own. They are multiples of ``stride`` (at least 32), and none
    is below two strides unless imgsz is.

    Raises:
        UserError: the range holds no other side than imgsz.
    """
    if multi_scale == 0:
        return (imgsz,)
    grid = max(stride, MIN_STRIDE)
    reach = int(multi_scale * imgsz / grid + 1e-9)
    if reach == 0:
        least = -(-grid * 1000 // imgsz) / 1000
        raise UserError(
            f"multi_scale={multi_scale} leaves imgsz={imgsz} as the only side, since sides are multiples "
            f"of {grid}: use multi_scale={least} or more, or 0"
        )
    half = (reach + 1) // 2
    sides = {imgsz + grid * steps for steps in (-reach, -half, 0, half, reach)}
    return tuple(sorted(side for side in sides if side >= min(imgsz, 2 * grid)))
