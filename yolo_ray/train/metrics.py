"""COCO mAP of gathered detections (faster-coco-eval), precision and recall at the best mean F1.

Letters: C classes, T IoU thresholds (0.50 to 0.95), N photos, D detections.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster

from yolo_ray.data.records import Records

Sample = tuple[int, np.ndarray, np.ndarray, np.ndarray]
"""Image id, boxes float32 [k,4] xyxy px of the photo, scores float32 [k], classes int64 [k]."""

IOU_50, IOU_75 = 0, 5  # places in COCO's list of thresholds 0.50, 0.55 ... 0.95
CONFIDENCES = 1000  # points of the precision, recall and F1 curves
SMOOTHING = 0.1  # share of the curve the mean F1 is averaged over before its peak is taken


@dataclass(frozen=True)
class Detections:
    """Detections of many photos as flat arrays; the rows of one photo are in descending score."""

    image_ids: np.ndarray  # [D] int64 record index
    boxes: np.ndarray  # [D,4] float32 xyxy px of the ORIGINAL photo, may reach over its edge
    scores: np.ndarray  # [D] float32
    classes: np.ndarray  # [D] int64

    def __len__(self) -> int:
        return len(self.image_ids)

    def take(self, rows: np.ndarray) -> Detections:
        """Those rows, in that order; ``rows`` is an index or a mask."""
        return Detections(
            self.image_ids[rows], self.boxes[rows], self.scores[rows], self.classes[rows]
        )

    def ordered(self) -> Detections:
        """By image id, then descending score; equal scores keep their order."""
        return self.take(np.lexsort((-self.scores, self.image_ids)))


def join_detections(parts: list[Detections]) -> Detections:
    """All detections of several parts (ranks), ordered: the same whatever the split into parts."""
    return Detections(
        np.concatenate([part.image_ids for part in parts]),
        np.concatenate([part.boxes for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.classes for part in parts]),
    ).ordered()


@dataclass(frozen=True)
class Curves:
    """Curves at IoU 0.5 for pictures; a class without ground truth has a row of NaN."""

    confidence: np.ndarray  # [1000] from 0 to 1
    precision: np.ndarray  # [C,1000] against confidence
    recall: np.ndarray  # [C,1000]
    f1: np.ndarray  # [C,1000]
    recall_points: np.ndarray  # [101] from 0 to 1
    precision_at_recall: np.ndarray  # [C,101] COCO's interpolated precision


@dataclass(frozen=True)
class EvalResult:
    """The numbers of one evaluation.

    Means are over the classes that have ground truth; a class without any has NaN. All means are
    NaN if no photo has a box.
    """

    map50_95: float
    map50: float
    map75: float
    precision: float  # mean over classes at ``best_confidence``, IoU 0.5
    recall: float
    best_confidence: float  # where the smoothed mean F1 is highest
    names: tuple[str, ...]
    class_map50_95: np.ndarray  # [C] float64
    class_map50: np.ndarray  # [C]
    curves: Curves
    num_images: int
    num_boxes: int
    num_detections: int
    nms: bool = True  # False: the NMS-free head was judged
    samples: list[Sample] = field(default_factory=list)
    replays: int = 0  # of the evaluation's graph by this rank so far

    @property
    def metrics(self) -> dict[str, float]:
        """``val/...`` names and values, without the classes that have no ground truth."""
        values = {
            "val/map50_95": self.map50_95,
            "val/map50": self.map50,
            "val/map75": self.map75,
            "val/precision": self.precision,
            "val/recall": self.recall,
        }
        for name, value in zip(self.names, self.class_map50_95.tolist(), strict=True):
            if not np.isnan(value):
                values[f"val/{name}/map50_95"] = value
        return values


def evaluate_detections(
    records: Records, detections: Detections, names: tuple[str, ...], max_det: int
) -> EvalResult:
    """Judge detections against the ground truth of every photo of ``records``.

    mAP is COCO's (Lin et al. 2014): IoU thresholds 0.50 to 0.95, 101 recall points, maxDets
    (1, 10, ``max_det``), all box sizes, equal to ``eval["precision"]`` of pycocotools.

    Precision and recall mean what Ultralytics means: IoU 0.5, at the one confidence where the
    mean F1 over classes, smoothed, is highest, averaged over classes. They come from COCO's
    matching (detections by descending score, each takes the free box it overlaps most), while
    Ultralytics matches the pairs of highest IoU first: in crowds the two may differ in the third
    digit.

    The order of ``detections`` does not matter, except among equal scores of one photo.
    """
    num_classes = len(names)
    detections = detections.ordered()
    assert not len(detections) or 0 <= detections.classes.min(), "class ids are not negative"
    assert not len(detections) or detections.classes.max() < num_classes, "one name a class"
    coco = _run_coco(records, detections, num_classes, max_det)
    precision_TRC = coco.eval["precision"][:, :, :, 0, -1]
    precision_TRC = np.where(precision_TRC < 0, np.nan, precision_TRC)  # -1: no ground truth
    average_TC = precision_TRC.mean(axis=1)
    true_counts = np.bincount(records.classes, minlength=num_classes)
    curves = _curves(
        detections,
        matched_50(detections, coco.ious, max_det),
        true_counts,
        precision_TRC[IOU_50].T,
        np.asarray(coco.params.recThrs),
    )
    best = _peak(curves.f1)
    return EvalResult(
        map50_95=_mean(average_TC.mean(axis=0)),
        map50=_mean(average_TC[IOU_50]),
        map75=_mean(average_TC[IOU_75]),
        precision=_mean(curves.precision[:, best]),
        recall=_mean(curves.recall[:, best]),
        best_confidence=float(curves.confidence[best]),
        names=names,
        class_map50_95=average_TC.mean(axis=0),
        class_map50=average_TC[IOU_50],
        curves=curves,
        num_images=len(records),
        num_boxes=len(records.classes),
        num_detections=len(detections),
    )


def _mean(values_C: np.ndarray) -> float:
    """Mean over the classes with ground truth; NaN when there are none."""
    known = values_C[~np.isnan(values_C)]
    return float(known.mean()) if len(known) else float("nan")


def _run_coco(
    records: Records, detections: Detections, num_classes: int, max_det: int
) -> COCOeval_faster:
    """An evaluated COCOeval; image and category ids are ours, annotation ids start at 1."""
    images = [{"id": i} for i in range(len(records))]
    categories = [{"id": c, "name": str(c)} for c in range(num_classes)]
    counts = np.diff(records.offsets)
    size_M2 = np.repeat(records.sizes[:, ::-1].astype(np.float64), counts, axis=0)
    true = _annotations(
        np.repeat(np.arange(len(records)), counts),
        records.boxes.astype(np.float64) * np.tile(size_M2, 2),
        records.classes,
    )
    found = _annotations(detections.image_ids, detections.boxes, detections.classes)
    for annotation, score in zip(found, detections.scores.tolist(), strict=True):
        annotation["score"] = score
    evaluator = COCOeval_faster(
        COCO({"images": images, "annotations": true, "categories": categories}),
        COCO({"images": images, "annotations": found, "categories": categories}),
        iouType="bbox",
    )
    evaluator.params.maxDets = sorted({min(1, max_det), min(10, max_det), max_det})
    evaluator.params.areaRng = [[0, 1e10]]
    evaluator.params.areaRngLbl = ["all"]
    evaluator.evaluate()
    evaluator.accumulate()
    return evaluator


def _annotations(image_ids: np.ndarray, boxes: np.ndarray, classes: np.ndarray) -> list[dict]:
    """COCO annotation dicts of xyxy boxes."""
    xyxy = boxes.astype(np.float64)
    xywh = np.concatenate([xyxy[:, :2], xyxy[:, 2:] - xyxy[:, :2]], axis=1)
    rows = zip(image_ids.tolist(), xywh.tolist(), classes.tolist(), strict=True)
    return [
        {"id": i, "image_id": image, "category_id": c, "bbox": b, "area": b[2] * b[3], "iscrowd": 0}
        for i, (image, b, c) in enumerate(rows, start=1)
    ]


def matched_50(
    detections: Detections, ious: dict[tuple[int, int], np.ndarray], max_det: int
) -> np.ndarray:
    """Which detections COCO's matching at IoU 0.5 gives a box, bool [D]; ``detections`` ordered.

    ``ious[image, class]`` is COCOeval's matrix: rows are that photo's detections of that class by
    score, at most ``max_det``; columns are its true boxes; empty where either is missing.
    """
    matched_D = np.zeros(len(detections), dtype=bool)
    by_group = np.lexsort((detections.classes, detections.image_ids))  # stable: score order stays
    keys = np.stack([detections.image_ids[by_group], detections.classes[by_group]], axis=1)
    starts = np.flatnonzero(np.any(np.diff(keys, axis=0, prepend=-1) != 0, axis=1))
    for rows in np.split(by_group, starts[1:]):
        if not len(rows):
            continue
        pair = (int(detections.image_ids[rows[0]]), int(detections.classes[rows[0]]))
        matrix = np.asarray(ious[pair], dtype=np.float64)
        if matrix.size:
            matched_D[rows[:max_det]] = _greedy(matrix)
    return matched_D


def _greedy(iou_DG: np.ndarray) -> np.ndarray:
    """COCO's matching at IoU 0.5: in turn, each row takes the best free column (ties: the last)."""
    matched = np.zeros(len(iou_DG), dtype=bool)
    free_G = iou_DG.copy()
    last = free_G.shape[1] - 1
    for row in np.flatnonzero((iou_DG >= 0.5).any(axis=1)):
        column = last - int(np.argmax(free_G[row, ::-1]))
        if free_G[row, column] >= 0.5:
            matched[row] = True
            free_G[:, column] = -1.0
    return matched


def _curves(
    detections: Detections,
    matched_D: np.ndarray,
    true_counts: np.ndarray,
    precision_at_recall: np.ndarray,
    recall_points: np.ndarray,
) -> Curves:
    """Precision, recall and F1 of every class against confidence, from matches at IoU 0.5."""
    confidence = np.linspace(0.0, 1.0, CONFIDENCES)
    shape = (len(true_counts), CONFIDENCES)
    precision, recall = np.zeros(shape), np.zeros(shape)
    order = np.lexsort((detections.image_ids, -detections.scores))
    for c, total in enumerate(true_counts.tolist()):
        if total == 0:
            precision[c], recall[c] = np.nan, np.nan
            continue
        rows = order[detections.classes[order] == c]
        if not len(rows):
            continue
        scores = detections.scores[rows].astype(np.float64)
        hits = np.cumsum(matched_D[rows])
        # np.interp wants ascending places, hence the minus signs; above the best score nothing is
        # found: recall 0 and, by Ultralytics' convention, precision 1
        recall[c] = np.interp(-confidence, -scores, hits / total, left=0.0)
        precision[c] = np.interp(-confidence, -scores, hits / np.arange(1, len(hits) + 1), left=1.0)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-16)
    return Curves(confidence, precision, recall, f1, recall_points, precision_at_recall)


def _peak(f1: np.ndarray) -> int:
    """Place where the mean F1 over classes with ground truth, box-smoothed, is highest."""
    known = f1[~np.isnan(f1).any(axis=1)]
    if not len(known):
        return 0
    width = round(f1.shape[1] * SMOOTHING * 2) // 2 + 1
    padded = np.pad(known.mean(axis=0), width // 2, mode="edge")
    return int(np.convolve(padded, np.full(width, 1.0 / width), mode="valid").argmax())
