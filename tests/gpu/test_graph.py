"""One graph replay a step on a real GPU: equal to the eager step, silent, and without a trace of its capture."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from yolo_ray.augment.device import augment, normalised
from yolo_ray.bench.scene import make_batches, make_records
from yolo_ray.data.batch import Batch, PhotoRing
from yolo_ray.data.geometry import resize_output
from yolo_ray.errors import UserError
from yolo_ray.model.assign import ONE_TO_MANY, ONE_TO_ONE, Truth, assign
from yolo_ray.model.boxes import HeadOutput, boxes_from_distances, make_anchors
from yolo_ray.model.build import build_detector
from yolo_ray.model.fused_layers import DenseConcatenation, max_pool
from yolo_ray.model.loss import DetectionLoss, head_gains_at
from yolo_ray.model.norm import fuse
from yolo_ray.step.build import build_step
from yolo_ray.step.graph import GraphedStep, Step
from yolo_ray.step.precision import set_kernels
from yolo_ray.step.reduce import AllReduce, distributed_reduce, no_reduce
from yolo_ray.step.schedule import Controls
from yolo_ray.step.train_step import StepOptions, TrainStep

pytestmark = pytest.mark.gpu

IMGSZ, BATCH, BOXES = 128, 4, 6
NAMES = make_records(1).names
CUDA = torch.device("cuda")
FAMILIES = ("yolov8n.yaml", "yolo11n.yaml", "yolo26n.yaml")


@dataclasses.dataclass
class Heads:
    """What the loss must know of a detector."""

    reg_max: int
    strides: tuple[int, ...]
    dual: bool


@pytest.fixture(autouse=True)
def deterministic_kernels() -> Iterator[None]:
    set_kernels("fp32", deterministic=True)
    yield
    set_kernels("fp32", deterministic=False)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return make_batches(BATCH, IMGSZ, BOXES, CUDA)


def make_step(
    model: str = "yolo11n.yaml",
    optimizer: str = "SGD",
    precision: str = "bf16",
    reduce: AllReduce = no_reduce,
) -> TrainStep:
    options = StepOptions(
        batch=BATCH, imgsz=IMGSZ, gains=(7.5, 0.5, 1.5), clip_norm=10.0, optimizer=optimizer, momentum=0.9,
        precision=precision,
    )  # fmt: skip
    detector = build_detector(model, NAMES, imgsz=IMGSZ, seed=0).to(CUDA).train()
    return build_step(detector, options, reduce)


def run(step: Step, batch: Batch, *, lr: float = 1e-3, update: bool = True) -> None:
    step.set_controls(Controls(lr, lr, 0.9, 5e-4, 0.99), head_gains_at(0, 10, step.num_heads))
    step(batch, update=update)


def state_of(step: Step) -> dict[str, Tensor]:
    flat = step.flat
    named = {
        "state": flat.state,
        "ema": flat.ema,
        "counters": flat.counters,
        "pending": step.pending,
    }
    return {
        k: v.clone() for k, v in {**named, **step.optimizer.slots, "skipped": step.skipped}.items()
    }


def assert_equal(ours: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for key, value in other.items():
        gap = (ours[key].double() - value.double()).abs().max().item()
        assert torch.equal(ours[key], value), f"{key} differs by {gap:.3g}"


def test_pixels_equal_those_of_the_cpu(batches: list[Batch]) -> None:
    for batch in batches:
        here = normalised(batch, torch.float32)
        there = augment(batch.to("cpu")) / 255
        assert torch.equal(here.cpu(), there)
        wide = normalised(batch, torch.bfloat16, 8).cpu()
        assert torch.equal(wide[:, :3], there.bfloat16()) and not wide[:, 3:].any()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "MuSGD"])
@pytest.mark.parametrize("model", FAMILIES)
def test_graph_equals_eager(
    model: str, optimizer: str, precision: str, batches: list[Batch]
) -> None:
    eager = make_step(model, optimizer, precision)
    graphed = GraphedStep(make_step(model, optimizer, precision), mode="require")
    assert_equal(state_of(graphed), state_of(eager))
    for number, update in enumerate([False, True, True, False, True]):
        run(eager, batches[number % 4], update=update)
        run(graphed, batches[number % 4], update=update)
        assert_equal(state_of(graphed), state_of(eager))
    assert graphed.read_sums() == eager.read_sums()
    assert (graphed.captures, graphed.replays) == (2, 5)


def test_capture_leaves_no_trace(batches: list[Batch]) -> None:
    step = make_step()
    torch.manual_seed(5)
    before, random = state_of(step), torch.cuda.get_rng_state()
    graphed = GraphedStep(step, mode="require")
    assert graphed._try_capture((IMGSZ, len(batches[0].boxes), True), batches[0])
    assert_equal(state_of(graphed), before)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert not step.sums.any()


def test_the_host_never_waits() -> None:
    rows = make_batches(BATCH, IMGSZ, BOXES, CUDA)
    graphed = GraphedStep(make_step(), mode="require")
    run(graphed, rows[0])
    ring, photos = (
        PhotoRing(BATCH, IMGSZ, 8, CUDA),
        torch.zeros(BATCH, IMGSZ, IMGSZ, 3, dtype=torch.uint8),
    )
    ring.put(0, photos)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(100):
            ring.put(number + 1, photos)
            run(graphed, rows[number % 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graphed.replays == 101


def test_eager_step_never_waits(batches: list[Batch]) -> None:
    step = make_step("yolo26n.yaml", "MuSGD")
    run(step, batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(step, batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(step.skipped) == 0, "both steps trained"


def test_a_gradient_that_is_not_finite_changes_nothing(batches: list[Batch]) -> None:
    step = make_step()
    poison = torch.zeros((), device=CUDA)
    step.reduce = lambda wire: wire[7].add_(poison)
    graphed = GraphedStep(step, mode="require")
    run(graphed, batches[0])
    before = state_of(graphed)
    poison.fill_(float("inf"))
    run(graphed, batches[1])
    after = state_of(graphed)
    assert int(after.pop("skipped")) == int(before.pop("skipped")) + 1
    for state in (after, before):
        state.pop("counters")  # how many batches were seen, not a statistic
    assert_equal(after, before)
    poison.zero_()
    run(graphed, batches[2])
    assert not torch.equal(graphed.flat.state, before["state"]), "training goes on"


def test_a_changed_rate_takes_effect_in_the_next_replay(batches: list[Batch]) -> None:
    graphed = GraphedStep(make_step(), mode="require")
    run(graphed, batches[0])
    before = graphed.flat.params.clone()
    run(graphed, batches[1], lr=0.0)
    assert torch.equal(graphed.flat.params, before)
    run(graphed, batches[1], lr=1e-2)
    assert not torch.equal(graphed.flat.params, before)
    assert graphed.captures == 1


def test_memory_stays_flat(batches: list[Batch]) -> None:
    graphed = GraphedStep(make_step(), mode="require")
    for number in range(20):
        run(graphed, batches[number % 4])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for number in range(500):
        run(graphed, batches[number % 4])
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.parametrize("model", FAMILIES)
def test_a_batch_without_boxes(model: str, batches: list[Batch]) -> None:
    empty = dataclasses.replace(batches[0], valid=torch.zeros_like(batches[0].valid))
    graphed = GraphedStep(make_step(model), mode="require")
    run(graphed, batches[0])
    run(graphed, empty)
    sums = graphed.read_sums()
    assert sums["skipped"] == 0 and all(value == value for value in sums.values())


def with_side(batch: Batch, side: int) -> Batch:
    """The same batch at another side of the images, as multi_scale makes it."""
    ratio = side / IMGSZ
    planned, boxes = batch.inverse.cpu().double().numpy(), batch.boxes * ratio
    inverse, _ = resize_output(planned, np.zeros((0, 4), np.float32), IMGSZ, side)
    moved = torch.from_numpy(inverse).to(batch.inverse)
    return dataclasses.replace(batch, inverse=moved, boxes=boxes, side=side)


def test_every_side_has_a_graph_of_its_own(batches: list[Batch]) -> None:
    eager, graphed = make_step(), GraphedStep(make_step(), mode="require")
    sides = [IMGSZ, 96, 160, IMGSZ, 160, 96]
    for number, side in enumerate(sides):
        batch = with_side(batches[number % 4], side)
        pixels = normalised(batch, torch.float32)
        assert pixels.shape[-1] == side
        assert torch.equal(pixels.cpu(), augment(batch.to("cpu")) / 255)
        run(eager, batch)
        run(graphed, batch)
        assert_equal(state_of(graphed), state_of(eager))
    assert (graphed.captures, graphed.replays) == (3, 6)


def mixed(batch: Batch) -> Batch:
    """The same batch with every row's neighbour blended in, but for the first row."""
    names = ("picks", "origins", "extents", "centre", "canvas", "inverse")
    rows = len(batch.picks)
    both = {
        name: torch.stack([part, part.roll(1, 0)], 1).reshape(rows, -1, *part.shape[2:])
        for name, part in ((name, getattr(batch, name)) for name in names)
    }
    weights = torch.tensor([4096.0, 1000, 2048, 3000], device=CUDA)
    return dataclasses.replace(batch, mix=weights, **both)


def test_mixup_on_the_gpu(batches: list[Batch]) -> None:
    eager, graphed = make_step(), GraphedStep(make_step(), mode="require")
    for number in range(3):
        batch = mixed(batches[number])
        pixels = normalised(batch, torch.float32).cpu()
        assert torch.equal(pixels, augment(batch.to("cpu")) / 255)
        plain = normalised(batches[number], torch.float32).cpu()
        assert torch.equal(pixels[0], plain[0]) and not torch.equal(pixels[1], plain[1])
        run(eager, batch)
        run(graphed, batch)
        assert_equal(state_of(graphed), state_of(eager))
    assert graphed.captures == 1


def test_another_shape_is_refused(batches: list[Batch]) -> None:
    graphed = GraphedStep(make_step(), mode="require")
    run(graphed, batches[0])
    with pytest.raises(ValueError, match="picks is"):
        run(graphed, dataclasses.replace(batches[0], picks=batches[0].picks[:2]))


def make_unfit_step() -> TrainStep:
    step = make_step()
    step.reduce = lambda wire: wire.add_(wire.sum().item() * 0)  # a host read: no capture can do it
    return step


def test_auto_falls_back_with_one_warning(batches: list[Batch]) -> None:
    said: list[str] = []
    graphed, eager = GraphedStep(make_unfit_step(), warn=said.append), make_unfit_step()
    for number in range(3):
        run(graphed, batches[number])
        run(eager, batches[number])
    assert len(said) == 1 and "cannot be captured" in said[0]
    assert graphed.replays == 0 and graphed.reason
    assert_equal(state_of(graphed), state_of(eager))
    with pytest.raises(UserError, match="cannot be captured"):
        run(GraphedStep(make_unfit_step(), mode="require"), batches[0])


def test_collectives_are_captured(batches: list[Batch], tmp_path: Path) -> None:
    """Synchronised batch norm and the gradient's all-reduce through NCCL, started and ended three times."""
    eager = make_step()
    for number in range(3):
        run(eager, batches[number])
    for cycle in range(3):
        dist.init_process_group(
            "nccl", init_method=f"file://{tmp_path}/store{cycle}", rank=0, world_size=1
        )
        graphed = GraphedStep(make_step(reduce=distributed_reduce), mode="require")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(3):
                run(graphed, batches[number])
        assert_equal(state_of(graphed), state_of(eager))
        graphed.release()
        dist.destroy_process_group()


@pytest.mark.parametrize("channels", [16, 80, 6])
@pytest.mark.parametrize("silu", [True, False])
def test_fused_norm_equals_torch(channels: int, silu: bool) -> None:
    """Outputs, gradients and statistics, against float64."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03).to(CUDA)
    with torch.no_grad():
        plain.weight.uniform_(0.5, 2)
        plain.bias.uniform_(-1, 1)
    fused = nn.Sequential(copy.deepcopy(plain))
    fuse(fused)
    fused[0].__dict__["act"] = nn.SiLU() if silu else None
    exact = copy.deepcopy(plain).double()
    x = torch.randn(4, channels, 33, 40, device=CUDA).contiguous(memory_format=torch.channels_last)
    # As the backward pass of a concatenation gives it: a part of longer rows.
    dy = torch.randn(4, 33, 40, channels * 2, device=CUDA).permute(0, 3, 1, 2)[:, :channels]
    results = []
    for net, dtype in ((fused, torch.float32), (exact, torch.float64)):
        leaf = x.to(dtype).requires_grad_()
        y = net(leaf)
        y = y if net is fused or not silu else nn.functional.silu(y)
        grads = torch.autograd.grad(y, [leaf, *net.parameters()], dy.to(dtype))
        results.append([y.detach(), *grads, *(b.double() for b in net.buffers())])
    for ours, wanted in zip(*results, strict=True):
        assert (ours.double() - wanted).norm() <= 2e-6 * wanted.norm()


def test_assignment_equals_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    for rule in (ONE_TO_MANY, ONE_TO_ONE):
        points, strides = make_anchors(IMGSZ, (8, 16, 32))
        scores = torch.randn(3, 5, len(points))
        boxes = boxes_from_distances(torch.rand(3, 4, len(points)) * 4, points, strides)
        low = torch.rand(40, 2) * 100
        truth = Truth(
            torch.cat((low, low + torch.rand(40, 2) * 60), 1), torch.randint(0, 5, (40,)),
            torch.randint(0, 3, (40,)), torch.rand(40) < 0.8,
        )  # fmt: skip
        there = assign(scores, boxes, points, truth, rule, min_side=16)
        moved = Truth(*(part.to(CUDA) for part in truth))
        here = assign(scores.to(CUDA), boxes.to(CUDA), points.to(CUDA), moved, rule, min_side=16)
        torch.testing.assert_close(here.weight.cpu(), there.weight, rtol=1e-4, atol=1e-6)
        learns = there.weight > 0
        assert learns.sum() > 20
        assert torch.equal(here.row.cpu()[learns], there.row[learns])


def test_fused_loss_equals_that_of_the_cpu() -> None:
    """Items, score sums and the gradients of all raw outputs, for both kinds of box head."""
    torch.manual_seed(0)
    anchors = len(make_anchors(IMGSZ, (8, 16, 32))[0])
    for reg_max, dual in ((16, False), (1, True)):
        loss = DetectionLoss(Heads(reg_max, (8, 16, 32), dual))
        raw = [torch.randn(3, 4 * reg_max + 5, anchors) * 2 for _ in range(1 + dual)]
        low = torch.rand(30, 2) * 100
        boxes = torch.cat((low, low + torch.rand(30, 2) * 60 + 4), 1)
        truth = (
            boxes,
            torch.randint(0, 5, (30,)),
            torch.randint(0, 3, (30,)),
            torch.rand(30) < 0.8,
        )
        results = []
        for device in ("cpu", "cuda"):
            leaves = [part.to(device).requires_grad_() for part in raw]
            heads = [HeadOutput(*leaf.split([4 * reg_max, 5], 1)) for leaf in leaves]
            sums = loss(heads, *(part.to(device) for part in truth), imgsz=IMGSZ)
            grads = torch.autograd.grad(
                (sums.items * torch.tensor([7.5, 0.5, 1.5], device=device)).sum(), leaves
            )
            results.append([part.cpu() for part in (sums.items.detach(), sums.scores, *grads)])
        for there, here in zip(*results, strict=True):
            assert (here - there).norm() <= 1e-5 * there.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_and_concatenation_equal_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 48, 9, 11, device=CUDA, dtype=dtype).contiguous(
        memory_format=torch.channels_last
    )

    def compute(pool: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        half = leaf.chunk(2, 1)[1]
        y = torch.cat((half, pool(leaf), leaf[:, :5], pool(pool(leaf))), 1)
        weight = torch.linspace(-1, 1, y.numel(), device=CUDA, dtype=dtype).view_as(y)
        return [y.detach(), *torch.autograd.grad((y * weight).float().sum(), leaf)]

    wanted = compute(lambda t: nn.functional.max_pool2d(t, 5, 1, 2))
    with DenseConcatenation():
        found = compute(lambda t: max_pool(t, 5))
    assert torch.equal(found[0], wanted[0])
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert (found[1] - wanted[1]).float().norm() <= tolerance * wanted[1].float().norm()
