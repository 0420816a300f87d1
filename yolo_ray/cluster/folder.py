"""Where a run lies: paths that hold on every node, and a folder that can be written."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from yolo_ray.config.address import checked_place, inside_job, is_remote
from yolo_ray.config.schema import TrainConfig
from yolo_ray.errors import UserError

CLAIM = "driver.json"
PROBE_BYTES = 2**20


def absolute_paths(config: TrainConfig) -> TrainConfig:
    """Workers run in other folders, on other nodes: every path they get is absolute.

    Raises:
        UserError: a relative project in a job, or data that is no place.
    """
    project = Path(config.project).expanduser()
    if not project.is_absolute() and inside_job():
        if "project" in config.explicit:
            raise UserError(
                f"project={config.project} is relative, and a Ray job runs in a temporary copy of its folder: "
                "give an absolute path"
            )
        project = Path.home() / "runs"
    changes: dict[str, Any] = {"project": str(project.resolve())}
    if config.data.path:
        data = checked_place(config.data.path)
        changes["data.path"] = data if is_remote(data) else str(Path(data).expanduser().resolve())
    if Path(config.model).expanduser().is_file():
        changes["model"] = str(Path(config.model).expanduser().resolve())
    return config.override(changes)


def find_model(config: TrainConfig) -> str:
    """What the detector is built from: ``model``, or what the resumed run kept of that file.

    A checkpoint holds every tensor; only the architecture is taken from here then, and the file may have
    changed or gone since.
    """
    if not config.resume:
        return config.model
    folder = Path(config.resume)
    kept = [_kept(folder, config.model), Path(config.model)]
    if Path(config.model).suffix.lower() == ".pt":
        kept.append(folder / "weights" / "last.pt")
    return next((str(path) for path in kept if path.is_file()), config.model)


def keep_model(folder: Path, source: str) -> str:
    """Copy a model's file into the run's folder, which all nodes see; what the workers build from.

    A name that Ultralytics knows is returned as it is, like a file of the run itself.

    Raises:
        OSError: the disk refuses.
    """
    if not Path(source).is_file() or folder in Path(source).parents:
        return source
    kept = _kept(folder, source)
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f".{kept.name}.{os.getpid()}.tmp")
        try:
            shutil.copyfile(source, temporary)
            os.replace(temporary, kept)
        finally:
            temporary.unlink(missing_ok=True)
    return str(kept)


def _kept(folder: Path, model: str) -> Path:
    """The file keeps its name: Ultralytics reads the scale of a YAML model from it."""
    return folder / "model" / Path(model).name


def check_writable(folder: Path, option: str = "project") -> None:
    """Try it before a cluster is started.

    Raises:
        UserError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): pass {option}= with a folder that has room and is yours"
        ) from error


def open_folder(config: TrainConfig) -> Path:
    """The run's folder: the one to resume, or a new one; a name that exists gets a number appended."""
    if config.resume:
        return Path(config.resume)
    for number in itertools.count(1):
        folder = Path(config.project) / (config.name if number == 1 else f"{config.name}{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise AssertionError("counting never ends")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep a second driver on this machine out of a run's folder. One that was killed leaves no claim behind.

    Raises:
        UserError: another process is training in the folder.
    """
    claim = folder / CLAIM
    holder = _living_holder(claim)
    if holder is not None:
        raise UserError(
            f"{folder} is in use by process {holder}: wait for that run, or stop it first"
        )
    claim.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def _living_holder(claim: Path) -> int | None:
    """The process that holds a claim, if it runs on this machine still."""
    try:
        holder = json.loads(claim.read_text())
        host, pid = str(holder["host"]), int(holder["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    alive = host == socket.gethostname() and pid != os.getpid() and psutil.pid_exists(pid)
    return pid if alive else None
