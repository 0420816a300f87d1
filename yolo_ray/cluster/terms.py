"""What a study is asked to do, judged before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from yolo_ray.cluster.probe import resolve_batch
from yolo_ray.config.load import load
from yolo_ray.config.schema import AUTO_BATCH, TrainConfig
from yolo_ray.config.space import Domain, domains_of
from yolo_ray.config.tune import STUDY_CONFIG, TuneConfig
from yolo_ray.data.records import Records
from yolo_ray.errors import UserError
from yolo_ray.study.trials import JOURNAL, Journal, Trial, read_trials

# What a study may change when it goes on: how it runs, not what it compares.
CHANGEABLE = (
    "project", "name", "resume", "log_steps", "data.cache", "data.cache_dir", "cluster.", "mlflow.", "checkpoint.",
    "tune.num_samples", "tune.warm_start", "tune.max_concurrent", "tune.gpu_per_trial", "tune.workers_per_trial",
)  # fmt: skip
# What a state depends on: a trial that takes over another's cannot have another one.
FIXED_IN_PBT = (
    "model", "epochs", "batch", "imgsz", "seed", "freeze", "optim.optimizer", "optim.nbs", "augment.multi_scale",
)  # fmt: skip


def checked_space(config: TuneConfig) -> dict[str, Domain]:
    """The search space by dotted name, when it goes together with the rest.

    Raises:
        UserError: there is none, population-based training cannot change an option of it, or a study that goes on
            would compare unlike trials.
    """
    space = domains_of(config.space)
    if not space:
        raise UserError(
            "no search space is given: add configs/tune.yaml, or ranges such as 'space.lr0={loguniform: [1e-4, 1e-1]}'"
        )
    fixed = [name for name in space if name in FIXED_IN_PBT]
    if config.tune.scheduler == "pbt" and fixed:
        raise UserError(
            f"tune.scheduler=pbt cannot change {fixed[0]}: a trial goes on from another's state, which belongs to its "
            f"{fixed[0]}; take it out of the space, or use tune.scheduler=asha"
        )
    if config.tune.scheduler == "pbt" and config.tune.num_samples < 2:
        raise UserError("tune.scheduler=pbt compares trials: set tune.num_samples to 2 or more")
    if config.resume:
        _refuse_changes(config, Path(config.resume))
    else:
        _refuse_idle_scheduler(config, most_epochs(config.training(), space))
    return space


def most_epochs(base: TrainConfig, space: Mapping[str, Domain]) -> int:
    """Of any trial: that is where the last rung lies."""
    return max(base.epochs, *(space["epochs"].ends if "epochs" in space else ()), 1)


def _refuse_idle_scheduler(config: TuneConfig, epochs: int) -> None:
    """One that would let every trial run to its end is not what somebody asks for who names a period."""
    options = config.tune
    periods: dict[str, tuple[str, object, str]] = {
        "asha": ("grace_period", options.grace_period, "stopped early"),
        "pbt": ("perturb_period", options.perturb_period, "changed"),
    }
    name, period, never = periods.get(options.scheduler, ("", None, ""))
    if isinstance(period, int) and period >= epochs:
        raise UserError(
            f"tune.{name}={period} is no less than the {epochs} epochs of a trial, so none would ever be {never}: "
            "lower it, raise epochs, or use tune.scheduler=none"
        )


def models_of(space: Mapping[str, Domain]) -> tuple[str, ...]:
    """The models that trials may choose."""
    return space["model"].values if "model" in space else ()


def _refuse_changes(config: TuneConfig, folder: Path) -> None:
    """Trials of one study are compared, so what they have in common stays."""
    before = load([str(folder / STUDY_CONFIG)], TuneConfig).flat()
    for name, value in config.flat().items():
        if before[name] != value and not name.startswith(CHANGEABLE):
            raise UserError(
                f"resume={folder}: the study has {name}={before[name]}, not {value}: its trials could not be compared; "
                f"leave {name} as it is, or begin a new study with tune.from={folder}"
            )
    begun = len(Journal(folder / JOURNAL).trials)
    if config.tune.num_samples < begun:
        raise UserError(
            f"resume={folder}: {begun} trials have begun, num_samples={config.tune.num_samples} asks for fewer: leave "
            f"it out, or ask for {begun} or more"
        )


def with_batch(config: TuneConfig, base: TrainConfig, train: Records) -> TrainConfig:
    """The options of a trial with a number for ``batch=auto``.

    Raises:
        UserError: trials have a part of a GPU, and the search for a batch takes a whole one.
    """
    if base.batch == AUTO_BATCH and config.tune.gpu_per_trial not in (
        "auto",
        float(base.cluster.workers),
    ):
        raise UserError(
            "batch=auto measures a whole GPU, and trials have a part of one (tune.gpu_per_trial): set batch"
        )
    return resolve_batch(base, train)


def earlier_trials(config: TuneConfig) -> list[Trial]:
    """Those of ``tune.from``, under numbers that no trial of this study has.

    Raises:
        UserError: that is no study, or it had another objective.
    """
    if config.tune.warm_start is None:
        return []
    folder = Path(config.tune.warm_start)
    try:
        trials = read_trials(folder)
    except UserError as error:
        # A study that goes on may do without, should the earlier one have gone.
        remedy = "; or go on without it: tune.from=null" if config.resume else ""
        raise UserError(f"tune.from={error}{remedy}") from error
    objective = load([str(folder / STUDY_CONFIG)], TuneConfig).tune.objective
    if objective != config.tune.objective:
        raise UserError(
            f"tune.from={folder}: that study's objective is {objective}, this one's {config.tune.objective}: they "
            "cannot be compared"
        )
    return [
        replace(trial, number=-1 - trial.number) for trial in trials if trial.state != "running"
    ]
