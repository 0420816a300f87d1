"""The options of a study: those of training, how trials are chosen, and the search space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from yolo_ray.config.options import RECORD, build, options_of, values_of
from yolo_ray.config.schema import Name, Positive, Section, TrainConfig
from yolo_ray.errors import UserError

Count = Annotated[int, Field(ge=1)]
SPACE = "space"
STUDY_CONFIG = "study.yaml"  # the record of a study, in its folder
# Spellings that Python keeps for itself.
ALIASES = {"tune.from": "tune.warm_start", "from": "tune.warm_start"}


def _weighted(value: Any) -> Any:
    """An objective of weights holds numbers."""
    for name, weight in value.items() if isinstance(value, Mapping) else ():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"the weight of {name} must be a number, not {weight!r}")
    return value


class TuneOptions(Section):
    """How trials are chosen, how many run at a time, and when one is stopped."""

    num_samples: Count = Field(default=20, description="trials in all, the baseline among them")
    workers_per_trial: Count | None = Field(
        default=None, description="workers of each trial; null: cluster.workers"
    )
    max_concurrent: Count | Literal["auto"] = Field(
        default="auto", description="trials at a time; auto: as many as the cluster holds well"
    )
    gpu_per_trial: Positive | Literal["auto"] = Field(
        default="auto",
        description="GPUs of each trial: a part of one, such as 0.25, or one for each worker (auto)",
    )
    search: Literal["optuna", "random", "grid"] = Field(
        default="optuna", description="how the next options are chosen; optuna: TPE"
    )
    scheduler: Literal["asha", "none", "pbt"] = Field(
        default="asha", description="who is stopped early (asha), or copied and mutated (pbt)"
    )
    grace_period: Count | Literal["auto"] = Field(
        default="auto",
        description="epochs before a trial may be stopped; auto: an eighth of epochs",
    )
    reduction_factor: Annotated[float, Field(gt=1.0)] = Field(
        default=3.0, description="asha goes on with the best 1/reduction_factor at each rung"
    )
    perturb_period: Count = Field(
        default=5, description="pbt: epochs between two comparisons of the population"
    )
    objective: Annotated[
        Name | dict[str, float],
        BeforeValidator(_weighted, json_schema_input_type=Name | dict[str, float]),
    ] = Field(
        default="val/map50_95",
        description="what is to be large: a metric, or weights such as "
        "{val/map50_95: 1, latency_ms: -0.01, parameters_m: -0.005}",
    )
    warm_start: str | None = Field(
        default=None,
        description="(also tune.from) an earlier study's folder, to learn from its trials",
    )


class TuneConfig(TrainConfig):
    """Everything one study depends on."""

    name: Name = Field(
        default="study",
        description="folder of the study under project; a number is appended if it exists",
    )
    resume: str | None = Field(default=None, description="a study folder to go on with")

    tune: TuneOptions = TuneOptions()
    space: dict[str, dict[str, Any]] = Field(
        default={},
        description="options to search, with their ranges: {lr0: {loguniform: [1e-4, 1e-1]}}; "
        "uniform, loguniform, quniform (with a step), randint, choice",
    )

    def training(self) -> TrainConfig:
        """The options of one trial before anything is sampled; ``given`` stays given."""
        known = options_of(TrainConfig)
        values = {name: value for name, value in values_of(self).items() if name in known}
        given = {name for name in self.explicit if name in known} - {"name", "resume"}
        values |= {"name": "train", "resume": None}
        if self.tune.workers_per_trial is not None:
            values["cluster.workers"] = self.tune.workers_per_trial
            given.add("cluster.workers")
        with self.naming_workers():
            return build(TrainConfig, values | {RECORD: tuple(sorted(given))}, {})

    @contextmanager
    def naming_workers(self) -> Iterator[None]:
        """A mistake about the number of workers names the option that was given."""
        try:
            yield
        except UserError as error:
            if self.tune.workers_per_trial is None:
                raise
            text = str(error).replace("cluster.workers", "tune.workers_per_trial")
            raise UserError(text) from error
