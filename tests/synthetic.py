"""Small made-up data sets: coloured shapes on gray noise, in YOLO format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle")
COLOURS = ((220, 40, 40), (40, 200, 60), (60, 80, 230))


def make_dataset(
    folder: str | Path,
    *,
    train: int = 8,
    val: int = 4,
    classes: Sequence[str] = SHAPES,
    size: int | tuple[int, int] = 128,
    seed: int = 0,
) -> Path:
    """Write photos, labels and data.yaml below ``folder``; return the path of data.yaml.

    size: side in px, or (height, width). Every photo has one to four objects; class c has shape and
    colour c modulo 3, so that a detector can learn them. The same arguments give the same pixels.
    """
    folder = Path(folder)
    rng = np.random.default_rng(seed)
    height, width = (size, size) if isinstance(size, int) else size
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            photo, rows = _photo(rng, height, width, len(classes))
            photo.save(folder / "images" / split / f"{number:04d}.jpg", quality=95)
            (folder / "labels" / split / f"{number:04d}.txt").write_text("".join(rows))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(classes))
    data = folder / "data.yaml"
    data.write_text(f"path: .\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return data


def _photo(
    rng: np.random.Generator, height: int, width: int, num_classes: int
) -> tuple[Image.Image, list[str]]:
    photo = Image.fromarray(rng.integers(90, 140, (height, width, 3), dtype=np.uint8))
    draw = ImageDraw.Draw(photo)
    cells = rng.permutation(4)[: rng.integers(1, 5)]  # a quarter each: objects do not overlap
    return photo, [_object(rng, draw, int(cell), (height, width), num_classes) for cell in cells]


def _object(
    rng: np.random.Generator,
    draw: ImageDraw.ImageDraw,
    cell: int,
    size: tuple[int, int],
    num_classes: int,
) -> str:
    """Draw one object into a quarter of the photo and return its label row."""
    height, width = size
    number = int(rng.integers(num_classes))
    side = int(min(height, width) * rng.uniform(0.2, 0.45))
    left = cell % 2 * (width // 2) + int(rng.integers(max(width // 2 - side, 1)))
    top = cell // 2 * (height // 2) + int(rng.integers(max(height // 2 - side, 1)))
    right, bottom, colour = left + side, top + side, COLOURS[number % 3]
    if number % 3 == 0:
        draw.ellipse((left, top, right, bottom), fill=colour)
    elif number % 3 == 1:
        draw.rectangle((left, top, right, bottom), fill=colour)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=colour)
    x, y = (left + right) / 2 / width, (top + bottom) / 2 / height
    return f"{number} {x:.6f} {y:.6f} {side / width:.6f} {side / height:.6f}\n"
