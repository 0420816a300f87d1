"""Optimizers on the flat buffers: tensors in, tensors changed in place, no number baked in.

Every time-varying value is a 0-dim device tensor, and every write is a ``torch.where(ok, new, old)``, so that a step
with a non-finite gradient leaves all state bit for bit as it was, without asking the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from yolo_ray.step.flat import FlatModel, Segment, View
from yolo_ray.step.lanes import Lanes

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Muon's quintic coefficients (K. Jordan, 2024)
ADAM_BETA2, ADAM_EPS = 0.999, 1e-8
MUON_GAIN = 0.2
MUON_LANES = 6


@dataclass(frozen=True)
class Rates:
    """0-dim tensors on the device: what the schedule writes before a step."""

    lr: Tensor
    lr_bias: Tensor
    momentum: Tensor
    weight_decay: Tensor

    def of(self, segment: Segment) -> Tensor:
        """The learning rate of a segment."""
        rate = self.lr_bias if segment.kind == "bias" else self.lr
        return rate * segment.boost if segment.boost != 1.0 else rate


def keep(ok: Tensor, old: Tensor, new: Tensor) -> None:
    """``old`` becomes ``new`` where the 0-dim bool ``ok`` holds; a select, never a branch."""
    torch.where(ok, new, old, out=old)


def _decayed(segment: Segment) -> bool:
    return segment.kind in ("weight", "muon")


class Sgd:
    """SGD with Nesterov momentum (Sutskever et al. 2013, as torch.optim.SGD defines it)."""

    def __init__(self, flat: FlatModel, momentum: float) -> None:
        del momentum  # scheduled: it comes with the rates
        self.flat = flat
        self.slots = {"momentum": torch.zeros_like(flat.grads)}

    def update(self, grads: Tensor, rates: Rates, ok: Tensor) -> None:
        """Apply the gradient [P] to the parameters; nothing changes where ``ok`` is false."""
        for segment in self.flat.segments:
            self._sgd(segment, grads, rates, ok, self.flat.state[segment.span])

    def _sgd(
        self, segment: Segment, grads: Tensor, rates: Rates, ok: Tensor, start: Tensor
    ) -> None:
        """One segment's update, beginning at ``start``: its parameters, or what Muon made of them."""
        grad, buffer = grads[segment.span], self.slots["momentum"][segment.span]
        if _decayed(segment):
            grad = torch.addcmul(grad, start, rates.weight_decay)
        velocity = torch.addcmul(grad, buffer, rates.momentum)
        direction = torch.addcmul(grad, velocity, rates.momentum)
        keep(ok, buffer, velocity)
        param = self.flat.state[segment.span]
        keep(ok, param, torch.addcmul(start, direction, rates.of(segment), value=-1))


class AdamW:
    """Decoupled weight decay Adam (Loshchilov and Hutter 2019, as torch.optim.AdamW defines it)."""

    def __init__(self, flat: FlatModel, momentum: float) -> None:
        self.flat, self.beta1 = flat, momentum
        count = torch.zeros((), device=flat.grads.device)
        zeros = torch.zeros_like
        self.slots = {"mean": zeros(flat.grads), "square": zeros(flat.grads), "count": count}

    def update(self, grads: Tensor, rates: Rates, ok: Tensor) -> None:
        """Apply the gradient [P] to the parameters; nothing changes where ``ok`` is false."""
        mean, square, count = self.slots["mean"], self.slots["square"], self.slots["count"]
        keep(ok, count, count + 1)
        new_mean = torch.lerp(mean, grads, 1 - self.beta1)
        new_square = torch.addcmul(square * ADAM_BETA2, grads, grads, value=1 - ADAM_BETA2)
        # 1 - beta^n in float64 would need a double kernel; expm1 keeps float32 exact enough at n = 1.
        correction1 = -torch.expm1(count * math.log(self.beta1))
        correction2 = -torch.expm1(count * math.log(ADAM_BETA2))
        direction = (new_mean / correction1) / ((new_square / correction2).sqrt() + ADAM_EPS)
        keep(ok, mean, new_mean)
        keep(ok, square, new_square)
        for segment in self.flat.segments:
            param = self.flat.state[segment.span]
            rate = rates.of(segment)
            decayed = param * (1 - rate * rates.weight_decay) if _decayed(segment) else param
            keep(ok, param, torch.addcmul(decayed, direction[segment.span], rate, value=-1))


class MuSgd(Sgd):
    """Ultralytics' MuSGD: for matrices and filters 0.2 x Muon + 1.0 x SGD, for the rest SGD.

    Muon: an EMA of the gradient, Nesterov, orthogonalised by five Newton-Schulz steps in bfloat16 and scaled by
    sqrt(max(1, rows/columns)) with the tensor's last two sizes. Weight decay belongs to the SGD part alone.
    """

    def __init__(self, flat: FlatModel, momentum: float) -> None:
        super().__init__(flat, momentum)
        self.slots["muon"] = torch.zeros_like(flat.grads)
        self.batches = _same_shape_batches(flat)
        lanes = Lanes(flat.grads.device, MUON_LANES)
        # Hundreds of matrix products: torch.compile takes a minute for them and makes them no faster.
        self._side_by_side: Callable[..., None] = cast(Any, torch.compiler.disable)(lanes.run)

    def update(self, grads: Tensor, rates: Rates, ok: Tensor) -> None:
        """Apply the gradient [P] to the parameters; nothing changes where ``ok`` is false."""
        buffer, decay = self.slots["muon"], 1 - rates.momentum
        average = torch.addcmul(buffer * rates.momentum, grads, decay)
        look_ahead = torch.addcmul(average * rates.momentum, grads, decay)
        self._side_by_side([partial(_orthogonalise, look_ahead, views) for views in self.batches])
        for segment in self.flat.segments:
            start = self.flat.state[segment.span]
            if segment.kind == "muon":
                step = rates.of(segment) * MUON_GAIN
                start = torch.addcmul(start, look_ahead[segment.span], step, value=-1)
            self._sgd(segment, grads, rates, ok, start)
        keep(ok, buffer, average)


def _orthogonalise(flat: Tensor, views: list[View]) -> None:
    """Replace matrices of one shape in a flat buffer."""
    orthogonal = _orthogonalised(torch.stack([view.of(flat) for view in views]))
    for view, matrix in zip(views, orthogonal.unbind(0), strict=True):
        view.of(flat).copy_(matrix)


def _same_shape_batches(flat: FlatModel) -> list[list[View]]:
    """Muon's tensors grouped by shape: each group is orthogonalised in one batched product."""
    spans = [(s.start, s.stop) for s in flat.segments if s.kind == "muon"]
    groups: dict[torch.Size, list[View]] = {}
    for view in flat.views[: flat.num_views_trained]:
        if any(start <= view.start < stop for start, stop in spans):
            groups.setdefault(view.shape, []).append(view)
    # The largest first, so that the lanes end together.
    return sorted(groups.values(), key=lambda views: -len(views) * views[0].numel)


def _orthogonalised(stack: Tensor) -> Tensor:
    """[n, rows, ...] -> the nearest semi-orthogonal matrices (approximately), scaled by their aspect."""
    scale = math.sqrt(max(1.0, stack.shape[-2] / stack.shape[-1]))
    x = stack.flatten(2).bfloat16()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return ((x.mT if tall else x).to(stack.dtype) * scale).reshape(stack.shape)


Optimizer = Sgd | AdamW | MuSgd
OPTIMIZERS: dict[str, Callable[[FlatModel, float], Optimizer]] = {
    "SGD": Sgd,
    "AdamW": AdamW,
    "MuSGD": MuSgd,
}
