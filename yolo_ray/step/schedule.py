"""Everything that changes over time, as pure functions of the step number.

The rules are Ultralytics' (its documentation of ``lr0 lrf warmup_* cos_lr nbs``), tabulated instead of recurring, so
that a resumed run needs no more state than its step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from yolo_ray.config.schema import OptimConfig


@dataclass(frozen=True)
class Controls:
    """The numbers written to the device before a step."""

    lr: float
    lr_bias: float
    momentum: float
    weight_decay: float
    ema_decay: float


@dataclass(frozen=True)
class ResolvedOptim:
    """The optimizer after ``auto`` was decided."""

    optimizer: str
    lr0: float
    momentum: float
    warmup_bias_lr: float
    reason: str = ""


def resolve_optim(
    optim: OptimConfig, explicit: frozenset[str], *, total_steps: int, num_classes: int
) -> ResolvedOptim:
    """Decide ``optimizer=auto`` by Ultralytics' rule; what the user set explicitly stays.

    Above 10 000 steps MuSGD (lr 0.01), below AdamW with lr fitted to the class count; momentum 0.9, warmup_bias_lr 0.
    """
    if optim.optimizer != "auto":
        return ResolvedOptim(optim.optimizer, optim.lr0, optim.momentum, optim.warmup_bias_lr)
    name, lr0 = (
        ("MuSGD", 0.01) if total_steps > 10_000 else ("AdamW", round(0.01 / (4 + num_classes), 6))
    )
    chosen = {"lr0": lr0, "momentum": 0.9, "warmup_bias_lr": 0.0}
    kept = {key: getattr(optim, key) for key in chosen if f"optim.{key}" in explicit}
    chosen |= kept
    reason = f"optimizer=auto: {name} lr0={chosen['lr0']:g} momentum={chosen['momentum']:g} for {total_steps} steps"
    return ResolvedOptim(name, chosen["lr0"], chosen["momentum"], chosen["warmup_bias_lr"], reason)


def lr_factor_at(epoch: int, *, epochs: int, lrf: float, cosine: bool) -> float:
    """The factor on lr0: linear or half a cosine from 1 to ``lrf`` over ``epochs``."""
    if cosine:
        return (1 - math.cos(epoch * math.pi / epochs)) / 2 * (lrf - 1) + 1
    return max(1 - epoch / epochs, 0) * (1 - lrf) + lrf


class Schedule:
    """``at(step)`` and ``updates[step]`` for the whole run.

    Attributes:
        updates: bool [total_steps], whether the step ends with an optimizer update.
        ema_updates: int64 [total_steps], optimizer updates made up to and including that step.
    """

    def __init__(
        self,
        optim: OptimConfig,
        resolved: ResolvedOptim,
        *,
        epochs: int,
        steps_per_epoch: int,
        batch: int,
    ) -> None:
        self.optim, self.resolved = optim, resolved
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        total = epochs * steps_per_epoch
        warm_epochs = min(optim.warmup_epochs, max(epochs - 1, 0))
        self.warmup_steps = round(warm_epochs * steps_per_epoch) if warm_epochs > 0 else 0
        nominal = max(round(optim.nbs / batch), 1)
        # Decay is scaled by the nominal accumulation, before it is capped by the length of the run.
        self.weight_decay = optim.weight_decay * batch * nominal / optim.nbs
        self.updates = self._tabulate_updates(total, min(nominal, total))
        self.ema_updates = np.cumsum(self.updates)

    def _tabulate_updates(self, total: int, nominal: int) -> np.ndarray:
        updates, last = np.zeros(total, dtype=bool), -1
        for step in range(total):
            accumulate = nominal
            if self.warmup_steps and step <= self.warmup_steps:
                ramp = np.interp(step, [0, self.warmup_steps], [1, nominal])
                accumulate = max(1, int(ramp.round()))
            if step - last >= accumulate:
                updates[step], last = True, step
        if total:
            updates[-1] = True  # the last gradients are not thrown away
        return updates

    def at(self, step: int) -> Controls:
        """The controls of a step, [0, total_steps)."""
        optim, resolved = self.optim, self.resolved
        epoch = step // self.steps_per_epoch
        lr = resolved.lr0 * lr_factor_at(
            epoch, epochs=self.epochs, lrf=optim.lrf, cosine=optim.cos_lr
        )
        lr_bias, momentum = lr, resolved.momentum
        if self.warmup_steps and step <= self.warmup_steps:
            ramp = [0, self.warmup_steps]
            lr_bias = float(np.interp(step, ramp, [resolved.warmup_bias_lr, lr]))
            lr = float(np.interp(step, ramp, [0.0, lr]))
            momentum = float(np.interp(step, ramp, [optim.warmup_momentum, resolved.momentum]))
        done = int(self.ema_updates[step])
        ema_decay = optim.ema_decay * (1 - math.exp(-done / optim.ema_tau))
        return Controls(lr, lr_bias, momentum, self.weight_decay, ema_decay)
