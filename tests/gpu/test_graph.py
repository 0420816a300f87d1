"""One graph replay a step on a real GPU: equal to the eager step, silent, and without a trace of its capture."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gpu.steps import (
    BATCH,
    BOXES,
    CUDA,
    FAMILIES,
    IMGSZ,
    OTHER_FAMILIES,
    assert_equal,
    make_step,
    run,
    state_of,
)
from yolo_ray.augment.device import augment, normalised
from yolo_ray.bench.scene import make_batches
from yolo_ray.data.batch import Batch, PhotoRing, take_rows
from yolo_ray.data.geometry import resize_output
from yolo_ray.errors import UserError
from yolo_ray.step import graph
from yolo_ray.step.graph import GraphedStep
from yolo_ray.step.reduce import distributed_reduce
from yolo_ray.step.train_step import TrainStep
from yolo_ray.train.checkpoint import Progress, Snapshot

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("model", "optimizer", "precision"),
    [
        *itertools.product(FAMILIES, ("SGD", "AdamW", "MuSGD"), ("bf16", "fp32")),
        *((model, "SGD", "bf16") for model in OTHER_FAMILIES),
    ],
)
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
    assert graphed.take_sums().read() == eager.take_sums().read()
    assert (graphed.captures, graphed.replays) == (2, 5)


@pytest.mark.parametrize("changes", [{"precision": "fp16"}, {"micro_batch": 3}])
def test_graph_equals_eager_with(changes: dict[str, Any], batches: list[Batch]) -> None:
    eager = make_step(**changes)
    graphed = GraphedStep(make_step(**changes), mode="require")
    for number in range(4):
        run(eager, batches[number])
        run(graphed, batches[number])
    assert_equal(state_of(graphed), state_of(eager))
    assert torch.equal(graphed.scale.state, eager.scale.state)
    sums = graphed.take_sums().read()
    assert sums == eager.take_sums().read() and sums["skipped"] < 4 and sums["box"] > 0


def test_loss_scale_recovers_from_overflow(batches: list[Batch]) -> None:
    graphed = GraphedStep(make_step(precision="fp16"), mode="require")
    graphed.scale.state[0] = 2.0**16
    before = graphed.flat.state.clone()
    run(graphed, batches[0])
    for number in range(24):
        run(graphed, batches[number % 4])
    sums, factor = graphed.take_sums().read(), graphed.scale.state[0].item()
    assert factor == 2.0 ** (16 - sums["skipped"]), "it halves at every skipped step"
    assert sums["skipped"] < 20 and not torch.equal(graphed.flat.state, before)


def test_losses_of_the_families_are_alive(batches: list[Batch]) -> None:
    """Every term trains: an assigner that finds nothing leaves the box terms at 0."""
    for model in (*FAMILIES, *OTHER_FAMILIES):
        graphed = GraphedStep(make_step(model), mode="require")
        run(graphed, batches[0])
        sums = graphed.take_sums().read()
        assert all(sums[name] > 0.01 for name in ("box", "cls", "dfl")), (model, sums)


def test_a_changed_gain_takes_effect_in_the_next_replay(batches: list[Batch]) -> None:
    step = make_step()
    graphed = GraphedStep(step, mode="require")
    run(graphed, batches[0], lr=0.0)
    before = graphed.take_sums().read()
    step.options = dataclasses.replace(step.options, gains=(15.0, 0.5, 1.5))
    run(graphed, batches[0], lr=0.0)
    after = graphed.take_sums().read()
    assert after["box"] == pytest.approx(2 * before["box"], rel=2e-2)
    assert after["cls"] == pytest.approx(before["cls"], rel=2e-2)


def test_what_is_taken_is_of_its_moment(batches: list[Batch]) -> None:
    """Snapshot and sums are copied while the device is behind, and read after further replays."""
    graphed = GraphedStep(make_step(), mode="require")
    run(graphed, batches[0])
    graphed.take_sums()
    torch.cuda._sleep(50_000_000)  # some 30 ms
    run(graphed, batches[1])
    expected, losses = graphed.flat.state.clone(), graphed.step.sums.clone()
    snapshot, sums = Snapshot(graphed, Progress(step=2)), graphed.take_sums()
    for number in range(4):
        run(graphed, batches[number])
    state = snapshot.state({}, "digest")
    for view in graphed.flat.views:
        assert torch.equal(state["model"][view.name], view.of(expected).cpu()), view.name
    assert sums.read()["box"] == losses[0].item() and state["progress"]["step"] == 2
    assert not torch.equal(graphed.flat.state, expected)


def test_dropout_draws_anew_in_every_replay(batches: list[Batch]) -> None:
    step = make_step()
    layers: Any = step.detector.net.model
    layers[4].register_forward_hook(lambda module, inputs, y: nn.functional.dropout(y, 0.5))
    graphed = GraphedStep(step, mode="require")
    losses = []
    for _ in range(3):
        run(graphed, batches[0], lr=0.0)
        losses.append(graphed.take_sums().read()["cls"])
    assert len(set(losses)) == 3


def test_ranks_agree_on_a_failed_capture(batches: list[Batch]) -> None:
    """Another rank could not capture: this one, which could, runs eagerly too, from the same state."""
    said: list[str] = []
    graphed = GraphedStep(make_step(), warn=said.append, agree=lambda mine: False)
    eager = make_step()
    for number in range(2):
        run(graphed, batches[number])
        run(eager, batches[number])
    assert_equal(state_of(graphed), state_of(eager))
    assert graphed.replays == 0 and "another worker" in said[0] and len(said) == 1


def empty_cache() -> None:
    """As in a new process: cuBLAS keeps a workspace for every stream that was ever used, 32 MiB each."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def test_what_does_not_fit_is_said_with_what_would() -> None:
    rows, side = 16, 640
    large = make_batches(rows, side, BOXES, CUDA)
    probe = make_step(batch=rows, imgsz=side)
    used = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(probe, large[0])
    needed = torch.cuda.max_memory_allocated() - used
    del probe
    empty_cache()
    graphed = GraphedStep(make_step(batch=rows, imgsz=side), mode="require")
    _, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.memory_reserved() + 0.6 * needed
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        with pytest.raises(
            UserError, match=r"16 photos of 640 px .* about batch=\d+ would fit"
        ) as told:
            run(graphed, large[0])
        fits = int(re.findall(r"batch=(\d+)", str(told.value))[0])
        del graphed
        empty_cache()
        small = take_rows(large[0], 0, fits)
        run(GraphedStep(make_step(batch=fits, imgsz=side), mode="require"), small)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_peak_memory_of_graph_and_eager() -> None:
    rows, side = 16, 320
    large = make_batches(rows, side, BOXES, CUDA)
    peaks = []
    for mode in ("off", "require"):
        empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = GraphedStep(make_step(batch=rows, imgsz=side), mode=mode)
        for number in range(3):
            run(step, large[number % 4])
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        step.release()
        del step
    assert peaks[1] <= 1.10 * peaks[0], peaks


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
    for number in range(2000):
        run(graphed, batches[number % 4])
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.parametrize("model", FAMILIES)
def test_a_batch_without_boxes(model: str, batches: list[Batch]) -> None:
    empty = dataclasses.replace(batches[0], valid=torch.zeros_like(batches[0].valid))
    graphed = GraphedStep(make_step(model), mode="require")
    run(graphed, batches[0])
    run(graphed, empty)
    sums = graphed.take_sums().read()
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


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (1 + 0 * gradients[0].sum().item())  # a host read


def test_a_capture_that_fails_in_the_backward_pass(batches: list[Batch]) -> None:
    """Weight gradients are under way on another stream then; the eager steps after it do not meet them."""
    steps = [make_step() for _ in range(2)]
    for step in steps:
        layers: Any = step.detector.net.model
        layers[2].register_forward_hook(lambda module, inputs, y: ReadsInBackward.apply(y))
    said: list[str] = []
    graphed = GraphedStep(steps[0], warn=said.append)
    for number in range(3):
        run(graphed, batches[number])
        run(steps[1], batches[number])
    assert_equal(state_of(graphed), state_of(steps[1]))
    assert graphed.replays == 0 and len(said) == 1 and "cannot be captured" in said[0]


def test_rare_shapes_are_captured_uncompiled(
    batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "MAX_COMPILED", 0)
    torch._dynamo.utils.counters.clear()
    eager, graphed = (
        make_step(compile="step"),
        GraphedStep(make_step(compile="step"), mode="require"),
    )
    for number in range(3):
        with torch.compiler.set_stance("force_eager"):
            run(eager, batches[number])
        run(graphed, batches[number])
    assert_equal(state_of(graphed), state_of(eager))
    assert graphed.captures == 1 and not torch._dynamo.utils.counters["stats"]["unique_graphs"]


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
    """Synchronised batch norm and the gradient's all-reduce through NCCL, started and ended twenty times."""
    eager = make_step()
    for number in range(3):
        run(eager, batches[number])
    for cycle in range(20):
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
