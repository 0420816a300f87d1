"""The model's file of a run: kept in its folder, and found there when the original has gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from yolo_ray.cluster.folder import find_model, keep_model
from yolo_ray.cluster.sentences import loaded_sentence
from yolo_ray.config.load import load
from yolo_ray.config.schema import TrainConfig
from yolo_ray.config.tune import TuneConfig
from yolo_ray.errors import UserError
from yolo_ray.model.build import build_detector, save_weights

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights for eighty classes, whose class branch is wider than that of a new model for two."""
    path = tmp_path_factory.mktemp("zoo") / "many.pt"
    many = build_detector("yolov8n.yaml", [f"class{i}" for i in range(80)], imgsz=64, seed=3)
    save_weights(path, many, many.net.state_dict(), {})
    return path


def config_of(model: Path | str, folder: Path | None) -> TrainConfig:
    return TrainConfig().override({"model": str(model), "resume": folder and str(folder)})


def shapes(model: str) -> dict[str, torch.Size]:
    net = build_detector(model, NAMES, imgsz=64, seed=0).net
    return {name: tensor.shape for name, tensor in net.state_dict().items()}


def test_a_model_that_has_gone_is_found_in_the_run(weights: Path, tmp_path: Path) -> None:
    mine = tmp_path / "zoo" / "mine.pt"
    mine.parent.mkdir()
    mine.write_bytes(weights.read_bytes())
    run = tmp_path / "run"
    run.mkdir()
    source = find_model(config_of(mine, None))
    kept = keep_model(run, source)
    assert source == str(mine) and kept == str(run / "model" / "mine.pt")
    assert find_model(config_of(mine, run)) == kept, "the file may have changed since"
    before = shapes(source)
    assert before != shapes("yolov8n.yaml"), "a case that tells nothing"
    mine.unlink()
    assert find_model(config_of(mine, None)) == str(mine), "only a resume looks elsewhere"
    config = config_of(mine, run)
    found = find_model(config)
    assert found == kept and shapes(found) == before
    assert keep_model(run, found) == kept
    detector = build_detector(found, NAMES, imgsz=64, seed=0)
    assert loaded_sentence(config, detector, found) == (
        f"the architecture is that of {kept}, the tensors are those of the checkpoint"
    )
    assert [path.name for path in run.rglob("*.*")] == ["mine.pt"], "no other file is left"


def test_runs_that_kept_nothing_have_their_own_weights(weights: Path, tmp_path: Path) -> None:
    detector = build_detector(str(weights), NAMES, imgsz=64, seed=0)
    last = tmp_path / "weights" / "last.pt"
    save_weights(last, detector, detector.net.state_dict(), {})
    gone = tmp_path / "gone.pt"
    assert find_model(config_of(gone, tmp_path)) == str(last)
    assert keep_model(tmp_path, str(last)) == str(last), "a file of the run is not copied"
    assert shapes(str(last)) == shapes(str(weights)), "the width of the class branch too"
    last.unlink()
    assert find_model(config_of(gone, tmp_path)) == str(gone), "which says that it is missing"


def test_a_name_is_no_file(tmp_path: Path) -> None:
    assert keep_model(tmp_path, "yolo11n.yaml") == "yolo11n.yaml"
    assert find_model(config_of("yolo11n.yaml", tmp_path)) == "yolo11n.yaml"
    assert not list(tmp_path.iterdir())


def test_the_first_copy_stays(weights: Path, tmp_path: Path) -> None:
    kept = Path(keep_model(tmp_path, str(weights)))
    other = tmp_path.parent / "other" / weights.name
    other.parent.mkdir(exist_ok=True)
    other.write_bytes(b"something else")
    assert keep_model(tmp_path, str(other)) == str(kept)
    assert kept.read_bytes() == weights.read_bytes()


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "..", "a\\b"])
def test_the_name_of_a_run_is_no_path(name: str, tmp_path: Path) -> None:
    for schema in (TrainConfig, TuneConfig):
        with pytest.raises(UserError, match="is a path"):
            load(["data=d.yaml", f"project={tmp_path}/p", f"name={name}"], schema)
