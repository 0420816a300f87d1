"""TrainState: everything a resumed run needs, written atomically, read back exactly.

A checkpoint is one file of plain tensors, numbers and strings (``torch.load(weights_only=True)`` reads it), keyed by
tensor NAME: the layout of the flat buffers may change between versions without making old checkpoints useless.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from yolo_ray.config.schema import TrainConfig
from yolo_ray.errors import UserError
from yolo_ray.model.saving import save_atomically
from yolo_ray.step.flat import View
from yolo_ray.step.graph import Step
from yolo_ray.step.host import HostCopy

VERSION = 1
# What torch.load raises for a torn or foreign file.
UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError)
_NAME = re.compile(r"step_(\d+)\.pt$")


@dataclass
class Progress:
    """The host side of a run's state. The position in the data is ``step``; the epoch follows from it.

    ``ended``: epochs that were evaluated and written down; one behind ``step`` after a stop at an epoch's last step.
    """

    step: int = 0
    ended: int = 0
    best: float = -1.0
    best_epoch: int = -1
    best_metrics: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0


class Snapshot:
    """A run's whole state at one moment; its tensors are on their way to the host while the device goes on."""

    def __init__(self, step: Step, progress: Progress) -> None:
        """Take it; what is enqueued later is not in it."""
        flat = step.flat
        self._flat = flat
        self._optimizer = step.options.optimizer
        self._slots = step.optimizer.slots
        self._is_scaled = step.scale.is_active
        self._copy = HostCopy(
            {
                "model": flat.state, "ema": flat.ema, "counters": flat.counters, "pending": step.pending,
                "skipped": step.skipped, "scale": step.scale.state,
                **{f"slots/{name}": slot for name, slot in self._slots.items()},
            }
        )  # fmt: skip
        self._rng = {"cpu": torch.get_rng_state(), "cuda": _cuda_rng(flat.state.device)}
        self._progress = dict(vars(progress))

    def state(self, config: dict[str, Any], digest: str) -> dict[str, Any]:
        """The versioned dict of a checkpoint; tensors lie on the CPU, in float32."""
        flat, copies = self._flat, self._copy.read()
        trained = flat.views[: flat.num_views_trained]
        slots = {name: copies[f"slots/{name}"] for name in self._slots}
        return {
            "version": VERSION,
            "model": _by_name(copies["model"], flat.views),
            "ema": _by_name(copies["ema"], flat.views),
            "counters": copies["counters"],
            "optimizer": {
                "name": self._optimizer,
                "slots": {
                    name: _by_name(slot, trained) if slot.ndim else slot
                    for name, slot in slots.items()
                },
            },
            "pending": _by_name(copies["pending"], trained),
            "skipped": int(copies["skipped"]),
            "scale": copies["scale"] if self._is_scaled else None,
            "rng": self._rng,
            "progress": self._progress,
            "config": config,
            "data_digest": digest,
        }

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights as a state_dict of the network."""
        copies = self._copy.read()
        counters = zip(self._flat.counter_names, copies["counters"].unbind(0), strict=True)
        return dict(self._flat.named(copies["ema"])) | dict(counters)


def restore_state(step: Step, state: dict[str, Any]) -> Progress:
    """Put a captured state back, bit for bit.

    Raises:
        UserError: the state is of another model, optimizer or version.
    """
    flat = step.flat
    if state["version"] != VERSION:
        raise UserError(
            f"checkpoint format {state['version']} is not {VERSION}: resume with the yolo_ray that wrote it"
        )
    if state["optimizer"]["name"] != step.options.optimizer:
        raise UserError(
            f"the checkpoint was written with optimizer={state['optimizer']['name']}, this run has "
            f"optimizer={step.options.optimizer}: resume with the same optimizer"
        )
    trained = flat.views[: flat.num_views_trained]
    _put(flat.state, flat.views, state["model"])
    _put(flat.ema, flat.views, state["ema"])
    _put(step.pending, trained, state["pending"])
    if "counters" in state:  # batches seen by each batch norm; no number depends on them
        flat.counters.copy_(state["counters"])
    for name, slot in step.optimizer.slots.items():
        saved = state["optimizer"]["slots"][name]
        if slot.ndim:
            _put(slot, trained, saved)
        else:
            slot.copy_(saved)
    step.skipped.fill_(state["skipped"])
    if state.get("scale") is not None and step.scale.is_active:
        step.scale.state.copy_(state["scale"])
    torch.set_rng_state(state["rng"]["cpu"])
    if state["rng"]["cuda"] is not None and flat.state.device.type == "cuda":
        torch.cuda.set_rng_state(state["rng"]["cuda"], flat.state.device)
    return Progress(**state["progress"])


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 of float tensors by name, wherever they lie."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].detach().float().contiguous().cpu().numpy().tobytes())
    return total.hexdigest()


def _by_name(flat: Tensor, views: list[View]) -> dict[str, Tensor]:
    return {view.name: view.of(flat).clone() for view in views}


def _put(flat: Tensor, views: list[View], tensors: dict[str, Tensor]) -> None:
    if {view.name: view.shape for view in views} != {name: t.shape for name, t in tensors.items()}:
        raise UserError(
            "the checkpoint belongs to another model: resume with the model and data it was made with"
        )
    for view in views:
        view.of(flat).copy_(tensors[view.name])


def _cuda_rng(device: torch.device) -> Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def check_resumable(
    state: dict[str, Any],
    config: TrainConfig,
    optimizer: str,
    digest: str,
    shapes: dict[str, torch.Size],
) -> None:
    """Judge, before anything of the old run is touched, whether this run can go on from ``state``.

    Args:
        state: the checkpoint.
        config: this run's.
        optimizer: as ``auto`` was decided for this run.
        digest: of this run's training data.
        shapes: of this run's floating tensors, by name.

    Raises:
        UserError: what differs, and that it has to be as it was.
    """
    if {name: tensor.shape for name, tensor in state["model"].items()} != shapes:
        raise UserError(
            "the checkpoint belongs to another model or class count: resume with those it was made with"
        )
    if state["data_digest"] != digest:
        raise UserError(
            "the photos or labels have changed since the checkpoint was written: start a new run, or put the data back"
        )
    now = {"batch": config.batch, "seed": config.seed, "freeze": config.flat()["freeze"]}
    now |= {"optimizer": optimizer}
    then = {
        **{name: state["config"][name] for name in ("batch", "seed")},
        "freeze": state["config"].get("freeze"),  # there were checkpoints before this option
        "optimizer": state["optimizer"]["name"],
    }
    for name, value in now.items():
        if then[name] != value:  # a step would mean other photos, or the state of another rule
            raise UserError(
                f"the checkpoint was written with {name}={then[name]}, this run has {name}={value}: "
                f"resume with {name}={then[name]}"
            )


@contextmanager
def disk_explained(folder: Path) -> Iterator[None]:
    """A disk that refuses, in a sentence.

    Raises:
        UserError: instead of OSError.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"{folder} cannot be written ({reason}): free some space or make it writable, then go on with "
            f"resume={folder}; the checkpoints written before are intact"
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    found = [
        (int(match[1]), path)
        for path in folder.glob("step_*.pt")
        if (match := _NAME.search(path.name))
    ]
    return [path for _, path in sorted(found)]


def save_checkpoint(state: dict[str, Any], folder: Path, *, keep: int) -> Path:
    """Write ``step_<n>.pt`` and remove all but the newest ``keep``."""
    path = folder / f"step_{state['progress']['step']:09d}.pt"
    for torn in folder.glob(".*.tmp"):  # of a worker that was killed while it wrote
        torn.unlink(missing_ok=True)
    save_atomically(state, path)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest readable checkpoint and a sentence for each unreadable newer one; ``(None, ...)``: none."""
    damaged: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True), damaged
        except UNREADABLE as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            damaged.append(f"{path} cannot be read ({reason}); going back to an older checkpoint")
    return None, damaged
