"""A user's mistake: one sentence, exit 2, no traceback, no run left behind. None of these reaches Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelines import evaluate, train
from tests.synthetic import make_dataset
from yolo_ray.entry import run


def labels(data: Path, split: str = "train") -> list[Path]:
    return sorted((data.parent / "labels" / split).glob("*.txt"))


def photos(data: Path, split: str = "train") -> list[Path]:
    return sorted((data.parent / "images" / split).iterdir())


def class_out_of_range(data: Path) -> None:
    with open(labels(data)[1], "a") as file:
        file.write("7 0.5 0.5 0.1 0.1\n")


def nan_box(data: Path) -> None:
    labels(data)[0].write_text("0 nan 0.5 0.1 0.1\n")


def negative_box(data: Path) -> None:
    labels(data)[0].write_text("0 0.5 -0.5 0.1 0.1\n")


def truncated_photo(data: Path) -> None:
    photo = photos(data)[2]
    photo.write_bytes(photo.read_bytes()[:-40])


def empty_photo(data: Path) -> None:
    photos(data)[2].write_bytes(b"")


def no_labels(data: Path) -> None:
    for path in labels(data):
        path.unlink()


def no_photos(data: Path) -> None:
    for path in photos(data, "val"):
        path.unlink()


def no_split(data: Path) -> None:
    data.write_text(data.read_text().replace("val: images/val\n", ""))


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (class_out_of_range, "0001.txt:"),
    (nan_box, "0000.txt:1"),
    (negative_box, "0000.txt:1"),
    (truncated_photo, "0002.jpg"),
    (empty_photo, "0002.jpg"),
    (no_labels, "label"),
    (no_photos, "val"),
    (no_split, "val"),
]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], pipeline=train) -> str:
    """The one sentence of a refused call."""
    code = run(pipeline.main, arguments)
    out, err = capsys.readouterr()
    assert code == 2, err
    assert json.loads(out.strip().splitlines()[-1])["exit"] == 2
    assert "Traceback" not in err
    (sentence,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return sentence


@pytest.mark.parametrize(
    ("damage", "named"), DAMAGE, ids=lambda value: getattr(value, "__name__", "")
)
def test_bad_data(
    damage: Callable[[Path], None], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "d", train=6, val=2, size=64)
    damage(data)
    sentence = refused([f"data={data}", f"project={tmp_path}/runs", "imgsz=64"], capsys)
    assert named in sentence
    assert not (tmp_path / "runs").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["imgsz=100"], "imgsz=96"),
        (["model=yolo11x9.yaml"], "did you mean"),
        (["model=yolo11n.pt"], "yolo11n.yaml"),
        (["lr=0.1"], "lr0"),
        (["epochs=many"], "epochs"),
        (["mosiac=0"], "did you mean"),
        (["workers=7", "batch=8"], "cluster.workers"),
        (["batch=1", "cluster.workers=2"], "batch"),
        (["device=0"], "device"),
        (["resume=nowhere"], "nowhere"),
        (["multi_scale=0.1"], "multi_scale=0.5 or more"),
        (["freeze=[0,24]"], "freeze=[0, 24] names layers that the model does not have"),
        (["freeze=24"], "leaves nothing to train"),
        (["albumentations=[{transform: Blurr}]"], "Blur"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "d", train=6, val=2, size=64)
    sentence = refused([f"data={data}", f"project={tmp_path}/runs", "imgsz=64", *arguments], capsys)
    assert named in sentence


def test_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused([f"data={tmp_path}/nowhere.yaml"], capsys)
    assert "data=path/to/data.yaml" in refused([], capsys)


def test_fewer_photos_than_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "d", train=2, val=1, size=64)
    sentence = refused([f"data={data}", "imgsz=64", "batch=4", "cluster.workers=3"], capsys)
    assert "2 training photos" in sentence and "lower cluster.workers" in sentence


def test_output_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_dataset(tmp_path / "d", train=6, val=2, size=64)
    (tmp_path / "file").write_text("in the way")
    sentence = refused([f"data={data}", "imgsz=64", f"project={tmp_path}/file/runs"], capsys)
    assert "pass project=" in sentence
    assert (tmp_path / "file").read_text() == "in the way"
    sentence = refused([f"data={data}", "imgsz=64", "project=/proc/runs"], capsys)
    assert "pass project=" in sentence


def test_weights_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_dataset(tmp_path / "d", train=6, val=2, size=64)
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "other.pt")
    arguments = [f"data={data}", f"project={tmp_path}/runs", f"model={tmp_path}/other.pt"]
    assert "other.pt" in refused(arguments, capsys)
    assert "other.pt" in refused([f"data={data}", f"weights={tmp_path}/other.pt"], capsys, evaluate)
    assert "weights=" in refused([f"data={data}"], capsys, evaluate)
    assert "option of training" in refused([f"data={data}", "lr0=0.1"], capsys, evaluate)
