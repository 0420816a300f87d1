"""Evaluation on a real GPU: one replay a batch, equal to the eager pass; suppression of a whole batch at once."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.steps import BATCH, BOXES, CUDA, IMGSZ, assert_equal, make_step, run, state_of
from tests.nms_cases import (
    RULES,
    Case,
    cases,
    class_by_class,
    far_too_many,
    image_by_image,
    whole_boxes,
)
from tests.unit.test_evaluate import (
    OPTIONS,
    alone,
    assert_same_bits,
    batches_of,
    easy_records,
    random_detector,
)
from yolo_ray.bench.scene import make_batches
from yolo_ray.data.records import Records
from yolo_ray.errors import UserError
from yolo_ray.model.detect import detect_nms, detect_one_to_one
from yolo_ray.step.graph import GraphedStep
from yolo_ray.train.evaluate import eval_batch, evaluate
from yolo_ray.train.graphed_eval import GraphedEval
from yolo_ray.train.loop import ema_weights
from yolo_ray.train.metrics import EvalResult

pytestmark = pytest.mark.gpu

EVAL_BATCH = 5


def photos(seed: int, count: int = EVAL_BATCH) -> Tensor:
    """uint8 [count,3,S,S] as a worker gets them: pinned, channels last."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, IMGSZ, IMGSZ, 3), dtype=np.uint8)
    return eval_batch(np.arange(count), pixels, pinned=True).images


def as_in_evaluation(predict: GraphedEval, images: Tensor) -> list[Tensor]:
    """What a pass gives, copied; the detector goes back to training."""
    predict.detector.eval()
    out = [part.clone() for part in predict(images)]
    predict.detector.train()
    return out


@pytest.mark.parametrize("model", ["yolov8n.yaml", "yolo11n.yaml", "yolo26n.yaml"])
@pytest.mark.parametrize("nms", [True, False])
def test_a_replay_equals_the_eager_pass_as_weights_change(model: str, nms: bool) -> None:
    step = make_step(model)
    eager = GraphedEval(step.detector, nms=nms, mode="off")
    graphed = GraphedEval(step.detector, nms=nms, mode="require")
    batches = make_batches(BATCH, IMGSZ, BOXES, CUDA)
    seen = []
    for number in range(3):
        run(step, batches[number], lr=1e-2)
        with ema_weights(step):
            wanted = as_in_evaluation(eager, photos(number))
            found = as_in_evaluation(graphed, photos(number))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        seen.append(as_in_evaluation(graphed, photos(0)))
    assert graphed.replays == 6 and eager.replays == 0
    assert not torch.equal(seen[0][1], seen[2][1]), "the graph reads the weights of the moment"


def test_evaluations_leave_no_trace_in_training() -> None:
    """Steps by a graph with evaluations between them, captured and replayed, and without any."""
    batches = make_batches(BATCH, IMGSZ, BOXES, CUDA)
    plain, between = (GraphedStep(make_step(), mode="require") for _ in range(2))
    predict = GraphedEval(between.step.detector, nms=True, mode="require")
    torch.manual_seed(5)
    for number in range(4):
        run(plain, batches[number])
        run(between, batches[number])
        before, random = state_of(between), torch.cuda.get_rng_state()
        with ema_weights(between):
            as_in_evaluation(predict, photos(number))
        assert_equal(state_of(between), before)
        assert torch.equal(torch.cuda.get_rng_state(), random)
    assert_equal(state_of(between), state_of(plain))
    assert predict.replays == 4
    predict.release()
    between.release()
    plain.release()


def test_the_host_never_waits_for_a_pass() -> None:
    predict = GraphedEval(make_step().detector, nms=True, mode="require")
    predict.detector.eval()
    parts = [photos(number) for number in range(4)]
    predict(parts[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(40):
            predict(parts[number % 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert predict.replays == 41


def test_release_gives_the_memory_back_and_goes_on_without() -> None:
    predict = GraphedEval(make_step().detector, nms=True, mode="require")
    first = as_in_evaluation(predict, photos(0))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    predict.release()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < held[0] and torch.cuda.memory_reserved() < held[1]
    again = as_in_evaluation(predict, photos(0))
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    assert predict.replays == 1 and predict.reason == "the graph was released"
    predict.release()


def test_another_shape_is_refused() -> None:
    predict = GraphedEval(make_step().detector, nms=True, mode="require")
    as_in_evaluation(predict, photos(0))
    with pytest.raises(ValueError, match="captured with"):
        as_in_evaluation(predict, photos(0, EVAL_BATCH - 1))


def test_auto_falls_back_with_one_warning() -> None:
    step = make_step()
    layer = next(m for m in step.detector.modules() if isinstance(m, torch.nn.Conv2d))
    layer.register_forward_hook(lambda _, __, out: out * (1 + 0 * out.sum().item()))  # a host read
    said: list[str] = []
    auto = GraphedEval(step.detector, nms=True, warn=said.append)
    eager = GraphedEval(step.detector, nms=True, mode="off")
    for number in range(3):
        found, wanted = (as_in_evaluation(p, photos(number)) for p in (auto, eager))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(said) == 1 and "cannot be captured" in said[0]
    assert auto.replays == 0 and auto.reason
    with pytest.raises(UserError, match=r"graph\.mode=require, but"):
        as_in_evaluation(GraphedEval(step.detector, nms=True, mode="require"), photos(0))


def test_metrics_with_the_graph_equal_those_without() -> None:
    detector = random_detector()
    records = easy_records(detector, 9)
    on_cpu = judged(GraphedEval(detector, nms=True), records)
    here = detector.to(CUDA)
    eager = judged(GraphedEval(here, nms=True, mode="off"), records)
    graphed = judged(GraphedEval(here, nms=True, mode="require"), records)
    assert_same_bits(graphed, eager)
    assert 0.01 < graphed.map50_95 < 0.95, "a case that tells nothing"
    assert graphed.replays == 3 and eager.replays == on_cpu.replays == 0
    assert graphed.num_detections == pytest.approx(on_cpu.num_detections, rel=0.02)
    assert abs(graphed.map50_95 - on_cpu.map50_95) < 0.02


def judged(predict: GraphedEval, records: Records) -> EvalResult:
    return evaluate(
        predict.detector, batches_of(np.arange(len(records))), records,
        imgsz=64, options=OPTIONS, gather=alone, predict=predict,
    )  # fmt: skip


@pytest.mark.parametrize("case", [*cases(), far_too_many()], ids=lambda case: case[0])
def test_suppression_equals_torchvision_on_the_cpu(case: Case) -> None:
    name, boxes, scores, rules = case
    wanted = image_by_image(boxes, scores, suppress=class_by_class, **rules)
    found = detect_nms(boxes.to(CUDA), scores.to(CUDA), **rules)
    assert [len(a) for a in found] == [len(b) for b in wanted], name
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True)), name
    cut = {"conf": rules["conf"], "max_det": rules["max_det"]}
    there, here = (
        detect_one_to_one(b, s, **cut) for b, s in ((boxes, scores), (boxes.cuda(), scores.cuda()))
    )
    assert all(torch.equal(a.cpu(), b) for a, b in zip(here, there, strict=True)), name


def test_the_host_waits_as_often_for_many_images_as_for_one() -> None:
    def waits(images: int) -> int:
        boxes, scores = (part.to(CUDA) for part in whole_boxes(0, images, 3000, 3))
        detect_nms(boxes, scores, **RULES)  # compiles the kernel
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                detect_nms(boxes, scores, **RULES)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(one.message) for one in said)

    assert 1 <= waits(2) <= 4
    assert waits(12) == waits(2)
