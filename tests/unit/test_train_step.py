"""Parts of the training step: micro-batches add up to the batch, the loss scale finds its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.local_run import LocalOptions, LocalRun
from yolo_ray.config.load import load
from yolo_ray.config.schema import AUTO_BATCH
from yolo_ray.data.records import load_records
from yolo_ray.errors import UserError
from yolo_ray.step.graph import Cost
from yolo_ray.step.memory import Memory
from yolo_ray.step.scale import GROWTH_STEPS, LARGEST, LossScale

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 3, 4, 100])
def test_micro_batches_add_up(rows: int, tiny_dataset: Callable[..., Path]) -> None:
    """The same gradient and losses as all rows at once; batch norm apart, which sees fewer photos."""
    records = load_records(tiny_dataset(train=8, size=64), "train", max_bad=0.0)
    whole = LocalRun(records, LocalOptions(frozen_norm=True))
    parts = LocalRun(records, LocalOptions(frozen_norm=True, micro_batch=rows))
    gradients: list[Tensor] = []
    for run in (whole, parts):
        run.train(0, 1)
        gradients.append(run.step.optimizer.slots["momentum"].clone())
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[0].norm()
    assert gradients[0].norm() > 0
    sums = [run.step.take_sums().read() for run in (whole, parts)]
    assert sums[1] == pytest.approx(sums[0], rel=1e-5)


def test_loss_scale_halves_and_doubles() -> None:
    scale = LossScale("fp16", 16, CPU)
    assert scale.state.tolist() == [64.0, 0.0]
    yes, no = torch.tensor(True), torch.tensor(False)
    scale.follow(no)
    assert scale.state.tolist() == [32.0, 0.0]
    for _ in range(GROWTH_STEPS - 1):
        scale.follow(yes)
    assert scale.state.tolist() == [32.0, GROWTH_STEPS - 1]
    scale.follow(yes)
    assert scale.state.tolist() == [64.0, 0.0]
    scale.follow(yes)
    scale.follow(no)
    assert scale.state.tolist() == [32.0, 0.0], "good steps are counted in a row"
    loss = torch.tensor(3.0)
    assert scale.scaled(loss) / scale.divisor(torch.tensor(1.0)) == loss
    scale.state[0] = LARGEST
    scale.state[1] = GROWTH_STEPS - 1
    scale.follow(yes)
    assert scale.state[0] == LARGEST


def test_other_precisions_have_no_scale() -> None:
    scale = LossScale("bf16", 16, CPU)
    scale.follow(torch.tensor(False))
    loss = torch.tensor(3.0)
    assert scale.scaled(loss) is loss and scale.divisor(loss) is loss
    assert scale.state.tolist() == [1.0, 0.0]


def test_rows_that_fit() -> None:
    assert Memory(fixed=1e9, per_row=1e8, limit=10e9).rows == 82
    assert Memory(fixed=20e9, per_row=1e8, limit=10e9).rows == 0


def test_break_even() -> None:
    cost = Cost(capture_s=2.0, eager_ms=50.0, replay_ms=10.0)
    assert cost.break_even == 50
    assert "paid back after 50 of 208 steps" in cost.sentence(208)
    assert Cost(2.0, 10.0, 10.0).break_even == float("inf")


@pytest.mark.parametrize("word", ["auto", "-1"])
def test_batch_auto(word: str) -> None:
    config = load(["data=x.yaml", f"batch={word}", "cluster.workers=2"])
    assert config.batch == AUTO_BATCH
    with pytest.raises(UserError, match="batch=-2 is wrong"):
        load(["data=x.yaml", "batch=-2"])
    with pytest.raises(UserError, match="batch=0 is wrong"):
        load(["data=x.yaml", "batch=0"])


def test_micro_batches_of_uneven_workers_are_refused() -> None:
    with pytest.raises(UserError, match="not a multiple of"):
        load(["data=x.yaml", "batch=9", "cluster.workers=2", "micro_batch=4"])
