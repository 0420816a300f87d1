"""Puts a training step together in the form that its device runs fastest."""

from __future__ import annotations

from yolo_ray.config.schema import TrainConfig
from yolo_ray.model.build import Detector
from yolo_ray.model.norm import fuse, synchronise
from yolo_ray.step.flat import FlatModel
from yolo_ray.step.reduce import AllReduce, no_reduce
from yolo_ray.step.schedule import ResolvedOptim
from yolo_ray.step.train_step import StepOptions, TrainStep


def step_options(config: TrainConfig, optim: ResolvedOptim, precision: str) -> StepOptions:
    """A run's options as its step needs them; ``precision`` as ``resolve_precision`` gives it."""
    return StepOptions(
        batch=config.batch,
        gains=(config.loss.box, config.loss.cls, config.loss.dfl),
        clip_norm=config.optim.clip_norm,
        optimizer=optim.optimizer,
        momentum=optim.momentum,
        precision=precision,
        compile=config.graph.compile,
        micro_batch=config.micro_batch,
    )


def build_step(
    detector: Detector, options: StepOptions, reduce: AllReduce = no_reduce, *, sync_bn: bool = True
) -> TrainStep:
    """The step of a detector that is on its device and in training mode.

    On a GPU filters lie channels last, and batch norm and SiLU run fused unless torch.compile fuses them. ``sync_bn``:
    batch statistics over all workers; on a CPU with one worker too, so that its bits are those of any number.
    """
    is_gpu = next(detector.parameters()).is_cuda
    if sync_bn and not (is_gpu and reduce is no_reduce):
        synchronise(detector.net, reduce)
    if is_gpu and options.compile == "off":
        fuse(detector.net)
    flat = FlatModel(detector, muon=options.optimizer == "MuSGD", channels_last=is_gpu)
    return TrainStep(detector, flat, options, reduce)
