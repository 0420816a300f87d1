"""Pictures: what is drawn where, in which colour, and that odd input draws."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as pyplot
import numpy as np
import pytest
from PIL import Image

from yolo_ray.track.pictures import (
    GAP_PX,
    class_color,
    draw_curves,
    draw_grid,
    draw_pr,
    draw_predictions,
)
from yolo_ray.track.table import append_row

BOX = np.array([[100.0, 150.0, 250.0, 300.0]])
NONE = (np.zeros((0, 4)), np.zeros(0, int))


def gray(count: int, side: int = 320) -> np.ndarray:
    return np.full((count, side, side, 3), 128, np.uint8)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def share(image: np.ndarray, color: tuple[int, int, int]) -> float:
    return float((np.abs(image - np.array(color)).max(-1) < 40).mean())


def test_grid_draws_each_box_at_its_place_in_its_class_colour(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "grid.png"
    boxes = [BOX, NONE[0], BOX * 0.5]
    classes = [np.array([0]), NONE[1], np.array([1])]
    draw_grid(gray(3), boxes, classes, ["one"], path)  # class 1 has no name
    image = pixels(path)
    step = 320 + GAP_PX
    assert image.shape == (2 * step + GAP_PX, 2 * step + GAP_PX, 3)
    first, third = (image[GAP_PX + y :, GAP_PX:][:320, :320] for y in (0, step))
    assert tuple(first[300, 180]) == class_color(0)  # the lower edge
    assert tuple(third[150, 90]) == class_color(1)
    assert tuple(first[200, 180]) == (128, 128, 128)  # not filled
    second = image[GAP_PX:, GAP_PX + step :][:320, :320]
    assert (second == 128).all()
    assert tuple(image[-30, -30]) == (255, 255, 255)  # no fourth photo


def test_grid_scales_photos_of_any_shape_and_shows_sixteen(tmp_path: Path) -> None:
    path = tmp_path / "grid.jpg"
    wide = np.full((100, 200, 3), 128, np.uint8)
    whole = np.array([[0.0, 0.0, 200.0, 100.0]])
    draw_grid([wide] * 20, [whole] * 20, [np.array([3])] * 20, ["a"], path, [np.array([0.5])] * 20)
    image = pixels(path)
    assert image.shape[0] == 4 * (320 + GAP_PX) + GAP_PX
    cell = image[GAP_PX:, GAP_PX:][:320, :320]
    assert share(cell[78:84, 100:], class_color(3)) > 0.2  # the photo's top edge, centred
    assert share(cell[235:241], class_color(3)) > 0.2


def test_predictions_leave_out_low_scores(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    found = (np.concatenate([BOX, BOX + 40]), np.array([1, 2]), np.array([0.9, 0.1]))
    draw_predictions(gray(2), [(BOX, np.array([0])), NONE], [found, (*NONE, np.zeros(0))], [], path)
    image = pixels(path)
    half = image.shape[1] // 2
    assert share(image[:, : half // 2], class_color(0)) > 0.005
    assert share(image[:, half // 2 : half], class_color(1)) > 0.005
    assert share(image[:, half // 2 : half], class_color(0)) < 0.001
    assert share(image, class_color(2)) < 0.001
    draw_predictions(gray(0), [], [], [], path)


def test_a_photo_is_not_changed(tmp_path: Path) -> None:
    images = gray(1)
    draw_grid(images, [BOX], [np.array([0])], ["a"], tmp_path / "g.jpg")
    assert (images == 128).all()


def test_curves_draw_what_there_is(tmp_path: Path) -> None:
    table, empty, full = tmp_path / "results.csv", tmp_path / "empty.png", tmp_path / "full.png"
    draw_curves(table, empty)
    for epoch in range(1, 6):
        metrics = {"val/map50": 0.1 * epoch} if epoch % 2 else {}
        append_row(table, {"train/box": float("nan"), "lr": 0.1 / epoch, **metrics}, epoch=epoch)
    draw_curves(table, full)
    assert share(pixels(empty), class_color(1)) < 1e-5
    assert share(pixels(full), class_color(1)) > 1e-4
    assert pyplot.get_fignums() == []


@dataclass
class Curves:
    confidence: np.ndarray
    f1: np.ndarray
    recall_points: np.ndarray
    precision_at_recall: np.ndarray


def test_pr_leaves_out_classes_without_truth(tmp_path: Path) -> None:
    confidence, recall = np.linspace(0, 1, 1000), np.linspace(0, 1, 101)
    nothing = np.full(1000, np.nan)
    f1 = np.stack([np.sin(np.pi * confidence), nothing, 0.5 * np.sin(np.pi * confidence)])
    precision = np.stack([1 - recall**4, nothing[:101], 1 - recall])
    path = tmp_path / "pr.png"
    draw_pr(Curves(confidence, f1, recall, precision), ["a", "b", "c"], path)
    image = pixels(path)
    assert share(image, class_color(0)) > 1e-4
    assert share(image, class_color(2)) > 1e-4
    assert share(image, class_color(1)) < 1e-4
    draw_pr(Curves(confidence, f1[1:2], recall, precision[1:2]), ["b"], path)
    many = np.tile(f1[:1], (30, 1))
    draw_pr(Curves(confidence, many, recall, np.tile(precision[:1], (30, 1))), [], path)


def test_signs_that_the_font_lacks_do_not_fill_the_log(tmp_path: Path) -> None:
    line, ones = np.linspace(0, 1, 5), np.ones((2, 5))
    names = [
        "\u6a39\u6728",
        "\ud83c\udf33\u30c6".encode("utf-16", "surrogatepass").decode("utf-16"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_pr(Curves(line, ones, line, ones), names, tmp_path / "pr.png")
        draw_grid(gray(1), [BOX], [np.array([0])], names, tmp_path / "grid.jpg")
    assert (tmp_path / "pr.png").is_file() and (tmp_path / "grid.jpg").is_file()
    plain = pyplot.figure()
    plain.text(0.5, 0.5, names[0])
    with pytest.warns(UserWarning, match=r"Glyph .* missing from"):  # what is kept quiet
        plain.savefig(tmp_path / "plain.png")
    pyplot.close(plain)
