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
    """``at(step)`` and ``is_update(step)`` of a run of any length: only its warm-up is a table."""

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
        self.total_steps, self._nominal = total, min(nominal, total)
        self._warm = self._warm_up_updates()
        self._warm_done = np.cumsum(self._warm)
        ends = np.flatnonzero(self._warm)
        self._last = int(ends[-1]) if len(ends) else -1  # update of the warm-up

    def _warm_up_updates(self) -> np.ndarray:
        """bool [warmup_steps + 1], whether a step of the warm-up ends with an update; empty without one."""
        count = min(self.warmup_steps + 1, self.total_steps) if self.warmup_steps else 0
        updates, last = np.zeros(count, dtype=bool), -1
        ramp = np.interp(np.arange(count), [0, max(self.warmup_steps, 1)], [1, self._nominal])
        for step, accumulate in enumerate(np.maximum(ramp.round(), 1).tolist()):
            if step - last >= accumulate:
                updates[step], last = True, step
        return updates

    def is_update(self, step: int) -> bool:
        """Whether a step, [0, total_steps), ends with an optimizer update; the last one does."""
        if step == self.total_steps - 1:
            return True  # the last gradients are not thrown away
        if step < len(self._warm):
            return bool(self._warm[step])
        return (step - self._last) % self._nominal == 0

    def updates_until(self, step: int) -> int:
        """Optimizer updates up to and including that of a step, [0, total_steps)."""
        if step < 0:
            return 0
        if step == self.total_steps - 1:
            return self.updates_until(step - 1) + 1
        if step < len(self._warm):
            return int(self._warm_done[step])
        done = int(self._warm_done[-1]) if len(self._warm) else 0
        return done + (step - self._last) // self._nominal

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
        done = self.updates_until(step)
        ema_decay = optim.ema_decay * (1 - math.exp(-done / optim.ema_tau))
        return Controls(lr, lr_bias, momentum, self.weight_decay, ema_decay)
