"""What one Ray Train worker does: the one place that knows both the loop and Ray Train."""

from __future__ import annotations

import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import ray.train
import torch
import torch.distributed as dist

from yolo_ray.cluster.preflight import Placement
from yolo_ray.cluster.weights import held_weights
from yolo_ray.config.load import RUN_CONFIG
from yolo_ray.config.schema import EvaluateConfig, TrainConfig
from yolo_ray.data.batch import PhotoRing
from yolo_ray.data.decoding import DeviceDecoder
from yolo_ray.data.pipeline import eval_photos, start_readers, train_photos
from yolo_ray.data.plan import Plan, slots_of
from yolo_ray.data.reading import Reading
from yolo_ray.data.records import Records
from yolo_ray.data.room import held
from yolo_ray.errors import StopRequested, UserError
from yolo_ray.export.session import OnnxForward
from yolo_ray.model.build import Detector, build_detector, load_detector
from yolo_ray.model.freeze import freeze_layers
from yolo_ray.step.build import build_step, step_options
from yolo_ray.step.graph import GraphedStep
from yolo_ray.step.precision import resolve_precision, set_kernels
from yolo_ray.step.reduce import AllReduce, distributed_reduce, no_reduce
from yolo_ray.step.schedule import ResolvedOptim, Schedule
from yolo_ray.train.checkpoint import Progress, load_newest, restore_state, weights_digest
from yolo_ray.train.costs import measure_costs
from yolo_ray.train.evaluate import EvalBatch, eval_batch, evaluate, judge, rank_images
from yolo_ray.train.events import EventLog, NullEventLog
from yolo_ray.train.feed import Feed
from yolo_ray.train.graphed_eval import GraphedEval
from yolo_ray.train.loop import Run, fit
from yolo_ray.train.metrics import EvalResult
from yolo_ray.train.report import NullTracker, Tracker

T = TypeVar("T")
FAILURE_FILE = "failure.txt"
EVAL_CACHE_BYTES = 256 * 2**20
MIN_COMPILED_STEPS = 1000


@dataclass(frozen=True)
class Job:
    """What the driver sends every training worker; ``model``: what the detector is built from."""

    config: TrainConfig
    folder: Path
    placement: Placement
    optim: ResolvedOptim
    tracker: Tracker
    plan: ray.ObjectRef
    val: ray.ObjectRef
    names: tuple[str, ...]
    data_digest: str
    model: str
    reading: Reading
    measures_costs: bool = False


@dataclass(frozen=True)
class EvaluateJob:
    """What the driver sends every worker that evaluates a file."""

    config: EvaluateConfig
    folder: Path
    placement: Placement
    val: ray.ObjectRef
    weights: str
    content: ray.ObjectRef  # of that file, for nodes that do not see it
    reading: Reading


@dataclass(frozen=True)
class Here:
    """This worker among the others."""

    rank: int
    workers: int
    device: torch.device

    @property
    def reduce(self) -> AllReduce:
        """Sums a tensor over all ranks in place."""
        return distributed_reduce if self.workers > 1 else no_reduce

    def agree(self, value: bool) -> bool:
        """Whether all ranks say yes."""
        votes = torch.tensor([float(not value)], device=self.device)
        dist.all_reduce(votes)
        return not votes.item()

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        if self.workers == 1:
            return [value]
        out: list[Any] = [None] * self.workers
        dist.all_gather_object(out, value)
        return out


def train_worker(settings: dict[str, Any]) -> bool | None:
    """Entry of a training worker: True when the run has come to its end, None when it was asked to stop."""
    job: Job = settings["job"]
    return _guarded(job, partial(_train, job), job.config.seed)


def evaluate_worker(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Entry of an evaluation worker; Ray Train hands rank 0's metrics to the driver."""
    job: EvaluateJob = settings["job"]
    return _guarded(job, partial(_evaluate_file, job), 0)


def _guarded(job: Job | EvaluateJob, work: Callable[[Here], T], seed: int) -> T | None:
    here = _start(job.placement, seed)
    if (job.folder / FAILURE_FILE).exists():
        return None  # a restart after a user's mistake: nothing would change, the driver reads the reason
    try:
        with _cache_held(job.reading):
            return work(here)
    except StopRequested:
        return None
    except BaseException as error:
        _note(job.folder, here.rank, find_user_error(error))
        raise


def _cache_held(reading: Reading) -> AbstractContextManager[None]:
    return nullcontext() if reading.cache is None else held(reading.cache)


def _warn(folder: Path, text: str) -> None:
    """A sentence for the user from any rank: what a node cannot do, rank 0 may not see."""
    EventLog(folder / "events.jsonl").write("warning", text=text)


def _note(folder: Path, rank: int, mistake: UserError | None) -> None:
    """Leave the reason of a failure in the run's folder, as far as the disk lets us."""
    with suppress(OSError):
        if mistake is not None:
            (folder / FAILURE_FILE).write_text(str(mistake))
        log = folder / "logs" / f"rank_{rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{traceback.format_exc()}\n")


def find_user_error(error: BaseException | None) -> UserError | None:
    """The user's mistake at the bottom of a chain of wrapped errors, if there is one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        inner = getattr(
            error, "cause", None
        )  # Ray's wrapper poses as what it wraps: look inside first
        if isinstance(error, UserError) and inner is None:
            return error
        error = inner or error.__cause__ or error.__context__
    return None


def _start(placement: Placement, seed: int) -> Here:
    context = ray.train.get_context()
    # Threads that fetch photos and write checkpoints share the interpreter with the one that launches steps.
    # By default it would wait 5 ms for it whenever one of them computes.
    sys.setswitchinterval(0.0005)
    torch.set_num_threads(placement.threads)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if placement.use_gpu
        else torch.device("cpu")
    )
    if placement.use_gpu and placement.gpus < 1:
        # Who takes more than its part fails by itself, and not the runs beside it.
        torch.cuda.set_per_process_memory_fraction(placement.gpus, device)
    return Here(context.get_world_rank(), context.get_world_size(), device)


def _train(job: Job, here: Here) -> bool:
    config = job.config
    _check_shared(job.folder)
    start_readers(job.placement.data, config.augment.albumentations)
    plan: Plan = ray.get(job.plan)
    events = EventLog(job.folder / "events.jsonl") if here.rank == 0 else NullEventLog()
    detector = build_detector(job.model, job.names, imgsz=config.imgsz, seed=config.seed).to(
        here.device
    )
    freeze_layers(detector, config.freeze)
    if job.measures_costs and here.rank == 0:
        events.write("costs", **measure_costs(detector, config.imgsz, here.device))
    detector.train()
    step = _build_step(job, detector, here, events, plan.total_steps)
    progress = _restore(job, step, events)
    steps = here.gather(progress.step)
    if len(set(steps)) > 1:  # a network disk may show a new file late; the restart looks again
        raise RuntimeError(
            f"the workers found checkpoints of different steps: {sorted(set(steps))}"
        )
    schedule = Schedule(
        config.optim, job.optim,
        epochs=config.epochs, steps_per_epoch=plan.steps_per_epoch, batch=config.batch,
    )  # fmt: skip
    tracker = job.tracker if here.rank == 0 else NullTracker()
    tracker.warn = lambda text: events.write("warning", text=text)
    val: Records = ray.get(job.val)
    predict = GraphedEval(
        detector, nms=config.eval.nms, mode=config.graph.mode,
        warn=lambda text: events.write("warning", text=text),
    )  # fmt: skip
    run = Run(
        config=config, folder=job.folder, detector=detector, step=step, schedule=schedule,
        feed=_build_feed(job, plan, here), evaluate=_build_evaluate(job, predict, here), val=val, reduce=here.reduce,
        report=ray.train.report, tracker=tracker, events=events, rank=here.rank,
        workers=here.workers, data_digest=job.data_digest, progress=progress,
        data_cpus=job.placement.data.cpus * here.workers,
    )  # fmt: skip
    try:
        fit(run)
    finally:
        predict.release()
        step.release()  # graphs must be gone before the process group is, or NCCL hangs
        tracker.close()
    return True


def _check_shared(folder: Path) -> None:
    if not (folder / RUN_CONFIG).is_file():
        raise UserError(
            f"{folder} is not visible on the node {socket.gethostname()}: pass project= with a folder that all nodes "
            "of the cluster share"
        )


def _build_step(
    job: Job, detector: Detector, here: Here, events: EventLog | NullEventLog, steps: int
) -> GraphedStep:
    """The training step of this worker: one graph replay on a GPU, eager elsewhere."""
    config = job.config
    precision = resolve_precision(config.precision, here.device)
    set_kernels(precision, deterministic=config.deterministic)
    options = step_options(config, job.optim, precision)
    options = replace(options, compile=_compile_option(config, here, steps, events))
    eager = build_step(detector, options, here.reduce, sync_bn=config.cluster.sync_bn)
    return GraphedStep(
        eager,
        mode=config.graph.mode,
        warn=lambda text: events.write("warning", text=text),
        agree=here.agree if here.workers > 1 else None,
    )


def _compile_option(
    config: TrainConfig, here: Here, steps: int, events: EventLog | NullEventLog
) -> str:
    """``graph.compile`` as it is worth it: minutes of compiling do not pay in a short run."""
    wanted = config.graph.compile
    if wanted == "off":
        return wanted
    if here.device.type != "cuda":
        events.write(
            "note", text=f"graph.compile={wanted} is left out: there is no GPU to compile for"
        )
        return "off"
    if config.graph.mode != "require" and steps < MIN_COMPILED_STEPS:
        events.write(
            "note",
            text=f"graph.compile={wanted} is left out: compiling takes minutes, and this run has only {steps} "
            f"steps (fewer than {MIN_COMPILED_STEPS}); graph.mode=require compiles all the same",
        )
        return "off"
    return wanted


def _restore(job: Job, step: GraphedStep, events: EventLog | NullEventLog) -> Progress:
    state, damaged = load_newest(job.folder / "checkpoints")
    for sentence in damaged:
        events.write("warning", text=sentence)
    if state is None:
        return Progress()
    progress = restore_state(step, state)
    events.write("note", text=f"going on from step {progress.step}")
    # What is in the model now, and not what the file said: population-based training is judged by it.
    events.write(
        "restored",
        step=progress.step,
        digest=weights_digest(dict(step.flat.named(step.flat.state))),
    )
    return progress


def _build_feed(job: Job, plan: Plan, here: Here) -> Feed:
    slots = slots_of(here.rank, here.workers, job.config.batch)
    ring = PhotoRing(len(slots), job.config.imgsz, plan.window, here.device)
    source = partial(_train_source, job, slots)
    decode = DeviceDecoder(job.config.imgsz, here.device) if job.reading.encoded else None
    return Feed(plan, rank=here.rank, workers=here.workers, source=source, ring=ring, decode=decode)


def _train_source(job: Job, slots: range, steps: range) -> Iterator[Any]:
    option = job.config.augment.albumentations
    warn = partial(_warn, job.folder)
    return train_photos(job.plan, slots, steps, option, job.reading, job.placement.data, warn)


def _build_evaluate(
    job: Job | EvaluateJob, predict: GraphedEval, here: Here
) -> Callable[[], EvalResult]:
    records: Records = ray.get(job.val)
    batches = _eval_batches(job, records, here)
    return lambda: evaluate(
        predict.detector,
        batches(),
        records,
        imgsz=job.config.imgsz,
        options=job.config.eval,
        gather=here.gather,
        predict=predict,
    )


def _eval_batches(
    job: Job | EvaluateJob, records: Records, here: Here
) -> Callable[[], Iterator[EvalBatch]]:
    """This worker's photos, anew with every call."""
    ids = rank_images(len(records), here.rank, here.workers)
    cached: list[EvalBatch] = []
    fits = len(ids) * 3 * job.config.imgsz**2 <= EVAL_CACHE_BYTES

    def batches() -> Iterator[EvalBatch]:
        # A small validation set is decoded once: starting a dataset each epoch would cost more than it reads.
        if cached:
            yield from cached
            return
        stream = eval_photos(
            job.val, ids, job.reading,
            batch=job.config.eval.val_batch, limits=job.placement.data, warn=partial(_warn, job.folder),
        )  # fmt: skip
        for photo_ids, photos in stream:
            batch = eval_batch(photo_ids, photos, pinned=here.device.type == "cuda")
            if fits:
                cached.append(batch)
            yield batch

    return batches


def _evaluate_file(job: EvaluateJob, here: Here) -> dict[str, Any]:
    with held_weights(job.weights, job.content) as weights:
        if weights.suffix == ".onnx":
            return _evaluate_onnx(job, weights, here)
        return _evaluate_pt(job, weights, here)


def _evaluate_onnx(job: EvaluateJob, weights: Path, here: Here) -> dict[str, Any]:
    records: Records = ray.get(job.val)
    forward = OnnxForward(weights, threads=job.placement.threads, gpu=here.device.type == "cuda")
    # What the file chose itself is not chosen from again.
    options = job.config.eval.model_copy(update={"nms": forward.file.layout == "raw"})
    batches = _eval_batches(job, records, here)
    return judge(
        forward, batches(), records, imgsz=job.config.imgsz, options=options, gather=here.gather
    ).metrics


def _evaluate_pt(job: EvaluateJob, weights: Path, here: Here) -> dict[str, Any]:
    precision = resolve_precision(
        job.config.precision, here.device
    )  # the kernels of training's evaluations
    set_kernels(precision, deterministic=job.config.deterministic)
    detector = load_detector(weights).to(here.device)
    predict = GraphedEval(detector, nms=job.config.eval.nms, mode=job.config.graph.mode)
    try:
        metrics: dict[str, Any] = _build_evaluate(job, predict, here)().metrics
        is_eager = here.device.type == "cuda" and predict.replays == 0
        return metrics | ({"without_graph": predict.reason} if is_eager else {})
    finally:
        predict.release()
