"""The frozen assignment: what a step would gain, and lose, by assigning each batch of photos only once.

Public write-ups make a YOLO step capturable this way: anchors are assigned to boxes once for a batch, outside of the
graph, and the graph reads that answer again and again. Training here assigns exactly in every step; this module
only measures the difference, by standing in for the loss's ``assign`` while it trains.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from yolo_ray.bench.measure import Clock, profile
from yolo_ray.bench.ratios import Row
from yolo_ray.bench.variants import Scene, Setting, build_ours, make_scene, run_step
from yolo_ray.model import loss as loss_module
from yolo_ray.model.assign import Assignment
from yolo_ray.step.graph import GraphedStep
from yolo_ray.step.precision import set_kernels
from yolo_ray.step.schedule import Controls
from yolo_ray.step.train_step import TrainStep

LEARNING = Controls(lr=0.01, lr_bias=0.01, momentum=0.9, weight_decay=5e-4, ema_decay=0.99)
Assign = Callable[..., Assignment]


class FrozenAssignment:
    """``assign`` that asks the real one while recording, and afterwards repeats its answers.

    The answers of the batch in turn lie in tensors that never move, so that a graph may read them.
    """

    def __init__(self, exact: Assign) -> None:
        self._exact = exact
        self._kept: list[list[Tensor]] = []  # row and weight of every head, for each batch
        self._live: list[Tensor] = []
        self._calls = 0

    def record(self, train: Callable[[], None]) -> None:
        """Keep what the real assignment answers during one step as that of the next batch.

        Raises:
            RuntimeError: the loss did not ask.
        """
        self._live, self._calls = [], 0
        self._kept.append([])
        train()
        if not self._kept[-1]:
            raise RuntimeError("the loss no longer calls the assign of its own module")
        self._live = [tensor.clone() for tensor in self._kept[-1]]

    def select(self, number: int) -> None:
        """Repeat the answers of that batch from now on."""
        kept = self._kept[number % len(self._kept)]
        for place, value in zip(self._live, kept, strict=True):
            place.copy_(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Assignment:
        """Assign, or repeat."""
        if not self._live:
            answer = self._exact(*args, **kwargs)
            self._kept[-1] += [tensor.clone() for tensor in answer]
            return answer
        head = self._calls % (len(self._live) // 2)
        self._calls += 1
        return Assignment(*self._live[2 * head : 2 * head + 2])


def static_rows(setting: Setting, clock: Clock, steps: int) -> list[Row]:
    """Our step with the exact assignment, and with the frozen one: ms, and the loss after ``steps`` steps.

    The first step on each batch assigns exactly in both. The loss is that of the exact assignment in both.
    """
    set_kernels(setting.precision, deterministic=setting.deterministic)
    scene = make_scene(setting, clock.device)
    return [_trained(setting, scene, clock, steps, frozen=frozen) for frozen in (False, True)]


def _trained(setting: Setting, scene: Scene, clock: Clock, steps: int, *, frozen: bool) -> Row:
    is_gpu = clock.device.type == "cuda"
    step = build_ours(setting, clock.device)
    stand_in = FrozenAssignment(loss_module.assign)
    count = len(scene.batches)
    graphed = GraphedStep(step, mode="require" if is_gpu else "off")

    def call(number: int) -> None:
        if frozen:
            stand_in.select(number)
        run_step(graphed, scene.batches[number % count], LEARNING)

    with _assigning_by(stand_in) if frozen else nullcontext():
        for batch in scene.batches:
            if frozen:
                stand_in.record(lambda batch=batch: run_step(step, batch, LEARNING))
            else:
                run_step(step, batch, LEARNING)
        for number in range(count, steps):
            call(number)
    losses = _exact_losses(step, scene)
    with _assigning_by(stand_in) if frozen else nullcontext():
        step_ms = statistics.median(clock.blocks_ms(call))
        row: Row = {"step_ms": round(step_ms, 3)} | losses
        if is_gpu:
            row["kernel_ms"] = profile(call, top=0, title="")["kernel_ms"]
    graphed.release()
    how = "frozen for each batch" if frozen else "exact in every step"
    return setting.named() | {"assignment": how, "steps": steps} | row


def _exact_losses(step: TrainStep, scene: Scene) -> Row:
    """Mean losses over the batches with the weights as they are."""
    step.take_sums().read()
    for batch in scene.batches:
        step(batch, update=False)
    sums = step.take_sums().read()
    step.pending.zero_()
    terms = {name: round(sums[name], 4) for name in ("box", "cls", "dfl")}
    return terms | {"total": round(sum(terms.values()), 4)}


@contextmanager
def _assigning_by(stand_in: Assign) -> Iterator[None]:
    """The loss calls ``stand_in`` instead of its own module's ``assign``."""
    exact = loss_module.assign
    setattr(loss_module, "assign", stand_in)  # noqa: B010 (a function of another type)
    try:
        yield
    finally:
        setattr(loss_module, "assign", exact)  # noqa: B010
