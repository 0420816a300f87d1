"""What lets ten million photos be planned: flat paths, an order that is not kept, photos judged in runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data import plan as plan_module
from yolo_ray.data import records as records_module
from yolo_ray.data import texts as texts_module
from yolo_ray.data.judging import Judged, judge_photos
from yolo_ray.data.plan import Plan
from yolo_ray.data.records import load_records
from yolo_ray.data.shuffle import Shuffle
from yolo_ray.data.texts import Texts


def test_texts_are_a_sequence_of_strings() -> None:
    names = ["a.jpg", "", "ü/é.png", os.fsdecode(b"\xff.jpg"), "b"]
    texts = Texts(names)
    assert (
        list(texts) == names
        and len(texts) == 5
        and texts[-1] == "b"
        and texts[np.int64(2)] == names[2]
    )
    assert list(texts[1:4:2]) == names[1:4:2]
    assert (
        texts == Texts(names)
        and texts != Texts([*names[:-1], "c"])
        and texts != Texts(["a.jpgü/é.png"])
    )
    assert pickle.loads(pickle.dumps(texts)) == texts
    parts = [Texts(names[:2]), Texts(), Texts(names[2:])]
    assert Texts.joined(parts) == texts and list(Texts.joined([])) == []
    for start, stop in ((0, 5), (1, 3), (2, 2), (4, 9)):
        assert texts.encoded(start, stop) == [os.fsencode(name) for name in names[start:stop]]
    assert texts.hold("é.p") and not texts.hold("x") and not Texts().hold("x")
    for place in (5, -6):
        with pytest.raises(IndexError):
            texts[place]


def test_hashes_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["", "a", "a\0", "ab", "12345678", "123456789", "x" * 41, "x" * 42, "ü/é.png"]
    hashes = Texts(names).hashes()
    assert hashes.dtype == np.uint64 and len(set(hashes.tolist())) == len(names)
    monkeypatch.setattr(texts_module, "AT_ONCE", 2)
    assert np.array_equal(Texts(names[::-1]).hashes(), hashes[::-1])
    assert len(Texts().hashes()) == 0
    numbers = Texts(f"/data/{number}.jpg" for number in range(100_000))
    assert len(np.unique(numbers.hashes())) == len(numbers)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_a_shuffle_is_a_permutation(length: int) -> None:
    shuffle = Shuffle(length, np.random.default_rng(0))
    numbers = shuffle[np.arange(length)]
    assert sorted(numbers.tolist()) == list(range(length))
    assert shuffle[np.array([length - 1, 0])].tolist() == [numbers[-1], numbers[0]], (
        "any place alone"
    )
    if length > 64:
        other = Shuffle(length, np.random.default_rng(1))[np.arange(length)]
        assert (other == numbers).mean() < 0.05


def test_a_shuffle_mixes() -> None:
    """Neighbours end up as far apart as by chance, and every region is sampled evenly."""
    length = 100_000
    numbers = Shuffle(length, np.random.default_rng(3))[np.arange(length)]
    gaps = np.abs(np.diff(numbers)) / length
    assert abs(gaps.mean() - 1 / 3) < 0.01  # of two uniform numbers
    counts = np.histogram(numbers[:10_000], bins=10, range=(0, length))[0]
    assert counts.min() > 850 and counts.max() < 1150
    assert abs(np.corrcoef(np.arange(length), numbers)[0, 1]) < 0.02


def test_a_large_plan_shows_every_photo_once_an_epoch(
    tiny_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "LARGEST_KEPT_ORDER", 0)
    records = load_records(tiny_dataset(train=13), "train", max_bad=0.0)
    plans = [
        Plan(records, seed=7, epochs=3, batch=4, imgsz=64, augment=AugmentConfig())
        for _ in range(2)
    ]
    for epoch in range(3):
        steps = range(epoch * plans[0].steps_per_epoch, (epoch + 1) * plans[0].steps_per_epoch)
        shown = [plans[0].images_at(step)[:2] for step in steps]
        own = np.concatenate([images[~fill] for images, fill in shown])
        assert sorted(own.tolist()) == list(range(13))
    assert np.array_equal(plans[1].at(9).boxes, plans[0].at(9).boxes), (
        "a resume needs nothing before"
    )


@pytest.mark.parametrize("root", ["/data", "/data/", "/", "/data/.hidden", "s3://bucket/data"])
def test_the_digest_names_photos_as_before(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "RUN", 2)
    below = [
        "a.jpg",
        "b/c.jpg",
        "d.jpg",
        ".e/f.jpg",
        "g//h.jpg",
        "i.jpg",
        "..j.jpg",
        "k.jpg",
        "ü.jpg",
    ]
    paths = [f"{root.rstrip('/')}/{name}" for name in below] + ["/other/a.jpg", "/data.jpg"]
    numbers = np.arange(len(paths))
    one_by_one = [
        os.fsencode(f"{records_module.relative_name(path, root)}\0{number}\0")
        for path, number in zip(paths, numbers, strict=True)
    ]
    lines = records_module._relative_lines(Texts(paths), numbers, root)
    assert b"".join(lines) == b"".join(one_by_one)


def test_runs_judged_anywhere_make_the_same_records(
    tiny_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny_dataset(train=9)
    photos = sorted((data.parent / "images" / "train").iterdir())
    photos[3].write_bytes(b"no photo")
    whole = load_records(data, "train", max_bad=0.2)
    monkeypatch.setattr(records_module, "RUN", 2)
    lengths: list[int] = []

    def judge(runs: Sequence[Sequence[str]], num_classes: int) -> Iterator[Judged]:
        for run in runs:
            lengths.append(len(run))
            yield pickle.loads(pickle.dumps(judge_photos(run, num_classes)))

    parts = load_records(data, "train", max_bad=0.2, judge=judge)
    assert lengths == [2, 2, 2, 2, 1] and len(parts) == 8 and parts.bad == whole.bad
    assert parts.digest == whole.digest and parts.paths == whole.paths
    for name in ("sizes", "offsets", "boxes", "classes", "num_bytes", "tails"):
        assert np.array_equal(getattr(parts, name), getattr(whole, name))
