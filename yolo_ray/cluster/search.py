"""What Ray Tune asks during a study: which trial next, who is stopped, who is copied; and what is written down."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from yolo_ray.config.space import Domain
from yolo_ray.config.tune import TuneOptions
from yolo_ray.study.sampling import Sampler, mutate
from yolo_ray.study.trials import BASELINE, Journal, Trial

ORDER = "order"  # the only key of a trial's config for Ray Tune, which would rewrite nested values
# What a trial reports; `done` is Tune's own.
EPOCH, OBJECTIVE, CURRENT, STATE = "epoch", "objective", "current", "state"
INTERRUPTED = "interrupted"  # asked to stop: the journal keeps it running, a resume goes on with it


@dataclass(frozen=True)
class Order:
    """What one attempt of a trial is to do; ``folder`` is relative to the study's."""

    number: int
    options: dict[str, Any]
    folder: str

    def settings(self) -> dict[str, str]:
        """As Ray Tune carries it."""
        return {ORDER: json.dumps(asdict(self))}


def order_of(settings: Mapping[str, Any]) -> Order:
    """What ``settings`` made."""
    return Order(**json.loads(settings[ORDER]))


class StudySearch(Searcher):
    """Hands out trials: those that were interrupted, the baseline, then what the sampler chooses.

    Its state is the journal; what Ray Tune would keep of it is nothing.
    """

    def __init__(
        self,
        journal: Journal,
        sampler: Sampler,
        num_samples: int,
        baseline: Mapping[str, Any] | None,
    ) -> None:
        """``baseline``: the options of trial 0 as the sampler may learn from them; None: it may not."""
        super().__init__(metric=OBJECTIVE, mode="max")
        self.is_stopping = False
        self._journal, self._sampler, self._num_samples = journal, sampler, num_samples
        self._baseline = baseline
        self._numbers: dict[str, int] = {}  # by Tune's id
        trials = journal.trials.values()
        self._waiting = deque(trial for trial in trials if trial.state == "running")
        for trial in trials:
            if trial.state != "running":
                self._tell(trial, trial.state)

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune writes a copy that nobody reads: the state is the journal's."""
        return {}

    @property
    def left(self) -> int:
        """Trials that are still to run."""
        return len(self._waiting) + max(0, self._num_samples - len(self._journal.trials))

    def suggest(self, trial_id: str) -> Any:
        """The next order, or that there is none."""
        trial = None if self.is_stopping else self._next()
        if trial is None:
            return Searcher.FINISHED
        self._numbers[trial_id] = trial.number
        return Order(trial.number, trial.options, trial.folder).settings()

    def _next(self) -> Trial | None:
        if self._waiting:
            return self._waiting.popleft()
        number = len(self._journal.trials)
        options = {} if number == BASELINE else self._sampler.ask(number)
        if number >= self._num_samples or options is None:
            return None
        return self._journal.write("trial", number, options=options, folder=f"trials/{number:03d}")

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the sampler, unless the trial was only interrupted."""
        trial = self._journal.trials[self._numbers[trial_id]]
        state = (result or {}).get(STATE, "failed" if error else "stopped")
        if state != INTERRUPTED:
            self._tell(trial, state)

    def _tell(self, trial: Trial, state: Any) -> None:
        options = self._baseline if trial.number == BASELINE else trial.options
        if options is not None:
            self._sampler.tell(
                Trial(
                    trial.number,
                    dict(options),
                    trial.folder,
                    state,
                    dict(trial.reports),
                    trial.value,
                )
            )

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the journal is the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: see ``save``."""


class Asha(AsyncHyperBandScheduler):
    """ASHA (Li et al. 2020) by our own epochs, with rungs that the journal fills again after a resume."""

    def __init__(self, journal: Journal, options: TuneOptions, epochs: int) -> None:
        grace = options.grace_period
        # A study begun before longer ones were refused may go on with one.
        grace = max(1, epochs // 8) if grace == "auto" else min(grace, epochs)
        super().__init__(
            time_attr=EPOCH, metric=OBJECTIVE, mode="max", max_t=epochs, grace_period=grace,
            reduction_factor=options.reduction_factor,
        )  # fmt: skip
        self._before = {n: dict(trial.reports) for n, trial in journal.trials.items()}
        for number, trial in journal.trials.items():
            if trial.state != "running":
                stand_in: Any = SimpleNamespace(trial_id=f"before-{number}")
                self._replay(stand_in, self._before.pop(number))

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune writes a copy that nobody reads: the state is the journal's."""
        return {}

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        """A trial that goes on has been at its old rungs already."""
        super().on_trial_add(tune_controller, trial)
        reports = self._before.pop(order_of(trial.config).number, {})
        self._replay(trial, reports)

    def _replay(self, trial: TuneTrial, reports: Mapping[int, float]) -> None:
        if trial.trial_id not in self._trial_info:
            super().on_trial_add(None, trial)  # type: ignore[arg-type]
        for epoch in sorted(reports):
            result = {EPOCH: epoch, OBJECTIVE: reports[epoch]}
            self.on_trial_result(None, trial, result)  # type: ignore[arg-type]


class Population(PopulationBasedTraining):
    """Population-based training: who is behind takes over the state of one ahead, with its options mutated."""

    def __init__(
        self,
        journal: Journal,
        space: Mapping[str, Domain],
        period: int,
        seed: int,
        base: Mapping[str, Any],
    ) -> None:
        """``base``: the options of the space as the baseline has them."""
        super().__init__(
            time_attr=EPOCH, metric=CURRENT, mode="max", perturbation_interval=period,
            custom_explore_fn=lambda config: config, log_config=False,
        )  # fmt: skip
        self._journal, self._space, self._base = journal, space, dict(base)
        self._rng = random.Random(seed + len(journal.trials))

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune writes a copy that nobody reads: the state is the journal's."""
        return {}

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Ray refuses PBT beside a search algorithm, which might choose options; ours only hands out orders."""
        stand_in: Any = SimpleNamespace(search_alg=None)
        super().on_trial_add(stand_in, trial)
        reports = self._journal.trials[order_of(trial.config).number].reports
        if reports:  # going on: compared again after another period
            self._trial_state[trial].last_perturbation_time = max(reports)

    def _get_new_config(
        self, trial: TuneTrial, trial_to_clone: TuneTrial
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The donor's options mutated, for a new attempt in a folder of its own."""
        own, donor = order_of(trial.config), order_of(trial_to_clone.config)
        options = mutate(self._space, self._base | donor.options, self._rng)
        copies = len(self._journal.trials[own.number].donors) + 1
        order = Order(own.number, options, f"trials/{own.number:03d}-{copies}")
        self._journal.write(
            "exploit", own.number, options=options, folder=order.folder, donor=donor.number,
            epoch=(self._trial_state[trial_to_clone].last_result or {}).get(EPOCH, 0),
        )  # fmt: skip
        return order.settings(), {}


def scheduler_of(
    journal: Journal,
    options: TuneOptions,
    space: Mapping[str, Domain],
    *,
    epochs: int,
    seed: int,
    base: Mapping[str, Any],
) -> TrialScheduler:
    """What ``tune.scheduler`` names."""
    if options.scheduler == "asha":
        return Asha(journal, options, epochs)
    if options.scheduler == "pbt":
        return Population(journal, space, options.perturb_period, seed, base)
    return FIFOScheduler()


class Recorder(Callback):
    """Writes what happens to trials into the journal and tells the driver."""

    def __init__(self, journal: Journal, ended: Callable[[Trial], None]) -> None:
        """``ended``: told of a trial that has ended by itself or by the scheduler, from Ray Tune's thread."""
        self._journal, self._ended = journal, ended

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune writes a copy that nobody reads: the state is the journal's."""
        return {}

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        """An epoch of a trial, or its end."""
        value, epoch = result.get(OBJECTIVE, math.nan), int(result.get(EPOCH, 0))
        if epoch and math.isfinite(value):
            metrics = json.loads(result.get("metrics", "{}"))
            number = order_of(trial.config).number
            self._journal.write("report", number, epoch=epoch, objective=value, metrics=metrics)

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """It has come to its end, has failed, or was stopped early; an interrupted one goes on later."""
        last = trial.last_result or {}
        known = self._journal.trials[order_of(trial.config).number]
        state = last.get(STATE, "stopped")
        reason = last.get("reason") or ""
        if state == "stopped":
            reason = f"stopped early after epoch {known.epoch}: behind the others"
        if state != INTERRUPTED:
            self._ended(self._journal.write("end", known.number, state=state, reason=reason))

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        """Its process died: what fails inside of it is a result."""
        known = self._journal.trials[order_of(trial.config).number]
        reason = "its process was killed, or its node was lost"
        self._ended(self._journal.write("end", known.number, state="failed", reason=reason))
