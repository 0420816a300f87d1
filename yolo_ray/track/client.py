"""The door to MLflow: connect, describe a run, deliver operations."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from yolo_ray.errors import UserError
from yolo_ray.track.outbox import Operation, Refused, short

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

START_S = 15.0  # how long a server may take to answer the first call
MAX_NAME, MAX_PARAM, MAX_TAG, MAX_BATCH = 250, 6000, 5000, 100  # MLflow's limits, 3.17
# Few, short requests: the outbox has retries of its own. Values the user has set stay.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout belongs to the pipeline's result
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST", "INVALID_STATE"}
REMEDY = "start the server, pass another mlflow.uri=, or mlflow.enabled=false"


class Sender:
    """Delivers operations; the client is built by the first call, in the thread that makes it."""

    def __init__(self, uri: str, client: MlflowClient | None = None) -> None:
        self._uri = uri
        self._client = client

    def __call__(self, operation: Operation) -> None:
        """Deliver one operation. Raises Refused if the server will never take it."""
        if self._client is None:
            self._client = connect(self._uri, create=False)
        from mlflow.exceptions import MlflowException

        try:
            SEND[operation["kind"]](self._client, operation)
        except MlflowException as error:
            if error.error_code in REFUSALS:
                raise Refused(short(error)) from error
            raise


_STORE_KEYS = frozenset({
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCESS_KEY",
})  # fmt: skip


def access_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What the environment says of reaching a server: token, user and password, certificates. Secrets.

    The keys of an artifact store too, which clients of a server that does not pass artifacts on reach by themselves.
    They travel pickled with the tracker, and not in Ray's runtime environment: Ray writes that to its logs.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in _STORE_KEYS
        or (name.startswith(("MLFLOW_TRACKING_", "MLFLOW_S3_")) and name != "MLFLOW_TRACKING_URI")
    }


def absolute_uri(uri: str | None, project: Path) -> str:
    """The URI as any process may use it: SQLite's path made absolute, the default filled in."""
    if uri is not None and "@" in urlsplit(uri).netloc:
        raise UserError(
            f"mlflow.uri={uri.partition('://')[0]}://...@... holds a user or password, which would be written to "
            "config.yaml and logs: leave them out of the address and set MLFLOW_TRACKING_TOKEN, or "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if uri is None:
        if "?" in str(project.resolve()):  # SQLAlchemy would cut the path there
            raise UserError(
                f"project={project} has a question mark in its path, which SQLite's address cannot hold"
            )
        return f"sqlite:///{project.resolve() / 'mlflow.db'}"
    path = _sqlite_path(uri)
    return uri if path is None else f"sqlite:///{path.resolve()}"


def metric_names(names: Sequence[str] | Mapping[str, object]) -> list[str]:
    """The names as MLflow takes them, all different.

    Letters, digits, ``_ - . /`` and space stay; others (of a class name) become ``_``; equal
    results are numbered. MLflow refuses empty, ``.`` and ``..`` parts of a path and more than
    250 characters.
    """
    taken: dict[str, None] = {}
    for name in names:
        parts = [re.sub(r"[^\w.\- ]", "_", part) for part in name.split("/") if part]
        parts = [part.replace(".", "_") if part.strip(".") == "" else part for part in parts]
        spelled = "/".join(parts)[:MAX_NAME].rstrip("/") or "_"
        candidates = (spelled[: MAX_NAME - 8] + f"_{n}" for n in range(2, len(names) + 2))
        while spelled in taken:
            spelled = next(candidates)
        taken[spelled] = None
    return list(taken)


def connect(uri: str, *, create: bool) -> MlflowClient:
    """A client of a database or server; ``create``: a missing SQLite database is made.

    Raises OSError or MlflowException, within about 15 seconds, if it cannot be used.
    """
    _prepare()
    from mlflow import MlflowClient

    path = _sqlite_path(uri)
    if path is None:
        return _within(START_S, lambda: MlflowClient(uri))
    if not create and not path.exists():  # MLflow would make an empty one on this machine
        raise FileNotFoundError(f"{path} is not on this machine")
    _check_sqlite(path)
    return MlflowClient(uri)


def connect_to_run(uri: str, run_id: str) -> MlflowClient:
    """A client of the place that holds this run already; nothing is made there.

    Raises:
        UserError: the run is not there.
        OSError, MlflowException: the place cannot be used.
    """
    from mlflow.exceptions import MlflowException

    try:
        client = connect(uri, create=False)
        _within(START_S, lambda: client.get_run(run_id))
    except (FileNotFoundError, MlflowException) as error:
        code = getattr(error, "error_code", "RESOURCE_DOES_NOT_EXIST")
        if code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise UserError(
            f"mlflow.uri={uri} does not hold run {run_id}, which this folder goes on with: pass the mlflow.uri= that "
            "mlflow.json in the folder names, bring mlflow.db and mlartifacts along with a copied folder, or pass "
            "mlflow.enabled=false"
        ) from error
    return client


@contextmanager
def usable(uri: str, remedy: str = REMEDY) -> Iterator[None]:
    """What goes wrong inside is the user's to mend: a UserError that names ``mlflow.uri``."""
    _prepare()
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError) as error:
        dead = "Max retries exceeded" in str(error)  # else a page of the HTTP library's insides
        reason = "it does not answer" if dead else short(error)
        raise UserError(f"mlflow.uri={uri} cannot be used ({reason}): {remedy}") from error


def find_experiment(client: MlflowClient, uri: str, name: str, project: Path) -> str:
    """The id of the experiment, created if missing; the first call that meets the server."""
    from mlflow.exceptions import MlflowException

    found = _within(START_S, lambda: client.get_experiment_by_name(name))
    if found is not None and found.lifecycle_stage == "deleted":
        raise UserError(
            f"mlflow.experiment={name} is deleted in {uri}: pass another mlflow.experiment=, "
            f"or restore it with: mlflow experiments restore -x {found.experiment_id}"
        )
    if found is not None:
        return found.experiment_id
    try:
        return client.create_experiment(name, _artifacts(uri, project))
    except MlflowException as error:
        found = client.get_experiment_by_name(name)  # another driver may have been quicker
        if found is None:
            raise error
        return found.experiment_id


def _artifacts(uri: str, project: Path) -> str | None:
    """Where artifacts go: a server decides itself; MLflow's default would be the current folder."""
    if uri.startswith(("http:", "https:", "databricks")):
        return None
    path = _sqlite_path(uri)
    folder = project if path is None else path.parent
    return (folder.resolve() / "mlartifacts").as_uri()


def create_run(
    client: MlflowClient,
    experiment_id: str,
    name: str,
    params: Mapping[str, object],
    tags: Mapping[str, str],
) -> str:
    """A new RUNNING run with its parameters and tags; its id."""
    run_id = client.create_run(experiment_id, run_name=name).info.run_id
    try:
        _describe(client, run_id, params, tags)
    except BaseException:
        client.set_terminated(run_id, "FAILED")
        raise
    return run_id


def go_on(
    client: MlflowClient, run_id: str, params: Mapping[str, object], tags: Mapping[str, str]
) -> None:
    """Parameters of a run cannot be changed in MLflow: the new values are tags."""
    old = client.get_run(run_id).data
    client.update_run(run_id, status="RUNNING")
    if "end.reason" in old.tags:
        client.delete_tag(run_id, "end.reason")
    new = {name: value for name, value in params.items() if name not in old.params}
    changed = {
        f"changed.{name}": str(value)
        for name, value in params.items()
        if name in old.params and old.params[name] != str(value)[:MAX_PARAM]
    }
    _describe(client, run_id, new, {**tags, **changed})


def _describe(
    client: MlflowClient, run_id: str, params: Mapping[str, object], tags: Mapping[str, str]
) -> None:
    from mlflow.entities import Param, RunTag

    listed = [Param(name, str(value)[:MAX_PARAM]) for name, value in params.items()]
    for piece in _pieces(listed):
        client.log_batch(run_id, params=piece)
    for piece in _pieces([RunTag(name, value[:MAX_TAG]) for name, value in tags.items()]):
        client.log_batch(run_id, tags=piece)


def _send_metrics(client: MlflowClient, operation: Operation) -> None:
    from mlflow.entities import Metric

    metrics = [Metric(*entry) for entry in operation["values"]]
    client.log_batch(operation["run_id"], metrics=metrics)


def _send_file(client: MlflowClient, operation: Operation) -> None:
    if not Path(operation["path"]).exists():
        raise Refused(f"{operation['path']} is gone")
    client.log_artifact(operation["run_id"], operation["path"], operation["folder"] or None)


def _send_status(client: MlflowClient, operation: Operation) -> None:
    run_id = operation["run_id"]
    if client.get_run(run_id).info.status != "RUNNING":
        return
    if operation["reason"]:
        client.set_tag(run_id, "end.reason", operation["reason"][:MAX_TAG])
    client.set_terminated(run_id, operation["status"], end_time=operation["time_ms"])


SEND: dict[str, Callable[[MlflowClient, Operation], None]] = {
    "metrics": _send_metrics,
    "file": _send_file,
    "status": _send_status,
}


def _prepare() -> None:
    """Before MLflow is imported, here and not at our own import: it reads its environment."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow.store", "alembic"):  # a page of messages about creating tables
        logging.getLogger(name).setLevel(logging.WARNING)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call, or TimeoutError; for clients that retry for minutes on their own."""
    results: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    return results[0]


def _check_sqlite(path: Path) -> None:
    """Raise OSError for a database that cannot be written: MLflow would retry for minutes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=5.0)
        try:
            connection.execute("PRAGMA schema_version")
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from error


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def _pieces(items: list[T]) -> Iterator[list[T]]:
    return (items[at : at + MAX_BATCH] for at in range(0, len(items), MAX_BATCH))
