"""The fixed-shape assignment: its rules on small cases, and the installed assigner as oracle."""

import pytest
import torch

from yolo_ray.model.assign import ONE_TO_MANY, ONE_TO_ONE, Truth, assign
from yolo_ray.model.boxes import make_anchors

IMGSZ, STRIDES, CLASSES = 128, (8, 16, 32), 3
POINTS, SIZES = make_anchors(IMGSZ, STRIDES)
CELLS = torch.cat((POINTS - SIZES[:, None], POINTS + SIZES[:, None]), 1)


def run(scores, boxes, truth, rule=ONE_TO_MANY, chunk=1024):
    return assign(scores, boxes, POINTS, truth, rule, min_side=STRIDES[1], chunk=chunk)


def truth_of(boxes, image_index=None, classes=None):
    boxes = torch.tensor(boxes, dtype=torch.float32)
    zeros = torch.zeros(len(boxes), dtype=torch.int64)
    return Truth(
        boxes,
        zeros if classes is None else torch.tensor(classes),
        zeros if image_index is None else torch.tensor(image_index),
        torch.ones(len(boxes), dtype=torch.bool),
    )


def random_case(seed, batch=3, each=12):
    """Predictions near the boxes they may be asked to learn, so that boxes compete for anchors."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.rand(batch, each, 2, generator=generator) * IMGSZ
    side = torch.rand(batch, each, 2, generator=generator) * 60 + 4
    boxes = torch.cat((centre - side / 2, centre + side / 2), 2).clamp(0, IMGSZ)
    classes = torch.randint(CLASSES, (batch, each), generator=generator)
    near = (POINTS[None, :, None] - centre[:, None]).square().sum(-1).argmin(2)
    jitter = torch.randn(batch, len(POINTS), 4, generator=generator) * 3
    predicted = boxes.gather(1, near[..., None].expand(-1, -1, 4)) + jitter
    scores = torch.randn(batch, CLASSES, len(POINTS), generator=generator)
    return boxes, classes, predicted, scores


def test_claims_are_the_ten_best_inside():
    boxes = CELLS[None].clone()
    result = run(torch.zeros(1, CLASSES, len(POINTS)), boxes, truth_of([[16, 16, 112, 112]]))
    chosen = result.weight[0] > 0
    assert chosen.sum() == 10
    inside = ((POINTS > 16) & (POINTS < 112)).all(1)
    assert inside[chosen].all()


def test_side_below_second_stride_is_widened():
    tiny = [[61.0, 61.0, 63.0, 63.0]]  # holds no centre: the next is at 60, 60
    boxes = torch.tensor(tiny).expand(1, len(POINTS), 4)
    result = run(torch.zeros(1, CLASSES, len(POINTS)), boxes, truth_of(tiny))
    chosen = POINTS[result.weight[0] > 0]
    assert len(chosen) == 5  # four cells of stride 8 and one of stride 16
    assert ((chosen - 62).abs() < 8).all()


def test_contested_anchor_goes_to_highest_overlap():
    boxes = CELLS[None].clone()
    anchor = 8 * 16 + 8  # centre 68, 68
    boxes[0, anchor] = torch.tensor([52.0, 52.0, 84.0, 84.0])
    pair = [[36.0, 36.0, 100.0, 100.0], [50.0, 50.0, 86.0, 86.0]]
    result = run(torch.zeros(1, CLASSES, len(POINTS)), boxes, truth_of(pair))
    assert result.row[0, anchor] == 1
    swapped = run(torch.zeros(1, CLASSES, len(POINTS)), boxes, truth_of(pair[::-1]))
    assert swapped.row[0, anchor] == 0
    assert torch.equal(result.weight, swapped.weight)


def test_equal_boxes_go_to_the_first():
    boxes = CELLS[None].clone()
    twin = truth_of([[36.0, 36.0, 100.0, 100.0]] * 2, classes=[2, 1])
    result = run(torch.zeros(1, CLASSES, len(POINTS)), boxes, twin)
    assert (result.row[result.weight > 0] == 0).all()


def test_one_to_one_keeps_one_anchor_a_box():
    boxes, classes, predicted, scores = random_case(0)
    rows, image_index = boxes.flatten(0, 1), torch.arange(3).repeat_interleave(12)
    truth = Truth(rows, classes.flatten(), image_index, torch.ones(36, dtype=torch.bool))
    result = run(scores, predicted, truth, ONE_TO_ONE)
    learned = result.row[result.weight > 0]
    assert len(learned) == len(learned.unique())
    assert len(learned) > 20


def test_invalid_rows_are_never_learned():
    boxes, classes, predicted, scores = random_case(1)
    rows, image_index = boxes.flatten(0, 1), torch.arange(3).repeat_interleave(12)
    valid = torch.arange(36) % 2 == 0
    result = run(scores, predicted, Truth(rows, classes.flatten(), image_index, valid))
    assert valid[result.row[result.weight > 0]].all()
    nothing = Truth(rows, classes.flatten(), image_index, torch.zeros(36, dtype=torch.bool))
    assert run(scores, predicted, nothing).weight.abs().sum() == 0


@pytest.mark.parametrize("rule", (ONE_TO_MANY, ONE_TO_ONE))
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_installed_assigner(rule, seed):
    from ultralytics.utils.tal import TaskAlignedAssigner

    boxes, classes, predicted, scores = random_case(seed)
    oracle = TaskAlignedAssigner(
        topk=rule.topk,
        topk2=1 if rule.single else None,
        num_classes=CLASSES,
        alpha=0.5,
        beta=6.0,
        stride=list(STRIDES),
    )
    mask = torch.ones(3, 12, 1)
    _, target_boxes, target_scores, _, _ = oracle(
        scores.sigmoid().movedim(1, 2), predicted, POINTS, classes[..., None], boxes, mask
    )
    image_index = torch.arange(3).repeat_interleave(12)
    valid = torch.ones(36, dtype=torch.bool)
    truth = Truth(boxes.flatten(0, 1), classes.flatten(), image_index, valid)
    result = run(scores, predicted, truth, rule, chunk=7)
    torch.testing.assert_close(result.weight, target_scores.sum(-1), rtol=1e-4, atol=1e-7)
    learned = result.weight > 1e-6
    assert learned.sum() > (20 if rule.single else 100)
    assert torch.equal(truth.boxes[result.row][learned], target_boxes[learned])
    best = target_scores.argmax(-1)
    assert torch.equal(truth.classes[result.row][learned], best[learned])
