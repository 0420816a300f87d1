"""Mosaic, affine, letterbox, flips, box filter and HSV against the installed Ultralytics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from ultralytics.data import augment as oracle
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils.instance import Instances

from yolo_ray.augment.device import Scene, compose, hsv, mix
from yolo_ray.data.geometry import Affine, Layout, build_affine, lay_out, transform_boxes
from yolo_ray.data.plan import MIX_STEPS
from yolo_ray.data.sides import sides_of

SIDE = 160
# angle, scale, shear x, shear y, x and y of the canvas' centre; mosaic centre; flips (lr, ud)
CASES = [
    ((0, 1.0, 0, 0, 0.5, 0.5), (160, 160), (False, False)),
    ((0, 0.6, 0, 0, 0.42, 0.57), (97, 201), (True, False)),
    ((0, 1.45, 0, 0, 0.55, 0.44), (233, 84), (False, True)),
    ((13, 0.8, 4, -7, 0.5, 0.6), (140, 181), (True, True)),
    ((-40, 1.2, -9, 2, 0.4, 0.5), (201, 120), (False, False)),
]


def make_photo(height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [h,w,3] with edges and soft shades, as a photo has."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
    photo = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    cv2.circle(photo, (width // 3, height // 2), height // 4, (250, 20, 90), -1, cv2.LINE_AA)
    return photo


def make_boxes(seed: int, count: int = 60) -> np.ndarray:
    """Fractions [n,4] of all sizes, thin ones and specks among them."""
    rng = np.random.default_rng(seed)
    middle = rng.random((count, 2))
    half = rng.random((count, 2)) ** 3 / 2
    boxes = np.concatenate([middle - half, middle + half], axis=1).clip(0, 1)
    return boxes.astype(np.float32)


def make_label(photo: np.ndarray, boxes: np.ndarray, first_class: int) -> dict[str, Any]:
    """One sample as Ultralytics' dataset hands it to its transforms; class ids name the boxes."""
    return {
        "im_file": "photo.jpg",
        "ori_shape": photo.shape[:2],
        "resized_shape": photo.shape[:2],
        "img": photo.copy(),
        "cls": np.arange(first_class, first_class + len(boxes))[:, None],
        "instances": Instances(
            boxes.copy(), np.zeros((0, 1000, 2), np.float32), bbox_format="xyxy", normalized=True
        ),
    }


class Photos:
    """As much of a dataset as Ultralytics' mosaic asks for."""

    cache = "ram"

    def __init__(self, labels: list[dict[str, Any]]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def get_image_and_label(self, index: int) -> dict[str, Any]:
        return copy.deepcopy(self.labels[index])


def script(monkeypatch: pytest.MonkeyPatch, numbers: list[float]) -> None:
    """Make Ultralytics' next uniform draws these numbers."""
    remaining = iter(numbers)
    monkeypatch.setattr("random.uniform", lambda low, high: next(remaining))


def run_oracle(
    monkeypatch: pytest.MonkeyPatch,
    labels: list[dict[str, Any]],
    case: tuple[Any, Any, Any],
    mosaic: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    motion, centre, flips = case
    affine_draws = [0, 0, *motion[:4], motion[4], motion[5]]
    script(monkeypatch, ([0, centre[1], centre[0]] if mosaic else []) + affine_draws)
    label = copy.deepcopy(labels[0])
    if mosaic:
        paste = oracle.Mosaic(Photos(labels), imgsz=SIDE, p=1.0)
        monkeypatch.setattr(paste, "get_indexes", lambda: [1, 2, 3])
        label = paste(label)
    label = oracle.RandomPerspective(size=(SIDE, SIDE))(label)
    for flip, direction in zip(flips, ("horizontal", "vertical"), strict=True):
        label = oracle.RandomFlip(p=float(flip), direction=direction)(label)
    label["instances"].convert_bbox("xyxy")
    return label["img"], label["instances"].bboxes, label["cls"].reshape(-1)


def run_ours(
    photos: list[np.ndarray], boxes: list[np.ndarray], case: tuple[Any, Any, Any], mosaic: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    motion, centre, flips = case
    extents = np.array([[photo.shape[1::-1] for photo in photos]], dtype=float)
    layout = lay_out(extents, np.array([centre], float), np.array([mosaic]), SIDE)
    affine = build_affine(np.array([motion], float), np.array([flips]), layout.canvas, SIDE)
    used = 4 if mosaic else 1
    rows = np.repeat(np.arange(used), [len(part) for part in boxes[:used]])
    found, kept = transform_boxes(
        np.concatenate(boxes[:used]).astype(np.float64), rows, layout, affine, SIDE
    )
    return compose_one(photos, layout, affine), found, kept


def compose_one(photos: list[np.ndarray], layout: Layout, affine: Affine) -> np.ndarray:
    ring = np.full((4, SIDE, SIDE, 3), 114, np.uint8)
    for place, photo in zip(ring, photos, strict=True):
        place[: photo.shape[0], : photo.shape[1]] = photo
    parts = (layout.origins, layout.extents, layout.centre, layout.canvas, affine.inverse)
    scene = Scene(
        torch.from_numpy(ring).permute(0, 3, 1, 2).contiguous(),
        torch.arange(4)[None],
        *(torch.from_numpy(part.astype(np.float32)) for part in parts),
    )
    image = compose(scene, SIDE)
    return image[0].permute(1, 2, 0).numpy()


@pytest.fixture(scope="module")
def scene() -> tuple[list[np.ndarray], list[np.ndarray], list[dict[str, Any]]]:
    shapes = [(120, SIDE), (SIDE, 106), (SIDE, SIDE), (90, SIDE)]
    photos = [make_photo(*shape, seed) for seed, shape in enumerate(shapes)]
    boxes = [make_boxes(seed) for seed in range(4)]
    labels = [make_label(photos[i], boxes[i], 60 * i) for i in range(4)]
    return photos, boxes, labels


@pytest.mark.parametrize("mosaic", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_pixels_and_boxes(monkeypatch, scene, case, mosaic):
    photos, boxes, labels = scene
    wanted_image, wanted_boxes, wanted_ids = run_oracle(monkeypatch, labels, case, mosaic)
    image, found, ids = run_ours(photos, boxes, case, mosaic)
    apart = np.abs(image - wanted_image)
    assert (apart <= 2).mean() > 0.999, f"{(apart > 2).mean():.4f} of the pixels, {apart.max()}"
    np.testing.assert_array_equal(ids, wanted_ids)
    assert 5 < len(ids) < sum(map(len, boxes))
    np.testing.assert_allclose(found, wanted_boxes, atol=1e-3)


@pytest.mark.parametrize("ratio", [0.37, 0.5, 0.641])
def test_mixup_of_flipped_images_is_a_flipped_mixup(monkeypatch, scene, ratio):
    """Ultralytics flips the blend; we fold the same flips into both images."""
    photos, boxes, labels = scene
    cases = [(*CASES[1][:2], (True, True)), (*CASES[3][:2], (True, True))]
    ours, theirs = [], []
    for case, mosaic in zip(cases, (True, False), strict=True):
        ours.append(run_ours(photos, boxes, case, mosaic))
        image, found, ids = run_oracle(monkeypatch, labels, (*case[:2], (False, False)), mosaic)
        boxed = Instances(
            found, np.zeros((0, 1000, 2), np.float32), bbox_format="xyxy", normalized=False
        )
        theirs.append({"img": image, "instances": boxed, "cls": ids[:, None]})
    label: Any = {**theirs[0], "mix_labels": [theirs[1]]}
    mixup, params = oracle.MixUp(None, p=1.0), {"r": ratio}
    label = mixup.apply_instances(mixup.apply_image(label, params), params)
    for direction in ("horizontal", "vertical"):
        label = oracle.RandomFlip(p=1.0, direction=direction)(label)
    label["instances"].convert_bbox("xyxy")
    pair = torch.stack([torch.from_numpy(part[0]).permute(2, 0, 1) for part in ours])
    found = mix(pair, torch.tensor([float(round(ratio * MIX_STEPS))]))[0].permute(1, 2, 0).numpy()
    apart = np.abs(found - label["img"])
    assert (apart <= 2).mean() > 0.999 and (apart <= 1).mean() > 0.95
    np.testing.assert_array_equal(
        np.concatenate([part[2] for part in ours]), label["cls"].reshape(-1)
    )
    bounds = np.concatenate([part[1] for part in ours])
    np.testing.assert_allclose(bounds, label["instances"].bboxes, atol=1e-3)


def test_mixup_closes_with_mosaic():
    """The installed Ultralytics sets both to zero when it closes the mosaic; so does our plan."""
    from ultralytics.data.dataset import YOLODataset

    hyp = SimpleNamespace(mosaic=1.0, mixup=0.5, copy_paste=0.0, cutmix=0.0)
    dataset = SimpleNamespace(build_transforms=lambda given: None)
    YOLODataset.close_mosaic(dataset, hyp)  # pyright: ignore[reportArgumentType]
    assert (hyp.mosaic, hyp.mixup) == (0.0, 0.0)


@pytest.mark.parametrize("shape", [(120, SIDE), (SIDE, 107), (99, SIDE), (SIDE, SIDE), (1, SIDE)])
def test_without_affine_the_letterbox_is_exact(shape):
    photo, boxes = make_photo(*shape, seed=5), make_boxes(5)
    label: Any = oracle.LetterBox((SIDE, SIDE))(make_label(photo, boxes, 0))
    image, found, kept = run_ours([photo] * 4, [boxes] * 4, CASES[0], mosaic=False)
    np.testing.assert_array_equal(image, label["img"])
    np.testing.assert_allclose(found, label["instances"].bboxes[kept], atol=1e-3)


@pytest.mark.parametrize("multi_scale", [0.05, 0.1, 0.3, 0.5, 0.77])
def test_sides_of_multi_scale_are_some_of_ultralytics(monkeypatch, multi_scale):
    """Ours are among theirs, and reach as far as the range does."""
    asked: list[tuple[int, int]] = []

    def randrange(low: int, high: int) -> int:
        asked.append((low, high))
        return low

    monkeypatch.setattr("random.randrange", randrange)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(multi_scale=multi_scale, imgsz=640),
        stride=32,
        device=torch.device("cpu"),
    )
    batch = {"img": torch.zeros(1, 3, 640, 640, dtype=torch.uint8)}
    image = DetectionTrainer.preprocess_batch(trainer, batch)["img"]
    possible = sorted({number // 32 * 32 for number in range(*asked[0])})
    sides = sides_of(640, multi_scale, 32)
    assert image.shape[-1] == possible[0] and set(sides) <= set(possible)
    assert sides[0] - possible[0] <= 32 and possible[-1] - sides[-1] <= 32
    assert 3 <= len(sides) <= 5 and sides[0] + sides[-1] == 2 * 640


@pytest.mark.parametrize(
    "draws", [(1, 1, 1), (-1, -1, -1), (0.3, -0.9, 0.5), (-0.6, 0.8, -0.4), (0, 0, 0)]
)
@pytest.mark.parametrize("ranges", [(0.015, 0.7, 0.4), (0.5, 0.5, 0.5)])
def test_hsv(monkeypatch, draws, ranges):
    noise = np.random.default_rng(2).integers(0, 256, (40, SIDE, 3), dtype=np.uint8)
    grays = np.repeat(np.arange(SIDE, dtype=np.uint8)[None, :, None], 3, axis=2)
    image = np.concatenate([make_photo(120, SIDE, 3), noise, grays])
    uniform: Callable[..., np.ndarray] = lambda low, high, size: np.array(draws, float)  # noqa: E731
    monkeypatch.setattr("numpy.random.uniform", uniform)
    label = {"img": image.copy()}
    wanted = oracle.RandomHSV(*ranges).apply_image(label)["img"][..., ::-1]
    gains = np.array([0, 1, 1]) + np.array(draws) * ranges
    rgb = torch.from_numpy(image[..., ::-1].copy()).permute(2, 0, 1)[None].float()
    found = hsv(rgb, torch.from_numpy(gains[None].astype(np.float32)))[0].permute(1, 2, 0).numpy()
    if any(draws):
        apart = np.abs(found - wanted)
        assert apart.max() <= 2 and (apart <= 1).mean() > 0.999 and (apart == 0).mean() > 0.8
    else:  # we leave the image alone, Ultralytics' way through 8-bit HSV loses a little
        np.testing.assert_array_equal(found, image[..., ::-1])
