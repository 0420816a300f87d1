"""Frozen layers stay as they are, to the bit, in weights, statistics and EMA; the rest trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.local_run import LocalOptions, LocalRun
from yolo_ray.config.schema import TrainConfig
from yolo_ray.data.records import Records, load_records
from yolo_ray.errors import UserError
from yolo_ray.model.build import build_detector
from yolo_ray.model.freeze import freeze_layers
from yolo_ray.train.checkpoint import Progress, Snapshot, check_resumable, restore_state
from yolo_ray.train.evaluate import evaluating
from yolo_ray.train.loop import average_buffers

LAST = 23  # layer of the head of yolo11n and yolo26n


@pytest.fixture
def records(tiny_dataset: Callable[..., Path]) -> Records:
    return load_records(tiny_dataset(train=20, size=64), "train", max_bad=0.0)


def tensors_of(run: LocalRun) -> dict[str, Tensor]:
    """Copies of weights, buffers, counters and EMA by name."""
    flat = run.step.flat
    own = {name: tensor.clone() for name, tensor in run.detector.net.state_dict().items()}
    return own | {f"ema {name}": tensor.clone() for name, tensor in flat.named(flat.ema)}


def norms_of(run: LocalRun) -> dict[str, nn.Module]:
    """The batch norms by name."""
    named = run.detector.net.named_modules()
    return {name: module for name, module in named if isinstance(module, nn.BatchNorm2d)}


def layer_of(name: str) -> int:
    return int(name.removeprefix("ema ").split(".")[1])


@pytest.mark.parametrize(
    ("model", "freeze", "optimizer"),
    [
        ("yolo11n.yaml", 10, "SGD"),
        ("yolo11n.yaml", (0, 4, 16), "AdamW"),
        ("yolo26n.yaml", 22, "MuSGD"),
        ("yolo26n.yaml", (LAST,), "SGD"),
    ],
)
def test_frozen_layers_stay_and_the_rest_moves(
    model: str, freeze: int | tuple[int, ...], optimizer: str, records: Records
) -> None:
    options = LocalOptions(model=model, batch=4, optimizer=optimizer, freeze=freeze)
    run = LocalRun(records, options)
    frozen = set(range(freeze)) if isinstance(freeze, int) else set(freeze)
    before = tensors_of(run)
    run.train(0, 2)
    with evaluating(run.detector):  # as after an epoch
        assert not any(norm.training for norm in norms_of(run).values())
    run.train(2, 4)
    after = tensors_of(run)
    stayed = [name for name in before if torch.equal(before[name], after[name])]
    assert [n for n in before if layer_of(n) in frozen and n not in stayed] == []
    assert any(layer_of(name) in frozen and "running_mean" in name for name in before)
    free = [name for name in before if layer_of(name) not in frozen and ".dfl." not in name]
    moved = [name for name in free if name not in stayed]
    # In these few warm-up steps some weights at exactly 1 move by less than their last bit.
    assert len(moved) > 0.8 * len(free) and int(run.step.skipped) == 0
    assert {layer_of(name) for name in moved} == {layer_of(name) for name in free}
    trained = {view.name for view in run.step.flat.views[: run.step.flat.num_views_trained]}
    assert not {layer_of(name) for name in trained} & frozen


def test_frozen_norms_use_their_statistics_in_every_mode(records: Records) -> None:
    run = LocalRun(records, LocalOptions(freeze=(1, 2)))
    norms = norms_of(run)
    for mode in (True, False, True):
        run.detector.train(mode)
        modes = {name: module.training for name, module in norms.items()}
        assert modes == {name: mode and layer_of(name) not in (1, 2) for name in norms}


def test_without_freeze_nothing_changes(records: Records) -> None:
    runs = [LocalRun(records, LocalOptions(batch=4, freeze=freeze)) for freeze in (None, 0, ())]
    for run in runs:
        run.train(0, 2)
        assert torch.equal(run.step.flat.state, runs[0].step.flat.state)


def test_a_resume_is_bit_equal(records: Records) -> None:
    options = LocalOptions(batch=4, freeze=5)
    whole = LocalRun(records, options)
    whole.train(0, 6)
    half = LocalRun(records, options)
    half.train(0, 3)
    state = Snapshot(half.step, Progress(step=3)).state({}, records.digest)
    rest = LocalRun(records, options)
    restore_state(rest.step, state)
    rest.train(3, 6)
    for name, tensor in tensors_of(whole).items():
        assert torch.equal(tensors_of(rest)[name], tensor), name


def test_a_resume_with_other_frozen_layers_is_refused() -> None:
    state: dict[str, Any] = {
        "model": {}, "data_digest": "d", "optimizer": {"name": "SGD"},
        "config": TrainConfig(freeze=(0, 1)).flat(),
    }  # fmt: skip
    check_resumable(state, TrainConfig(freeze=(0, 1)), "SGD", "d", {})
    with pytest.raises(UserError, match=r"with freeze=\[0, 1\], this run has freeze=3"):
        check_resumable(state, TrainConfig(freeze=3), "SGD", "d", {})
    del state["config"]["freeze"]  # written before there was the option
    check_resumable(state, TrainConfig(), "SGD", "d", {})


@pytest.mark.parametrize("freeze", [25, 1000, (0, 24), (24,)])
def test_a_layer_that_is_not_there_is_refused_with_the_range(freeze: int | tuple[int, ...]) -> None:
    detector = build_detector("yolo11n.yaml", ("a",), imgsz=64, seed=0)
    with pytest.raises(UserError, match=r"freeze=[\d\[].* does not have: its layers are 0 to 23"):
        freeze_layers(detector, freeze)
    assert all(p.requires_grad for n, p in detector.named_parameters() if ".dfl." not in n)


@pytest.mark.parametrize("freeze", [24, tuple(range(24))])
def test_nothing_left_to_train_is_refused(freeze: int | tuple[int, ...]) -> None:
    detector = build_detector("yolo11n.yaml", ("a",), imgsz=64, seed=0)
    with pytest.raises(UserError, match="leaves nothing to train"):
        freeze_layers(detector, freeze)


def test_averaged_buffers_of_equal_numbers_are_those_numbers() -> None:
    """Without synchronised batch norm the ranks' buffers are averaged, frozen ones among them."""
    torch.manual_seed(0)
    state = torch.randn(5000)
    flat = SimpleNamespace(state=state.clone(), ema=state.clone(), num_trained=10)

    def reduce(tensor: Tensor) -> None:  # what seven ranks with the same numbers do
        total = tensor.clone()
        for _ in range(6):
            total += tensor
        tensor.copy_(total)

    run: Any = SimpleNamespace(
        workers=7, reduce=reduce, step=SimpleNamespace(flat=flat),
        config=TrainConfig().override({"sync_bn": False}),
    )  # fmt: skip
    average_buffers(run)
    assert torch.equal(flat.state, state) and torch.equal(flat.ema, state)
