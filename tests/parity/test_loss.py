"""Loss items and gradients of every family equal those of the installed Ultralytics."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from yolo_ray.model.assign import Truth
from yolo_ray.model.build import build_detector
from yolo_ray.model.loss import DetectionLoss, head_gains_at

FAMILIES = ("yolov5nu", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n")
NAMES = ("crack", "dent", "scratch")
GAINS = (7.5, 0.5, 1.5)
IMGSZ, BATCH = 128, 3
COUNTS = (0, 1, 17)


def make_detector(family, seed=3):
    """A detector whose scores and boxes are no longer those of a fresh one."""
    detector = build_detector(f"{family}.yaml", NAMES, imgsz=IMGSZ, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            if ".cv2." in name or ".cv3." in name or "one2one" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return detector


def make_truth(counts, seed, small=False) -> Truth:
    """Flat list of random boxes (px), their classes and images."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(counts)
    centre = torch.rand(total, 2, generator=generator) * IMGSZ
    side = torch.rand(total, 2, generator=generator) * (12 if small else 90) + 3
    boxes = torch.cat((centre - side / 2, centre + side / 2), 1).clamp(0, IMGSZ)
    classes = torch.randint(len(NAMES), (total,), generator=generator)
    image_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return Truth(boxes, classes, image_index, torch.ones(total, dtype=torch.bool))


def padded(truth: Truth, rows) -> Truth:
    boxes, classes, image_index, valid = truth
    more = rows - len(boxes)
    return Truth(
        torch.cat((boxes, torch.zeros(more, 4))),
        torch.cat((classes, torch.zeros(more, dtype=torch.int64))),
        torch.cat((image_index, torch.zeros(more, dtype=torch.int64))),
        torch.cat((valid, torch.zeros(more, dtype=torch.bool))),
    )


def images(seed=5):
    return torch.rand(BATCH, 3, IMGSZ, IMGSZ, generator=torch.Generator().manual_seed(seed))


def our_loss(detector, truth: Truth, epoch=0, epochs=10):
    """Total loss and the items as Ultralytics reports them."""
    sums = DetectionLoss(detector)(detector(images()), *truth, IMGSZ)
    items = sums.items * torch.tensor(GAINS) / sums.scores.clamp(min=1)[:, None]
    weights = torch.tensor(head_gains_at(epoch, epochs, len(items)))
    return BATCH * (weights[:, None] * items).sum(), items[-1].detach()


def their_criterion(detector, epochs) -> Any:
    box, cls, dfl = GAINS
    detector.net.args = SimpleNamespace(box=box, cls=cls, dfl=dfl, epochs=epochs)
    return detector.net.init_criterion()


def their_loss(detector, truth, epoch=0, epochs=10):
    boxes, classes, image_index, _ = truth
    criterion = their_criterion(detector, epochs)
    for _ in range(epoch if detector.dual else 0):
        criterion.update()
    low, high = boxes[:, :2], boxes[:, 2:]
    batch = {
        "batch_idx": image_index.float(),
        "cls": classes.float(),
        "bboxes": torch.cat(((low + high) / 2, high - low), 1) / IMGSZ,
    }
    loss, items = criterion(detector.net(images()), batch)
    return loss.sum(), torch.stack(list(items.values()))


def gradients(detector, loss):
    trained = {n: p for n, p in detector.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def distance(one, other):
    """Largest relative L2 distance of any parameter's gradient that is more than noise."""
    noise = 1e-7 * max(g.norm() for g in other.values())
    return max(
        ((one[n] - g).norm() / g.norm()).item() if g.norm() > noise else one[n].norm().item()
        for n, g in other.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_items_and_gradients_equal_ultralytics(family):
    detector = make_detector(family)
    truth = make_truth(COUNTS, seed=11)
    ours, our_items = our_loss(detector, padded(truth, 32), epoch=4)
    theirs, their_items = their_loss(detector, truth, epoch=4)
    torch.testing.assert_close(our_items, their_items, rtol=1e-4, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    our_gradients, their_gradients = gradients(detector, ours), gradients(detector, theirs)
    assert distance(our_gradients, their_gradients) < 1e-3


@pytest.mark.parametrize("family", ("yolo11n", "yolo26n"))
@pytest.mark.parametrize("seed", range(4))
def test_items_equal_on_crowded_small_boxes(family, seed):
    detector = make_detector(family, seed)
    truth = make_truth((40, 3, 25), seed, small=True)
    _, our_items = our_loss(detector, truth)
    _, their_items = their_loss(detector, truth)
    torch.testing.assert_close(our_items, their_items, rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", ("yolo11n", "yolov10n", "yolo26n"))
def test_batch_without_boxes_is_finite_and_trains_every_parameter(family):
    detector = make_detector(family)
    ours, our_items = our_loss(detector, padded(make_truth((0, 0, 0), 0), 8))
    theirs, their_items = their_loss(detector, make_truth((0, 0, 0), 0))
    torch.testing.assert_close(our_items, their_items, rtol=1e-4, atol=0)
    found, expected = gradients(detector, ours), gradients(detector, theirs)
    assert all(g.isfinite().all() for g in found.values())
    assert set(found) | detector.frozen_parameters() == {n for n, _ in detector.named_parameters()}
    assert distance(found, expected) < 1e-3


@pytest.mark.parametrize("family", ("yolo11n", "yolo26n"))
def test_padding_changes_no_bit_and_chunks_change_nothing(family):
    detector = make_detector(family)
    truth = make_truth(COUNTS, seed=7)
    heads = detector(images())
    plain = DetectionLoss(detector)(heads, *truth, IMGSZ)
    more = DetectionLoss(detector)(heads, *padded(truth, 64), IMGSZ)
    chunked = DetectionLoss(detector, chunk=5)(heads, *padded(truth, 64), IMGSZ)
    for other in (more, chunked):
        assert torch.equal(plain.items, other.items)
        assert torch.equal(plain.scores, other.scores)


def test_order_of_boxes_changes_nothing():
    detector = make_detector("yolo26n")
    truth = make_truth(COUNTS, seed=9)
    order = torch.randperm(sum(COUNTS), generator=torch.Generator().manual_seed(0))
    heads = detector(images())
    loss = DetectionLoss(detector)
    plain = loss(heads, *truth, IMGSZ)
    boxes, classes, image_index, valid = (column[order] for column in truth)
    shuffled = loss(heads, boxes, classes, image_index, valid, IMGSZ)
    assert torch.equal(plain.items, shuffled.items)


def test_head_gains_follow_the_installed_schedule():
    criterion = their_criterion(make_detector("yolo26n"), epochs=7)
    for epoch in range(9):
        assert head_gains_at(epoch, 7) == (criterion.o2m, criterion.o2o)
        criterion.update()
    assert head_gains_at(0, 1) == (0.8, pytest.approx(0.2))
    assert head_gains_at(3, 7, heads=1) == (1.0,)


def test_float64_stays_float64():
    detector = make_detector("yolo11n").double()
    truth = make_truth(COUNTS, seed=11)
    sums = DetectionLoss(detector)(detector(images().double()), *truth, IMGSZ)
    assert sums.items.dtype == torch.float64
