"""Photos in both splits, and the sentences at the start of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from yolo_ray.cluster.sentences import data_sentence, leak_sentence
from yolo_ray.data import leaks
from yolo_ray.data.leaks import shared_photos
from yolo_ray.data.records import Records, load_records

Maker = Callable[..., Path]


def splits(data: Path) -> tuple[Records, Records]:
    return load_records(data, "train", max_bad=0.0), load_records(data, "val", max_bad=0.0)


def photo(data: Path, split: str, number: int) -> Path:
    return data.parent / "images" / split / f"{number:04d}.jpg"


def put(data: Path, number: int, make: Callable[[Path, Path], object]) -> tuple[str, str]:
    """Validation photo ``number`` made of training photo ``number + 2``."""
    place, source = photo(data, "val", number), photo(data, "train", number + 2)
    place.unlink()
    make(source, place)
    return str(place), str(source)


def test_nothing_is_shared_and_nothing_is_opened(
    tiny_dataset: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny_dataset(train=6, val=3)
    for number in range(3):  # no two files of one length
        with open(photo(data, "val", number), "ab") as file:
            file.write(bytes(1000 + number))
    train, val = splits(data)
    assert not set(train.num_bytes.tolist()) & set(val.num_bytes.tolist())
    monkeypatch.setattr(leaks, "_read", lambda *_: pytest.fail("the lengths say it"))
    assert shared_photos(train, val) == [] and leak_sentence(train, val) == ""


def test_copies_and_links_are_found(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=8, val=5)
    pairs = [
        put(data, number, make)
        for number, make in enumerate(
            (shutil.copyfile, lambda a, b: b.symlink_to(a), lambda a, b: os.link(a, b))
        )
    ]
    train, val = splits(data)
    assert shared_photos(train, val) == pairs
    sentence = leak_sentence(train, val)
    assert sentence.startswith("3 of the 5 validation photos are training photos too")
    assert pairs[0][0] in sentence and pairs[0][1] in sentence and "\n" not in sentence


def test_one_folder_for_both_splits_opens_no_file(
    tiny_dataset: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny_dataset(train=4, val=2)
    data.write_text(data.read_text().replace("images/val", "images/train"))
    monkeypatch.setattr(leaks, "_read", lambda *_: pytest.fail("the paths say it"))
    train, val = splits(data)
    assert shared_photos(train, val) == [(path, path) for path in map(str, train.paths)]
    assert "4 of the 4" in leak_sentence(train, val)


def test_the_answers_are_those_of_comparing_every_pair(tiny_dataset: Maker) -> None:
    """Photos listed twice, copies of copies, a copy beside the photo itself; with the tails of judging and without."""
    data = tiny_dataset(train=8, val=6)
    for number in range(3):
        put(data, number, shutil.copyfile)
    shutil.copyfile(photo(data, "train", 3), photo(data, "train", 7))
    own = photo(data, "train", 0)
    data.write_text(
        data.read_text()
        .replace("train: images/train", "train: [images/train, images/train]")
        .replace("val: images/val", f"val: [images/val, {own}, {own}, {photo(data, 'train', 7)}]")
    )
    train, val = splits(data)
    content = [Path(path).read_bytes() for path in train.paths]
    expected = []
    for path in val.paths:
        if path in list(train.paths):
            expected.append((path, path))
        elif (own_content := Path(path).read_bytes()) in content:
            expected.append((path, train.paths[content.index(own_content)]))
    assert len(expected) == 6
    assert shared_photos(train, val) == expected
    unread = replace(train, tails=np.zeros(0, np.uint32))  # as of a pack
    assert shared_photos(unread, val) == expected
    assert shared_photos(unread, replace(val, tails=unread.tails)) == expected


def test_files_alike_in_length_size_and_end_but_not_in_content(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=3, val=2, size=64)
    for split, number, colour in (("train", 0, (9, 9, 9)), ("val", 0, (9, 9, 8))):
        path = photo(data, split, number)
        image = Image.new("RGB", (64, 64), (5, 5, 5))
        image.putpixel((0, 63), colour)  # a BMP begins with its last row
        image.save(path.with_suffix(".bmp"))
        path.unlink()
    train, val = splits(data)
    assert train.num_bytes[0] == val.num_bytes[0]
    assert train.tails[0] == val.tails[0] != train.tails[1]
    assert shared_photos(train, val) == []
    shutil.copyfile(str(train.paths[0]), str(val.paths[0]))
    assert len(shared_photos(train, val)) == 1
    Path(str(val.paths[0])).unlink()
    assert shared_photos(train, val) == [], "a file that has gone is nobody's twin"


def test_the_data_in_a_sentence(tiny_dataset: Maker) -> None:
    data = tiny_dataset(train=4, val=2)
    labels = data.parent / "labels"
    (labels / "train" / "0000.txt").write_text(
        "1 .5 .5 .2 .2\n0 0.9 0.5 0.4 0.2\n1 0.50 0.5 0.2 0.2\n"
    )
    (labels / "train" / "0001.txt").unlink()
    (labels / "train" / "0002.txt").write_text("\n")
    (labels / "train" / "0003.txt").write_text("1 .5 .5 .2 .2\n")
    for number in range(2):
        (labels / "val" / f"000{number}.txt").write_text("0 .5 .5 .2 .2\n")
    assert data_sentence(*splits(data)) == (
        "train: 4 photos with 3 boxes, 2 without any (background), 1 box clipped to their photo, "
        "1 box dropped as repeated; val: 2 photos with 2 boxes"
    )
