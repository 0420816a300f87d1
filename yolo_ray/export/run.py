"""The export of one weights file, as the pipeline asks for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from yolo_ray.augment.images import PhotoError, letterbox, read_photo
from yolo_ray.config.address import absolute_out
from yolo_ray.config.deploy import ExportConfig
from yolo_ray.data.listing import photos_of
from yolo_ray.errors import UserError
from yolo_ray.export.check import made_up_photos
from yolo_ray.export.formats import FORMATS
from yolo_ray.export.network import ExportPlan
from yolo_ray.export.write import export_detector
from yolo_ray.model.build import load_detector

CHECKED_PHOTOS = 8  # at most, of a user's own
DEFAULT_IMGSZ = 640


def export(config: ExportConfig, weights: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Write what ``config`` asks for from the file ``weights``; what is printed as JSON.

    Raises:
        UserError: weights that cannot be exported, a place that cannot be written.
        CheckFailed: the exported file does not give what torch gives.
    """
    if weights.suffix.lower() != ".pt":
        raise UserError(
            f"weights={config.weights} is exported already: pass the .pt that it was made from"
        )
    out = _out(config, weights)
    detector = load_detector(weights)
    imgsz = config.imgsz or detector.trained_imgsz or DEFAULT_IMGSZ
    plan = ExportPlan(
        imgsz, nms=config.nms, half=config.half, dynamic_batch=config.dynamic,
        conf=config.conf, iou=config.iou, max_det=config.max_det,
    )  # fmt: skip
    photos = made_up_photos(imgsz)
    if config.source:
        photos = np.concatenate([photos, _own_photos(config.source, imgsz)])
    say(f"exporting {weights.name} at {imgsz} px as {config.format}; this takes a while")
    done = export_detector(detector, out, config.format, plan, photos)
    figures = done.figures
    say(
        f"checked on {len(photos)} photos: boxes differ from torch's by {figures['max_box_px']:.2g} px at most, "
        f"scores by {figures['max_score']:.2g}"
    )
    return {
        "file": str(done.path),
        "format": config.format,
        "output": done.layout,
        "imgsz": imgsz,
        "classes": len(detector.names),
        "bytes": done.path.stat().st_size,
        "check": figures,
    }


def _out(config: ExportConfig, weights: Path) -> Path:
    suffix = FORMATS[config.format].suffix
    if config.out:
        out = absolute_out(config.out)
        if out.suffix != suffix:
            raise UserError(
                f"out={config.out} does not end with {suffix}, as format={config.format} does: use {out.stem}{suffix}"
            )
        if out.is_dir():
            raise UserError(f"out={config.out} is a folder: pass the name of a file in it")
        return out
    reference = str(config.weights)
    if re.match(r"models:/|runs:/", reference) or not Path(reference).expanduser().exists():
        raise UserError(f"weights={reference} lie in MLflow: pass out=FILE{suffix}")
    return weights.with_suffix(suffix)


def _own_photos(source: str, imgsz: int) -> np.ndarray:
    """Up to so many photos of the user's, spread over all, letterboxed uint8 [n,S,S,3]."""
    places = photos_of(source)
    picked = np.linspace(0, len(places) - 1, min(len(places), CHECKED_PHOTOS)).astype(int)
    try:
        return np.stack([letterbox(read_photo(places[index]), imgsz)[0] for index in picked])
    except PhotoError as error:
        raise UserError(f"{error}: leave it out of source=") from error
