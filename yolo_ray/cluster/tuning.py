"""The driver of a study: judge everything once, share the cluster, let Ray Tune run the trials, leave the results."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import tune as ray_tune

from yolo_ray.cluster.folder import (
    absolute_paths,
    check_writable,
    claimed,
    find_model,
    keep_model,
    open_folder,
)
from yolo_ray.cluster.groups import remove_orphans
from yolo_ray.cluster.launch import (
    Status,
    check_device,
    ended_properly,
    in_thread,
    load_data,
    stop_on_signals,
)
from yolo_ray.cluster.preflight import connect, living_nodes, wait_for_cpus
from yolo_ray.cluster.scan import judge_on
from yolo_ray.cluster.search import Recorder, StudySearch, scheduler_of
from yolo_ray.cluster.sharing import ACTOR_CPUS, Sharing, share_on
from yolo_ray.cluster.terms import checked_space, earlier_trials, models_of, most_epochs, with_batch
from yolo_ray.cluster.trial import StudyJob, TrialObservers, run_trial
from yolo_ray.config.load import dump
from yolo_ray.config.schema import TrainConfig
from yolo_ray.config.space import Domain
from yolo_ray.config.tune import STUDY_CONFIG, TuneConfig
from yolo_ray.errors import StopRequested, UserError
from yolo_ray.model.build import build_detector
from yolo_ray.study.objective import weights_of
from yolo_ray.study.results import write_results
from yolo_ray.study.sampling import SAMPLERS, Sampler
from yolo_ray.study.trials import JOURNAL, Journal, Trial
from yolo_ray.train.checkpoint import disk_explained
from yolo_ray.train.loop import STOP_FILE

TICK_S = 0.5
LET_GO_S = 5.0  # after its end a trial's workers are surely gone, and its tracking run can be ended
TRACKED_AS: dict[str, Status] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
    "running": "KILLED",
}
# Ray Tune's own habits, in the driver's process: results are ours, and so is the state of a study.
TUNE_ENV = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_AIR_NEW_OUTPUT": "0",
}


class StudyObserver(Protocol):
    """What the pipelines plug in from track/: the parent run, the trials' tracking, the table, the pictures."""

    def counted(self, what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how far something long is."""
        ...

    def start(
        self, config: TuneConfig, folder: Path, tags: dict[str, str]
    ) -> tuple[TrialObservers, str | None]:
        """Create (or reopen) the parent run; what trials are tracked by, and the server's absolute address."""
        ...

    def follow(
        self, trials: Mapping[int, Trial], num_samples: int
    ) -> AbstractContextManager[Callable[[str], None]]:
        """Show the table of the trials inside the context, which takes sentences to be shown."""
        ...

    def end_trial(self, folder: Path, status: Status, reason: str) -> None:
        """End a trial's tracking run that its own process did not end."""
        ...

    def finish(
        self, folder: Path, space: Mapping[str, Domain], status: Status, reason: str | None
    ) -> None:
        """Draw the pictures and end the parent run."""
        ...


@dataclass
class _Study:
    """A study while it runs in this process."""

    config: TuneConfig
    base: TrainConfig
    folder: Path
    space: dict[str, Domain]
    journal: Journal
    search: StudySearch
    observer: StudyObserver
    sharing: Sharing
    joined_here: bool  # or the caller had joined the cluster before

    def __post_init__(self) -> None:
        self.outcome: Future[Any] | None = None  # of Ray Tune's thread
        self.leaving: list[tuple[float, Trial]] = []  # ended, whose workers may still be there
        self.lock = threading.Lock()

    def leave_cluster(self) -> None:
        """A thread of Ray's prints what it warns of on stdout, where the result is to be the last line.

        Ray Tune's thread, should it still be there, would only start another cluster.
        """
        if self.joined_here and (self.outcome is None or self.outcome.done()):
            ray.shutdown()

    def ended(self, trial: Trial) -> None:
        """From Ray Tune's thread."""
        with self.lock:
            self.leaving.append((time.monotonic() + LET_GO_S, trial))

    def ask_to_stop(self) -> None:
        """No further trials; those that run save and stop.

        Said again until they have: one that is just starting takes the file for that of an earlier stop.
        """
        self.search.is_stopping = True
        for trial in list(self.journal.trials.values()):  # Ray Tune's thread adds to them
            place = self.folder / trial.folder
            if trial.state == "running" and place.is_dir():
                (place / STOP_FILE).touch()

    def let_go(self, *, all_of_them: bool = False) -> None:
        """Free what ended trials left behind, and end their tracking runs; write the results so far."""
        remove_orphans()
        if self.search.is_stopping and not all_of_them:
            self.ask_to_stop()
        now = time.monotonic()
        with self.lock:
            due = [trial for at, trial in self.leaving if all_of_them or at <= now]
            self.leaving = [] if all_of_them else [one for one in self.leaving if one[0] > now]
        for trial in due:
            status = TRACKED_AS[trial.state]
            self.observer.end_trial(self.folder / trial.folder, status, trial.reason)
        if due:
            self.write()

    def write(self) -> None:
        """The results so far."""
        with disk_explained(self.folder):
            write_results(self.folder, self.config, self.journal.trials.values())


def tune(config: TuneConfig, observer: StudyObserver) -> dict[str, Any]:
    """Run a study, or go on with one; returns what result.json holds.

    Raises:
        UserError: anything wrong with options, space, data, model, folder or cluster, or no trial came to anything.
        StopRequested: Ctrl-C or SIGTERM; every trial's last checkpoint is intact.
    """
    space = checked_space(config)
    weights = weights_of(config.tune.objective)
    base = absolute_paths(config.training())
    splits = load_data(base, judge_on(base.cluster, observer.counted))
    base = with_batch(config, base, splits[0])
    source = find_model(base.override({"resume": config.resume}))
    for model in (source, *models_of(space)):  # or its mistake, once
        build_detector(model, splits[0].names, imgsz=base.imgsz, seed=base.seed)
    earlier = earlier_trials(config)
    check_writable(Path(config.resume or base.project))
    joined_here = not ray.is_initialized()
    connect(config.cluster.address)
    with config.naming_workers():
        sharing = share_on(living_nodes(), base.cluster, config.tune)
    remove_orphans()  # of a driver that was killed
    wait_for_cpus(sharing.cpus)
    check_device(base, sharing.placement)
    folder = open_folder(base.override({"name": config.name, "resume": config.resume}))
    with claimed(folder):
        with disk_explained(folder):
            dump(config, folder / STUDY_CONFIG)
            base = base.override({"model": keep_model(folder, source)})
        tags = {
            "data_digest": splits[0].digest,
            "val_digest": splits[1].digest,
            "study": folder.name,
        }
        observers, uri = observer.start(config, folder, tags)
        if uri is not None:
            base = base.override({"mlflow.uri": uri})
        journal = Journal(folder / JOURNAL)
        search = _search(config, base, space, journal, earlier)
        study = _Study(config, base, folder, space, journal, search, observer, sharing, joined_here)
        job = StudyJob(
            study=folder, base=base, train=ray.put(splits[0]), val=ray.put(splits[1]), placement=sharing.placement,
            weights=weights, observers=observers, env=_carried_settings(),
            period=config.tune.perturb_period if config.tune.scheduler == "pbt" else 0,
        )  # fmt: skip
        with ended_properly(partial(_finish, study)):
            _run(study, job)
            if study.search.is_stopping:
                raise StopRequested(f"stopped on request; go on with: resume={folder}")
            return _result(study)


def _search(
    config: TuneConfig,
    base: TrainConfig,
    space: Mapping[str, Domain],
    journal: Journal,
    earlier: list[Trial],
) -> StudySearch:
    # Another seed after a resume, or the first random trials would come again.
    seed = base.seed + len(journal.trials)
    sampler: Sampler = SAMPLERS[config.tune.search](space, seed, config.tune.num_samples)
    for trial in earlier:
        sampler.tell(trial)
    return StudySearch(journal, sampler, config.tune.num_samples, _baseline_options(base, space))


def _baseline_options(base: TrainConfig, space: Mapping[str, Domain]) -> dict[str, Any] | None:
    """The options of the space as the baseline has them; None where `optimizer=auto` puts others in their place."""
    if base.optim.optimizer == "auto":
        decided = ("optim.lr0", "optim.momentum")
        if any(name in space and not base.is_given(name) for name in decided):
            return None
    return _base_options(base, space)


def _base_options(base: TrainConfig, space: Mapping[str, Domain]) -> dict[str, Any]:
    values = base.model_dump(mode="json")
    pairs = ((name, name.rpartition(".")) for name in space)
    return {
        name: values[section][leaf] if section else values[leaf]
        for name, (section, _, leaf) in pairs
    }


def _carried_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_TRAIN_")}


def _finish(study: _Study, status: Status, reason: str | None) -> None:
    """The study's tracking runs end and its results are written, each whatever the others come to."""
    with ExitStack() as last:  # the last one first
        last.callback(study.leave_cluster)
        notes = study.folder / "ray"  # Ray Tune's; the state is ours
        last.callback(shutil.rmtree, notes, ignore_errors=True)
        last.callback(study.observer.finish, study.folder, study.space, status, reason)
        last.callback(study.write)
        last.callback(study.let_go, all_of_them=True)


def _run(study: _Study, job: StudyJob) -> None:
    left = study.search.left
    trials = study.journal.trials
    with (
        study.observer.follow(trials, study.config.tune.num_samples) as say,
        stop_on_signals(study.ask_to_stop),
    ):
        say(f"study {study.folder}: {study.sharing.sentence()}")
        if trials:
            ended = sum(trial.state != "running" for trial in trials.values())
            under_way = len(trials) - ended
            say(f"going on: {ended} ended, {under_way} continue, {left - under_way} are new")
        if not left:
            return
        tuner = _tuner(study, job, left)
        outcome = study.outcome = in_thread(tuner.fit, "tune")
        while not outcome.done():
            study.let_go()
            time.sleep(TICK_S)
        outcome.result()


def _tuner(study: _Study, job: StudyJob, left: int) -> ray_tune.Tuner:
    # Pages about a trial whose process died; the journal has the sentence.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    for name, value in TUNE_ENV.items():
        os.environ.setdefault(name, value)
    scheduler = scheduler_of(
        study.journal, study.config.tune, study.space,
        epochs=most_epochs(study.base, study.space), seed=study.base.seed, base=_base_options(study.base, study.space),
    )  # fmt: skip
    trainable = ray_tune.with_parameters(run_trial, job=job)
    return ray_tune.Tuner(
        ray_tune.with_resources(trainable, {"cpu": ACTOR_CPUS}),
        tune_config=ray_tune.TuneConfig(
            search_alg=study.search, scheduler=scheduler, num_samples=left,
            max_concurrent_trials=study.sharing.concurrent,
        ),
        run_config=ray_tune.RunConfig(
            name=f"attempt-{time.time_ns()}", storage_path=str(study.folder / "ray"), verbose=0,
            callbacks=[Recorder(study.journal, study.ended)],
        ),
    )  # fmt: skip


def _result(study: _Study) -> dict[str, Any]:
    trials = list(study.journal.trials.values())
    best = study.journal.best()
    if best is None:
        reasons = [trial.reason for trial in trials if trial.reason]
        raise UserError(
            f"no trial of {study.folder} came to anything; the first says: {reasons[0] if reasons else 'nothing'}"
        )
    states = {
        state: sum(t.state == state for t in trials) for state in ("finished", "stopped", "failed")
    }
    result = {
        "study": str(study.folder), "best": str(study.folder / "best.yaml"), "best_trial": best.number,
        "objective": best.value, "weights": str(study.folder / best.folder / "weights" / "best.pt"),
        "trials": len(trials), **states, "baseline": trials[0].value, "options": best.options, **best.metrics,
    }  # fmt: skip
    with disk_explained(study.folder):
        (study.folder / "result.json").write_text(json.dumps(result, indent=2))
    return result
