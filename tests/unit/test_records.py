"""data.yaml, labels and records: what is accepted, what is named, and that nothing is written."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.synthetic import make_dataset
from yolo_ray.data.formats import LabelError, label_path, load_data_yaml, load_labels
from yolo_ray.data.records import load_records
from yolo_ray.errors import UserError

Maker = Callable[..., Path]


def content_of(folder: Path) -> dict[str, tuple[str, int]]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {
        str(file): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in files
    }


def photo_of(data: Path, number: int, split: str = "train") -> Path:
    return data.parent / "images" / split / f"{number:04d}.jpg"


def label_of(data: Path, number: int, split: str = "train") -> Path:
    return data.parent / "labels" / split / f"{number:04d}.txt"


def refusal(data: Path, split: str = "train", max_bad: float = 0.01) -> str:
    with pytest.raises(UserError) as caught:
        load_records(data, split, max_bad=max_bad)  # pyright: ignore[reportArgumentType]
    message = str(caught.value)
    assert "\n" not in message
    return message


# ----------------------------------------------------------------------------------- what is read


def test_records_hold_every_photo_sorted_and_write_nothing(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=7, val=3, size=(96, 128))
    before = content_of(data.parent)
    records = load_records(data, "train", max_bad=0.0)
    assert content_of(data.parent) == before
    assert (
        len(records) == 7 and records.bad == () and len(load_records(data, "val", max_bad=0)) == 3
    )
    assert list(records.paths) == sorted(records.paths)
    assert records.sizes.tolist() == [[96, 128]] * 7 and records.sizes.dtype == np.int32
    assert records.boxes.dtype == np.float32 and records.classes.dtype == np.int32
    assert records.offsets[0] == 0 and records.offsets[-1] == len(records.boxes)
    for number in range(7):
        boxes, classes = records.boxes_of(number)
        rows = np.loadtxt(label_of(data, number), ndmin=2)
        np.testing.assert_array_equal(classes, rows[:, 0])
        np.testing.assert_allclose((boxes[:, :2] + boxes[:, 2:]) / 2, rows[:, 1:3], atol=1e-6)
        np.testing.assert_allclose(boxes[:, 2:] - boxes[:, :2], rows[:, 3:], atol=1e-6)


def test_records_equal_ultralytics(
    tiny_dataset: Maker, shared_data: Path | None, tmp_path: Path
) -> None:
    from ultralytics.data.utils import verify_image_label

    data = tiny_dataset(train=12, val=2, size=(90, 130))
    label_of(data, 0).write_text("0 0.99 0.5 0.1 0.2\n1 0.1 0.1 0.05 0.05\n1 0.1 0.1 0.05 0.050\n")
    label_of(data, 1).write_text("2 0.1 0.2 0.5 0.25 0.4 0.6\n0 0.5 0.5 0.6 0.5 0.6 0.6 0.5 0.7\n")
    sets = [data] + ([shared_data / "bccd" / "data.yaml"] if shared_data else [])
    for data_yaml in sets:
        records = load_records(data_yaml, "train", max_bad=0.0)
        for number, path in enumerate(records.paths):
            arguments = (
                str(path),
                label_path(str(path)),
                "",
                False,
                len(records.names),
                0,
                0,
                False,
            )
            _, rows, shape, *_ = verify_image_label(arguments)
            boxes, classes = records.boxes_of(number)
            assert shape == tuple(records.sizes[number])
            theirs = np.concatenate(
                [rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2, rows[:, :1]],
                axis=1,
            ).clip(0, None)
            theirs[:, :4] = theirs[:, :4].clip(0, 1)
            ours = np.concatenate([boxes, classes[:, None]], axis=1)
            assert len(ours) == len(theirs)
            apart = np.abs(ours[:, None] - theirs[None]).max(2)
            assert (apart.min(0) < 1e-6).all() and (apart.min(1) < 1e-6).all()


def test_duplicates_background_and_clipping_are_counted(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=3)
    label_of(data, 0).write_text("1 .5 .5 .2 .2\n0 0.9 0.5 0.4 0.2\n1 0.50 0.5 0.2 0.2\n")
    label_of(data, 1).unlink()
    label_of(data, 2).write_text("\n")
    records = load_records(data, "train", max_bad=0.0)
    assert records.counts == {"duplicates": 1, "clipped": 1}
    boxes, classes = records.boxes_of(0)
    assert classes.tolist() == [1, 0] and records.offsets.tolist() == [0, 2, 2, 2]
    np.testing.assert_allclose(boxes, [[0.4, 0.4, 0.6, 0.6], [0.7, 0.4, 1.0, 0.6]], atol=1e-6)


def test_boxes_and_polygons_of_one_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("﻿0 0.5 0.5 0.2 0.2\r\n1 0.1 0.2 0.5 0.25 0.4 0.6\r\n", encoding="utf-8")
    labels = load_labels(str(file), 2)
    assert labels is not None
    np.testing.assert_allclose(
        labels.boxes, [[0.4, 0.4, 0.6, 0.6], [0.1, 0.2, 0.5, 0.6]], atol=1e-6
    )
    assert load_labels(str(tmp_path / "none.txt"), 2) is None


def test_the_digest_knows_content_and_not_place(tiny_dataset: Maker, tmp_path: Path) -> None:
    data = tiny_dataset(train=4)
    first = load_records(data, "train", max_bad=0.0).digest
    moved = shutil.copytree(data.parent, tmp_path / "elsewhere" / "moved") / "data.yaml"
    assert load_records(moved, "train", max_bad=0.0).digest == first
    digests = {first}
    label_of(moved, 0).write_text("0 0.5 0.5 0.25 0.25\n")
    digests.add(load_records(moved, "train", max_bad=0.0).digest)
    with photo_of(moved, 1).open("ab") as file:
        file.write(b"trailer")
    digests.add(load_records(moved, "train", max_bad=0.0).digest)
    moved.write_text(moved.read_text().replace("circle", "disc"))
    digests.add(load_records(moved, "train", max_bad=0.0).digest)
    photo_of(moved, 3).rename(photo_of(moved, 9))
    label_of(moved, 3).rename(label_of(moved, 9))
    digests.add(load_records(moved, "train", max_bad=0.0).digest)
    assert len(digests) == 5


# ------------------------------------------------------------------------------------- data.yaml


@pytest.mark.parametrize("path_line", ["", "path: .\n", "path: {folder}\n"])
def test_places_are_relative_to_the_yaml_file(
    tiny_dataset: Maker, monkeypatch: pytest.MonkeyPatch, path_line: str
) -> None:
    data = tiny_dataset(train=4, val=2)
    (data.parent / "lists").mkdir()
    listed = data.parent / "lists" / "train.txt"
    listed.write_text("./../images/train/0002.jpg\n\n../images/train/0000.jpg\n")
    head = path_line.format(folder=data.parent)
    data.write_text(
        f"{head}train: lists/train.txt\nval: [images/val, images/train/0001.jpg]\nnc: 3\n"
    )
    monkeypatch.chdir("/")
    train, val = (load_records(data, split, max_bad=0.0) for split in ("train", "val"))
    assert [Path(path).name for path in train.paths] == ["0000.jpg", "0002.jpg"]
    assert len(val) == 3 and val.names == ("class_0", "class_1", "class_2")


def test_roboflow_places_and_hidden_files(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=2, val=2)
    data.write_text("train: ../images/train\nvalidation: ../images/val\nnames: [a, b, c]\nnc: 3\n")
    (data.parent / "images" / "train" / "._0000.jpg").write_bytes(b"Apple double")
    (data.parent / "images" / "train" / "notes.json").write_text("{}")
    assert (
        len(load_records(data, "train", max_bad=0))
        == len(load_records(data, "val", max_bad=0))
        == 2
    )


def test_names_as_list_or_map_stay_words(tmp_path: Path) -> None:
    data = tmp_path / "data.yaml"
    for text in ("[no, 'yes', 7]", "{2: 7, 0: no, 1: yes}", "\n- no\n- yes\n- 7"):
        data.write_text(f"train: x\nval: x\nnames: {text}\n")
        assert load_data_yaml(data).names == ("no", "yes", "7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("names: {0: a, 2: b}", "has no class id 1"),
        ("names: {-1: a, 0: b}", "class id -1 in 'names:' is negative"),
        ("names: {0: a, 0: b}", "repeats the key '0'"),
        ("names: {0: a, 00: b}", "given twice"),
        ("names: {x: a}", "class id 'x'"),
        ("names: [a, b]\nnc: 3", "nc is 3 but 'names:' has 2"),
        ("names: [a]\nnc: one", "whole number"),
        ("names: [a, a]", "both named 'a'"),
        ("names: [[a]]", "list of words"),
        ("names: 3", "list of words"),
        ("train: x", "no 'names:'"),
        ("names: [a\n", "not valid YAML"),
        ("just words", "write a YOLO-format data.yaml"),
        ("path: nowhere\nnames: [a]", "no folder"),
        ("path: [a]\nnames: [a]", "must be one folder"),
        ("train: {a: b}\nnames: [a]", "'train:' must be"),
    ],
)
def test_mistakes_in_data_yaml(tmp_path: Path, text: str, words: str) -> None:
    data = tmp_path / "data.yaml"
    data.write_text(text + "\n")
    message = refusal(data)
    assert words in message and str(data) in message


def test_missing_file_split_folder_and_photos(tiny_dataset: Maker, tmp_path: Path) -> None:
    assert "pass data=PATH/data.yaml" in refusal(tmp_path / "none.yaml")
    assert "two slashes: data=s3://b/d.yaml" in refusal(Path("s3:/b/d.yaml"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.yaml").touch()
    assert f"pass data={tmp_path}/set/data.yaml" in refusal(tmp_path / "set")
    data = tiny_dataset(train=2)
    text = data.read_text()
    data.write_text(text.replace("train: images/train\n", ""))
    assert "has no 'train:'" in refusal(data)
    data.write_text(text.replace("images/train", "images/trian"))
    assert "images/trian" in refusal(data) and "is not there" in refusal(data)
    (data.parent / "empty").mkdir()
    data.write_text(text.replace("images/train", "empty"))
    assert "has no photos in empty" in refusal(data)


def test_all_labels_missing_or_empty(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=3)
    for number in range(3):
        label_of(data, number).write_text("")
    assert "holds a box" in refusal(data)
    shutil.rmtree(data.parent / "labels" / "train")
    message = refusal(data)
    assert "has a label file" in message and str(label_of(data, 0)) in message


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("0 0.5 0.5 0.2", "4 columns"),
        ("0 0.5 0.5 0.2 0.2 0.9", "6 columns"),
        ("0 0.5 0.5 0.2 0.2 0.9 0.1 0.3", "8 columns"),
        ("0 0.5 abc 0.2 0.2", "not a number"),
        ("0 nan 0.5 0.2 0.2", "NaN"),
        ("0 0.5 0.5 inf 0.2", "infinite"),
        ("0.5 0.5 0.5 0.2 0.2", "not a whole number"),
        ("0 -0.3 0.5 0.2 0.2", "negative coordinate -0.3"),
        ("0 0.5 0.5 -0.2 0.2", "zero or negative"),
        ("0 0.5 0.5 0.2 0", "zero or negative"),
        ("0 320 0.5 0.2 0.2", "coordinate 320 above 1"),
        ("0 -0.005 0.5 0.001 0.2", "without area"),
        ("0 0.1 0.1 0.1 0.2 0.1 0.3", "without area"),
        ("0 0.1 0.1 1.2 0.2 0.1 0.3", "above 1"),
    ],
)
def test_bad_rows_are_named_with_their_line(tmp_path: Path, row: str, words: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text(f"0 0.5 0.5 0.2 0.2\n\n{row}\n0 bad\n")
    with pytest.raises(LabelError) as caught:
        load_labels(str(file), 1)
    assert caught.value.line == 3
    assert words in caught.value.reason and "1 more bad lines" in caught.value.reason


@pytest.mark.parametrize("number", ["3", "-1", "7.0"])
def test_class_out_of_range_stops_at_once(tiny_dataset: Maker, number: str) -> None:
    data = tiny_dataset(train=3)
    with label_of(data, 1).open("w") as file:
        file.write(f"0 0.5 0.5 0.2 0.2\n{number} 0.5 0.5 0.2 0.2\n")
    message = refusal(data, max_bad=1.0)
    assert f"{label_of(data, 1)}:2" in message and "classes 0 to 2" in message


def test_bad_photos_are_left_out_below_the_limit_and_named_above(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=10)
    whole = photo_of(data, 1).read_bytes()
    photo_of(data, 1).write_bytes(whole[: len(whole) // 2])
    photo_of(data, 4).write_bytes(b"no photo")
    label_of(data, 5).write_text("0 0.5 0.5 0.2 0.2\n0 nan 0.5 0.2 0.2\n")
    before = content_of(data.parent)
    records = load_records(data, "train", max_bad=0.3)
    assert content_of(data.parent) == before
    places = [(bad.path, bad.line) for bad in records.bad]
    assert places == [
        (str(photo_of(data, 1)), None),
        (str(photo_of(data, 4)), None),
        (str(label_of(data, 5)), 2),
    ]
    names = [Path(path).name for path in records.paths]
    assert names == [f"{number:04d}.jpg" for number in (0, 2, 3, 6, 7, 8, 9)]
    expected = np.loadtxt(label_of(data, 6), ndmin=2)[:, 0]
    np.testing.assert_array_equal(records.boxes_of(3)[1], expected)
    message = refusal(data, max_bad=0.29)
    assert "3 of the 10 photos" in message and "raise data.max_bad" in message
    assert f"{label_of(data, 5)}:2: NaN" in message and f"{photo_of(data, 1)}: truncated" in message


def test_all_photos_bad_is_refused_whatever_the_limit(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=5)
    for number in range(5):
        photo_of(data, number).write_bytes(b"")
    message = refusal(data, max_bad=1.0)
    assert "all 5 photos" in message and "and 2 more" in message


def test_listed_files_that_are_missing_or_no_photos_are_named(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=3)
    photo_of(data, 2).rename(photo_of(data, 2).with_suffix(".heic"))
    listed = data.parent / "train.txt"
    lines = [
        "images/train/0000.jpg",
        "images/train/none.jpg",
        "images/train/0002.heic",
        "data.yaml",
    ]
    listed.write_text("\n".join(lines))
    data.write_text(data.read_text().replace("train: images/train", "train: train.txt"))
    records = load_records(data, "train", max_bad=0.9)
    reasons = {Path(bad.path).name: bad.reason for bad in records.bad}
    assert reasons["none.jpg"] == "no such file" and ".heic" in reasons["0002.heic"]
    assert set(reasons) == {"none.jpg", "0002.heic", "data.yaml"} and len(records) == 1


def test_exif_rotation_swaps_the_size(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "turned", train=1, val=1, size=(60, 90))
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(photo_of(data, 0)) as image:
        image.save(photo_of(data, 0), exif=exif)
    assert load_records(data, "train", max_bad=0.0).sizes.tolist() == [[90, 60]]
