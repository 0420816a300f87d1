"""One trial: an ordinary training run, its epochs passed on to Ray Tune. Runs in Tune's process of that trial."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
import torch
import yaml
from ray import tune

from yolo_ray.cluster.launch import Observer, in_thread, train_on
from yolo_ray.cluster.preflight import Placement
from yolo_ray.cluster.search import CURRENT, EPOCH, INTERRUPTED, OBJECTIVE, STATE, Order, order_of
from yolo_ray.config.load import RUN_CONFIG
from yolo_ray.config.options import find_option
from yolo_ray.config.schema import TrainConfig
from yolo_ray.errors import StopRequested, UserError
from yolo_ray.model.saving import link_or_copy
from yolo_ray.study.objective import needs_costs, value_of
from yolo_ray.train.checkpoint import list_checkpoints, weights_digest

POLL_S = 0.2
CHECKPOINT_S = 120.0  # how long a checkpoint of an epoch may take to be on the disk
FORWARD, FORWARDED_KEPT = "forward", 3  # a donor's states that wait to be taken over
FORWARD_FILE = "forward.json"
ADOPTED_FILE = "adopted.json"


@dataclass(frozen=True)
class StudyJob:
    """What every trial of a study gets.

    Attributes:
        study: the study's folder, the same on all nodes.
        base: the options before anything is sampled.
        splits: training and validation photos in the object store.
        placement: what each trial takes of the cluster.
        weights: of the objective.
        observers: makes the tracking of a trial from its number.
        period: epochs between states that others may take over; 0: none.
        env: settings of the driver's that Ray does not pass on from it to a trial.
    """

    study: Path
    base: TrainConfig
    train: ray.ObjectRef
    val: ray.ObjectRef
    placement: Placement
    weights: dict[str, float]
    observers: TrialObservers
    period: int
    env: dict[str, str]


class TrialObservers(Protocol):
    """Makes the observer of a trial; picklable."""

    def trial(self, number: int, options: Mapping[str, Any]) -> Observer:
        """Tracking of one trial, without a progress display."""
        ...


@dataclass
class _Follower:
    """The events that an attempt writes from now on."""

    path: Path
    offset: int = 0
    steps_per_epoch: int = 0
    costs: dict[str, float] = field(default_factory=dict)

    def evaluations(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Epoch and metrics of every evaluation that is new."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self.offset += whole
        for line in text[:whole].splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if event["kind"] == "step":
                    self.steps_per_epoch = int(event["steps"])
                elif event["kind"] == "costs":
                    self.costs = {k: v for k, v in event.items() if k != "kind"}
                elif event["kind"] == "val":
                    metrics = {k: v for k, v in event.items() if k.startswith("val/")}
                    yield int(event["epoch"]), metrics


def run_trial(settings: dict[str, Any], *, job: StudyJob) -> None:
    """Entry of Ray Tune's process: train, report every epoch, and the end with its state and reason.

    A failure is a result, so that the study goes on; SystemExit comes from Tune when the trial is stopped early, and
    the process, the controller of the workers and the workers end with it.
    """
    os.environ.update(job.env)
    order = order_of(settings)
    last: dict[str, Any] = {EPOCH: 0, OBJECTIVE: math.nan, CURRENT: math.nan}
    try:
        _Attempt(job, order, last).run()
        end = {STATE: "finished"}
    except StopRequested as stop:
        end = {STATE: INTERRUPTED, "reason": str(stop)}
    except Exception as error:
        end = {STATE: "failed", "reason": f"{_kind(error)}{str(error).strip() or 'no message'}"}
    tune.report({**last, **end, "done": True})


def _kind(error: Exception) -> str:
    return "" if isinstance(error, UserError | RuntimeError) else f"{type(error).__name__}: "


class _Attempt:
    """A trial's training from where its folder stands."""

    def __init__(self, job: StudyJob, order: Order, last: dict[str, Any]) -> None:
        self.job, self.order, self.last = job, order, last
        self.folder = job.study / order.folder
        self.best = -math.inf
        self.follower = _Follower(self.folder / "events.jsonl")

    def run(self) -> None:
        adopt(self.folder, _forwarded())
        config = config_of(self.job.base, self.order, self.folder)
        self.take_in_old()
        outcome = in_thread(lambda: self._train(config), "train")
        while not outcome.done():
            self._pass_on(config)
            time.sleep(POLL_S)
        result = outcome.result()
        self._pass_on(config)
        check_used(self.folder, self.order.options)
        metrics = {f"val/{k}": float(v) for k, v in result.items() if isinstance(v, float | int)}
        self._note(result["best_epoch"], metrics)
        self.last[EPOCH] = result["epochs"]

    def take_in_old(self) -> None:
        """Evaluations of before a resume: reported then, but for the last one perhaps, and part of the best so far."""
        for epoch, metrics in self.follower.evaluations():
            self._note(epoch, metrics)

    def _train(self, config: TrainConfig) -> dict[str, Any]:
        splits = (ray.get(self.job.train), ray.get(self.job.val))
        observer = self.job.observers.trial(self.order.number, self.order.options)
        return train_on(
            config, splits, observer, lambda _: self.job.placement,
            measures_costs=needs_costs(self.job.weights),
        )  # fmt: skip

    def _pass_on(self, config: TrainConfig) -> None:
        """Report what was evaluated; the last epoch is reported when everything of the run is written."""
        for epoch, metrics in self.follower.evaluations():
            check_used(self.folder, self.order.options)
            self._note(epoch, metrics)
            if epoch >= config.epochs:
                continue
            if self.job.period and epoch % self.job.period == 0:
                with tempfile.TemporaryDirectory() as pointer:
                    self._forward(epoch, Path(pointer) / FORWARD_FILE)
                    tune.report(dict(self.last), checkpoint=tune.Checkpoint(pointer))
            else:
                tune.report(dict(self.last))

    def _note(self, epoch: int, metrics: dict[str, float]) -> None:
        metrics = metrics | self.follower.costs
        value = value_of(self.job.weights, metrics)
        if value > self.best:
            self.best = value
            shown = {*self.job.weights, "val/map50_95", "val/map50"}
            kept = {name: metrics[name] for name in metrics if name in shown}
            self.last["metrics"] = json.dumps(kept)  # of the best epoch
        self.last |= {EPOCH: epoch, OBJECTIVE: self.best, CURRENT: value}

    def _forward(self, epoch: int, pointer: Path) -> None:
        """Keep the state after this epoch aside for who takes it over; Ray Tune gets a pointer to it."""
        wanted = epoch * self.follower.steps_per_epoch
        end = time.monotonic() + CHECKPOINT_S
        while not (
            found := [p for p in list_checkpoints(_states(self.folder)) if _step(p) >= wanted]
        ):
            if time.monotonic() > end:
                raise RuntimeError(f"the checkpoint after epoch {epoch} was not written in time")
            time.sleep(POLL_S)
        kept = self.folder / FORWARD / f"{epoch:06d}"
        for path in (found[0], _states(self.folder) / "best.pt", self.folder / "weights/best.pt"):
            place = kept / path.relative_to(self.folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                link_or_copy(path, place)
        for old in sorted((self.folder / FORWARD).iterdir())[:-FORWARDED_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        pointer.write_text(
            json.dumps({"path": str(kept), "epoch": epoch, "donor": self.order.number})
        )


def config_of(base: TrainConfig, order: Order, folder: Path) -> TrainConfig:
    """The options of an attempt: new in its folder, or going on there.

    Raises:
        UserError: the sampled options do not go together.
    """
    if (folder / RUN_CONFIG).is_file() or list_checkpoints(_states(folder)):
        return base.override({**order.options, "resume": str(folder)})
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed before it began
    return base.override({**order.options, "project": str(folder.parent), "name": folder.name})


def check_used(folder: Path, options: Mapping[str, Any]) -> None:
    """The run's own record must have the options that were sampled for it.

    Raises:
        AssertionError: it has others: its result would be put down to the wrong options.
    """
    record = yaml.safe_load((folder / RUN_CONFIG).read_text())
    for name, value in options.items():
        section, _, leaf = find_option(TrainConfig, name, "space").name.rpartition(".")
        used = record[section][leaf] if section else record[leaf]
        if json.dumps(used, default=list) != json.dumps(value, default=list) and used != value:
            raise AssertionError(f"{name}={value!r} was sampled, {folder.name} runs with {used!r}")


def adopt(folder: Path, forwarded: dict[str, Any] | None) -> None:
    """Begin a folder with a donor's state, once; ``adopted.json`` says whose and the digest of its weights."""
    if forwarded is None or (folder / ADOPTED_FILE).exists():
        return
    source = Path(forwarded["path"])
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (newest,) = list_checkpoints(_states(folder))
    state = torch.load(newest, map_location="cpu", weights_only=True)
    record = forwarded | {"step": _step(newest), "digest": weights_digest(state["model"])}
    (folder / ADOPTED_FILE).write_text(json.dumps(record))


def _forwarded() -> dict[str, Any] | None:
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return json.loads((Path(folder) / FORWARD_FILE).read_text())


def _states(folder: Path) -> Path:
    return folder / "checkpoints"


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
