"""The door to Optuna: which options the next trial tries, and how much each option mattered."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from yolo_ray.config.space import Domain
from yolo_ray.errors import UserError
from yolo_ray.study.trials import Trial

# What a trial's end is to Optuna. A stopped one has told how far it came, which TPE makes use of.
STATES = {"finished": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "failed": TrialState.FAIL}
FEWEST_RANDOM, MOST_RANDOM = 3, 10  # random trials before TPE has something to go by
FEWEST_RATED = 4  # trials below which importance is noise


class Sampler(Protocol):
    """Chooses options."""

    def ask(self, number: int) -> dict[str, Any] | None:
        """The options of trial ``number`` by dotted name; None when there is nothing left to try."""
        ...

    def tell(self, trial: Trial) -> None:
        """How a trial ended; also one of before a resume, or of another study."""
        ...


class OptunaSampler:
    """TPE (Bergstra et al. 2011), multivariate (Falkner et al. 2018), or random numbers.

    A trial under way counts as a bad one (constant liar), so that trials at a time differ.
    """

    def __init__(self, space: Mapping[str, Domain], sampler: optuna.samplers.BaseSampler) -> None:
        self._space = dict(space)
        self._distributions = {name: distribution_of(domain) for name, domain in space.items()}
        self._study = _new_study(sampler)
        self._asked: dict[int, optuna.Trial] = {}

    def ask(self, number: int) -> dict[str, Any] | None:
        """The options of trial ``number``."""
        asked = self._study.ask(self._distributions)
        self._asked[number] = asked
        return {name: _value(self._space[name], asked.params[name]) for name in self._space}

    def tell(self, trial: Trial) -> None:
        """How a trial ended. One whose options lie outside the space teaches nothing."""
        asked = self._asked.pop(trial.number, None)
        frozen = _frozen(trial, self._space, self._distributions)
        if asked is None:
            if frozen is not None:
                self._study.add_trial(frozen)
            return
        for epoch, value in trial.reports.items():
            asked.report(value, epoch)
        state = _state(trial)
        value = trial.value if state == TrialState.COMPLETE else None
        self._study.tell(asked, value, state)


class GridSampler:
    """Every combination once, in the order of the space. Trial 1 is the first, since 0 is the baseline."""

    def __init__(self, space: Mapping[str, Domain]) -> None:
        """Raises UserError for a range with infinitely many values."""
        self._names = list(space)
        values = []
        for name, domain in space.items():
            one = domain.grid()
            if one is None:
                raise UserError(
                    f"tune.search=grid: {name} has infinitely many values between {domain.values[0]} and "
                    f"{domain.values[1]}; use choice, randint or quniform"
                )
            values.append(one)
        self._combinations = list(itertools.product(*values))

    def __len__(self) -> int:
        return len(self._combinations)

    def ask(self, number: int) -> dict[str, Any] | None:
        """The combination of that number; None after the last."""
        if number > len(self._combinations):
            return None
        return dict(zip(self._names, self._combinations[number - 1], strict=True))

    def tell(self, trial: Trial) -> None:
        """Do nothing: the grid does not learn."""


def tpe(space: Mapping[str, Domain], seed: int, num_samples: int) -> Sampler:
    """Optuna's TPE, random for the first quarter (3 to 10) of the trials."""
    startup = min(max(num_samples // 4, FEWEST_RANDOM), MOST_RANDOM)
    sampler = optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=startup, multivariate=True, constant_liar=True
    )
    return OptunaSampler(space, sampler)


def at_random(space: Mapping[str, Domain], seed: int, num_samples: int) -> Sampler:
    """Independent random numbers."""
    return OptunaSampler(space, optuna.samplers.RandomSampler(seed=seed))


def on_grid(space: Mapping[str, Domain], seed: int, num_samples: int) -> Sampler:
    """All combinations."""
    return GridSampler(space)


SAMPLERS: dict[str, Callable[[Mapping[str, Domain], int, int], Sampler]] = {
    "optuna": tpe,
    "random": at_random,
    "grid": on_grid,
}


def distribution_of(domain: Domain) -> BaseDistribution:
    """A domain as Optuna has it. Choices are their JSON texts: Optuna keeps no lists."""
    if domain.kind == "choice":
        return CategoricalDistribution([_text(value) for value in domain.values])
    low, high = domain.values[:2]
    if domain.kind == "randint":
        return IntDistribution(low, high)
    if domain.kind == "quniform":
        step = domain.values[2]
        if all(isinstance(value, int) for value in domain.values):
            return IntDistribution(low, domain.nearest(high), step=step)
        return FloatDistribution(low, domain.nearest(high), step=step)
    return FloatDistribution(low, high, log=domain.kind == "loguniform")


def mutate(
    space: Mapping[str, Domain], options: Mapping[str, Any], rng: random.Random
) -> dict[str, Any]:
    """The explore step of population-based training (Jaderberg et al. 2017, section 4.1.1).

    Each option is drawn anew with probability 0.25, else a number is multiplied by 0.8 or 1.2 (and kept inside its
    range) and a choice moves to a neighbour.
    """
    return {name: _mutated(domain, options.get(name), rng) for name, domain in space.items()}


def _mutated(domain: Domain, value: Any, rng: random.Random) -> Any:
    if not domain.holds(value) or rng.random() < 0.25:
        return _drawn(domain, rng)
    if domain.kind == "choice":
        texts = [_text(one) for one in domain.values]
        place = texts.index(_text(value)) + rng.choice((-1, 1))
        return domain.values[min(max(place, 0), len(texts) - 1)]
    return domain.nearest(value * rng.choice((0.8, 1.2)))


def _drawn(domain: Domain, rng: random.Random) -> Any:
    low_high = optuna.samplers.RandomSampler(seed=rng.getrandbits(32))
    study = _new_study(low_high)
    asked = study.ask({domain.name: distribution_of(domain)})
    return _value(domain, asked.params[domain.name])


def importances(trials: Iterable[Trial], space: Mapping[str, Domain]) -> dict[str, float]:
    """The share of each option in how the objective varies (fANOVA, Hutter et al. 2014), largest first.

    Empty for fewer than 4 trials with a value, or when all are equal.
    """
    distributions = {name: distribution_of(domain) for name, domain in space.items()}
    study = _new_study(None)
    values = set()
    for trial in trials:
        # A stopped trial counts with what it had reached.
        frozen = _frozen(trial, space, distributions, is_done=True)
        if frozen is not None:
            study.add_trial(frozen)
            values.add(trial.value)
    if len(study.trials) < FEWEST_RATED or len(values) < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _new_study(sampler: optuna.samplers.BaseSampler | None) -> optuna.Study:
    """In memory, without Optuna's lines about it, which say nothing of ours."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize", sampler=sampler)


def _frozen(
    trial: Trial,
    space: Mapping[str, Domain],
    distributions: Mapping[str, BaseDistribution],
    *,
    is_done: bool = False,
) -> FrozenTrial | None:
    """A trial as Optuna keeps it; None if it has other options, or has not come to anything."""
    held = all(name in trial.options and d.holds(trial.options[name]) for name, d in space.items())
    state = TrialState.COMPLETE if is_done and trial.value is not None else _state(trial)
    if not held or state == TrialState.RUNNING or (is_done and trial.value is None):
        return None
    params = {name: _param(domain, trial.options[name]) for name, domain in space.items()}
    return create_trial(
        state=state, params=params, distributions=dict(distributions),
        value=trial.value if state == TrialState.COMPLETE else None,
        intermediate_values=dict(trial.reports),
    )  # fmt: skip


def _state(trial: Trial) -> TrialState:
    state = STATES.get(trial.state, TrialState.RUNNING)
    if state == TrialState.COMPLETE and trial.value is None:
        return TrialState.FAIL
    return state


def _param(domain: Domain, value: Any) -> Any:
    return _text(value) if domain.kind == "choice" else value


def _value(domain: Domain, param: Any) -> Any:
    return json.loads(param) if domain.kind == "choice" else domain.nearest(param)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=list)
