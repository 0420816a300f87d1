"""The driver: judge everything first, then start the workers, follow them, and leave the run folder complete."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import ray
import ray.train
from ray.exceptions import OutOfMemoryError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from yolo_ray.augment.transforms import build_transform
from yolo_ray.cluster.caching import cached, reading_of
from yolo_ray.cluster.folder import (
    absolute_paths,
    check_writable,
    claimed,
    find_model,
    keep_model,
    open_folder,
)
from yolo_ray.cluster.preflight import WORKER_ENV, Placement, connect, place
from yolo_ray.cluster.probe import resolve_batch
from yolo_ray.cluster.scan import judge_on
from yolo_ray.cluster.sentences import (
    data_sentence,
    leak_sentence,
    left_out_sentence,
    loaded_sentence,
)
from yolo_ray.cluster.worker import FAILURE_FILE, EvaluateJob, Job, find_user_error, train_worker
from yolo_ray.config.load import RUN_CONFIG, dump
from yolo_ray.config.schema import ClusterConfig, EvaluateConfig, TrainConfig
from yolo_ray.data.plan import Plan
from yolo_ray.data.reading import Reading
from yolo_ray.data.records import Judge, Records, load_records
from yolo_ray.data.sides import sides_of
from yolo_ray.errors import StopRequested, UserError
from yolo_ray.model.build import Detector, build_detector
from yolo_ray.model.freeze import freeze_layers
from yolo_ray.step.schedule import ResolvedOptim, resolve_optim
from yolo_ray.train.checkpoint import check_resumable, disk_explained, load_newest
from yolo_ray.train.events import EventLog
from yolo_ray.train.loop import STOP_FILE, SUMMARY_FILE
from yolo_ray.train.report import NullTracker, Tracker

Status = Literal["FINISHED", "FAILED", "KILLED"]
STOP_GRACE_S = 120.0
T = TypeVar("T")


class Observer(Protocol):
    """What the pipelines plug in from track/: the tracking run and the progress display."""

    def counted(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how far something long is; the context is told of each so many photos."""
        ...

    def start(
        self, config: TrainConfig, folder: Path, names: tuple[str, ...], tags: dict[str, str]
    ) -> Tracker:
        """Create (or, in a resumed folder, reopen) the tracking run."""
        ...

    def follow(self, folder: Path) -> AbstractContextManager[Any]:
        """Show the run's progress inside the context."""
        ...

    def finish(self, tracker: Any, folder: Path, status: Status, reason: str | None) -> None:
        """Draw the last pictures and end the tracking run as FINISHED, FAILED or KILLED."""
        ...


def train(config: TrainConfig, observer: Observer) -> dict[str, Any]:
    """Train; returns what result.json holds.

    Raises:
        UserError: anything wrong with options, data, model, folder or cluster.
        StopRequested: Ctrl-C or SIGTERM; the last checkpoint is intact.
    """
    config = absolute_paths(config)
    splits = load_data(config, judge_on(config.cluster, observer.counted))
    return train_on(config, splits, observer, place)


def train_on(
    config: TrainConfig,
    splits: tuple[Records, Records],
    observer: Observer,
    placing: Callable[[ClusterConfig], Placement],
    *,
    measures_costs: bool = False,
) -> dict[str, Any]:
    """``train`` on photos that were judged before, those to train and those to validate with.

    Args:
        config: its paths are absolute.
        splits: training and validation.
        observer: tracking and progress.
        placing: what the workers take of the cluster.
        measures_costs: whether rank 0 measures the model itself first, for a study's objective.
    """
    train_records, val_records = splits
    reading = reading_of(config.data, config.imgsz, train_records, val_records)
    reading = replace(reading, encoded=config.data.decode == "gpu")
    config = resolve_batch(config, train_records)
    source = find_model(config)
    detector = build_detector(source, train_records.names, imgsz=config.imgsz, seed=config.seed)
    freeze_layers(detector, config.freeze)
    sides = sides_of(config.imgsz, config.augment.multi_scale, max(detector.strides))
    plan = Plan(
        train_records, seed=config.seed, epochs=config.epochs, batch=config.batch,
        imgsz=config.imgsz, augment=config.augment,
        moves_boxes=build_transform(config.augment.albumentations).moves_boxes,
    ).with_sides(sides)  # fmt: skip
    if config.resume:
        _check_resume(config, plan, detector)
    check_writable(Path(config.resume or config.project))
    connect(config.cluster.address)
    placement = placing(config.cluster)
    check_device(config, placement)
    folder = open_folder(config)
    sentences = [
        ("note", placement.sentence()),
        ("note", loaded_sentence(config, detector, source)),
        ("note", data_sentence(train_records, val_records)),
        ("note", left_out_sentence(folder, train_records, val_records)),
        ("warning", leak_sentence(train_records, val_records)),
    ]
    with claimed(folder), cached(reading, config.data) as (reading, cache_sentences):
        with disk_explained(folder):
            model = keep_model(folder, source)
        job = _build_job(config, folder, placement, plan, val_records, model)
        job = replace(job, reading=reading, measures_costs=measures_costs)
        return _train_in(job, plan, val_records.digest, observer, sentences + cache_sentences)


def _train_in(
    job: Job, plan: Plan, val_digest: str, observer: Observer, sentences: list[tuple[str, str]]
) -> dict[str, Any]:
    """The run itself, in a folder that is this driver's alone; ``sentences``: kind and text."""
    folder, config = job.folder, job.config
    for name in (FAILURE_FILE, STOP_FILE):
        (folder / name).unlink(missing_ok=True)
    with disk_explained(folder):
        dump(config, folder / RUN_CONFIG)
    tags = {"data_digest": plan.records.digest, "val_digest": val_digest}
    try:
        tracker = observer.start(config, folder, plan.records.names, tags)
    except UserError:
        if not config.resume:
            shutil.rmtree(folder, ignore_errors=True)  # nothing has run in it
        raise
    with ended_properly(partial(observer.finish, tracker, folder)):
        job = replace(job, tracker=tracker)
        with observer.follow(folder), stop_on_signals(partial(_ask_to_stop, folder)):
            for kind, sentence in (*sentences, ("note", job.optim.reason)):
                if sentence:
                    _say(folder, sentence, kind)
            finished = run_workers(job, train_worker, config.cluster.max_failures)
        if not finished:
            raise StopRequested(f"stopped on request; go on with: resume={folder}")
        return _write_result(job, plan)


def _check_resume(config: TrainConfig, plan: Plan, detector: Detector) -> None:
    """Refuse a resume that cannot work while the old run is still as it was."""
    state, _ = load_newest(Path(str(config.resume)) / "checkpoints")
    if state is not None:
        tensors = detector.net.state_dict().items()
        shapes = {name: tensor.shape for name, tensor in tensors if tensor.is_floating_point()}
        optimizer = _optim_of(config, plan).optimizer
        check_resumable(state, config, optimizer, plan.records.digest, shapes)


def check_device(config: TrainConfig | EvaluateConfig, placement: Placement) -> None:
    """Refuse what only a GPU can do before anything is created."""
    options = {"precision": config.precision, "graph.mode": config.graph.mode}
    if isinstance(config, TrainConfig):
        options["data.decode"] = config.data.decode
    for name, value in options.items():
        if not placement.use_gpu and value in ("bf16", "fp16", "tf32", "require", "gpu"):
            instead = "cpu" if value == "gpu" else "auto"
            raise UserError(
                f"{name}={value} needs a GPU for each worker, and the cluster has none free for them: "
                f"use {name}={instead}, or add GPUs"
            )


def data_path(config: TrainConfig | EvaluateConfig) -> str:
    """The data.yaml that was given, a path or an address.

    Raises:
        UserError: none was.
    """
    if config.data.path is None:
        raise UserError("no data given: pass data=path/to/data.yaml")
    return config.data.path


def load_data(config: TrainConfig, judge: Judge) -> tuple[Records, Records]:
    """The photos to train and to validate with, judged.

    Raises:
        UserError: no data, bad data, or fewer training photos than workers.
    """
    path = data_path(config)
    train_records = load_records(path, "train", max_bad=config.data.max_bad, judge=judge)
    val_records = load_records(path, "val", max_bad=config.data.max_bad, judge=judge)
    if len(train_records) < config.cluster.workers:
        raise UserError(
            f"{path} has {len(train_records)} training photos for cluster.workers={config.cluster.workers}: "
            "lower cluster.workers or add photos"
        )
    return train_records, val_records


def _optim_of(config: TrainConfig, plan: Plan) -> ResolvedOptim:
    """``optimizer=auto`` decided for this run."""
    return resolve_optim(
        config.optim,
        frozenset(config.explicit),
        total_steps=plan.total_steps,
        num_classes=len(plan.records.names),
    )


def _build_job(
    config: TrainConfig,
    folder: Path,
    placement: Placement,
    plan: Plan,
    val: Records,
    model: str,
) -> Job:
    return Job(
        config=config, folder=folder, placement=placement, optim=_optim_of(config, plan),
        tracker=NullTracker(), model=model, reading=Reading(config.imgsz),
        plan=ray.put(plan), val=ray.put(val), names=plan.records.names, data_digest=plan.records.digest,
    )  # fmt: skip


def run_workers(
    job: Job | EvaluateJob, entry: Callable[[dict[str, Any]], Any], max_failures: int
) -> Any:
    """Run ``entry`` on every worker through the failures allowed; what it returned on rank 0."""
    placement, storage = job.placement, job.folder / "ray"
    trainer = TorchTrainer(
        entry,
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=placement.use_gpu,
            resources_per_worker={"CPU": placement.cpus}
            | ({"GPU": placement.gpus} if placement.use_gpu else {}),
        ),
        run_config=RunConfig(
            # A name of its own for each attempt: Ray would otherwise go on from what it knows of the last.
            name=f"{job.folder.name}-{time.time_ns()}",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=max_failures, controller_failure_limit=5),
            worker_runtime_env={"env_vars": WORKER_ENV},
        ),
    )
    try:
        # Beside the main thread, where Ray would take Ctrl-C away from ``stop_on_signals``.
        result = in_thread(trainer.fit, "fit").result()
    except ray.train.TrainingFailedError as error:
        raise _explained(job, error) from error
    except OutOfMemoryError as error:
        raise RuntimeError(
            f"a worker was killed for memory: lower batch (eval.val_batch in an evaluation) or imgsz{_logs(job)}"
        ) from error
    finally:
        shutil.rmtree(storage, ignore_errors=True)  # Ray's notes of this attempt; the state is ours
    failure = job.folder / FAILURE_FILE
    if failure.exists():
        raise UserError(failure.read_text())
    return result.return_value


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """``work()`` in a thread that does not keep the process alive: a second Ctrl-C waits for nobody."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again by who asks for the result
            outcome.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return outcome


def _explained(job: Job | EvaluateJob, error: Exception) -> Exception:
    """The reason that the first failed worker gave, as the user's mistake or as a failure with its log."""
    failure = job.folder / FAILURE_FILE
    if failure.exists():
        return UserError(failure.read_text())
    causes = getattr(error, "worker_failures", None) or {}
    first = next(iter(causes.values()), error)
    mistake = find_user_error(first)
    if mistake is not None:
        return mistake
    text = str(first).strip().splitlines()
    kind = "training" if isinstance(job, Job) else "evaluation"
    return RuntimeError(f"{kind} failed: {text[-1] if text else type(first).__name__}{_logs(job)}")


def _logs(job: Job | EvaluateJob) -> str:
    if not isinstance(job, Job):
        return ""  # its folder goes with it
    return f"; see {job.folder / 'logs'}; the last checkpoint is intact, go on with resume={job.folder}"


@contextmanager
def ended_properly(finish: Callable[[Status, str | None], None]) -> Iterator[None]:
    """However what is inside ends, ``finish`` is told how and why."""
    status: Status = "FAILED"
    reason = None
    try:
        yield
        status = "FINISHED"
    except (StopRequested, KeyboardInterrupt) as stop:
        status, reason = "KILLED", str(stop)
        raise
    except BaseException as error:
        reason = str(error)
        raise
    finally:
        finish(status, reason)


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls ``stop``; the second, or two minutes, ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    timers: list[threading.Timer] = []

    def ask(number: int, _: Any) -> None:
        if timers:
            raise KeyboardInterrupt
        timers.append(threading.Timer(STOP_GRACE_S, os.kill, (os.getpid(), number)))
        timers[0].daemon = True
        timers[0].start()
        stop()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask_to_stop(folder: Path) -> None:
    """The workers save and stop."""
    (folder / STOP_FILE).touch()
    _say(folder, "stopping after a checkpoint; once more to stop at once")


def _say(folder: Path, text: str, kind: str = "note") -> None:
    EventLog(folder / "events.jsonl").write(kind, text=text)


def _write_result(job: Job, plan: Plan) -> dict[str, Any]:
    summary = json.loads((job.folder / SUMMARY_FILE).read_text())
    result = {
        "run": str(job.folder),
        "weights": str(job.folder / "weights" / "best.pt"),
        "epochs": summary["steps"] // plan.steps_per_epoch,
        **summary,
    }
    with disk_explained(job.folder):
        (job.folder / "result.json").write_text(json.dumps(result, indent=2))
    return result
