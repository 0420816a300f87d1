"""A study's journal, objective, samplers and results: plain files and numbers, no cluster."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import optuna
import pytest

from yolo_ray.config.load import load
from yolo_ray.config.space import Domain
from yolo_ray.config.tune import TuneConfig
from yolo_ray.errors import UserError
from yolo_ray.study.objective import needs_costs, value_of, weights_of
from yolo_ray.study.results import write_results
from yolo_ray.study.sampling import GridSampler, at_random, importances, mutate, tpe
from yolo_ray.study.trials import Journal, Trial, best_of, read_trials

SPACE = {
    "optim.lr0": Domain("optim.lr0", "loguniform", (1e-4, 1e-1)),
    "augment.mosaic": Domain("augment.mosaic", "quniform", (0.0, 1.0, 0.25)),
    "augment.close_mosaic": Domain("augment.close_mosaic", "randint", (0, 10)),
    "freeze": Domain("freeze", "choice", (None, 3, [0, 1])),
}


def test_a_journal_is_what_was_written_after_any_kill(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("trial", 0, options={}, folder="trials/000")
    journal.write("trial", 1, options={"optim.lr0": 0.02}, folder="trials/001")
    journal.write("report", 0, epoch=1, objective=0.2, metrics={"val/map50": 0.5})
    journal.write("report", 0, epoch=2, objective=0.4, metrics={"val/map50": 0.6})
    journal.write("end", 0, state="finished", reason="")
    journal.write(
        "exploit", 1, options={"optim.lr0": 0.03}, folder="trials/001-1", donor=0, epoch=2
    )
    whole = path.read_bytes()
    for length in range(len(whole)):  # a kill leaves any beginning of it
        path.write_bytes(whole[:length])
        cut = Journal(path)
        assert len(cut.trials) <= 2
        cut.write("trial", 7, options={}, folder="trials/007")
        assert Journal(path).trials == cut.trials
    path.write_bytes(whole)
    first, second = Journal(path).trials.values()
    assert (first.state, first.reports, first.value) == ("finished", {1: 0.2, 2: 0.4}, 0.4)
    assert first.metrics == {"val/map50": 0.6} and first.epoch == 2
    assert (second.state, second.options, second.folder) == (
        "running",
        {"optim.lr0": 0.03},
        "trials/001-1",
    )
    assert second.donors == [{"donor": 0, "epoch": 2}]
    assert Journal(path).best() == first
    assert read_trials(tmp_path) == [first, second]
    with pytest.raises(UserError, match="not the folder of a study"):
        read_trials(tmp_path / "x")


def test_the_disk_that_refuses_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        Journal(tmp_path / "nowhere" / "journal.jsonl").write("trial", 0, options={}, folder="x")


def test_objectives() -> None:
    assert weights_of("val/map50_95") == {"val/map50_95": 1.0}
    weights = weights_of({"val/map50": 1, "latency_ms": -0.01})
    assert value_of(weights, {"val/map50": 0.5, "latency_ms": 20.0}) == pytest.approx(0.3)
    assert needs_costs(weights) and not needs_costs(weights_of("val/Car/map50_95"))
    with pytest.raises(UserError, match="no run has a metric 'map'"):
        weights_of("map")
    with pytest.raises(UserError, match="no aim"):
        weights_of({"latency_ms": -1.0})
    with pytest.raises(UserError, match="no metric 'val/Bus/map50_95'"):
        value_of(weights_of("val/Bus/map50_95"), {"val/map50": 1.0})


def distance(options: dict[str, Any]) -> float:
    return abs(math.log10(options["optim.lr0"] / 0.01))


def run(sampler: Any, count: int) -> list[Trial]:
    """A study of one at a time, whose best lr0 is 0.01."""
    trials = []
    for number in range(1, count + 1):
        options = sampler.ask(number)
        value = -distance(options)
        trial = Trial(number, options, "", "finished", {1: value}, value)
        sampler.tell(trial)
        trials.append(trial)
    return trials


@pytest.mark.parametrize("build", [tpe, at_random])
def test_samplers_stay_inside_and_differ(build: Any) -> None:
    trials = run(build(SPACE, 0, 40), 12)
    for trial in trials:
        assert all(domain.holds(trial.options[name]) for name, domain in SPACE.items()), (
            trial.options
        )
        assert isinstance(trial.options["augment.close_mosaic"], int)
    assert len({json.dumps(trial.options) for trial in trials}) == 12
    assert run(build(SPACE, 0, 40), 3)[2].options == trials[2].options
    assert run(build(SPACE, 1, 40), 1)[0].options != trials[0].options


def test_tpe_learns_from_this_study_and_from_another() -> None:
    space = {"optim.lr0": SPACE["optim.lr0"]}
    one = tpe(space, 0, 40)
    trials = run(one, 40)
    early = sum(distance(t.options) for t in trials[:10])
    late = sum(distance(t.options) for t in trials[-10:])
    assert late < 0.75 * early
    warm = tpe(space, 5, 40)
    for trial in trials:
        warm.tell(
            Trial(-1 - trial.number, trial.options, "", trial.state, trial.reports, trial.value)
        )
    warm.tell(Trial(-99, {"loss.box": 3.0}, "", "finished", {1: 9.0}, 9.0))  # of another space
    first = [distance(trial.options) for trial in run(warm, 5)]
    assert sum(first) < 0.75 * early / 2


def test_trials_that_failed_or_were_stopped_are_taken() -> None:
    sampler = tpe(SPACE, 0, 10)
    for number, state in enumerate(("stopped", "failed", "finished"), 1):
        options = sampler.ask(number) or {}
        value = None if state == "failed" else 0.1
        sampler.tell(Trial(number, options, "", state, {} if value is None else {1: 0.1}, value))  # type: ignore[arg-type]
    assert sampler.ask(4)


def test_a_grid_has_every_combination_once() -> None:
    space = {name: SPACE[name] for name in ("augment.mosaic", "freeze")}
    grid = GridSampler(space)
    seen = [grid.ask(number) for number in range(1, len(grid) + 1)]
    assert len(grid) == 15 and len({json.dumps(one) for one in seen}) == 15
    assert grid.ask(16) is None
    with pytest.raises(UserError, match=r"optim.lr0 has infinitely many values"):
        GridSampler(SPACE)


def test_mutations_stay_inside_and_near() -> None:
    rng = random.Random(0)
    options = {"optim.lr0": 0.09, "augment.mosaic": 0.5, "augment.close_mosaic": 5, "freeze": 3}
    seen = [mutate(SPACE, options, rng) for _ in range(60)]
    for one in seen:
        assert all(domain.holds(one[name]) for name, domain in SPACE.items()), one
    factors = [one["optim.lr0"] / 0.09 for one in seen]
    near = [f for f in factors if f == pytest.approx(0.8) or f == pytest.approx(1 / 0.9)]
    assert 30 < len(near) < 60, "most are perturbed (and kept inside), a quarter is drawn anew"
    assert {json.dumps(one["freeze"]) for one in seen} == {"null", "3", "[0, 1]"}


def test_optuna_says_nothing_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)  # its default; it writes to stderr
    importances([Trial(0, {}, "trials/000")], SPACE)
    mutate(SPACE, {}, random.Random(0))
    assert capfd.readouterr().err == ""


def test_importance_finds_the_option_that_matters() -> None:
    trials = run(at_random(SPACE, 0, 40), 40)
    shares = importances(trials, SPACE)
    assert next(iter(shares)) == "optim.lr0" and shares["optim.lr0"] > 0.5
    assert sum(shares.values()) == pytest.approx(1)
    assert importances(trials[:3], SPACE) == {}


def test_best_yaml_is_what_training_takes(tmp_path: Path) -> None:
    config = load(
        ["data=d.yaml", "epochs=3", "workers_per_trial=2", "cos_lr=true", "name=big", "space.lr0={uniform: [0.1, 0.2]}",
         "space.freeze={choice: [null, [0, 1]]}"],
        TuneConfig,
    )  # fmt: skip
    trials = [
        Trial(0, {}, "trials/000", "finished", {1: 0.1}, 0.1, {"val/map50": 0.2}),
        Trial(
            1,
            {"optim.lr0": 0.15, "freeze": [0, 1]},
            "trials/001",
            "stopped",
            {1: 0.3},
            0.3,
            reason="behind",
        ),
        Trial(2, {"optim.lr0": 0.12, "freeze": None}, "trials/002", "failed", reason="a, b"),
    ]
    assert best_of(trials) is trials[1]
    write_results(tmp_path, config, trials)
    best = load([str(tmp_path / "best.yaml")])
    assert (best.optim.lr0, best.freeze, best.epochs, best.cluster.workers, best.optim.cos_lr) == (
        0.15,
        (0, 1),
        3,
        2,
        True,
    )
    assert best.name == "train" and best.data.path == config.data.path
    assert best == config.training().override(trials[1].options)
    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert [row["state"] for row in rows] == ["finished", "stopped", "failed"]
    assert rows[1]["optim.lr0"] == "0.15" and rows[2]["reason"] == "a, b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.yaml", "trials.csv"]


def test_no_best_without_a_value(tmp_path: Path) -> None:
    config = load(["data=d.yaml", "space.lr0={uniform: [0.1, 0.2]}"], TuneConfig)
    write_results(tmp_path, config, [Trial(0, {}, "trials/000", "failed", reason="x")])
    assert [path.name for path in tmp_path.iterdir()] == ["trials.csv"]
