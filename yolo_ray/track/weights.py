"""One door for every way to name weights: files, folders of runs, runs and models in MLflow."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from yolo_ray.config.address import is_remote
from yolo_ray.errors import UserError
from yolo_ray.track.client import absolute_uri, connect, usable
from yolo_ray.track.source import RUN_ID

if TYPE_CHECKING:
    from mlflow import MlflowClient

FILES = (".pt", ".onnx")
_RUN_ID = re.compile(rf"(?:runs:/)?({RUN_ID.pattern})")
_MODEL = re.compile(r"models:/([^/@]+)(?:@([^/@]+)|/([0-9]+))")
_LOGGED = re.compile(r"models:/(m-[0-9a-f]+)")
_KINDS = "a .pt, an .onnx, the folder of a run, the id of an MLflow run, models:/NAME@ALIAS or models:/NAME/VERSION"


@contextmanager
def weights_at(reference: str, uri: str | None) -> Iterator[Path]:
    """The weights file that ``reference`` names, absolute; what was fetched from MLflow goes at the end.

    ``uri``: of MLflow; None: MLFLOW_TRACKING_URI, or the database of the folder ``runs``. Of a registered model that
    has both, the .pt and not the .onnx.

    Raises:
        UserError: nothing is there, or it is none of the kinds.
    """
    run = _RUN_ID.fullmatch(reference)
    if reference.startswith("models:/"):
        with tempfile.TemporaryDirectory(prefix="yolo_ray-model-") as folder:
            yield _of_model(_fetched(uri, Path(folder), reference, None), reference)
    elif run and not Path(reference).exists():
        with tempfile.TemporaryDirectory(prefix="yolo_ray-model-") as folder:
            yield _of_run(_fetched(uri, Path(folder), f"runs:/{run[1]}/weights", run[1]), reference)
    else:
        yield _on_disk(reference)


def _on_disk(reference: str) -> Path:
    if is_remote(reference):
        raise UserError(
            f"weights={reference} is an address: copy the file here, then pass its path"
        )
    path = Path(reference).expanduser().resolve()
    if path.is_dir():
        return _of_run(path / "weights", reference)
    if not path.exists():
        raise UserError(f"weights={reference} is not there; pass {_KINDS}")
    if path.suffix.lower() not in FILES:
        raise UserError(f"weights={reference} is no file of weights that is read; pass {_KINDS}")
    return path


def _of_run(folder: Path, reference: str) -> Path:
    for name in ("best.pt", "last.pt"):
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"weights={reference} has neither weights/best.pt nor weights/last.pt: pass a run that has written weights"
    )


def _of_model(folder: Path, reference: str) -> Path:
    """The artifact ``weights`` of a pyfunc model, or ``onnx`` if it has none; never a file outside its folder."""
    described = folder / "MLmodel"
    content = yaml.safe_load(described.read_text()) if described.is_file() else {}
    artifacts = content.get("flavors", {}).get("python_function", {}).get("artifacts", {})
    for name in ("weights", "onnx"):
        path = (folder / str(artifacts.get(name, {}).get("path", ""))).resolve()
        if name in artifacts and path.is_file() and folder.resolve() in path.parents:
            return path
    raise UserError(
        f"weights={reference} is a model without our artifacts 'weights' and 'onnx': register it with "
        "python -m pipelines.register, or pass its file"
    )


def _fetched(uri: str | None, folder: Path, artifact: str, run_id: str | None) -> Path:
    """A folder of artifacts, downloaded."""
    where = uri or os.environ.get("MLFLOW_TRACKING_URI")
    where = absolute_uri(where, Path("runs"))
    with usable(where):
        client = connect(where, create=False)
        import mlflow.artifacts
        from mlflow.exceptions import MlflowException

        try:
            if run_id:
                client.get_run(run_id)
                address = artifact
            else:
                address = _address_of(client, artifact)
            return Path(
                mlflow.artifacts.download_artifacts(
                    artifact_uri=address, dst_path=str(folder), tracking_uri=where
                )
            )
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise UserError(
                f"weights={artifact} is not in {where}: check the name, or pass the mlflow.uri= where it is"
            ) from error


def _address_of(client: MlflowClient, model: str) -> str:
    """Where the files of a registered model lie.

    MLflow 3.17 looks such names up in the tracking server of the environment, whatever server it is given.
    """
    named = _MODEL.fullmatch(model)
    if named is None:
        raise UserError(
            f"weights={model} names no model: pass models:/NAME@ALIAS or models:/NAME/VERSION"
        )
    name, alias, version = named.groups()
    if alias:
        version = client.get_model_version_by_alias(name, alias).version
    address = client.get_model_version_download_uri(name, str(version))
    if logged := _LOGGED.fullmatch(address):
        return client.get_logged_model(logged[1]).artifact_location
    return address
