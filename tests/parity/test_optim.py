"""Optimizers on flat buffers against torch's own and the installed Ultralytics' MuSGD."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from ultralytics.optim import MuSGD

from yolo_ray.step.flat import FlatModel
from yolo_ray.step.optim import OPTIMIZERS, Rates

STEPS = 4
LR, LR_BIAS, MOMENTUM, DECAY = 0.02, 0.05, 0.9, 0.01


class Toy(nn.Module):
    """Stands for a detector: convolution, norm, and a head with a classifier and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        head = nn.Module()
        head.cv3 = nn.Sequential(nn.Conv2d(8, 4, 1))
        head.dfl = nn.Conv2d(4, 1, 1, bias=False)
        self.net = nn.Module()
        self.net.model = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), head])

    def one_to_one_parameters(self) -> set[str]:
        return set()

    def frozen_parameters(self) -> set[str]:
        return {"model.2.dfl.weight"}


def groups_of(toy: Toy, muon: bool) -> list[dict[str, Any]]:
    """The parameter groups that Ultralytics' trainer makes, written out by hand."""
    net: Any = toy.net
    stem, norm, head = net.model
    classifier, boost = head.cv3[0], 3 if muon else 1
    groups = [
        {"params": [stem.bias, norm.bias], "lr": LR_BIAS, "weight_decay": 0.0},
        {"params": [classifier.bias], "lr": LR_BIAS * boost, "weight_decay": 0.0},
        {"params": [norm.weight], "weight_decay": 0.0},
        {"params": [stem.weight], "weight_decay": DECAY},
        {"params": [classifier.weight], "weight_decay": DECAY, "lr": LR * boost},
    ]
    if muon:
        groups[3]["use_muon"] = groups[4]["use_muon"] = True
        for group in groups:
            group.update(momentum=MOMENTUM, nesterov=True)
    return groups


def reference(name: str, toy: Toy) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(groups_of(toy, False), lr=LR, momentum=MOMENTUM, nesterov=True)
    if name == "AdamW":
        return torch.optim.AdamW(groups_of(toy, False), lr=LR, betas=(MOMENTUM, 0.999))
    return MuSGD(groups_of(toy, True), lr=LR, muon=0.2, sgd=1.0)


def make_rates() -> Rates:
    return Rates(*(torch.tensor(value) for value in (LR, LR_BIAS, MOMENTUM, DECAY)))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_updates_equal_the_reference(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = Toy(), Toy()
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    flat = FlatModel(ours, muon=name == "MuSGD")  # type: ignore[arg-type]
    optimizer, expected = OPTIMIZERS[name](flat, MOMENTUM), reference(name, theirs)
    for _ in range(STEPS):
        flat.grads.normal_()
        optimizer.update(flat.grads, make_rates(), torch.tensor(True))
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = mine.grad.clone() if mine.grad is not None else None
        expected.step()
    for (key, mine), other in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            mine, other, rtol=2e-5, atol=2e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_refused_update_changes_no_bit(name: str) -> None:
    torch.manual_seed(0)
    toy = Toy()
    flat = FlatModel(toy, muon=name == "MuSGD")  # type: ignore[arg-type]
    optimizer = OPTIMIZERS[name](flat, MOMENTUM)
    optimizer.update(torch.randn_like(flat.grads), make_rates(), torch.tensor(True))
    before = {key: slot.clone() for key, slot in optimizer.slots.items()} | {
        "state": flat.state.clone()
    }
    bad = torch.randn_like(flat.grads)
    bad[3] = float("nan")
    optimizer.update(bad, make_rates(), torch.tensor(False))
    after = {**optimizer.slots, "state": flat.state}
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_flat_views_are_the_model() -> None:
    toy = Toy()
    before = copy.deepcopy(toy.state_dict())
    flat = FlatModel(toy)  # type: ignore[arg-type]
    assert all(torch.equal(value, toy.state_dict()[key]) for key, value in before.items())
    flat.state.zero_()
    assert all(not v.any() for k, v in toy.state_dict().items() if "num_batches" not in k)
    names = {name for name, _ in flat.named(flat.state)}
    assert names == {f"{k.removeprefix('net.')}" for k in before if "num_batches" not in k}
    kinds = {segment.kind for segment in flat.segments}
    assert kinds == {"weight", "norm", "bias"}
    trained = {view.name for view in flat.views[: flat.num_views_trained]}
    assert "model.2.dfl.weight" not in trained
