"""batch=auto: the largest batch that the GPUs hold, measured on one of them before the run is planned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import ray
import torch

from yolo_ray.cluster.preflight import WORKER_ENV, connect, place
from yolo_ray.config.schema import AUTO_BATCH, TrainConfig
from yolo_ray.data.batch import PhotoRing
from yolo_ray.data.plan import Plan
from yolo_ray.data.records import Records
from yolo_ray.data.sides import sides_of
from yolo_ray.errors import UserError
from yolo_ray.model.build import build_detector
from yolo_ray.model.freeze import freeze_layers
from yolo_ray.model.loss import head_gains_at
from yolo_ray.step.build import build_step, step_options
from yolo_ray.step.memory import measure_memory
from yolo_ray.step.precision import resolve_precision, set_kernels
from yolo_ray.step.schedule import Controls, resolve_optim
from yolo_ray.step.train_step import TrainStep

PROBE_ROWS = 4
EVALUATION_COPIES = 2  # its graph, and the passes that warm it up
MULTIPLE = 8  # of a worker's rows: half precision products like it


def resolve_batch(config: TrainConfig, records: Records) -> TrainConfig:
    """``config`` with ``batch=auto`` replaced by what fits; any other as it is.

    Raises:
        UserError: no GPU to measure, or not even one photo fits.
    """
    if config.batch != AUTO_BATCH:
        return config
    connect(config.cluster.address)
    placement = place(config.cluster)
    if not placement.use_gpu:
        raise UserError(
            "batch=auto measures the memory of a GPU, and this run has none: set batch, 16 is usual"
        )
    probe = ray.remote(_rows_that_fit).options(
        num_gpus=1, num_cpus=placement.cpus, runtime_env={"env_vars": WORKER_ENV}
    )
    rows = ray.get(probe.remote(config, ray.put(records)))
    if rows < 1:
        raise UserError(
            f"batch=auto: the GPU's memory holds hardly a photo of {config.imgsz} px beside the model: "
            "lower imgsz or take a smaller model, or set a small batch"
        )
    if rows > MULTIPLE:
        rows -= rows % MULTIPLE
    workers = config.cluster.workers
    return config.override({"batch": workers * max(min(rows, len(records) // workers), 1)})


def _rows_that_fit(config: TrainConfig, records: Records) -> int:
    """Rows of one worker, on this task's GPU; 0 where not even the probe fits."""
    try:
        return _measured_rows(config, records)
    except torch.OutOfMemoryError:
        return 0


def _measured_rows(config: TrainConfig, records: Records) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    precision = resolve_precision(config.precision, device)
    set_kernels(precision, deterministic=config.deterministic)
    detector = build_detector(config.model, records.names, imgsz=config.imgsz, seed=config.seed)
    freeze_layers(detector, config.freeze)
    sides = sides_of(config.imgsz, config.augment.multi_scale, max(detector.strides))
    optim = resolve_optim(config.optim, frozenset(), total_steps=1, num_classes=len(records.names))
    options = step_options(config, optim, precision)
    # The network sees all rows at once here; micro_batch would hide what a row takes.
    options = replace(options, batch=PROBE_ROWS, compile="off", micro_batch=None)
    step = build_step(detector.to(device).train(), options)
    step.set_controls(Controls(0.0, 0.0, 0.9, 0.0, 0.9), head_gains_at(0, 1, step.num_heads))
    plan = Plan(
        records, seed=config.seed, epochs=1, batch=PROBE_ROWS, imgsz=config.imgsz, augment=config.augment
    )  # fmt: skip
    ring = PhotoRing(PROBE_ROWS, config.imgsz, plan.window, device)
    photos = np.zeros((PROBE_ROWS, config.imgsz, config.imgsz, 3), np.uint8)
    for number in range(1 - plan.window, 1):
        ring.put(number, photos)
    batch = ring.batch(plan.at(0), range(PROBE_ROWS), plan.capacity_at(0, 1))
    batch = replace(batch, side=max(sides))  # the largest images of multi_scale
    per_row = ring.photos.nbytes // PROBE_ROWS
    memory = measure_memory(step, batch, ring_row_bytes=per_row)
    beside = EVALUATION_COPIES * _evaluation_bytes(step, config)
    return replace(memory, fixed=memory.fixed + beside).rows


def _evaluation_bytes(step: TrainStep, config: TrainConfig) -> int:
    """What a forward pass of an evaluation takes, beside the model."""
    detector, device = step.detector.eval(), step.flat.state.device
    shape = (config.eval.val_batch, 3, config.imgsz, config.imgsz)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        detector(torch.zeros(shape, device=device))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
