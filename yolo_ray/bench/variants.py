"""What is timed: every way to make one training step, behind one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from yolo_ray.augment.device import augment
from yolo_ray.bench.rival import GAINS, Rival
from yolo_ray.bench.scene import make_batches, make_records
from yolo_ray.data.batch import Batch
from yolo_ray.model.build import build_detector
from yolo_ray.model.loss import head_gains_at
from yolo_ray.step.build import build_step
from yolo_ray.step.graph import GraphedStep, Step
from yolo_ray.step.precision import resolve_precision
from yolo_ray.step.reduce import AllReduce, no_reduce
from yolo_ray.step.schedule import Controls
from yolo_ray.step.train_step import StepOptions, TrainStep

ULTRALYTICS, ULTRALYTICS_COMPILE = "ultralytics", "ultralytics+compile"
EAGER, GRAPH, GRAPH_COMPILE = "eager", "graph", "graph+compile"
REFERENCE = {GRAPH: EAGER, GRAPH_COMPILE: GRAPH, ULTRALYTICS_COMPILE: ULTRALYTICS}
"""What each variant adds its start-up cost to, for the step at which that is paid back."""

NAMES = make_records(1).names
CONTROLS = Controls(lr=1e-3, lr_bias=1e-3, momentum=0.9, weight_decay=5e-4, ema_decay=0.99)


@dataclass(frozen=True)
class Setting:
    """What the rows that are compared with each other share."""

    model: str
    batch: int
    imgsz: int
    boxes: int
    precision: str  # as asked for, but for auto
    optimizer: str
    deterministic: bool = False

    def named(self) -> dict[str, Any]:
        """What a row of it begins with."""
        return {
            "model": self.model.removesuffix(".yaml"),
            "batch": self.batch,
            "precision": self.precision,
            "optimizer": self.optimizer,
        }


@dataclass(frozen=True)
class Scene:
    """The made-up batches of one model at one batch size, on the device."""

    batches: list[Batch]
    device: torch.device

    @property
    def ring_bytes(self) -> int:
        """What our photo ring takes; Ultralytics needs none."""
        return self.batches[0].photos.nbytes

    def images(self) -> list[tuple[Tensor, Batch]]:
        """Every batch as augmented uint8 images [b,3,S,S], and its boxes."""
        return [(augment(batch).byte(), batch) for batch in self.batches]


@dataclass(frozen=True)
class Subject:
    """One variant, built. ``first()`` makes a step without a graph, so that kernels are chosen and
    compiled; ``call(number)`` trains on a batch; ``close()`` frees what it holds.
    """

    first: Callable[[], None]
    call: Callable[[int], None]
    close: Callable[[], None]


def make_scene(setting: Setting, device: torch.device) -> Scene:
    """Batches for a setting."""
    return Scene(make_batches(setting.batch, setting.imgsz, setting.boxes, device), device)


def run_step(step: Step, batch: Batch, controls: Controls = CONTROLS) -> None:
    """One step with an update, as the training loop calls it."""
    step.set_controls(controls, head_gains_at(0, 100, step.num_heads))
    step(batch, update=True)


def build_ours(
    setting: Setting,
    device: torch.device,
    *,
    compile: bool = False,
    names: tuple[str, ...] = NAMES,
    reduce: AllReduce = no_reduce,
) -> TrainStep:
    """Our eager step; ``setting.batch`` is the global one where ``reduce`` sums over ranks.

    Raises:
        UserError: an unknown model, or a precision that this device or the step lacks.
    """
    options = StepOptions(
        batch=setting.batch, gains=GAINS, clip_norm=10.0, momentum=0.9,
        optimizer=setting.optimizer, precision=resolve_precision(setting.precision, device),
        compile="model" if compile else "off",
    )  # fmt: skip
    detector = build_detector(setting.model, names, imgsz=setting.imgsz, seed=0)
    return build_step(detector.to(device).train(), options, reduce)


def build_variant(variant: str, setting: Setting, scene: Scene) -> Subject:
    """One of the five variants by its name."""
    # Ultralytics does not ask cuDNN to measure its kernels, and is not slowed down by it here.
    is_rival = variant in (ULTRALYTICS, ULTRALYTICS_COMPILE)
    torch.backends.cudnn.benchmark = not setting.deterministic and not is_rival
    return _BUILDERS[variant](setting, scene)


def _ours(setting: Setting, scene: Scene, *, graph: bool, compile: bool) -> Subject:
    forget = _forget_compiled if compile else _nothing
    forget()
    step = build_ours(setting, scene.device, compile=compile)
    graphed = GraphedStep(step, mode="require" if graph else "off")
    count = len(scene.batches)

    def close() -> None:
        graphed.release()
        forget()

    return Subject(
        first=lambda: run_step(step, scene.batches[0]),
        call=lambda number: run_step(graphed, scene.batches[number % count]),
        close=close,
    )


def _rival(setting: Setting, scene: Scene, *, compile: bool) -> Subject:
    forget = _forget_compiled if compile else _nothing
    forget()
    detector = build_detector(setting.model, NAMES, imgsz=setting.imgsz, seed=0).to(scene.device)
    rival = Rival(
        detector, scene.images(), precision=setting.precision, optimizer=setting.optimizer,
        compile=compile,
    )  # fmt: skip
    return Subject(first=lambda: rival(0), call=rival, close=forget)


def _forget_compiled() -> None:
    """Compiled code hangs on the code object of a forward, which all models share: after eight of them torch runs
    the next eagerly, with no more than a warning. It also keeps its model in memory.
    """
    torch.compiler.reset()


def _nothing() -> None:
    """Nothing was compiled."""


_BUILDERS: dict[str, Callable[[Setting, Scene], Subject]] = {
    ULTRALYTICS: partial(_rival, compile=False),
    ULTRALYTICS_COMPILE: partial(_rival, compile=True),
    EAGER: partial(_ours, graph=False, compile=False),
    GRAPH: partial(_ours, graph=True, compile=False),
    GRAPH_COMPILE: partial(_ours, graph=True, compile=True),
}
