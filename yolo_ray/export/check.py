"""An exported file beside torch's float32 network on the same photos, before it gets its name.

Letters: n photos, S side in px, A anchors, C classes, K rows of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch

from yolo_ray.export.network import Deployed, ExportPlan, split_raw
from yolo_ray.model.detect import detect_nms

Run = Callable[[np.ndarray], np.ndarray]
"""Images float32 [b,3,S,S] in 0..1 -> the answer, float32."""

PHOTOS = 4
NUM_SHAPES = 12
CANDIDATES = (
    300  # boxes a photo that suppression is checked with, whatever the weights think of the photos
)
MOST_MISSED = 0.01  # of those: overlaps that equal iou to the last bit may fall on either side


@dataclass(frozen=True)
class Tolerance:
    """How far an answer may be from torch's; boxes count where the best score is ``from_score`` or more."""

    box_px: float
    score: float
    from_score: float

    @staticmethod
    def of(plan: ExportPlan) -> Tolerance:
        """float32: what another order of additions makes; float16: 11 bits of a number, through every layer."""
        return Tolerance(0.02 * plan.imgsz, 0.03, 0.05) if plan.half else Tolerance(0.1, 1e-3, 0.0)


class CheckFailed(RuntimeError):
    """The exported file does not give what the network gives."""


def made_up_photos(imgsz: int, count: int = PHOTOS) -> np.ndarray:
    """Photos uint8 [count,S,S,3] with shadings, filled shapes and grain; the same for the same side."""
    rng = np.random.default_rng(imgsz)
    photos = np.empty((count, imgsz, imgsz, 3), np.uint8)
    for photo in photos:
        coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        scene = cv2.resize(coarse, (imgsz, imgsz), interpolation=cv2.INTER_CUBIC)
        for number in range(NUM_SHAPES):
            low, side = rng.integers(0, imgsz, 2), rng.integers(imgsz // 16, imgsz // 3, 2)
            colour = rng.integers(0, 256, 3).tolist()
            if number % 2:
                cv2.rectangle(scene, low.tolist(), (low + side).tolist(), colour, -1)
            else:
                cv2.ellipse(scene, low.tolist(), side.tolist(), 0, 0, 360, colour, -1)
        photo[:] = np.clip(scene + rng.normal(0, 6, scene.shape), 0, 255)
    return photos


def images_of(photos: np.ndarray) -> np.ndarray:
    """Photos uint8 [n,S,S,3] as a network takes them: float32 [n,3,S,S] in 0..1."""
    return np.ascontiguousarray(photos.transpose(0, 3, 1, 2)).astype(np.float32) / 255


@torch.inference_mode()
def expected(network: Deployed, images: np.ndarray) -> np.ndarray:
    """torch's answer of a float32 network, photo by photo."""
    return np.concatenate([network(torch.from_numpy(image[None])).numpy() for image in images])


def run_all(run: Run, images: np.ndarray, *, together: bool) -> np.ndarray:
    """The answers for all images, in one batch or one by one."""
    return run(images) if together else np.concatenate([run(image[None]) for image in images])


def check_raw(want: np.ndarray, got: np.ndarray, tolerance: Tolerance) -> dict[str, float]:
    """Raw answers [n,4+C,A] compared; the largest differences.

    Raises:
        CheckFailed: other shapes, numbers that are not finite, or too far apart.
    """
    _refuse_shapes(want, got)
    apart = np.abs(want - got)
    # Weights that are sure of nothing are judged by what they are least unsure of.
    judged = want[:, 4:].max(1) >= min(tolerance.from_score, busy_conf(want))
    boxes = float(apart[:, :4].max(1)[judged].max()) if judged.any() else 0.0
    return _judge(boxes, float(apart[:, 4:].max()), int(judged.sum()), tolerance)


def check_best(want: np.ndarray, got: np.ndarray, tolerance: Tolerance) -> dict[str, float]:
    """Best rows [n,K,6] compared, whatever the order of nearly equal scores.

    A row that nearly missed the last place may be another one, so only rows clear of it need a partner.

    Raises:
        CheckFailed: as ``check_raw``, or a row without a partner.
    """
    _refuse_shapes(want, got)
    # The k-th largest of numbers that moved by at most d has moved by at most d.
    scores, boxes, compared = float(np.abs(want[..., 4] - got[..., 4]).max()), 0.0, 0
    for wanted, given in zip(want, got, strict=True):
        clear = wanted[:, 4] > max(wanted[-1, 4] + 2 * tolerance.score, tolerance.from_score)
        for row in wanted[clear]:
            same = (given[:, 5] == row[5]) & (np.abs(given[:, 4] - row[4]) <= tolerance.score)
            if not same.any():
                raise CheckFailed(f"no row of class {row[5]:g} with the score {row[4]:.4f}")
            boxes = max(boxes, float(np.abs(given[same, :4] - row[:4]).max(1).min()))
        compared += int(clear.sum())
    return _judge(boxes, scores, compared, tolerance)


def check_nms(
    raw: np.ndarray, rows_above: Sequence[tuple[float, np.ndarray]], plan: ExportPlan
) -> dict[str, float]:
    """The graph's own suppression beside ``detect_nms`` of the same raw answers [n,4+C,A].

    ``rows_above``: score limits, and the rows [n,K,6] that the graph gave with each.

    Raises:
        CheckFailed: another selection of boxes.
    """
    boxes, scores = split_raw(torch.from_numpy(raw))
    checked = missed = 0
    for conf, answers in rows_above:
        wanted = detect_nms(boxes, scores, conf=conf, iou=plan.iou, max_det=plan.max_det)
        for want, answer in zip(wanted, answers, strict=True):
            given = answer[answer[:, 4] > 0]
            checked += len(want)
            missed += max(len(want), len(given)) - _common(want.numpy(), given)
    if missed > MOST_MISSED * max(checked, 1):
        raise CheckFailed(f"suppression in the graph chose {missed} of {checked} boxes otherwise")
    return {"nms_boxes": checked, "nms_boxes_otherwise": missed}


def busy_conf(raw: np.ndarray) -> float:
    """A score limit that leaves some hundred candidates a photo, so that suppression has work to do."""
    scores = np.sort(raw[:, 4:].reshape(len(raw), -1))[:, ::-1]
    return float(scores[:, min(CANDIDATES, scores.shape[1]) - 1].min())


def _common(want: np.ndarray, given: np.ndarray) -> int:
    """Rows of ``want`` that ``given`` has, to a thousandth."""
    keys = [{tuple(row) for row in np.round(rows, 3).tolist()} for rows in (want, given)]
    return len(keys[0] & keys[1])


def _refuse_shapes(want: np.ndarray, got: np.ndarray) -> None:
    if want.shape != got.shape:
        raise CheckFailed(f"its answer is {list(got.shape)}, torch's {list(want.shape)}")
    if not np.isfinite(got).all():
        raise CheckFailed("its answer holds numbers that are not finite")


def _judge(boxes: float, scores: float, compared: int, allowed: Tolerance) -> dict[str, float]:
    if boxes > allowed.box_px or scores > allowed.score:
        raise CheckFailed(
            f"boxes differ by up to {boxes:.4f} px ({allowed.box_px:g} allowed), "
            f"scores by {scores:.6f} ({allowed.score:g} allowed)"
        )
    return {"max_box_px": boxes, "max_score": scores, "boxes_compared": compared}
