"""The tree data set: tiles, boxes, splits and the command, from a made-up wheel without network."""

from __future__ import annotations

import io
import json
import zipfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines.fetch import main
from yolo_ray.augment.images import read_photo
from yolo_ray.data.records import load_records
from yolo_ray.data.trees import MARKER, PHOTOS, TILE_PX, clip_boxes, fetch_trees, starts_of
from yolo_ray.errors import UserError

SIZES = {"train": (900, 1000), "val": (850, 640)}  # (height, width) of the large photos


def object_xml(name: str, box: tuple[int, int, int, int]) -> str:
    corners = "".join(
        f"<{key}>{value}</{key}>"
        for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    )
    return f"<object><name>{name}</name><bndbox>{corners}</bndbox></object>"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with four photos of the real names; green squares on brown are the trees."""
    path = tmp_path_factory.mktemp("wheel") / "deepforest-2.1.0-py3-none-any.whl"
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for photo in PHOTOS:
            height, width = SIZES[photo.split] if photo.name.startswith("2019") else (400, 400)
            pixels = np.full((height, width, 3), (120, 90, 60), np.uint8)
            objects = ""
            for label in ("Tree", "Dead", "Alive") * 8:
                left, top = (int(rng.integers(0, side - 40)) for side in (width, height))
                pixels[top : top + 40, left : left + 40] = (30, 160, 40)
                objects += object_xml(label, (left, top, left + 40, top + 40))
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            archive.writestr(f"deepforest/data/{photo.name}.png", buffer.getvalue())
            archive.writestr(
                f"deepforest/data/{photo.name}.xml", f"<annotation>{objects}</annotation>"
            )
        archive.writestr("deepforest-2.1.0.dist-info/licenses/LICENSE", "MIT License of the photos")
    return path


def test_tiles_and_boxes_fit_the_photos(wheel: Path, tmp_path: Path) -> None:
    counts = fetch_trees(tmp_path / "trees", wheel)
    assert (counts["train"].images, counts["val"].images) == (3 * 3 + 1, 2 * 2 + 1)
    for split in ("train", "val"):
        records = load_records(tmp_path / "trees" / "data.yaml", split, max_bad=0.0)
        assert (
            len(records) == counts[split].images and len(records.boxes) == counts[split].boxes > 20
        )
        assert records.names == ("tree",) and records.sizes.max() == TILE_PX
        for number, path in enumerate(records.paths):
            photo = read_photo(path)
            for box in records.boxes_of(number)[0] * np.tile(photo.shape[1::-1], 2):
                left, top, right, bottom = box.round().astype(int)
                patch = photo[top + 4 : bottom - 4, left + 4 : right - 4]
                assert np.abs(patch.astype(int) - (30, 160, 40)).max() < 60  # JPEG
    source = (tmp_path / "trees" / "SOURCE.md").read_text()
    assert "MIT License of the photos" in source and "SOAP_061 in val" in source


def test_no_photo_is_in_two_splits_and_validation_tiles_do_not_overlap(
    wheel: Path, tmp_path: Path
) -> None:
    fetch_trees(tmp_path / "trees", wheel)
    tiles = {
        split: {file.stem for file in (tmp_path / "trees" / "images" / split).iterdir()}
        for split in ("train", "val")
    }
    photos = {split: {stem[:-10] for stem in stems} for split, stems in tiles.items()}
    assert len(photos["train"]) == len(photos["val"]) == 2 and not photos["train"] & photos["val"]
    corners = sorted(stem[-9:] for stem in tiles["val"] if stem.startswith("2019"))
    assert corners == ["0000_0000", "0000_0400", "0400_0000", "0400_0400"]


def test_starts_cover_the_photo_or_leave_a_narrow_rest() -> None:
    for length in (400, 401, 1035, 1249, 2299, 2472):
        starts = starts_of(length, 300)
        assert starts[0] == 0 and starts[-1] == length - 400
        assert all(0 < b - a <= 300 for a, b in pairwise(starts))
    assert starts_of(1249, 400) == [0, 400, 800] and starts_of(1035, 400) == [0, 400, 800]
    assert starts_of(399, 400) == [0] and starts_of(400, 400) == [0]


def test_boxes_are_clipped_and_kept_by_the_area_inside() -> None:
    boxes = np.array(
        [[390, 10, 410, 30], [393, 10, 410, 30], [100, 100, 120, 130], [0, 0, 5, 5]], float
    )
    kept = clip_boxes(boxes, 50, 0, 350, 400)
    assert kept.tolist() == [[340, 10, 350, 30], [343, 10, 350, 30], [50, 100, 70, 130]]
    assert len(clip_boxes(boxes, 50, 0, 349, 400)) == 2  # 6 of 17 px of the second are too few


def test_a_second_run_does_nothing_and_a_damaged_folder_is_made_again(
    wheel: Path, tmp_path: Path
) -> None:
    out = tmp_path / "trees"
    first = fetch_trees(out, wheel)
    stamps = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert fetch_trees(out, tmp_path / "no.whl") == first
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == stamps
    next((out / "images" / "val").iterdir()).unlink()
    assert fetch_trees(out, wheel) == first
    assert len(list((out / "images" / "val").iterdir())) == first["val"].images
    assert [file.name for file in tmp_path.iterdir()] == ["trees"]  # no temporary folder is left


def test_a_folder_of_the_user_is_not_touched(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UserError, match="was not made by fetch"):
        fetch_trees(tmp_path / "mine", wheel)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_the_command_ends_with_one_json_line(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "trees"), "--wheel", str(wheel)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["exit"] == 0 and line["train"]["images"] == 10 and line["val"]["boxes"] > 20
    assert (tmp_path / "trees" / MARKER).is_file()


def test_a_wrong_wheel_and_no_network_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.whl"
    bad.write_bytes(b"no zip")
    assert main(["--out", str(tmp_path / "a"), "--wheel", str(bad)]) == 1
    assert "is not the wheel of" in capsys.readouterr().err
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip finds nothing, as without network
    assert main(["--out", str(tmp_path / "b")]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "check the network" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["exit"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["bad.whl"]
