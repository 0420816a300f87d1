"""Studies on a real Ray cluster, as a user starts them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow.tracking import MlflowClient

from tests.integration.conftest import SMALL, Head, wait_for
from yolo_ray.config.load import load
from yolo_ray.study.trials import Trial, read_events, read_trials
from yolo_ray.train.checkpoint import list_checkpoints, weights_digest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STUDY = (*SMALL, "cluster.workers=1", "max_concurrent=2", "batch=6")


def trials_of(study: Path) -> dict[int, Trial]:
    return (
        {trial.number: trial for trial in read_trials(study)}
        if (study / "journal.jsonl").exists()
        else {}
    )


def digest_of_run(run: Path) -> str:
    newest = list_checkpoints(run / "checkpoints")[-1]
    return weights_digest(torch.load(newest, weights_only=True)["model"])


def runs_of(project: Path) -> dict[str, Any]:
    client = MlflowClient(f"sqlite:///{project}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {str(run.info.run_name): run for run in client.search_runs(experiments)}


def test_a_study(head: Head, data: Path, tmp_path: Path) -> None:
    """The baseline and a trial that differs in lr0 alone, and so in its weights."""
    outcome = head.run(
        "tune", f"data={data}", f"project={tmp_path}", "epochs=1", *STUDY, "num_samples=2", "optimizer=SGD",
        "space.lr0={choice: [0.001]}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    assert outcome.result["trials"] == 2 and outcome.result["finished"] == 2
    study = tmp_path / "study"
    trials = trials_of(study)
    assert (trials[0].options, trials[1].options) == ({}, {"optim.lr0": 0.001})
    for number, lr0 in ((0, 0.01), (1, 0.001)):
        record = yaml.safe_load((study / trials[number].folder / "config.yaml").read_text())
        assert record["optim"]["lr0"] == lr0
    assert digest_of_run(study / "trials/000") != digest_of_run(study / "trials/001")
    best = load([str(study / "best.yaml")])
    assert best.epochs == 1 and best.data.path == str(data)
    for name in ("history", "curves", "parallel", "importance"):
        assert (study / f"{name}.png").is_file()
    assert (study / "trials.csv").is_file() and not (study / "ray").exists()
    runs = runs_of(tmp_path)
    parent = runs.pop("study")
    assert parent.info.status == "FINISHED" and set(runs) == {"000", "001"}
    for run in runs.values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
    assert json.loads(runs["001"].data.tags["sampled.optim.lr0"]) == 0.001


@pytest.mark.slow
def test_a_failing_trial_is_recorded_and_costs_count(
    head: Head, data: Path, tmp_path: Path
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("space:\n  imgsz: {choice: [72, 96]}\n")
    outcome = head.run(
        "tune", str(space), f"data={data}", f"project={tmp_path}", "epochs=1", *STUDY, "num_samples=9",
        "tune.search=grid", "objective={val/map50_95: 1, parameters_m: -0.01, latency_ms: -0.00001}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    trials = trials_of(tmp_path / "study")
    assert [trials[n].state for n in range(3)] == ["finished", "failed", "finished"], trials
    assert len(trials) == 3, "the grid has no more"
    assert "imgsz=72" in trials[1].reason and "stride" in trials[1].reason
    assert outcome.result["failed"] == 1 and outcome.result["objective"] < 0
    costs = trials[2].metrics
    assert costs["parameters_m"] == pytest.approx(2.6, abs=0.1) and costs["latency_ms"] > 0
    assert set(runs_of(tmp_path)) == {"study", "000", "002"}


@pytest.mark.slow
def test_killed_and_resumed(head: Head, data: Path, tmp_path: Path) -> None:
    """kill -9 of the driver: what has ended stays, what ran goes on from its checkpoint, the number is reached."""
    process = head.start(
        "tune", f"data={data}", f"project={tmp_path}", *STUDY, "epochs=4", "num_samples=4", "grace_period=2",
        "space.lr0={loguniform: [1e-4, 1e-1]}",
    )  # fmt: skip
    study = tmp_path / "study"

    def is_half_way() -> bool:
        trials = trials_of(study).values()
        ended = sum(trial.state != "running" for trial in trials)
        return process.poll() is not None or (
            ended >= 1 and any(t.state == "running" and 1 <= t.epoch < 3 for t in trials)
        )

    wait_for(is_half_way, 240, "a trial that ended and one under way")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = trials_of(study)
    under_way = [trial for trial in before.values() if trial.state == "running" and trial.epoch]
    assert under_way, "killed too late to say anything"
    wait_for(lambda: not head.train_workers(), 60, "the workers to end with their driver")
    outcome = head.run("tune", f"resume={study}")
    assert outcome.code == 0, outcome.stderr
    after = trials_of(study)
    assert len(after) == 4 and all(
        trial.state in ("finished", "stopped") for trial in after.values()
    )
    for number, trial in before.items():
        assert after[number].options == trial.options
        if trial.state != "running":
            assert after[number] == trial
    for trial in under_way:
        events = read_events(study / trial.folder / "events.jsonl")
        assert any("going on from step" in event.get("text", "") for event in events)
    runs = runs_of(tmp_path)
    assert len(runs) == 5 and runs["study"].info.status == "FINISHED"
    assert not [run for run in runs.values() if run.info.status == "RUNNING"]
    wrong = head.run("tune", f"resume={study}", "epochs=9")
    assert wrong.code == 2 and "the study has epochs=4, not 9" in wrong.stderr


@pytest.mark.slow
def test_population_based_training_takes_over_the_donors_state(
    head: Head, data: Path, tmp_path: Path
) -> None:
    """An exploited trial starts from the donor's weights, bit for bit, with mutated options."""
    outcome = head.run(
        "tune", f"data={data}", f"project={tmp_path}", *STUDY, "epochs=6", "num_samples=2", "tune.scheduler=pbt",
        "perturb_period=2", "optimizer=SGD", "space.lr0={loguniform: [1e-3, 1e-1]}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    study = tmp_path / "study"
    trials = trials_of(study)
    copied = [trial for trial in trials.values() if trial.donors]
    assert copied, "nobody took over anything"
    for trial in copied:
        run = study / trial.folder
        adopted = json.loads((run / "adopted.json").read_text())
        assert adopted["donor"] == trial.donors[-1]["donor"] != trial.number
        (source,) = list_checkpoints(Path(adopted["path"]) / "checkpoints")
        assert Path(adopted["path"]).parents[1] != run
        donor = weights_digest(torch.load(source, weights_only=True)["model"])
        restored = [e for e in read_events(run / "events.jsonl") if e["kind"] == "restored"]
        assert restored[0]["digest"] == donor == adopted["digest"], (
            "what the worker had at its start"
        )
        assert restored[0]["step"] == adopted["step"] == adopted["epoch"] * 3
        record = yaml.safe_load((run / "config.yaml").read_text())
        assert record["optim"]["lr0"] == trial.options["optim.lr0"]
        assert trial.epoch == 6


@pytest.mark.slow
def test_an_early_stopped_trial_frees_its_workers_and_ctrl_c_ends_cleanly(
    head: Head, data: Path, tmp_path: Path
) -> None:
    process = head.start(
        "tune", f"data={data}", f"project={tmp_path}", *STUDY, "epochs=400", "num_samples=6", "grace_period=1",
        "max_concurrent=2", "space.lr0={loguniform: [1e-4, 1e-1]}", "objective={val/map50: 1, latency_ms: -1}",
    )  # fmt: skip
    study = tmp_path / "study"
    stopped = wait_for(
        lambda: [t for t in trials_of(study).values() if t.state == "stopped"] or process.poll() is not None,
        240, "a trial that is stopped",
    )  # fmt: skip
    assert stopped is not True
    wait_for(lambda: len(trials_of(study)) >= 3, 60, "the next trial")
    wait_for(
        lambda: 1 <= len(head.train_workers()) <= 2, 30, "the workers of two trials and no more"
    )
    process.send_signal(signal.SIGINT)
    outcome = head.finish(process)
    assert outcome.code == 75, outcome.stderr
    assert f"resume={study}" in outcome.stderr and "Traceback" not in outcome.stderr
    wait_for(lambda: not head.train_workers(), 30, "no worker is left")
    runs = runs_of(tmp_path)
    assert runs["study"].info.status == "KILLED"
    assert not [name for name, run in runs.items() if run.info.status == "RUNNING"]
