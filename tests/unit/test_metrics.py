"""COCO metrics equal pycocotools' on crowds and absent classes; P and R equal Ultralytics'."""

from __future__ import annotations

import contextlib
import io
from typing import Any, cast

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from yolo_ray.data.records import Records
from yolo_ray.train.metrics import (
    Detections,
    evaluate_detections,
    join_detections,
    matched_50,
)

NAMES = ("a", "b", "c", "never")


def make_records(
    photos: list[tuple[int, int]], boxes: list[np.ndarray], classes: list[np.ndarray]
) -> Records:
    """Records from sizes (h, w), pixel boxes and classes of every photo."""
    fractions = [b / np.tile([w, h], 2) for (h, w), b in zip(photos, boxes, strict=True)]
    return Records(
        paths=[f"{i}.jpg" for i in range(len(photos))],
        sizes=np.array(photos, dtype=np.int32),
        offsets=np.concatenate([[0], np.cumsum([len(b) for b in boxes])]).astype(np.int64),
        boxes=np.concatenate(fractions).reshape(-1, 4).astype(np.float32),
        classes=np.concatenate(classes).astype(np.int32),
        names=NAMES,
        digest="",
        bad=(),
    )


def random_boxes(rng: np.random.Generator, n: int, height: int, width: int) -> np.ndarray:
    corner = rng.uniform(0, 0.8, (n, 2)) * (width, height)
    size = rng.uniform(0.05, 0.2, (n, 2)) * (width, height)
    return np.concatenate([corner, corner + size], axis=1)


def random_case(seed: int, counts: list[int]) -> tuple[Records, Detections]:
    """Photos with that many boxes of three classes; found boxes are jittered truth and noise."""
    rng = np.random.default_rng(seed)
    photos, boxes, classes, parts = [], [], [], []
    for i, n in enumerate(counts):
        height, width = (int(v) for v in rng.integers(200, 900, 2))
        true = random_boxes(rng, n, height, width)
        kind = rng.integers(0, 3, n)
        jitter = true + rng.normal(0, 6, (n, 4))
        found = np.concatenate([jitter, jitter + 3, random_boxes(rng, 20, height, width)])
        labels = np.concatenate([kind, kind, rng.integers(0, 4, 20)])
        scores = np.round(rng.uniform(0.001, 1, len(found)), 2)  # two digits: many ties
        order = np.argsort(-scores, kind="stable")
        photos.append((height, width))
        boxes.append(true)
        classes.append(kind)
        parts.append(
            Detections(
                np.full(len(found), i, np.int64),
                np.sort(found.reshape(-1, 2, 2), axis=1).reshape(-1, 4).astype(np.float32)[order],
                scores.astype(np.float32)[order],
                labels[order],
            )
        )
    return make_records(photos, boxes, classes), join_detections(parts)


def pycoco(records: Records, found: Detections, max_det: int) -> COCOeval:
    """The same case through pycocotools."""
    true = []
    for i in range(len(records)):
        boxes, classes = records.boxes_of(i)
        height, width = records.sizes[i].tolist()
        for box, c in zip(boxes.astype(np.float64), classes, strict=True):
            x1, y1, x2, y2 = (box * (width, height, width, height)).tolist()
            entry = {"id": len(true) + 1, "image_id": i, "category_id": int(c), "iscrowd": 0}
            true.append(entry | {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)})
    results = [
        {"image_id": int(i), "category_id": int(c), "score": float(s), "bbox": [x, y, u - x, v - y]}
        for i, c, s, (x, y, u, v) in zip(
            found.image_ids, found.classes, found.scores, found.boxes.astype(float), strict=True
        )
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        dataset: Any = {
            "info": {},
            "images": [{"id": i} for i in range(len(records))],
            "annotations": true,
            "categories": [{"id": c, "name": n} for c, n in enumerate(records.names)],
        }
        truth.dataset = dataset
        truth.createIndex()
        judge = COCOeval(truth, truth.loadRes(cast(Any, results)), "bbox")
        judge.params.maxDets = [1, 10, max_det]
        judge.evaluate()
        judge.accumulate()
    return judge


def one(image_id: int, boxes: list[list[float]], scores: list[float], c: int = 0) -> Detections:
    n = len(boxes)
    return Detections(
        np.full(n, image_id, np.int64),
        np.array(boxes, np.float32).reshape(n, 4),
        np.array(scores, np.float32),
        np.full(n, c, np.int64),
    )


def perfect(records: Records) -> Detections:
    sizes = np.repeat(records.sizes[:, ::-1], np.diff(records.offsets), axis=0)
    ids = np.repeat(np.arange(len(records)), np.diff(records.offsets))
    boxes = (records.boxes * np.tile(sizes, 2)).astype(np.float32)
    return Detections(
        ids,
        boxes,
        np.linspace(1, 0.5, len(ids), dtype=np.float32),
        records.classes.astype(np.int64),
    )


@pytest.mark.parametrize(
    ("seed", "counts", "max_det"),
    [(0, [5, 0, 12, 3], 300), (1, [0, 160, 130, 1, 0], 300), (2, [160, 40], 50)],
    ids=["few", "crowds", "crowds cut at max_det"],
)
def test_map_equals_pycocotools(seed: int, counts: list[int], max_det: int) -> None:
    records, found = random_case(seed, counts)
    result = evaluate_detections(records, found, NAMES, max_det)
    precision = pycoco(records, found, max_det).eval["precision"][:, :, :, 0, -1]  # [T,R,C]
    assert 0.02 < precision[precision > -1].mean() < 0.9, "a case that tells nothing"
    for c in range(3):
        assert result.class_map50_95[c] == pytest.approx(precision[:, :, c].mean(), abs=1e-6)
        assert result.class_map50[c] == pytest.approx(precision[0, :, c].mean(), abs=1e-6)
        curve = result.curves.precision_at_recall[c]
        np.testing.assert_allclose(curve, precision[0, :, c], atol=1e-6)
    assert (precision[:, :, 3] == -1).all()
    assert np.isnan(result.class_map50_95[3])
    assert result.map50_95 == pytest.approx(precision[:, :, :3].mean(), abs=1e-6)
    assert result.map50 == pytest.approx(precision[0, :, :3].mean(), abs=1e-6)
    assert result.map75 == pytest.approx(precision[5, :, :3].mean(), abs=1e-6)


def test_a_hundred_detections_would_not_be_enough_in_a_crowd() -> None:
    records, _ = random_case(3, [400])
    found = perfect(records)
    assert evaluate_detections(records, found, NAMES, 300).map50_95 == pytest.approx(1.0)
    assert evaluate_detections(records, found, NAMES, 100).map50_95 < 0.9


def test_matches_are_cocos() -> None:
    records, found = random_case(4, [30, 0, 160])
    judge = pycoco(records, found, 300)
    ious = {k: np.asarray(v) for k, v in judge.ious.items()}
    ours = matched_50(found, ious, 300)
    theirs = sum(
        int((image["dtMatches"][0] > 0).sum())
        for image in judge.evalImgs
        if image is not None and image["aRng"] == judge.params.areaRng[0]
    )
    assert ours.sum() == theirs > 50


def test_precision_and_recall_are_ultralytics_where_matching_has_no_choice() -> None:
    from ultralytics.utils.metrics import ap_per_class

    rng = np.random.default_rng(5)
    photos, boxes, classes, parts, hits = [], [], [], [], []
    for i in range(30):  # boxes 100 px apart: every detection overlaps one box or none
        corner = np.stack(np.meshgrid(np.arange(3), np.arange(3)), -1).reshape(-1, 2) * 100.0
        true = np.concatenate([corner, corner + 60], axis=1)
        kind = rng.integers(0, 3, 9)
        hit = rng.random(9) < 0.6
        scores = np.sort(rng.uniform(0.01, 1, 9) * np.where(hit, 1, 0.7))[::-1]
        photos.append((300, 300))
        boxes.append(true)
        classes.append(kind)
        hits.append(hit)
        parts.append(one(i, (true + np.where(hit, 2, 45)[:, None]).tolist(), scores.tolist()))
        parts[-1].classes[:] = kind
    records, found = make_records(photos, boxes, classes), join_detections(parts)
    result = evaluate_detections(records, found, NAMES, 300)
    tp = np.repeat(np.concatenate(hits)[:, None], 10, axis=1)
    expected = ap_per_class(tp, found.scores, found.classes, np.concatenate(classes))
    assert result.precision == pytest.approx(expected[2].mean(), abs=1e-6)
    assert result.recall == pytest.approx(expected[3].mean(), abs=1e-6)
    np.testing.assert_allclose(result.curves.precision[:3], expected[7], atol=1e-6)
    np.testing.assert_allclose(result.curves.recall[:3], expected[8], atol=1e-6)
    np.testing.assert_allclose(result.curves.f1[:3], expected[9], atol=1e-6)


def test_perfect_detections_are_one_and_none_are_zero() -> None:
    records, found = random_case(6, [4, 0, 7])
    best = dict(evaluate_detections(records, perfect(records), NAMES, 300).metrics)
    assert best.pop("val/precision") == pytest.approx(1.0)
    assert best.pop("val/recall") == pytest.approx(1.0)
    assert set(best) == {
        "val/map50_95", "val/map50", "val/map75",
        "val/a/map50_95", "val/b/map50_95", "val/c/map50_95",
    }  # fmt: skip
    assert list(best.values()) == pytest.approx([1.0] * 6)
    empty = found.take(np.arange(0))
    none = evaluate_detections(records, empty, NAMES, 300)
    assert list(none.metrics.values()) == [0.0] * 8
    assert (none.num_images, none.num_boxes, none.num_detections) == (3, 11, 0)


def test_photos_without_any_truth_have_no_mean() -> None:
    records, found = random_case(7, [0, 0])
    result = evaluate_detections(records, found, NAMES, 300)
    assert len(found) and all(np.isnan(v) for v in result.metrics.values())


def test_order_and_split_of_detections_do_not_change_a_bit() -> None:
    records, found = random_case(8, [20, 3, 0, 40, 9, 1, 5])
    expected = evaluate_detections(records, found, NAMES, 300)
    for world in (2, 3):
        parts = [found.take(found.image_ids % world == rank) for rank in range(world)]
        joined = join_detections(parts[::-1])
        np.testing.assert_array_equal(joined.boxes, found.boxes)
        other = evaluate_detections(records, joined, NAMES, 300)
        assert other.metrics == expected.metrics
        assert other.best_confidence == expected.best_confidence


def test_a_second_detection_of_one_box_is_wrong() -> None:
    box = [10.0, 10.0, 50.0, 50.0]
    records = make_records([(100, 100)], [np.array([box])], [np.array([0])])
    result = evaluate_detections(records, one(0, [box, box], [0.9, 0.8]), NAMES, 300)
    assert result.map50_95 == pytest.approx(1.0)  # the recall of 1 came first
    assert result.curves.precision[0, 850] == pytest.approx(1.0, abs=0.3)
    assert result.curves.precision[0, 100] == pytest.approx(0.5)
