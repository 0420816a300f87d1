"""Pictures of a run: photos with boxes (PIL), curves of training and precision (matplotlib).

Nothing here touches matplotlib's global state: figures are objects, drawn by their own canvas.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from PIL import Image, ImageDraw, ImageFont

from yolo_ray.track.canvas import new_figure, save_figure, style
from yolo_ray.track.table import read_table

Color = tuple[int, int, int]
Boxes = tuple[np.ndarray, np.ndarray]  # xyxy px [k,4], class ids [k]
ScoredBoxes = tuple[np.ndarray, np.ndarray, np.ndarray]  # and scores [k]

MAX_PHOTOS = 16
MAX_PAIRS = 8
CELL_PX = (320, 640)  # smallest and largest side of one photo in a grid
GAP_PX = 6
PAPER: Color = (255, 255, 255)
INK: Color = (40, 40, 40)
MAX_LEGEND = 12  # more classes than that: only the mean has a name

# Strong enough on photos, neighbours far apart.
PALETTE: tuple[Color, ...] = (
    (230, 85, 13),
    (31, 119, 220),
    (24, 160, 90),
    (214, 39, 122),
    (240, 190, 20),
    (120, 80, 200),
    (20, 180, 200),
    (150, 75, 30),
    (220, 40, 40),
    (110, 170, 30),
    (240, 130, 170),
    (70, 90, 130),
)


class PrCurves(Protocol):
    """What :func:`draw_pr` reads; a class without ground truth has rows of NaN."""

    @property
    def confidence(self) -> np.ndarray:
        """[K] from 0 to 1."""
        ...

    @property
    def f1(self) -> np.ndarray:
        """[C,K] F1 against confidence."""
        ...

    @property
    def recall_points(self) -> np.ndarray:
        """[P] from 0 to 1."""
        ...

    @property
    def precision_at_recall(self) -> np.ndarray:
        """[C,P]."""
        ...


def class_color(index: int) -> Color:
    """The colour of a class, the same in every picture."""
    return PALETTE[index % len(PALETTE)]


def draw_grid(
    images: Sequence[np.ndarray] | np.ndarray,
    boxes: Sequence[np.ndarray],
    classes: Sequence[np.ndarray],
    names: Sequence[str],
    path: Path,
    scores: Sequence[np.ndarray] | None = None,
) -> None:
    """Draw up to 16 photos with their boxes into one file.

    ``images`` are uint8 [h,w,3] RGB, ``boxes`` [k,4] xyxy px of that image, ``classes`` [k] ids,
    ``scores`` [k] in 0..1. An id without a name is shown as its number.
    Raises OSError if the file cannot be written.
    """
    count = min(len(images), MAX_PHOTOS)
    columns = math.ceil(math.sqrt(count)) if count else 1
    rows = max(1, math.ceil(count / columns))
    side = _cell_side(images)
    sheet = _sheet(columns, rows, side)
    for index in range(count):
        score = None if scores is None else scores[index]
        cell = _draw_photo(images[index], (boxes[index], classes[index]), score, names, side)
        row, column = divmod(index, columns)
        sheet.paste(cell, (GAP_PX + column * (side + GAP_PX), GAP_PX + row * (side + GAP_PX)))
    _save(sheet, path)


def draw_predictions(
    images: Sequence[np.ndarray] | np.ndarray,
    truth: Sequence[Boxes],
    predictions: Sequence[ScoredBoxes],
    names: Sequence[str],
    path: Path,
    min_score: float = 0.25,
) -> None:
    """Draw up to 8 photos twice: the truth at the left, what the model says (and how surely) right.

    ``images`` are uint8 [h,w,3] RGB of any size; boxes are xyxy px of that image.
    Raises OSError if the file cannot be written.
    """
    count = min(len(images), MAX_PAIRS)
    pairs = 2 if count > 1 else 1  # pairs in a row of the sheet
    rows = max(1, math.ceil(count / pairs))
    side = _cell_side(images)
    heading = round(side * 0.075)
    pair_width, row_height = 2 * side + 4 * GAP_PX, side + GAP_PX
    width = pairs * pair_width + GAP_PX
    sheet = Image.new("RGB", (width, heading + rows * row_height + GAP_PX), PAPER)
    draw, font = ImageDraw.Draw(sheet), _font(round(heading * 0.62))
    right = f"Prediction (score \u2265 {min_score:.2f})"
    for pair in range(min(pairs, max(count, 1))):
        for text, shift in (("Truth", 0), (right, side + GAP_PX)):
            left = 2 * GAP_PX + pair * pair_width + shift
            draw.text((left, heading / 2 + GAP_PX / 2), text, fill=INK, font=font, anchor="lm")
    for index in range(count):
        row, pair = divmod(index, pairs)
        left = 2 * GAP_PX + pair * pair_width
        top = heading + GAP_PX + row * row_height
        sheet.paste(_draw_photo(images[index], truth[index], None, names, side), (left, top))
        boxes, classes, scores = predictions[index]
        kept = scores >= min_score
        found = _draw_photo(images[index], (boxes[kept], classes[kept]), scores[kept], names, side)
        sheet.paste(found, (left + side + GAP_PX, top))
    _save(sheet, path)


def draw_curves(table: Path, path: Path) -> None:
    """Draw results.csv by epoch: losses, mAP, precision and recall, learning rate, speed.

    Raises OSError if the file cannot be written.
    """
    columns = read_table(table)
    panels: list[tuple[str, list[str]]] = [
        ("Box loss", ["train/box"]),
        ("Class loss", ["train/cls"]),
        ("DFL loss", ["train/dfl"]),
        ("mAP", ["val/map50", "val/map75", "val/map50_95"]),
        ("Precision and recall", ["val/precision", "val/recall"]),
        ("Learning rate", ["lr"]),
    ]
    labels = {
        "val/map50": "mAP50",
        "val/map75": "mAP75",
        "val/map50_95": "mAP50-95",
        "val/precision": "precision",
        "val/recall": "recall",
    }
    figure = new_figure(12.0, 6.4)
    epochs = np.array(columns.get("epoch", []))
    for place, (title, wanted) in enumerate(panels, 1):
        axes = figure.add_subplot(2, 3, place)
        style(axes, title, "epoch", "")
        for index, name in enumerate(wanted):
            values = np.array(columns.get(name, []), dtype=float)
            seen = np.isfinite(values)
            if seen.any():
                _line(axes, epochs[seen], values[seen], index, labels.get(name, ""))
        if len(wanted) > 1:
            axes.set_ylim(bottom=0.0)
            if axes.lines:
                axes.legend(frameon=False, fontsize=9)
        elif not axes.lines:
            axes.text(0.5, 0.5, "no values", ha="center", color="0.6", transform=axes.transAxes)
    save_figure(figure, path)


def draw_pr(curves: PrCurves, names: Sequence[str], path: Path) -> None:
    """Draw precision against recall and F1 against confidence, per class and their mean, IoU 0.5.

    Raises OSError if the file cannot be written.
    """
    figure = new_figure(12.0, 5.0)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    style(left, "Precision and recall at IoU 0.5", "recall", "precision")
    style(right, "F1 by confidence at IoU 0.5", "confidence", "F1")
    precision, f1 = np.asarray(curves.precision_at_recall), np.asarray(curves.f1)
    _class_lines(left, curves.recall_points, precision, [_mean(row) for row in precision], names)
    _class_lines(right, curves.confidence, f1, [_max(row) for row in f1], names)
    with_truth = np.isfinite(f1).any(axis=1)
    if with_truth.any():
        mean_f1 = f1[with_truth].mean(axis=0)
        best = int(mean_f1.argmax())
        at = float(curves.confidence[best])
        right.axvline(at, color="0.6", linewidth=1, linestyle=":")
        label = f"best mean {mean_f1[best]:.2f} at {at:.2f}"
        left_half = at < 0.5
        right.annotate(
            label,
            (at, 0.04),
            xytext=(6 if left_half else -6, 0),
            textcoords="offset points",
            ha="left" if left_half else "right",
            fontsize=9,
            color="0.35",
        )
    save_figure(figure, path)


def _class_lines(
    axes: Axes, x: np.ndarray, rows: np.ndarray, values: list[float], names: Sequence[str]
) -> None:
    """A thin line a class and a thick one for the mean over the classes with ground truth."""
    kept = [index for index in range(len(rows)) if np.isfinite(rows[index]).all()]
    for index in kept:
        label = f"{_name(names, index)}  {values[index]:.2f}" if len(kept) <= MAX_LEGEND else None
        color = tuple(part / 255 for part in class_color(index))
        axes.plot(x, rows[index], color=color, linewidth=1.4, alpha=0.85, label=label)
    if len(kept) > 1:
        mean = rows[kept].mean(axis=0)
        value = float(np.mean([values[index] for index in kept]))
        axes.plot(x, mean, color="0.1", linewidth=2.6, label=f"mean  {value:.2f}")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.03)
    if kept:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def annotated_jpeg(
    photo: np.ndarray,
    boxes: np.ndarray,
    classes: np.ndarray,
    scores: np.ndarray,
    names: Sequence[str],
) -> bytes:
    """A photo uint8 [h,w,3] RGB in its own size with boxes xyxy px [k,4], as JPEG."""
    side = max(photo.shape[:2])
    drawn = _draw_photo(photo, (boxes, classes), scores, names, side)
    height, width = photo.shape[:2]
    left, top = (side - width) // 2, (side - height) // 2
    content = io.BytesIO()
    drawn.crop((left, top, left + width, top + height)).save(
        content, "JPEG", quality=90, subsampling=0
    )
    return content.getvalue()


def _draw_photo(
    image: np.ndarray, boxes: Boxes, scores: np.ndarray | None, names: Sequence[str], side: int
) -> Image.Image:
    """One photo in a square cell: boxes first, then labels, so that no box crosses a label."""
    height, width = image.shape[:2]
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    photo = Image.fromarray(np.ascontiguousarray(image)).resize(size, Image.Resampling.BILINEAR)
    cell = Image.new("RGB", (side, side), (228, 228, 228))
    left, top = (side - size[0]) // 2, (side - size[1]) // 2
    cell.paste(photo, (left, top))
    draw = ImageDraw.Draw(cell)
    line, font = max(2, side // 240), _font(max(11, side // 36))
    labels: list[tuple[float, float, str, Color]] = []
    order = range(len(boxes[0])) if scores is None else np.argsort(scores, kind="stable").tolist()
    for k in order:
        color = class_color(int(boxes[1][k]))
        x1, y1, x2, y2 = (boxes[0][k] * scale + np.array([left, top, left, top])).tolist()
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=color, width=line)
        text = _name(names, int(boxes[1][k]))
        text = text if scores is None else f"{text} {scores[k]:.2f}"
        labels.append((x1, y1, text, color))
    for x1, y1, text, color in labels:
        _draw_label(draw, (x1, y1), text, color, font, side)
    return cell


def _draw_label(
    draw: ImageDraw.ImageDraw,
    corner: tuple[float, float],
    text: str,
    color: Color,
    font: ImageFont.FreeTypeFont,
    side: int,
) -> None:
    """Above the box's top-left corner, pushed inside the cell."""
    width = draw.textlength(text, font=font) + 6
    height = font.size + 4
    x = min(max(corner[0], 0), max(0, side - width))
    y = corner[1] - height if corner[1] >= height else max(corner[1], 0)
    y = min(y, side - height)
    draw.rectangle((x, y, x + width, y + height), fill=color)
    bright = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 150
    ink = (20, 20, 20) if bright else (255, 255, 255)
    draw.text((x + 3, y + height / 2), text, fill=ink, font=font, anchor="lm")


def _cell_side(images: Sequence[np.ndarray] | np.ndarray) -> int:
    longest = max((max(image.shape[:2]) for image in images), default=CELL_PX[0])
    return int(min(max(longest, CELL_PX[0]), CELL_PX[1]))


def _sheet(columns: int, rows: int, side: int) -> Image.Image:
    size = (GAP_PX + columns * (side + GAP_PX), GAP_PX + rows * (side + GAP_PX))
    return Image.new("RGB", size, PAPER)


def _font(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib brings a font that knows Latin, Greek and Cyrillic letters."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)


def _save(sheet: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, quality=90, subsampling=0)  # thin coloured lines blur else


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, index: int, label: str) -> None:
    """Few points are marked: a line of one point cannot be seen."""
    order = (1, 2, 0) if label else (1,)
    color = tuple(part / 255 for part in class_color(order[index % len(order)]))
    marker = "o" if len(x) <= 20 else ""
    axes.plot(x, y, color=color, linewidth=1.8, marker=marker, markersize=3.5, label=label)


def _name(names: Sequence[str], index: int) -> str:
    return names[index] if 0 <= index < len(names) else str(index)


def _mean(row: np.ndarray) -> float:
    return float(row.mean())


def _max(row: np.ndarray) -> float:
    return float(row.max())
