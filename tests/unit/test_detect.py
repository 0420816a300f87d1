"""Decoding, NMS and the NMS-free choice equal Ultralytics', image by image."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from ultralytics.nn.modules.head import Detect
from ultralytics.utils.nms import non_max_suppression
from ultralytics.utils.ops import xyxy2xywh

from yolo_ray.model.build import Detector, build_detector
from yolo_ray.model.detect import decode, detect_nms, detect_one_to_one

IMGSZ = 160
RULES = {"conf": 0.001, "iou": 0.7, "max_det": 300}


def crowd(seed: int, images: int, anchors: int, classes: int) -> tuple[Tensor, Tensor]:
    """Boxes [b,A,4] that overlap a lot and scores [b,A,C], many of them below 0.001."""
    generator = torch.Generator().manual_seed(seed)
    corner = torch.rand(images, anchors, 2, generator=generator) * 60
    size = torch.rand(images, anchors, 2, generator=generator) * 40 + 20
    scores = torch.rand(images, anchors, classes, generator=generator) ** 4
    return torch.cat([corner, corner + size], dim=2), scores


def random_detector(model: str) -> Detector:
    """A detector whose batch norms are not the identity, so that outputs vary."""
    torch.manual_seed(0)
    detector = build_detector(model, ["a", "b", "c"], imgsz=IMGSZ, seed=0).eval()
    for module in detector.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.normal_(cast(Tensor, module.running_mean), 0, 0.1)
            torch.nn.init.uniform_(cast(Tensor, module.running_var), 0.3, 1.5)
    return detector


def detect_layer(detector: Detector) -> Detect:
    head = list(cast(torch.nn.Sequential, detector.model))[-1]
    assert isinstance(head, Detect)
    return head


def ultralytics_nms(boxes: Tensor, scores: Tensor, *, conf: float, iou: float, max_det: int):
    prediction = torch.cat([xyxy2xywh(boxes), scores], dim=2).transpose(1, 2)
    return non_max_suppression(
        prediction.clone(), conf, iou, multi_label=True, max_det=max_det, max_time_img=60.0
    )


@pytest.mark.parametrize(
    ("anchors", "classes", "max_det"),
    [(500, 3, 300), (400, 1, 300), (2000, 5, 20)],
    ids=["several classes", "one class", "cut at max_det"],
)
def test_nms_equals_ultralytics(anchors: int, classes: int, max_det: int) -> None:
    boxes, scores = crowd(anchors, 3, anchors, classes)
    rules = {**RULES, "max_det": max_det}
    ours = detect_nms(boxes, scores, **rules)
    theirs = ultralytics_nms(boxes, scores, **rules)
    for a, b in zip(ours, theirs, strict=True):
        assert 20 <= len(a) <= max_det
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # theirs offsets boxes by class


def test_only_the_best_candidates_enter_nms() -> None:
    boxes, scores = crowd(1, 1, 300, 3)
    (rows,) = detect_nms(boxes, scores, **RULES, max_candidates=10)
    tenth = scores.flatten().sort(descending=True).values[9]
    assert 0 < len(rows) <= 10
    assert (rows[:, 4] >= tenth).all()


def test_detections_do_not_depend_on_the_other_images() -> None:
    boxes, scores = crowd(2, 4, 400, 3)
    together = detect_nms(boxes, scores, **RULES)
    for i in (3, 0):
        (alone,) = detect_nms(boxes[i : i + 1], scores[i : i + 1], **RULES)
        assert torch.equal(alone, together[i])


def test_nothing_above_conf_and_boxes_that_are_not_finite() -> None:
    boxes, scores = crowd(3, 2, 50, 3)
    scores[0] = 0.0005
    boxes[1, :49] = float("nan")
    scores[1, 49] = torch.tensor([0.9, float("nan"), 0.0])
    for detect in (
        lambda: detect_nms(boxes, scores, **RULES),
        lambda: detect_one_to_one(boxes, scores, conf=0.001, max_det=300),
    ):
        empty, one = detect()
        assert empty.shape == (0, 6)
        assert one.shape == (1, 6)
        assert one[0, 4:].tolist() == pytest.approx([0.9, 0.0])
        assert one.dtype == torch.float32


def test_equal_scores_come_by_anchor_then_class() -> None:
    boxes = torch.tensor([[[0.0, 0, 10, 10], [50, 50, 60, 60], [100, 100, 110, 110]]])
    scores = torch.full((1, 3, 2), 0.5)
    for rows in (
        detect_nms(boxes, scores, **RULES)[0],
        detect_one_to_one(boxes, scores, conf=0.001, max_det=300)[0],
    ):
        assert rows[:, 0].tolist() == [0, 0, 50, 50, 100, 100]
        assert rows[:, 5].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("model", ["yolo11n.yaml", "yolov10n.yaml", "yolo26n.yaml"])
def test_decoded_boxes_and_scores_equal_ultralytics(model: str) -> None:
    detector = random_detector(model)
    images = torch.rand(2, 3, IMGSZ, IMGSZ)
    with torch.inference_mode():
        boxes, scores = decode(detector(images)[0], detector.strides, detector.reg_max, IMGSZ)
        detect_layer(detector).end2end = False
        expected = detector.net.eval()(images)[0].transpose(1, 2)
    assert scores.std() > 1e-4
    torch.testing.assert_close(xyxy2xywh(boxes), expected[..., :4], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(scores, expected[..., 4:], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("model", ["yolov10n.yaml", "yolo26n.yaml"])
def test_one_to_one_equals_ultralytics_end2end(model: str) -> None:
    detector = random_detector(model)
    images = torch.rand(2, 3, IMGSZ, IMGSZ)
    detect_layer(detector).end2end = True
    with torch.inference_mode():
        boxes, scores = decode(detector(images)[-1], detector.strides, detector.reg_max, IMGSZ)
        ours = detect_one_to_one(boxes, scores, conf=0.0, max_det=300)
        expected = detector.net.eval()(images)[0]
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == (300, 6)
        # equal scores may change places, so rows are compared in an order of their own
        np.testing.assert_allclose(a[:, 4], b[:, 4], rtol=1e-4, atol=1e-7)
        first, second = (r.numpy()[np.lexsort(r.numpy().round(2).T)] for r in (a, b))
        assert (np.abs(first - second).max(axis=1) < 1e-2).mean() > 0.98
