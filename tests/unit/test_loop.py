"""The training loop in this process: rows, pictures, patience, stop and going on, the summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.local_run import LocalOptions, LocalRun
from yolo_ray.config.schema import TrainConfig
from yolo_ray.data.records import Records, load_records
from yolo_ray.errors import StopRequested, UserError
from yolo_ray.step.graph import GraphedStep
from yolo_ray.train.checkpoint import list_checkpoints, load_newest, restore_state
from yolo_ray.train.events import EventLog
from yolo_ray.train.loop import LINE_LAG_STEPS, SUMMARY_FILE, Run, fit
from yolo_ray.train.metrics import Curves, EvalResult
from yolo_ray.train.report import NullTracker


class Notes(NullTracker):
    """A tracker that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}
        self.steps: list[int] = []
        self.pictures: list[str] = []

    def metrics(self, values: dict[str, float], *, step: int) -> None:
        self.steps.append(step)

    def row(self, values: dict[str, float], *, epoch: int) -> None:
        self.rows[epoch] = values

    def photos(self, name: str, *_: Any, step: int, **__: Any) -> None:
        self.pictures.append(name)


def judged(map50_95: float) -> EvalResult:
    """An evaluation with that result."""
    line, flat = np.linspace(0, 1, 5), np.zeros((3, 5))
    return EvalResult(
        map50_95=map50_95, map50=map50_95, map75=0.0, precision=0.5, recall=0.5, best_confidence=0.3,
        names=("circle", "square", "triangle"), class_map50_95=np.full(3, np.nan), class_map50=np.full(3, np.nan),
        curves=Curves(line, flat, flat, flat, line, flat), num_images=1, num_boxes=1, num_detections=0,
    )  # fmt: skip


class Case:
    """Runs of two steps an epoch in one folder, with evaluations of scripted results."""

    def __init__(self, records: Records, folder: Path, maps: list[float], **options: Any) -> None:
        self.records, self.folder, self.maps = records, folder, iter(maps)
        changes = {"epochs": len(maps), "batch": 4, "imgsz": 64, "log_steps": 1, **options}
        self.config = TrainConfig().override(changes)
        self.notes = Notes()
        self.evaluated: list[int] = []
        self.reported = 0

    def build(self) -> Run:
        """A fresh run, going on from the newest checkpoint if there is one."""
        local = LocalRun(self.records, LocalOptions(batch=4, epochs=self.config.epochs))
        state, _ = load_newest(self.folder / "checkpoints")
        resumed = {} if state is None else {"progress": restore_state(local.step, state)}
        run = Run(
            config=self.config, folder=self.folder, detector=local.detector, step=local.step,
            schedule=local.schedule, feed=local.feed, evaluate=self.evaluate, reduce=local.step.reduce,
            report=self.report, tracker=self.notes, events=EventLog(self.folder / "events.jsonl"), rank=0,
            workers=1, data_digest=self.records.digest, val=self.records, data_cpus=1.0, **resumed,
        )  # fmt: skip
        self.progress, self.step = run.progress, local.step
        return run

    def evaluate(self) -> EvalResult:
        self.evaluated.append(self.progress.step)
        return judged(next(self.maps))

    def report(self, values: dict[str, float]) -> None:
        self.reported += 1

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / SUMMARY_FILE).read_text())

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return [event for event in lines if event["kind"] == kind]


@pytest.fixture
def make(tiny_dataset: Callable[..., Path], tmp_path: Path) -> Callable[..., Case]:
    def case(*maps: float, photos: int = 8, **options: Any) -> Case:
        records = load_records(tiny_dataset(train=photos, size=64), "train", max_bad=0.0)
        (tmp_path / "run").mkdir()
        return Case(records, tmp_path / "run", list(maps), **options)

    return case


def test_a_whole_run(make: Callable[..., Case]) -> None:
    case = make(0.1, 0.3, 0.2, **{"checkpoint.keep": 2})
    fit(case.build())
    assert case.evaluated == [2, 4, 6] and case.reported == 3
    assert case.notes.steps == [1, 2, 3, 4, 5, 6]
    assert case.notes.pictures == ["train_batch0", "train_batch1", "train_batch2"]
    assert sorted(case.notes.rows) == [1, 2, 3]
    losses = ("train/box", "train/cls", "train/dfl")
    assert all(row[name] > 0 for row in case.notes.rows.values() for name in losses)
    assert [row["val/map50_95"] for row in case.notes.rows.values()] == [0.1, 0.3, 0.2]
    summary = case.summary()
    assert (summary["steps"], summary["best_epoch"], summary["map50_95"]) == (6, 2, 0.3)
    weights = [case.folder / "weights" / name for name in ("best.pt", "last.pt")]
    epochs = [torch.load(p, weights_only=False)["train_args"]["epoch"] for p in weights]
    assert epochs == [2, 3]
    kept = list_checkpoints(case.folder / "checkpoints")
    assert [path.name for path in kept] == ["step_000000004.pt", "step_000000006.pt"]
    best = torch.load(case.folder / "checkpoints" / "best.pt", weights_only=True)
    assert best["progress"]["step"] == 4 and best["progress"]["ended"] == 2


def test_replays_stand_in_the_row_of_a_graphed_step(make: Callable[..., Case]) -> None:
    case = make(0.1, 0.2, val_period=2)
    run = case.build()
    run.step = GraphedStep(case.step)  # eager here, as there is no GPU
    run.evaluate = lambda: replace(judged(0.1), replays=7)
    fit(run)
    assert "graph/eval_replays" not in case.notes.rows[1], "not evaluated"
    assert case.notes.rows[2]["graph/eval_replays"] == 7
    assert case.notes.rows[2]["graph/replays"] == 0
    assert "graph/eval_replays" not in run.progress.best_metrics


def test_patience_counts_epochs_and_waits_for_an_evaluation(make: Callable[..., Case]) -> None:
    case = make(*[0.3] * 8, patience=1, val_period=2)
    fit(case.build())
    assert case.evaluated == [4, 8], "best in epoch 2, no gain found in epoch 4"
    assert case.summary()["steps"] == 8 and case.summary()["best_epoch"] == 2
    assert [event["text"] for event in case.events("note")] == [
        "no gain in 1 epochs: training ends early"
    ]
    fit(case.build())  # a resume without more patience trains nothing
    assert case.evaluated == [4, 8] and case.summary()["steps"] == 8


def test_without_validation_the_last_epoch_is_judged(make: Callable[..., Case]) -> None:
    case = make(0.2, 0.2, val=False, patience=1)
    fit(case.build())
    assert case.evaluated == [4] and (case.folder / "weights" / "best.pt").exists()
    assert "val/map50_95" not in case.notes.rows[1] and case.notes.rows[2]["val/map50_95"] == 0.2


def test_a_stop_at_an_epochs_last_step_loses_no_evaluation(make: Callable[..., Case]) -> None:
    case = make(0.1, 0.2, log_steps=2)
    (case.folder / "stop").touch()
    with pytest.raises(StopRequested, match="stopped at step 2"):
        fit(case.build())
    assert case.evaluated == [], "a stop does not wait for an evaluation"
    with pytest.raises(StopRequested, match="stopped at step 4"):
        fit(case.build())
    assert case.evaluated == [2], "going on begins with it"
    (case.folder / "stop").unlink()
    fit(case.build())
    assert case.evaluated == [2, 4] and sorted(case.notes.rows) == [1, 2]
    assert "train/box" not in case.notes.rows[2], "no losses are known after the resume"
    assert case.summary()["steps"] == 4 and case.summary()["best_epoch"] == 2


def test_a_stop_within_an_epoch_loses_no_line(make: Callable[..., Case]) -> None:
    """A line is written three steps late, and a stop request comes with it."""
    case = make(0.1, photos=60)  # 15 steps
    remember, stop = case.notes.metrics, case.folder / "stop"

    def metrics(values: dict[str, float], *, step: int) -> None:
        remember(values, step=step)
        if step == 4:
            assert case.progress.step == 4 + LINE_LAG_STEPS
            stop.touch()  # so the next step asks, and its line comes three steps later

    case.notes.metrics = metrics
    with pytest.raises(StopRequested, match="stopped at step 11"):
        fit(case.build())
    assert case.notes.steps == list(range(1, 12))
    assert [p.name for p in list_checkpoints(case.folder / "checkpoints")] == ["step_000000011.pt"]
    stop.unlink()
    fit(case.build())
    assert case.notes.steps == list(range(1, 16)) and case.summary()["steps"] == 15
    assert case.events("step")[-1]["eta_s"] == 0


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_disk_that_refuses_ends_the_run(make: Callable[..., Case], is_stopped: bool) -> None:
    case = make(0.1)
    run = case.build()
    (case.folder / "checkpoints").write_text("a file in the way")
    if is_stopped:
        (case.folder / "stop").touch()
    with pytest.raises(UserError, match="cannot be written"):
        fit(run)
    assert not (case.folder / SUMMARY_FILE).exists()


def test_the_time_left_counts_from_the_resume(make: Callable[..., Case]) -> None:
    case = make(0.1, 0.2)
    run = case.build()
    run.progress.elapsed_s = 1e6  # of the run so far
    fit(run)
    assert all(event["eta_s"] < 1e5 for event in case.events("step"))
    assert case.summary()["elapsed_s"] > 1e6


def test_one_bad_step_is_skipped_and_many_end_the_run(make: Callable[..., Case]) -> None:
    case = make(*[0.1] * 4)
    run = case.build()
    bad = {1, 5, 6}
    case.step.reduce = lambda wire: wire[7].fill_(np.inf) if run.progress.step in bad else None
    with pytest.raises(UserError, match=r"last 2 steps \(to step 7\).*lower lr0"):
        fit(run)
    assert case.evaluated == [2, 4, 6] and int(run.step.skipped) == 3
    assert case.notes.rows[1]["skipped_steps"] == 1 and case.notes.rows[1]["train/box"] > 0
