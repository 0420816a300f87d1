"""Photos decoded on the device: the pixels of the CPU, within two levels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.gpu.steps import CUDA
from yolo_ray.augment.images import read_photo, resize_photo
from yolo_ray.data.batch import Encoded
from yolo_ray.data.decoding import DeviceDecoder

pytestmark = pytest.mark.gpu
SIDE = 320


def make_scene(height: int, width: int, seed: int) -> np.ndarray:
    """Soft colours with hard edges: what chroma at half the size is worst at."""
    rng = np.random.default_rng(seed)
    photo = cv2.resize(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8), (width, height))
    for _ in range(12):
        x, y = int(rng.integers(width)), int(rng.integers(height))
        colour = rng.integers(0, 256, 3).tolist()
        cv2.rectangle(photo, (x, y), (x + width // 6, y + height // 6), colour, -1)
    return photo


def save(folder: Path) -> list[Path]:
    """Upscaled, exact, large, tall, chroma in full, turned by EXIF, gray."""
    sizes = [(120, 160), (240, 320), (900, 1300), (640, 200), (480, 640), (301, 487)]
    photos = [Image.fromarray(make_scene(*size, seed)) for seed, size in enumerate(sizes)]
    paths = [folder / f"{number}.jpg" for number in range(len(photos))]
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: list[dict[str, Any]] = [{}, {}, {"quality": 95}, {}, {"subsampling": 0}, {"exif": exif}]
    for path, photo, kind in zip(paths, photos, kinds, strict=True):
        photo.save(path, **kind)
    photos[0].convert("L").save(folder / "gray.jpg")
    return [*paths, folder / "gray.jpg"]


def test_pixels_are_those_of_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.nvimgcodec")
    paths = save(tmp_path)
    own = np.random.default_rng(0).integers(0, 256, (200, SIDE, 3), dtype=np.uint8)
    damaged = paths[1].read_bytes()
    damaged = damaged[: len(damaged) // 2] + damaged[-2:]
    encoded = [Encoded(str(path), path.read_bytes()) for path in paths]
    encoded += [Encoded("own", own.tobytes(), own.shape[:2]), Encoded("damaged", damaged)]
    decode = DeviceDecoder(SIDE, CUDA)
    out = decode(encoded).cpu().numpy()
    assert (out == decode(encoded).cpu().numpy())[:-1].all()
    for path, square in zip(paths, out, strict=False):
        photo = resize_photo(read_photo(path), SIDE)
        height, width = photo.shape[:2]
        gap = np.abs(square[:height, :width].astype(int) - photo)
        print(f"{path.name}: largest {gap.max()}, mean {gap.mean():.4f}")
        assert gap.max() <= 2 and gap.mean() <= 0.5, path.name
        assert (square[height:] == 114).all() and (square[:, width:] == 114).all()
    assert (out[len(paths)][:200] == own).all()
