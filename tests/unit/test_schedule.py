"""Rates, warm-up, accumulation and EMA ramp as functions of the step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from yolo_ray.config.schema import OptimConfig
from yolo_ray.step.schedule import ResolvedOptim, Schedule, lr_factor_at, resolve_optim


def make(optim: OptimConfig, *, epochs: int = 10, steps: int = 20, batch: int = 16) -> Schedule:
    resolved = ResolvedOptim("SGD", optim.lr0, optim.momentum, optim.warmup_bias_lr)
    return Schedule(optim, resolved, epochs=epochs, steps_per_epoch=steps, batch=batch)


def test_ends_of_the_learning_rate() -> None:
    assert lr_factor_at(0, epochs=10, lrf=0.01, cosine=False) == 1
    assert lr_factor_at(10, epochs=10, lrf=0.01, cosine=False) == pytest.approx(0.01)
    assert lr_factor_at(0, epochs=10, lrf=0.01, cosine=True) == 1
    assert lr_factor_at(10, epochs=10, lrf=0.01, cosine=True) == pytest.approx(0.01)
    assert lr_factor_at(5, epochs=10, lrf=0.0, cosine=True) == pytest.approx(0.5)


def test_warm_up_moves_every_rate_to_its_target() -> None:
    schedule = make(OptimConfig(lr0=0.01, warmup_epochs=3.0))
    first, end = schedule.at(0), schedule.at(60)
    assert (first.lr, first.lr_bias, first.momentum) == (0.0, 0.1, 0.8)
    expected = 0.01 * lr_factor_at(3, epochs=10, lrf=0.01, cosine=False)
    assert end.lr == pytest.approx(expected) and end.lr_bias == pytest.approx(expected)
    assert end.momentum == pytest.approx(0.937)
    assert first.lr < schedule.at(30).lr < end.lr


def test_warm_up_leaves_the_last_epoch() -> None:
    assert make(OptimConfig(warmup_epochs=5.0), epochs=2).warmup_steps == 20
    assert make(OptimConfig(warmup_epochs=5.0), epochs=1).warmup_steps == 0


def test_accumulation_ramps_to_nbs_over_batch() -> None:
    schedule = make(OptimConfig(nbs=64, warmup_epochs=3.0), batch=16)
    updates = [schedule.is_update(step) for step in range(200)]
    gaps = np.diff(np.flatnonzero(updates))
    assert updates[0] and gaps[0] == 1
    assert (np.diff(gaps[:-1]) >= 0).all() and gaps[-2] == 4
    assert updates[-1], "the last gradients are used"
    large = make(OptimConfig(nbs=64), batch=128)
    assert all(large.is_update(step) for step in range(200))


@pytest.mark.parametrize("warmup_epochs", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("batch", [1, 16, 24, 128])
@pytest.mark.parametrize("epochs", [1, 2, 10])
def test_updates_are_counted(warmup_epochs: float, batch: int, epochs: int) -> None:
    schedule = make(OptimConfig(nbs=64, warmup_epochs=warmup_epochs), batch=batch, epochs=epochs)
    done = 0
    for step in range(20 * epochs):
        done += schedule.is_update(step)
        assert schedule.updates_until(step) == done
    assert schedule.is_update(20 * epochs - 1)


def test_weight_decay_is_scaled_by_the_real_batch() -> None:
    assert make(OptimConfig(), batch=16).weight_decay == pytest.approx(0.0005)
    assert make(OptimConfig(), batch=128).weight_decay == pytest.approx(0.001)
    assert make(OptimConfig(), batch=48).weight_decay == pytest.approx(0.0005 * 48 / 64)


def test_ema_ramp_follows_updates() -> None:
    schedule = make(OptimConfig(ema_decay=0.9999, ema_tau=2000.0))
    done = schedule.updates_until(100)
    assert done == sum(schedule.is_update(step) for step in range(101))
    assert schedule.at(100).ema_decay == pytest.approx(0.9999 * (1 - math.exp(-done / 2000)))


def test_auto_keeps_what_the_user_set() -> None:
    short = resolve_optim(OptimConfig(), frozenset(), total_steps=500, num_classes=1)
    assert (short.optimizer, short.lr0, short.momentum, short.warmup_bias_lr) == (
        "AdamW",
        0.002,
        0.9,
        0.0,
    )
    long = resolve_optim(OptimConfig(), frozenset(), total_steps=10_001, num_classes=80)
    assert (long.optimizer, long.lr0) == ("MuSGD", 0.01)
    kept = resolve_optim(
        OptimConfig(lr0=0.5), frozenset({"optim.lr0"}), total_steps=500, num_classes=1
    )
    assert (kept.lr0, kept.momentum) == (0.5, 0.9)
    fixed = resolve_optim(OptimConfig(optimizer="SGD"), frozenset(), total_steps=500, num_classes=1)
    assert (fixed.optimizer, fixed.lr0, fixed.momentum) == ("SGD", 0.01, 0.937)
