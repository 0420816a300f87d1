"""Weights of a registered model, from the registry that is named and not the one of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from yolo_ray.errors import UserError
from yolo_ray.track.weights import weights_at


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with version 1 of ``pcb``, which is its champion; the environment names an empty one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    files = tmp_path / "files"
    (files / "artifacts").mkdir(parents=True)
    (files / "artifacts" / "best.pt").write_bytes(b"weights")
    artifacts = {"weights": {"path": "artifacts/best.pt"}}
    (files / "MLmodel").write_text(
        yaml.safe_dump({"flavors": {"python_function": {"artifacts": artifacts}}})
    )
    uri = f"sqlite:///{tmp_path / 'mine.db'}"
    client = MlflowClient(uri, uri)
    client.create_registered_model("pcb")
    client.create_model_version("pcb", files.as_uri())
    client.set_registered_model_alias("pcb", "champion", "1")
    return uri


@pytest.mark.parametrize("reference", ["models:/pcb@champion", "models:/pcb/1"])
def test_the_named_registry_is_asked(registry: str, reference: str) -> None:
    with weights_at(reference, registry) as weights:
        assert weights.read_bytes() == b"weights"
    assert not weights.exists(), "what was fetched must go"


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("models:/none@champion", "is not in sqlite"),
        ("models:/pcb@best", "is not in sqlite"),
        ("models:/pcb/2", "is not in sqlite"),
        ("models:/pcb", "pass models:/NAME@ALIAS or models:/NAME/VERSION"),
    ],
)
def test_what_is_not_there_is_named(registry: str, reference: str, told: str) -> None:
    with pytest.raises(UserError, match=told), weights_at(reference, registry):
        pass
