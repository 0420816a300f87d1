"""Runs that nobody trained, and a data set whose truth one of them finds: enough for a gate to say yes and no."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.lively import lively_detector, tiny_model
from yolo_ray.augment.images import write_photo
from yolo_ray.config.load import RUN_CONFIG, dump, load
from yolo_ray.export.check import images_of, made_up_photos
from yolo_ray.model.build import Detector, save_weights
from yolo_ray.model.detect import decode, detect_nms

NAMES = ("scratch", "dent", "stain")
SIDE = 96


def detector_of(noise: float, seed: int = 0, names: Sequence[str] = NAMES) -> Detector:
    """A detector whose scores are ``noise`` (a share of their weights' spread) away from those that made the truth.

    Only the last layers of the scores: noise below them would grow on its way, and rounding errors with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        detector = lively_detector(tiny_model(Path(folder)), imgsz=SIDE, names=names)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            if parameter.ndim == 4 and "cv3" in name and name.endswith(".2.weight"):
                step = torch.randn(parameter.shape, generator=generator)
                parameter += noise * parameter.std() * step
    return detector.eval()


def save_run(folder: Path, data: Path, noise: float, names: Sequence[str] = NAMES) -> Path:
    """What a run leaves that registering needs: its options and its best weights."""
    (folder / "weights").mkdir(parents=True)
    detector = detector_of(noise, names=names)
    save_weights(folder / "weights" / "best.pt", detector, detector.state_dict(), {"imgsz": SIDE})
    dump(load([f"data={data}", f"imgsz={SIDE}"]), folder / RUN_CONFIG)
    return folder


def truth_data(folder: Path, count: int = 4, names: Sequence[str] = NAMES) -> Path:
    """Photos labelled with what ``detector_of(0)`` is surest of: data.yaml."""
    photos = made_up_photos(SIDE, count)
    detector = detector_of(0.0)
    with torch.inference_mode():
        head = detector(torch.from_numpy(images_of(photos)))[0]
        boxes, scores = decode(head, detector.strides, detector.reg_max, SIDE)
        found = detect_nms(boxes, scores, conf=0.001, iou=0.7, max_det=12)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for number, (photo, rows) in enumerate(zip(photos, found, strict=True)):
            # Each split its own pixels: the same photo in both would be a leak.
            photo = photo if split == "val" else photo[:, ::-1]
            write_photo(folder / "images" / split / f"{number}.png", photo)
            edges = torch.tensor([SIDE] * 4)
            low_high = (rows[:, :4] / edges).clamp(0, 1)
            extent = low_high[:, 2:] - low_high[:, :2]
            lines = [
                f"{int(kind)} {x:.6f} {y:.6f} {w:.6f} {h:.6f}"
                for kind, (x, y), (w, h) in zip(
                    rows[:, 5].tolist(),
                    (low_high[:, :2] + extent / 2).tolist(),
                    extent.tolist(),
                    strict=True,
                )
                if w > 0 and h > 0
            ]
            (folder / "labels" / split / f"{number}.txt").write_text("\n".join(lines))
    listed = "".join(f"  {number}: {name}\n" for number, name in enumerate(names))
    path = folder / "data.yaml"
    path.write_text(f"path: .\ntrain: images/train\nval: images/val\nnames:\n{listed}")
    return path
