"""Where a version comes from: a run's folder, or its run in MLflow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from yolo_ray.config.load import RUN_CONFIG
from yolo_ray.config.register import RegisterConfig
from yolo_ray.errors import UserError
from yolo_ray.gate.parts import Candidate
from yolo_ray.track.client import absolute_uri, connect, usable
from yolo_ray.track.observer import RUN_FILE
from yolo_ray.track.run import code_tags

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_ID = re.compile(r"[0-9a-f]{32}")
GIT = "mlflow.source.git.commit"
REMEDY = "start the server, or pass mlflow.uri= with the one that holds your runs"


@dataclass(frozen=True)
class Source:
    """A place of MLflow and what to register from it; ``folder`` or ``run_id`` or neither (going back)."""

    uri: str
    folder: Path | None
    run_id: str | None


def locate(config: RegisterConfig) -> Source:
    """Which MLflow, and which run.

    Raises:
        UserError: neither a run's folder nor an id.
    """
    project = Path(config.project).expanduser()
    if config.run is None:
        return Source(absolute_uri(config.mlflow.uri, project), None, None)
    folder = Path(config.run).expanduser()
    if folder.is_dir():
        return _of_folder(folder.resolve(), config.mlflow.uri)
    if not RUN_ID.fullmatch(config.run):
        raise UserError(
            f"run={config.run} is neither the folder of a run nor the id of one in MLflow (32 hexadecimal digits): "
            "pass run=runs/NAME"
        )
    return Source(absolute_uri(config.mlflow.uri, project), None, config.run)


def _of_folder(folder: Path, uri: str | None) -> Source:
    for name in (RUN_CONFIG, "weights/best.pt"):
        if not (folder / name).is_file():
            raise UserError(
                f"run={folder} has no {name}: pass the folder of a run that was evaluated at least once"
            )
    known = folder / RUN_FILE
    try:
        tracked = json.loads(known.read_text()) if known.is_file() else {}
        tracked_uri, run_id = tracked.get("uri"), tracked.get("run_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{known} cannot be read ({error}): delete it, the run is registered without its id then"
        ) from error
    chosen = absolute_uri(uri or tracked_uri, folder.parent)
    return Source(chosen, folder, run_id if chosen == tracked_uri else None)


def find_candidate(client: MlflowClient, source: Source, folder: Path) -> Candidate:
    """The run that ``source`` names, its weights copied into ``folder`` unless they are here.

    Raises:
        UserError: MLflow knows no such run, or it left no weights.
    """
    if source.folder is not None:
        tags = {} if source.run_id is None else _tags_if_there(client, source.run_id)
        known = source.run_id if tags is not None else None
        text = (source.folder / RUN_CONFIG).read_text(encoding="utf-8")
        weights = source.folder / "weights" / "best.pt"
        return _candidate(str(source.folder), weights, known, text, tags or {})
    assert source.run_id is not None, "locate gives a folder or an id"
    return _from_server(client, source, folder)


def _from_server(client: MlflowClient, source: Source, folder: Path) -> Candidate:
    from mlflow.exceptions import MlflowException

    assert source.run_id is not None
    try:
        data = client.get_run(source.run_id).data
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise UserError(
            f"run={source.run_id} is not in {source.uri}: pass mlflow.uri= with the server that holds it, or the "
            "run's folder"
        ) from error
    listed = {entry.path for entry in client.list_artifacts(source.run_id, "weights")}
    if "weights/best.pt" not in listed:
        raise UserError(
            f"run={source.run_id} has no weights/best.pt among its files: wait for its end, or pass the run's folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    weights = Path(client.download_artifacts(source.run_id, "weights/best.pt", str(folder)))
    text = yaml.safe_dump(dict(data.params), sort_keys=True)
    return _candidate(source.run_id, weights, source.run_id, text, data.tags)


def _tags_if_there(client: MlflowClient, run_id: str) -> dict[str, str] | None:
    """The tags of a run; None if somebody deleted it."""
    from mlflow.exceptions import MlflowException

    try:
        return dict(client.get_run(run_id).data.tags)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _candidate(
    source: str, weights: Path, run_id: str | None, text: str, tags: Mapping[str, str]
) -> Candidate:
    facts = {"data_digest": tags.get("data_digest", "unknown")}
    code = tags if GIT in tags else code_tags()
    facts["git_commit"] = code.get(GIT, "unknown")
    facts |= {name: value for name, value in code.items() if name.startswith("version.")}
    return Candidate(source, weights, _data_of(text), run_id, text, facts)


def _data_of(text: str) -> str | None:
    """``data.path`` of a run's options, nested or dotted."""
    options: Any = yaml.safe_load(text)
    if not isinstance(options, dict):
        return None
    section = options.get("data")
    found = options.get("data.path") or (section.get("path") if isinstance(section, dict) else None)
    return found if isinstance(found, str) else None


def reach(uri: str, *, create: bool) -> MlflowClient:
    """A client, after the first call that meets the server.

    Raises:
        UserError: it does not answer.
    """
    with usable(uri, REMEDY):
        client = connect(uri, create=create)
        client.search_experiments(max_results=1)
        return client
