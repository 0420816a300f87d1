"""Checkpoints are of the moment they were asked for, and a disk that refuses is heard of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.local_run import LocalOptions, LocalRun
from yolo_ray.config.schema import TrainConfig
from yolo_ray.data.records import load_records
from yolo_ray.errors import UserError
from yolo_ray.model.build import load_detector
from yolo_ray.train.checkpoint import Progress, Snapshot, load_newest
from yolo_ray.train.saver import Saver


@pytest.fixture
def local(tiny_dataset: Callable[..., Path]) -> LocalRun:
    records = load_records(tiny_dataset(train=8, size=64), "train", max_bad=0.0)
    return LocalRun(records, LocalOptions(batch=4, epochs=4))


def saver_in(folder: Path, local: LocalRun) -> Saver:
    return Saver(TrainConfig(), folder, local.detector, "digest")


def test_what_follows_is_not_in_it(local: LocalRun, tmp_path: Path) -> None:
    local.train(0, 2)
    progress, saver = Progress(step=2), saver_in(tmp_path, local)
    before = Snapshot(local.step, progress).state({}, "digest")
    saver.save(local.step, progress, epoch=1, is_best=True)
    progress.step = 5
    local.train(2, 5)
    saver.wait()
    saver.close()
    state, _ = load_newest(tmp_path / "checkpoints")
    assert state is not None and state["progress"]["step"] == 2
    for part in ("model", "ema", "pending"):
        assert all(torch.equal(state[part][name], value) for name, value in before[part].items())
    assert not torch.equal(local.step.flat.counters, before["counters"]), "training went on"
    for name in ("last.pt", "best.pt"):
        weights = load_detector(tmp_path / "weights" / name).state_dict()
        assert all(torch.equal(weights[key], value) for key, value in before["ema"].items())


def test_the_next_one_hears_that_the_disk_refused(local: LocalRun, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    saver, gate = saver_in(tmp_path, local), threading.Event()
    saver.save(local.step, Progress(step=1))
    saver._pool.submit(gate.wait)
    with pytest.raises(UserError, match="cannot be written"):
        saver.save(local.step, Progress(step=2))
    (tmp_path / "checkpoints").unlink()
    gate.set()
    saver.wait()
    saver.close()
    state, _ = load_newest(tmp_path / "checkpoints")
    assert state is not None and state["progress"]["step"] == 2, "it was tried all the same"


def test_who_only_checks_does_not_wait_for_the_end(local: LocalRun, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    saver, gate = saver_in(tmp_path, local), threading.Event()
    saver.check()
    saver._pool.submit(gate.wait)
    saver.save(local.step, Progress(step=1))
    saver.check()
    gate.set()
    saver.close()
    with pytest.raises(UserError, match="cannot be written"):
        saver.check()
    saver.check()  # told once
