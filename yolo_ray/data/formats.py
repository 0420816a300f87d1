"""The YOLO format: data.yaml and label files, on a disk or elsewhere. Nothing here writes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from yolo_ray.config.address import checked_place, is_remote, join, parent_of, split_host
from yolo_ray.data.storage import read_text
from yolo_ray.errors import UserError

Split = Literal["train", "val"]
PHOTO_SUFFIXES = frozenset(
    {".avif", ".bmp", ".jp2", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"}
)
# Ultralytics takes these with extra packages. They are named as bad photos, not passed over.
UNREADABLE_SUFFIXES = frozenset({".dng", ".heic", ".heif"})
# Ultralytics' tolerance for the rounding of whoever wrote the labels.
LOWEST, HIGHEST = -0.01, 1.01


@dataclass(frozen=True)
class DataYaml:
    """A data.yaml: its file, the folder its entries are relative to, class names, split entries.

    File and folder are absolute paths or addresses (``s3://...``).
    """

    file: str
    root: str
    names: tuple[str, ...]
    splits: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Labels:
    """Boxes of one label file: xyxy fractions float32 [n, 4] inside [0, 1], class ids int32 [n]."""

    boxes: np.ndarray
    classes: np.ndarray
    duplicates: int = 0
    clipped: int = 0


class LabelError(Exception):
    """A label file with bad lines: the first one's number and reason (others are counted in it)."""

    def __init__(self, line: int | None, reason: str) -> None:
        """Line from 1 up, None for the whole file."""
        super().__init__(line, reason)
        self.line = line
        self.reason = reason


# ----------------------------------------------------------------------------------- data.yaml


class _Loader(yaml.BaseLoader):
    """Scalars stay text, so that a class called ``no`` is not False; repeated keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                line = key.start_mark.line + 1
                raise yaml.MarkedYAMLError(problem=f"line {line} repeats the key {name!r}")
            seen.add(name)
        return super().construct_mapping(node, deep=True)


def load_data_yaml(file: str | Path) -> DataYaml:
    """Read a YOLO-format data.yaml. ``path`` is optional; it is relative to the YAML file's folder.

    Raises UserError for a missing file, bad YAML, bad ``names``, ``nc`` that does not fit.
    """
    file = _file_at(str(file))
    try:
        content = yaml.load(read_text(file), Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(
            f"{file} is not valid YAML ({' '.join(str(error).split())}); correct it"
        ) from error
    except FileNotFoundError as error:
        raise UserError(
            f"data={file} is not there; check bucket and path, pass data=s3://BUCKET/PATH/data.yaml"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}); save it as UTF-8 text") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{file} holds no 'train:', 'val:' and 'names:'; write a YOLO-format data.yaml"
        )
    root = _root(file, content.get("path"))
    splits = {
        split: entries
        for split, key in (("train", "train"), ("val", "validation"), ("val", "val"))
        if (entries := _entries(file, key, content.get(key)))
    }
    return DataYaml(file, root, _names(file, content.get("names"), content.get("nc")), splits)


def _file_at(file: str) -> str:
    file = checked_place(file)
    if is_remote(file):
        return file
    file = os.path.abspath(Path(file).expanduser())
    if not os.path.isfile(file):
        raise UserError(f"data={file} is not a file; {_meant(file)}")
    return file


def _meant(file: str) -> str:
    """What a wrong ``data=`` should have been."""
    if found := re.search(r"(?:^|/)(s3|gs|gcs|https?):/+(.*)", file):
        return f"an address has two slashes: data={found.group(1)}://{found.group(2)}"
    inside = os.path.join(file, "data.yaml")
    return f"pass data={inside if os.path.isfile(inside) else 'PATH/data.yaml'}"


def _root(file: str, path: Any) -> str:
    """The folder that ``path:`` names; a remote one is not looked for, stores have no folders."""
    if not isinstance(path, str | None):
        raise UserError(f"{file}: 'path:' must be one folder, not {path!r}; correct it")
    place = checked_place(path) if path and _given(path) else "."
    if is_remote(place):
        return join(place, ".")
    if is_remote(file) and not os.path.isabs(place):
        return join(parent_of(file), place)
    root = os.path.abspath(Path(file).parent / Path(place).expanduser())
    if not os.path.isdir(root):
        raise UserError(
            f"{file}: path {path!r} leads to {root}, which is no folder; correct 'path:'"
        )
    return root


def _given(value: Any) -> bool:
    return value not in (None, "", "~", "null")


def _entries(file: str, key: str, value: Any) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [value] if _given(value) else []
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise UserError(
            f"{file}: '{key}:' must be a folder, a .txt file or a list of them; correct it"
        )
    return tuple(entries)


def _names(file: str, names: Any, nc: Any) -> tuple[str, ...]:
    """Class names by id. Without names, ``nc: 3`` gives class_0 to class_2, as in Ultralytics."""
    count = _count(file, nc)
    if not _given(names) or names in ([], {}):
        if count is None:
            raise UserError(f"{file} has no 'names:'; list the class names in it")
        return tuple(f"class_{number}" for number in range(count))
    if isinstance(names, dict):
        names = _names_of_map(file, names)
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name.strip() for name in names
    ):
        raise UserError(
            f"{file}: 'names:' must be a list of words or a map from id to word; correct it"
        )
    if count is not None and count != len(names):
        raise UserError(f"{file}: nc is {count} but 'names:' has {len(names)}; correct one of them")
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(
                f"{file}: ids {names.index(name)} and {number} are both named {name!r}; rename one"
            )
    return tuple(names)


def _count(file: str, nc: Any) -> int | None:
    if not _given(nc):
        return None
    try:
        count = float(nc)
    except (TypeError, ValueError):
        count = 0.0
    if count < 1 or count % 1:
        raise UserError(f"{file}: nc must be a whole number above 0, not {nc!r}; correct it")
    return int(count)


def _names_of_map(file: str, names: dict[str, Any]) -> list[Any]:
    by_id: dict[int, Any] = {}
    for key, name in names.items():
        try:
            number = int(key)
        except (TypeError, ValueError):
            raise UserError(
                f"{file}: class id {key!r} in 'names:' is no whole number; correct it"
            ) from None
        if number < 0 or number in by_id:
            fault = "negative" if number < 0 else "given twice"
            raise UserError(
                f"{file}: class id {key} in 'names:' is {fault}; number classes from 0 up"
            )
        by_id[number] = name
    missing = [number for number in range(len(by_id)) if number not in by_id]
    if missing:
        raise UserError(f"{file}: 'names:' has no class id {missing[0]}; number classes from 0 up")
    return [by_id[number] for number in range(len(by_id))]


# ----------------------------------------------------------------------------------- label files


def label_path(photo: str) -> str:
    """Label file of a photo: the last /images/ in its path becomes /labels/, the suffix .txt.

    A bucket or host called images stays.
    """
    mark = f"{os.sep}images{os.sep}"
    host, photo = split_host(photo) if is_remote(photo) else ("", photo)
    head, found, tail = photo.rpartition(mark)
    moved = f"{head}{os.sep}labels{os.sep}{tail}" if found else photo
    return host + os.path.splitext(moved)[0] + ".txt"


def load_labels(file: str, num_classes: int) -> Labels | None:
    """Labels of one file, None if there is no file.

    A row is ``class x y width height`` (centre, fractions) or ``class x1 y1 x2 y2 x3 y3 ...``, a
    polygon that becomes its box. Exact duplicate rows are dropped and counted. Raises LabelError
    for bad rows and UserError for a class id that data.yaml does not name.
    """
    try:
        text = read_text(file)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise LabelError(None, "not a text file") from None
    except OSError as error:
        raise LabelError(None, f"cannot be read ({error.strerror})") from error
    rows = [
        (line, row)
        for line, text_row in enumerate(text.splitlines(), 1)
        if (row := text_row.split())
    ]
    if not rows:
        return Labels(np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
    values = _plain_rows(rows, num_classes)
    if values is None:
        values, keys = _rows_one_by_one(file, rows, num_classes)
    else:
        keys = [row.tobytes() for row in values.astype(np.float32)]
        values[:, 1:] = _corners(values[:, 1:])
    kept = list(dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True)).values())
    values = values[sorted(kept)]
    corners = values[:, 1:]
    clipped = int(((corners < -1e-6) | (corners > 1 + 1e-6)).any(1).sum())
    boxes = corners.clip(0.0, 1.0).astype(np.float32)
    return Labels(boxes, values[:, 0].astype(np.int32), len(keys) - len(kept), clipped)


def _corners(xywh: np.ndarray) -> np.ndarray:
    half = xywh[:, 2:] / 2
    return np.concatenate([xywh[:, :2] - half, xywh[:, :2] + half], axis=1)


def _plain_rows(rows: list[tuple[int, list[str]]], num_classes: int) -> np.ndarray | None:
    """float64 [n, 5] when every row is a flawless box, else None: the quick way for most files."""
    if any(len(row) != 5 for _, row in rows):
        return None
    try:
        values = np.array([row for _, row in rows], dtype=np.float64)
    except ValueError:
        return None
    numbers, places, sides = values[:, 0], values[:, 1:], values[:, 3:]
    classes_fit = (numbers >= 0) & (numbers < num_classes) & (numbers % 1 == 0)
    places_fit = (places >= LOWEST) & (places <= HIGHEST)
    if not (classes_fit.all() and places_fit.all() and (sides > 0).all()):
        return None
    return values if _visible(_corners(places)).all() else None


def _visible(corners: np.ndarray) -> np.ndarray:
    """Which boxes keep an area inside the photo, in the float32 that records store. [n] bool."""
    inside = corners.clip(0.0, 1.0).astype(np.float32)
    return np.all(inside[:, 2:] > inside[:, :2], axis=1)


def _rows_one_by_one(
    file: str, rows: list[tuple[int, list[str]]], num_classes: int
) -> tuple[np.ndarray, list[bytes]]:
    """Class and corners of every row, float64 [n, 5], and the bytes that tell rows apart."""
    values, keys = [], []
    defects: list[tuple[int, str]] = []
    for line, row in rows:
        try:
            numbers = _numbers_of(row)
        except ValueError as error:
            defects.append((line, str(error)))
            continue
        if not 0 <= numbers[0] < num_classes:
            raise UserError(
                f"{file}:{line}: class id {numbers[0]:.0f} is out of range, data.yaml names "
                f"classes 0 to {num_classes - 1}; correct the label or 'names:'"
            )
        keys.append(numbers.astype(np.float32).tobytes())
        values.append(np.concatenate([numbers[:1], _box_of(numbers[1:])]))
    if defects:
        more = f" (and {len(defects) - 1} more bad lines)" if len(defects) > 1 else ""
        raise LabelError(defects[0][0], defects[0][1] + more)
    return np.array(values), keys


def _box_of(places: np.ndarray) -> np.ndarray:
    if len(places) == 4:
        return _corners(places[None])[0]
    points = places.reshape(-1, 2)
    return np.concatenate([points.min(0), points.max(0)])


def _numbers_of(row: Sequence[str]) -> np.ndarray:
    """float64 numbers of one row. Raises ValueError with the reason."""
    if len(row) != 5 and (len(row) < 7 or len(row) % 2 == 0):
        raise ValueError(f"{len(row)} columns, a box has 5 and a polygon 7, 9, 11, ...")
    try:
        numbers = np.array(row, dtype=np.float64)
    except ValueError:
        raise ValueError(f"not a number: {' '.join(row)[:60]!r}") from None
    if not np.isfinite(numbers).all():
        raise ValueError("NaN or infinite value")
    if numbers[0] % 1:
        raise ValueError(f"class id {row[0]} is not a whole number")
    if len(row) == 5 and (numbers[3:] <= 0).any():
        raise ValueError(f"width {row[3]}, height {row[4]}: zero or negative")
    if (numbers[1:] < LOWEST).any():
        raise ValueError(f"negative coordinate {numbers[1:].min():g}")
    if (numbers[1:] > HIGHEST).any():
        raise ValueError(
            f"coordinate {numbers[1:].max():g} above 1, they are fractions of the photo"
        )
    if not _visible(_box_of(numbers[1:])[None]).all():
        raise ValueError("box without area inside the photo")
    return numbers
