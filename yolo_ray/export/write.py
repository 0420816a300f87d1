"""A detector into a file of another format: built, written aside, checked against torch, and only then named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from yolo_ray.errors import UserError
from yolo_ray.export.check import (
    CheckFailed,
    Run,
    Tolerance,
    busy_conf,
    check_best,
    check_nms,
    check_raw,
    expected,
    images_of,
    made_up_photos,
    run_all,
)
from yolo_ray.export.formats import FORMATS, Built
from yolo_ray.export.network import Deployed, ExportPlan, check_imgsz
from yolo_ray.model.build import Detector
from yolo_ray.model.saving import replaced

COMPARE: dict[str, Callable[[np.ndarray, np.ndarray, Tolerance], dict[str, float]]] = {
    "raw": check_raw,
    "best": check_best,
}


@dataclass(frozen=True)
class Exported:
    """A file that passed its check. ``figures``: the largest differences from torch, and on how many photos."""

    path: Path
    layout: str
    figures: dict[str, float]


def export_onnx(
    detector: Detector,
    path: str | Path,
    *,
    imgsz: int,
    nms: bool,
    dynamic_batch: bool = True,
) -> Path:
    """Write a detector as ONNX; see ``export_detector``, which takes the other options and tells the figures."""
    plan = ExportPlan(imgsz, nms=nms, dynamic_batch=dynamic_batch)
    return export_detector(detector, path, "onnx", plan).path


def export_detector(
    detector: Detector,
    path: str | Path,
    kind: str,
    plan: ExportPlan,
    photos: np.ndarray | None = None,
) -> Exported:
    """Write a detector in the format ``kind``, checked on ``photos`` uint8 [n,S,S,3] (none: made up).

    The input is ``images`` float32 (float16 with ``plan.half``) [B,3,S,S] RGB in 0..1, the output float32 in the
    form of ``plan.layout``. A file of that name is replaced at once or, if anything fails, stays as it is.

    Raises:
        UserError: a side that the strides do not divide, a disk without room, or a format that cannot be made here.
        CheckFailed: the file's answers are not torch's; none is left.
    """
    path = Path(path)
    check_imgsz(plan.imgsz, detector.strides)
    network = Deployed(detector, plan)
    built = FORMATS[kind].build(network, plan, metadata_of(detector, plan))
    reference = Deployed(detector, replace(plan, half=False)) if plan.half else network
    photos = made_up_photos(plan.imgsz) if photos is None else photos
    try:
        with replaced(path) as temporary:
            built.write(temporary)
            figures = _check(built, FORMATS[kind].open(temporary), reference, plan, photos)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): pass out= with a place that has room and is yours"
        ) from error
    except CheckFailed as error:
        raise CheckFailed(
            f"{path} is not written: on {len(photos)} photos the exported file does not give what torch gives: {error}"
        ) from error
    return Exported(path, network.layout, figures)


def _check(
    built: Built, final: Run, reference: Deployed, plan: ExportPlan, photos: np.ndarray
) -> dict[str, float]:
    images, tolerance = images_of(photos), Tolerance.of(plan)
    together = plan.dynamic_batch
    want = expected(reference, images)
    answers = run_all(final, images, together=together)
    if not plan.nms:
        return {"photos": len(photos)} | COMPARE[reference.layout](want, answers, tolerance)
    raw = run_all(built.raw, images, together=together)
    figures = check_raw(want, raw, tolerance)
    busy = busy_conf(raw)
    rows = run_all(built.rows_above(busy), images, together=together)
    return (
        {"photos": len(photos)}
        | figures
        | check_nms(raw, [(plan.conf, answers), (busy, rows)], plan)
    )


def metadata_of(detector: Detector, plan: ExportPlan) -> dict[str, object]:
    """What Ultralytics' loader reads of an exported file, under its names.

    ``batch`` and ``dynamic`` say what makes it letterbox to the square that the graph takes, one photo at a time: for
    it ``dynamic`` would mean any height and width.
    """
    layout = plan.layout(detector)
    args: dict[str, object] = {"batch": 1, "half": plan.half, "dynamic": False, "nms": plan.nms}
    if plan.nms:
        args |= {"conf": plan.conf, "iou": plan.iou, "max_det": plan.max_det}
    return {
        "description": "YOLO detector exported by yolo_ray",
        "author": "yolo_ray",
        "license": "AGPL-3.0",
        "task": "detect",
        "head": type(detector.head).__name__,
        "stride": max(detector.strides),
        "batch": 1,
        "channels": 3,
        "imgsz": [plan.imgsz, plan.imgsz],
        "names": dict(enumerate(detector.names)),
        "args": args,
        "end2end": layout == "best",
    }
