"""2N steps equal N steps, a checkpoint, a new process state, and N steps: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.local_run import LocalOptions, LocalRun
from yolo_ray.config.schema import AugmentConfig
from yolo_ray.data.records import load_records
from yolo_ray.errors import UserError
from yolo_ray.model.saving import save_atomically
from yolo_ray.train.checkpoint import (
    Progress,
    Snapshot,
    list_checkpoints,
    load_newest,
    restore_state,
    save_checkpoint,
)


@pytest.mark.parametrize(
    ("optimizer", "sides", "mixup"),
    [("SGD", (), 0), ("AdamW", (), 0), ("MuSGD", (), 0), ("SGD", (32, 64, 96), 0.5)],
)
def test_resumed_run_is_bit_equal(
    optimizer: str,
    sides: tuple[int, ...],
    mixup: float,
    tiny_dataset: Callable[..., Path],
    tmp_path: Path,
) -> None:
    records = load_records(tiny_dataset(train=20, size=64), "train", max_bad=0.0)
    augment = AugmentConfig(mixup=mixup, close_mosaic=0)
    options = LocalOptions(batch=4, epochs=2, optimizer=optimizer, sides=sides, augment=augment)
    whole = LocalRun(records, options)
    whole.train(0, 10)

    half = LocalRun(records, options)
    half.train(0, 5)
    state = Snapshot(half.step, Progress(step=5, best=0.25)).state({}, records.digest)
    save_checkpoint(state, tmp_path, keep=2)
    loaded, damaged = load_newest(tmp_path)
    assert loaded is not None and not damaged
    rest = LocalRun(records, options)
    progress = restore_state(rest.step, loaded)
    assert (progress.step, progress.best) == (5, 0.25)
    rest.train(5, 10)

    assert torch.equal(rest.step.flat.state, whole.step.flat.state), "weights and buffers"
    assert torch.equal(rest.step.flat.ema, whole.step.flat.ema)
    assert torch.equal(rest.step.flat.counters, whole.step.flat.counters)
    assert int(rest.step.flat.counters[0]) == 10
    assert torch.equal(rest.step.pending, whole.step.pending)
    slots = zip(
        rest.step.optimizer.slots.values(), whole.step.optimizer.slots.values(), strict=True
    )
    assert all(torch.equal(mine, other) for mine, other in slots)
    assert not torch.equal(whole.step.flat.state, half.step.flat.state), "the second half trained"


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_dataset: Callable[..., Path]) -> None:
    records = load_records(tiny_dataset(train=8, size=64), "train", max_bad=0.0)
    run = LocalRun(records, LocalOptions(batch=4))
    run.train(0, 1)
    step = run.step
    before = [t.clone() for t in (step.flat.state, step.flat.ema, *step.optimizer.slots.values())]
    step.reduce = lambda wire: wire[7].fill_(float("inf"))
    run.train(1, 2)
    after = [step.flat.state, step.flat.ema, *step.optimizer.slots.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert int(step.skipped) == 1
    assert step.take_sums().read()["skipped"] == 1


def test_newest_readable_checkpoint_wins(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_checkpoint({"progress": {"step": number}}, tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step_000000002.pt",
        "step_000000003.pt",
    ]
    (tmp_path / "step_000000003.pt").write_bytes(b"torn")
    state, damaged = load_newest(tmp_path)
    assert state is not None and state["progress"]["step"] == 2
    assert len(damaged) == 1 and "step_000000003.pt" in damaged[0]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    save_atomically({"a": 1}, path)

    class Unsaveable:
        def __reduce__(self) -> tuple:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_atomically({"a": Unsaveable()}, path)
    assert torch.load(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_other_optimizer_is_refused(tiny_dataset: Callable[..., Path]) -> None:
    records = load_records(tiny_dataset(train=4, size=64), "train", max_bad=0.0)
    run = LocalRun(records, LocalOptions(batch=4))
    state = Snapshot(run.step, Progress()).state({}, records.digest)
    other = LocalRun(records, LocalOptions(batch=4, optimizer="AdamW"))
    with pytest.raises(UserError, match="optimizer=SGD"):
        restore_state(other.step, state)
