"""Evaluation counts every photo once and gives the same bits for any number of ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from yolo_ray.augment.images import letterbox
from yolo_ray.config.schema import EvalConfig
from yolo_ray.data.records import Records
from yolo_ray.errors import UserError
from yolo_ray.model.build import Detector, build_detector
from yolo_ray.model.detect import decode
from yolo_ray.train.evaluate import (
    EvalBatch,
    Gather,
    eval_batch,
    evaluate,
    letterbox_geometry,
    rank_images,
    to_original,
)
from yolo_ray.train.graphed_eval import GraphedEval
from yolo_ray.train.metrics import EvalResult

IMGSZ = 64
NAMES = ("a", "b")
OPTIONS = EvalConfig(val_batch=4, max_det=50)


def photo_of(image_id: int) -> np.ndarray:
    """A coarse random picture, its size and content following from the id."""
    rng = np.random.default_rng(image_id)
    height, width = (int(side) for side in rng.integers(3, 9, 2))
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8).repeat(13, 0).repeat(13, 1)


def make_records(boxes: list[np.ndarray], classes: list[np.ndarray]) -> Records:
    """Records of ``photo_of(0) ...`` with those pixel boxes."""
    sizes = np.array([photo_of(i).shape[:2] for i in range(len(boxes))], np.int32).reshape(-1, 2)
    scaled = [b / np.tile(s[::-1], 2) for b, s in zip(boxes, sizes, strict=True)]
    return Records(
        paths=[f"{i}.png" for i in range(len(boxes))],
        sizes=sizes,
        offsets=np.concatenate([[0], np.cumsum([len(b) for b in boxes])]).astype(np.int64),
        boxes=np.concatenate(scaled).astype(np.float32),
        classes=np.concatenate(classes).astype(np.int32),
        names=NAMES,
        digest="",
        bad=(),
    )


def batches_of(ids: np.ndarray, val_batch: int = 4, imgsz: int = IMGSZ) -> Iterator[EvalBatch]:
    """Letterboxed photos in fixed batches, gray rows with id -1 at the end."""
    for start in range(0, len(ids), val_batch):
        rows = ids[start : start + val_batch]
        photos = np.full((val_batch, imgsz, imgsz, 3), 114, np.uint8)
        padded = np.full(val_batch, -1, np.int64)
        padded[: len(rows)] = rows
        for place, image_id in enumerate(rows.tolist()):
            photos[place] = letterbox(photo_of(image_id), imgsz)[0]
        yield eval_batch(padded, photos)


def random_detector(model: str = "yolo11n.yaml") -> Detector:
    """A detector whose boxes and scores vary with the photo, its boxes smaller than the photos."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    detector = build_detector(model, list(NAMES), imgsz=IMGSZ, seed=1)
    bins = torch.arange(detector.reg_max, dtype=torch.float32).repeat(4)
    for name, module in detector.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
        if isinstance(module, torch.nn.Conv2d) and module.bias is not None:
            is_box = module.out_channels == len(bins) and "cv2" in name
            torch.nn.init.normal_(module.weight, std=0.2)
            with torch.no_grad():
                module.bias.copy_(1.0 - 0.5 * bins if is_box else torch.tensor(-2.0))
    with torch.no_grad():  # one look at photos gives the batch norms statistics to match
        detector.train()(next(batches_of(np.arange(100, 116), 16)).images / 255)
    return detector


def alone(value: object) -> list[object]:
    return [value]


def judge(
    detector: Detector, records: Records, rank: int, world: int, gather: Gather
) -> EvalResult:
    """What one rank does."""
    batches = batches_of(rank_images(len(records), rank, world))
    return evaluate(detector, batches, records, imgsz=IMGSZ, options=OPTIONS, gather=gather)


def easy_records(detector: Detector, num_images: int) -> Records:
    """Truth that the detector half finds: some of its own detections, moved a little."""
    nothing = make_records([np.zeros((0, 4))] * num_images, [np.zeros(0, np.int32)] * num_images)
    rng = np.random.default_rng(0)
    boxes, classes = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("yolo_ray.train.evaluate.SAMPLES", num_images)
        result = judge(detector, nothing, 0, 1, alone)
    for _, found, _, kinds in result.samples:
        rows = np.arange(0, min(len(found), 12), 3)
        boxes.append(found[rows] + rng.normal(0, 0.3, (len(rows), 4)))
        classes.append(kinds[rows])
    return make_records(boxes, classes)


class ThreadGather:
    """A real gather among threads: everybody waits for everybody."""

    def __init__(self, world: int) -> None:
        self.values: list[object] = [None] * world
        self.barrier = threading.Barrier(world, timeout=200)

    def of(self, rank: int) -> Gather:
        def gather(value: object) -> list[object]:
            self.values[rank] = value
            self.barrier.wait()
            return list(self.values)

        return gather


def judge_by_threads(detector: Detector, records: Records, world: int) -> list[EvalResult]:
    """The results of all ranks, each with a detector of its own."""
    gather, results = ThreadGather(world), {}

    def run(rank: int) -> None:
        own = copy.deepcopy(detector)
        results[rank] = judge(own, records, rank, world, gather.of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(world)]


def assert_same_bits(first: EvalResult, second: EvalResult) -> None:
    np.testing.assert_equal(first.metrics, second.metrics)  # NaN equals NaN
    assert first.num_detections == second.num_detections
    np.testing.assert_array_equal(first.curves.precision, second.curves.precision)
    for (i, *a), (j, *b) in zip(first.samples, second.samples, strict=True):
        assert i == j
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def detector() -> Detector:
    return random_detector()


@pytest.mark.parametrize(("num_images", "worlds"), [(21, (2, 3)), (3, (4,))])
def test_any_number_of_ranks_gives_the_same_bits(
    detector: Detector, num_images: int, worlds: tuple[int, ...]
) -> None:
    records = easy_records(detector, num_images)
    expected = judge(detector, records, 0, 1, alone)
    assert 0.01 < expected.map50_95 < 0.95, "a case that tells nothing"
    assert expected.num_images == num_images
    for world in worlds:
        for result in judge_by_threads(detector, records, world):
            assert_same_bits(result, expected)


def test_the_place_of_a_photo_in_its_batch_does_not_change_a_bit(detector: Detector) -> None:
    # two photos of 96 px: here a whole batch at once gave other last bits in the other order
    records = make_records([np.zeros((0, 4))] * 2, [np.zeros(0, np.int32)] * 2)
    first, second = (
        evaluate(
            detector, batches_of(np.arange(2)[::order], 2, 96), records, imgsz=96, gather=alone,
            options=EvalConfig(val_batch=2),
        )
        for order in (1, -1)
    )  # fmt: skip
    assert first.num_detections > 100
    assert_same_bits(first, second)


def _gloo_rank(rank: int, world: int, folder: str, records: Records) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)

    def gather(value: object) -> list[object]:
        values: list[object] = [None] * world
        dist.all_gather_object(values, value)
        return values

    result = judge(random_detector(), records, rank, world, gather)
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_processes_give_the_same_bits_also_one_without_photos(
    detector: Detector, tmp_path: Path
) -> None:
    records = easy_records(detector, 1)
    spawn(_gloo_rank, (2, str(tmp_path), records), nprocs=2)
    expected = judge(detector, records, 0, 1, alone)
    for rank in range(2):
        assert_same_bits(torch.load(tmp_path / f"{rank}.pt", weights_only=False), expected)


def test_rank_images_are_a_partition() -> None:
    for num_images, world in ((21, 3), (3, 4), (0, 2)):
        parts = [rank_images(num_images, rank, world) for rank in range(world)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(num_images))
    assert rank_images(7, 1, 3).tolist() == [1, 4]


def test_a_photo_judged_twice_or_never_is_refused(detector: Detector) -> None:
    records = make_records([np.zeros((0, 4))] * 3, [np.zeros(0, np.int32)] * 3)
    for ids in ([0, 1], [0, 1, 2, 2]):
        with pytest.raises(AssertionError, match="exactly once"):
            evaluate(
                detector, batches_of(np.array(ids)), records, imgsz=IMGSZ, options=OPTIONS,
                gather=alone,
            )  # fmt: skip


def test_modes_of_all_modules_come_back_even_after_an_error(detector: Detector) -> None:
    records = make_records([np.array([[1.0, 1, 20, 20]])], [np.zeros(1, np.int32)])
    detector.train()
    frozen = next(m for m in detector.modules() if isinstance(m, torch.nn.Conv2d))
    frozen.eval()
    during: list[bool] = []
    hook = frozen.register_forward_hook(lambda *_: during.append(detector.training))
    judge(detector, records, 0, 1, alone)

    def broken() -> Iterator[EvalBatch]:
        raise OSError("the photo is gone")
        yield

    with pytest.raises(OSError, match="gone"):
        evaluate(detector, broken(), records, imgsz=IMGSZ, options=OPTIONS, gather=alone)
    hook.remove()
    assert during == [False] * OPTIONS.val_batch
    assert detector.training and not frozen.training
    assert next(m for m in detector.modules() if isinstance(m, torch.nn.Conv2d)) is frozen


def test_samples_are_the_first_photos_in_pixels_of_the_photo(detector: Detector) -> None:
    records = easy_records(detector, 3)
    samples = judge(detector, records, 0, 1, alone).samples
    assert [image_id for image_id, *_ in samples] == [0, 1, 2]
    for image_id, boxes, scores, classes in samples:
        height, width = photo_of(image_id).shape[:2]
        assert len(boxes) == len(scores) == len(classes) > 0
        assert boxes.min() >= 0
        assert boxes[:, 2].max() <= width
        assert boxes[:, 3].max() <= height
        assert (np.diff(scores) <= 0).all()


def test_the_nms_free_head_is_judged_when_asked() -> None:
    dual = random_detector("yolo26n.yaml")
    records = easy_records(dual, 2)
    both = [
        evaluate(
            dual, batches_of(np.arange(2)), records, imgsz=IMGSZ, gather=alone,
            options=EvalConfig(val_batch=4, nms=nms),
        )
        for nms in (True, False)
    ]  # fmt: skip
    assert [result.nms for result in both] == [True, False]
    assert both[0].map50_95 != both[1].map50_95


def test_a_users_mistakes_are_named(detector: Detector) -> None:
    records = make_records([np.zeros((0, 4))], [np.zeros(0, np.int32)])
    with pytest.raises(UserError, match="nms=false needs a model"):
        evaluate(detector, [], records, imgsz=IMGSZ, options=EvalConfig(nms=False), gather=alone)
    other = Records(**{**vars(records), "names": ("a", "b", "c")})
    with pytest.raises(UserError, match="knows 2 classes and the data names 3"):
        evaluate(detector, [], other, imgsz=IMGSZ, options=OPTIONS, gather=alone)


@pytest.mark.parametrize("imgsz", [64, 320, 640])
def test_boxes_return_to_the_photo_as_ultralytics_does(imgsz: int) -> None:
    from ultralytics.utils.ops import scale_boxes  # not on top: processes import this file

    rng = np.random.default_rng(0)
    sizes = [(480, 640), (641, 479), (33, 1000), (imgsz, imgsz // 2 + 1), (97, 101)]
    for height, width in sizes:
        scale, padding = letterbox_geometry(height, width, imgsz)
        gray = np.zeros((height, width, 3), np.uint8)
        square, corner = letterbox(gray, imgsz)
        dark = np.argwhere(square[:, :, 0] == 0)
        np.testing.assert_array_equal(padding, corner)
        np.testing.assert_array_equal(dark.min(axis=0)[::-1], padding)
        np.testing.assert_allclose(np.ptp(dark, axis=0)[::-1] + 1, scale * (width, height))
        boxes = (rng.uniform(-10, imgsz + 10, (40, 4))).astype(np.float32)
        ours = np.clip(to_original(boxes, height, width, imgsz), 0, np.tile([width, height], 2))
        expected = scale_boxes(  # it clips
            (imgsz, imgsz), boxes.astype(np.float64), (height, width),
            ratio_pad=((scale[1], scale[0]), tuple(padding)),
        )  # fmt: skip
        np.testing.assert_allclose(ours, np.asarray(expected), atol=1e-3)
        assert to_original(boxes, height, width, imgsz).min() < 0, "judged as they are"
        inside = rng.uniform(0, 1, (40, 4)) * np.tile([width, height], 2)
        there = inside * np.tile(scale, 2) + np.tile(padding, 2)
        np.testing.assert_allclose(to_original(there, height, width, imgsz), inside, atol=1e-3)


def test_without_a_gpu_there_is_no_graph(detector: Detector) -> None:
    records = easy_records(detector, 3)
    expected = judge(detector, records, 0, 1, alone)
    for mode in ("auto", "off"):
        predict = GraphedEval(detector, nms=True, mode=mode, warn=pytest.fail)
        batches = batches_of(np.arange(3))
        result = evaluate(
            detector, batches, records, imgsz=IMGSZ, options=OPTIONS, gather=alone, predict=predict
        )
        assert_same_bits(result, expected)
        assert predict.reason == "there is no GPU" and result.replays == 0
        predict.release()
    with pytest.raises(UserError, match=r"graph\.mode=require needs a GPU"):
        GraphedEval(detector, nms=True, mode="require")


def test_a_pass_is_the_networks_own(detector: Detector) -> None:
    """Pixels over 255, the wanted head, boxes in pixels: written out once more."""
    images = next(batches_of(np.arange(4))).images
    detector.eval()
    boxes, scores = GraphedEval(detector, nms=True)(images)
    with torch.inference_mode():
        head = detector(images.float() / 255)[0]
        wanted = decode(head, detector.strides, detector.reg_max, IMGSZ)
    assert torch.equal(boxes, wanted[0]) and torch.equal(scores, wanted[1])
    assert boxes.shape == (4, 84, 4) and scores.shape == (4, 84, 2)
