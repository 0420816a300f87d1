"""Photos are decoded, resized and augmented as documented, with Ultralytics as the oracle."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from yolo_ray.augment.images import (
    PhotoError,
    letterbox,
    photo_size,
    read_jpeg,
    read_photo,
    resize_photo,
    resized_size,
    write_photo,
)
from yolo_ray.augment.transforms import build_transform
from yolo_ray.errors import UserError

SIZES = [(480, 640), (37, 640), (333, 500), (640, 213), (100, 99), (1, 900), (320, 320), (75, 91)]
BOXES = np.array([[0.1, 0.2, 0.4, 0.6], [0.5, 0.5, 0.9, 0.95]], np.float32)
CLASSES = np.array([0, 1], np.int32)


def smooth_photo(height: int = 48, width: int = 64) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 3, y * 4, (x + y) * 2], axis=2).clip(0, 255).astype(np.uint8)


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)  # pyright: ignore[reportArgumentType]
    return path


# -------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "webp", "jp2"])
def test_lossless_rgb_is_read_exactly(tmp_path: Path, suffix: str) -> None:
    options = {"lossless": True} if suffix == "webp" else {}
    path = save(tmp_path / f"a.{suffix}", Image.fromarray(smooth_photo()), **options)
    np.testing.assert_array_equal(read_photo(path), smooth_photo())
    assert photo_size(path) == (48, 64)


def test_jpeg_equals_ultralytics_in_rgb(tmp_path: Path) -> None:
    from ultralytics.utils.patches import imread

    path = save(tmp_path / "a.jpg", Image.fromarray(smooth_photo()), quality=90)
    bgr = imread(str(path))
    assert bgr is not None
    np.testing.assert_array_equal(read_photo(path), bgr[:, :, ::-1])


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "PA"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(smooth_photo())
    image = image.convert("P").convert("PA") if mode == "PA" else image.convert(mode)
    suffix = "tif" if mode in ("CMYK", "PA") else "png"
    path = save(tmp_path / f"a.{suffix}", image)
    expected = np.asarray(image.convert("RGB")).astype(int)
    assert np.abs(read_photo(path).astype(int) - expected).max() <= 2  # CMYK rounds otherwise


def test_transparent_pixels_keep_their_colour(tmp_path: Path) -> None:
    image = Image.new("RGBA", (20, 20), (200, 100, 50, 0))
    assert read_photo(save(tmp_path / "a.png", image))[5, 5].tolist() == [200, 100, 50]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_are_scaled_by_value_range(tmp_path: Path, suffix: str) -> None:
    levels = np.array([0, 128, 129, 257, 32768, 65406, 65407, 65535], np.uint16)
    pixels = np.repeat(np.tile(levels, 4)[None], 16, axis=0)
    photo = read_photo(save(tmp_path / f"a.{suffix}", Image.fromarray(pixels)))
    assert photo[0, :8, 0].tolist() == [0, 0, 1, 1, 128, 254, 255, 255]
    np.testing.assert_array_equal(photo[..., 0], photo[..., 2])


def test_sixteen_bit_colour(tmp_path: Path) -> None:
    import cv2

    wide = smooth_photo().astype(np.uint16) * 257
    cv2.imwrite(str(tmp_path / "a.png"), wide[:, :, ::-1])
    np.testing.assert_array_equal(read_photo(tmp_path / "a.png"), smooth_photo())


def test_floats_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tif", Image.fromarray(np.ones((20, 20), np.float32)))
    with pytest.raises(PhotoError, match="32-bit"):
        read_photo(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, suffix: str, orientation: int) -> None:
    image = Image.fromarray(smooth_photo())
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if suffix == "webp" else {}
    path = save(tmp_path / f"a.{suffix}", image, exif=exif, **options)
    with Image.open(path) as stored:
        expected = np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
    photo = read_photo(path)
    np.testing.assert_array_equal(photo, expected)
    assert photo.shape[:2] == photo_size(path) == ((64, 48) if orientation >= 5 else (48, 64))


def test_damaged_files_raise_with_a_reason(tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    files: dict[str, bytes] = {}
    for suffix in ("jpg", "png", "bmp", "tif", "webp"):
        buffer = io.BytesIO()
        image.save(buffer, {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper()))
        files[f"cut.{suffix}"] = buffer.getvalue()[: len(buffer.getvalue()) * 2 // 3]
    whole = io.BytesIO()
    image.save(whole, "PNG")
    flipped = bytearray(whole.getvalue())
    flipped[len(flipped) // 2] ^= 0xFF
    broken = b"\xff\xd8\xff\xe0\x00\x10JF" + b"\x00" * 40 + b"\xff\xd9"
    files |= {"broken.jpg": broken, "renamed.jpg": b"GIF89a" + b"\x00" * 40}
    files |= {"flipped.png": bytes(flipped), "empty.jpg": b"", "text.jpg": b"hello, no photo here"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        for read in (photo_size, read_photo):
            with pytest.raises(PhotoError) as caught:
                read(tmp_path / name)
            assert (
                name in str(caught.value) and caught.value.reason and "\n" not in str(caught.value)
            )
    with pytest.raises(PhotoError, match="no such file"):
        photo_size(tmp_path / "missing.jpg")


def test_jpeg_with_a_thumbnail_is_still_found_truncated_and_a_trailer_is_fine(
    tmp_path: Path,
) -> None:
    small, large = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (32, 32)).save(small, "JPEG")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(large, "JPEG")
    data = large.getvalue()
    thumbnail = small.getvalue()
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail  # has its own end
    path = tmp_path / "a.jpg"
    path.write_bytes(data[:2] + segment + data[2 : len(data) // 2])
    with pytest.raises(PhotoError, match="truncated"):
        photo_size(path)
    path.write_bytes(data + b"maker note")
    assert photo_size(path) == (64, 64)
    np.testing.assert_array_equal(read_photo(path), np.asarray(Image.open(io.BytesIO(data))))


def test_tiny_photos_and_pickled_errors(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", Image.new("RGB", (9, 30)))
    with pytest.raises(PhotoError, match="only 9x30 px") as caught:
        photo_size(path)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_written_photo_comes_back(tmp_path: Path) -> None:
    write_photo(tmp_path / "a.png", smooth_photo())
    np.testing.assert_array_equal(read_photo(tmp_path / "a.png"), smooth_photo())


# ------------------------------------------------------------------------------- resize, letterbox


@pytest.mark.parametrize("imgsz", [320, 96])
def test_resize_and_letterbox_equal_ultralytics(tmp_path: Path, imgsz: int) -> None:
    from ultralytics.data.augment import LetterBox
    from ultralytics.data.base import BaseDataset

    rng = np.random.default_rng(0)
    photos = [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in SIZES]
    loader = BaseDataset.__new__(BaseDataset)
    loader.imgsz, loader.augment, loader.cache, loader.cv2_flag = imgsz, False, None, 1
    for number, photo in enumerate(photos):
        write_photo(tmp_path / f"{number}.png", photo)
    loader.im_files = [str(tmp_path / f"{number}.png") for number in range(len(photos))]
    loader.npy_files = [Path(file).with_suffix(".npy") for file in loader.im_files]
    loader.ims = [None] * len(photos)
    box = LetterBox((imgsz, imgsz), scaleup=False)
    for number, photo in enumerate(photos):
        expected, _, new_size = loader.load_image(number)
        np.testing.assert_array_equal(resize_photo(photo, imgsz), expected[:, :, ::-1])
        assert tuple(map(int, resized_size(photo.shape[0], photo.shape[1], imgsz))) == new_size
        square, (left, top) = letterbox(photo, imgsz)
        np.testing.assert_array_equal(square, np.asarray(box(image=expected))[:, :, ::-1])
        np.testing.assert_array_equal(
            square[top : top + new_size[0], left : left + new_size[1]], resize_photo(photo, imgsz)
        )


def test_resized_size_works_on_arrays_and_equals_single_calls() -> None:
    rng = np.random.default_rng(0)
    heights, widths = rng.integers(1, 3000, (2, 4000))
    many = np.stack(resized_size(heights, widths, 640))
    one = [resized_size(h, w, 640) for h, w in zip(heights, widths, strict=True)]
    np.testing.assert_array_equal(many.T, np.array(one))
    assert (many.max(0) == 640).all() and many.min() >= 1 and many.dtype == np.int64


# ---------------------------------------------------------------------------------- albumentations


def test_default_chain_hits_each_step_alone_at_one_percent() -> None:
    transform = build_transform(True)
    assert not transform.moves_boxes
    assert [step["transform"] for step in transform.steps] == [
        "Blur",
        "MedianBlur",
        "ToGray",
        "CLAHE",
    ]
    photo = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    before = photo.copy()
    outputs = [transform(photo, BOXES, CLASSES, seed)[0] for seed in range(2000)]
    np.testing.assert_array_equal(photo, before)
    changed = [out for out in outputs if not np.array_equal(out, photo)]
    assert 45 <= len(changed) <= 115  # 3.9 % of 2000 is 79
    gray = [out for out in changed if (out[..., 0] == out[..., 1]).all()]
    assert 5 <= len(gray) <= 45  # the steps are drawn apart: gray is a quarter, not all


def test_a_chain_that_draws_nothing_is_cheap_and_false_does_nothing() -> None:
    photo = np.zeros((640, 640, 3), np.uint8)
    transform = build_transform(({"transform": "Blur", "p": 0.0},) * 4)
    start = time.perf_counter()
    for seed in range(1000):
        assert transform(photo, BOXES, CLASSES, seed)[0] is photo
    assert time.perf_counter() - start < 0.2  # 0.2 ms a photo; the measured time is about 0.02
    assert build_transform(False).steps == ()


CHAIN = (
    {"transform": "GaussNoise", "p": 0.7},
    {"transform": "HorizontalFlip", "p": 0.5},
    {"transform": "RandomBrightnessContrast", "p": 0.8},
    {
        "transform": "OneOf",
        "p": 0.5,
        "transforms": [{"transform": "Blur"}, {"transform": "ToGray"}],
    },
)


def test_same_seed_same_pixels_in_any_order_and_process(tmp_path: Path) -> None:
    transform = build_transform(CHAIN)
    photo = smooth_photo()
    first = [transform(photo, BOXES, CLASSES, seed)[0] for seed in range(30)]
    copy = pickle.loads(pickle.dumps(transform))
    backwards = [copy(photo, BOXES, CLASSES, seed)[0] for seed in reversed(range(30))][::-1]
    for one, other in zip(first, backwards, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({out.tobytes() for out in first}) > 20
    (tmp_path / "t.pkl").write_bytes(pickle.dumps((transform, photo, BOXES, CLASSES)))
    code = (
        "import pickle, sys, hashlib; t, *a = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert 'albumentations' not in sys.modules, 'a pickle imports nothing'\n"
        "print(hashlib.sha256(b''.join(t(*a, seed)[0].tobytes() for seed in (7, 3))).hexdigest())"
    )
    import hashlib

    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t.pkl")],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = hashlib.sha256(first[7].tobytes() + first[3].tobytes()).hexdigest()
    assert out.stdout.strip() == expected


def test_boxes_move_and_are_dropped_with_their_rows() -> None:
    flip = build_transform(({"transform": "HorizontalFlip", "p": 1.0},))
    assert flip.moves_boxes
    photo, boxes, kept = flip(smooth_photo(), BOXES, CLASSES, 0)
    np.testing.assert_array_equal(photo, smooth_photo()[:, ::-1])
    np.testing.assert_allclose(boxes, [[0.6, 0.2, 0.9, 0.6], [0.1, 0.5, 0.5, 0.95]], atol=1e-6)
    assert kept.tolist() == [0, 1] and boxes.dtype == np.float32
    shift = {"transform": "Affine", "p": 1.0, "translate_percent": {"x": 0.45, "y": 0.0}}
    _, boxes, kept = build_transform((shift,))(smooth_photo(), BOXES[::-1].copy(), CLASSES, 0)
    assert kept.tolist() == [0, 1] and boxes.max() <= 1.0
    shift["translate_percent"] = {"x": 0.7, "y": 0.0}
    _, boxes, kept = build_transform((shift,))(smooth_photo(), BOXES[::-1].copy(), CLASSES, 0)
    assert kept.tolist() == [1] and len(boxes) == 1
    none = np.zeros((0, 4), np.float32)
    _, boxes, kept = flip(smooth_photo(), none, np.zeros(0, np.int32), 0)
    assert boxes.shape == (0, 4) and kept.shape == (0,)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"transform": "GausNoise"}, "did you mean 'GaussNoise'"),
        ({"p": 0.5}, "no transform None"),
        ({"transform": "Lambda"}, "no transform 'Lambda'"),
        ({"transform": "Blur", "blur_limits": 3}, "did you mean 'blur_limit'"),
        ({"transform": "Blur", "blur_limit": "x"}, "blur_limit"),
        ({"transform": "Blur", "p": 2}, "less than or equal to 1"),
        ({"transform": "Blur", "blur_limit": [9, 5]}, "Invalid range"),
        ({"transform": "OneOf", "transforms": [{"transform": "Blurr"}]}, "did you mean 'Blur'"),
    ],
)
def test_mistakes_in_the_list_are_told_in_one_sentence(step: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_transform((step,))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "step", [{"transform": "Resize", "height": 20, "width": 20}, {"transform": "ToFloat"}]
)
def test_a_changed_size_or_type_is_refused_by_name(step: dict[str, object]) -> None:
    chain = ({"transform": "Blur", "p": 1.0}, {**step, "p": 1.0})
    with pytest.raises(UserError, match=f"albumentations {step['transform']} turned"):
        build_transform(chain)(smooth_photo(), BOXES, CLASSES, 0)


def test_a_transform_that_fails_is_named() -> None:
    crop = build_transform(({"transform": "RandomCrop", "height": 500, "width": 500, "p": 1.0},))
    with pytest.raises(UserError, match="RandomCrop failed on a photo of 64x48"):
        crop(smooth_photo(), BOXES, CLASSES, 0)


def test_jpegs_for_a_device_are_plain_and_of_their_size(tmp_path: Path) -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: dict[str, dict[str, Any]] = {
        "plain.jpg": {}, "turned.jpg": {"exif": exif}, "progressive.jpg": {"progressive": True}, "x.png": {}
    }  # fmt: skip
    for name, kind in kinds.items():
        photo.save(tmp_path / name, **kind)
    photo.convert("L").save(tmp_path / "gray.jpg")
    photo.convert("CMYK").save(tmp_path / "cmyk.jpg")
    sizes = {name: (30, 50) for name in (*kinds, "gray.jpg", "cmyk.jpg")} | {"turned.jpg": (50, 30)}
    found = {name: read_jpeg(tmp_path / name, size) for name, size in sizes.items()}
    for name in ("plain.jpg", "turned.jpg", "gray.jpg"):
        assert found.pop(name) == (tmp_path / name).read_bytes()
    assert set(found.values()) == {None}
    assert read_jpeg(tmp_path / "plain.jpg", (31, 50)) is None, "replaced since the run began"
    (tmp_path / "torn.jpg").write_bytes((tmp_path / "plain.jpg").read_bytes()[:-9])
    with pytest.raises(PhotoError, match="torn"):
        read_jpeg(tmp_path / "torn.jpg", (30, 50))
