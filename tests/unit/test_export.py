"""Exported files give what torch gives, and Ultralytics opens them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.lively import lively_detector, tiny_model
from yolo_ray.augment.images import write_photo
from yolo_ray.errors import UserError
from yolo_ray.export.check import (
    CheckFailed,
    Tolerance,
    check_best,
    check_nms,
    check_raw,
    images_of,
    made_up_photos,
)
from yolo_ray.export.formats import FORMATS
from yolo_ray.export.network import Deployed, ExportPlan, best_rows, split_raw
from yolo_ray.export.session import OnnxForward
from yolo_ray.export.write import export_detector, export_onnx
from yolo_ray.model.build import Detector, build_detector
from yolo_ray.model.detect import decode, detect_nms, detect_one_to_one

IMGSZ = 96
CONF = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


@pytest.fixture(scope="module")
def detector(folder: Path) -> Detector:
    return lively_detector(tiny_model(folder), imgsz=IMGSZ)


@pytest.fixture(scope="module")
def dual(folder: Path) -> Detector:
    return lively_detector(tiny_model(folder, dual=True), imgsz=IMGSZ)


@pytest.fixture(scope="module")
def files(detector: Detector, dual: Detector, folder: Path) -> dict[str, Path]:
    """Exports by layout."""
    plan = ExportPlan(IMGSZ, nms=True, conf=CONF)
    return {
        "raw": export_onnx(detector, folder / "raw.onnx", imgsz=IMGSZ, nms=False),
        "nms": export_detector(detector, folder / "nms.onnx", "onnx", plan).path,
        "best": export_onnx(dual, folder / "best.onnx", imgsz=IMGSZ, nms=False),
    }


def torch_rows(detector: Detector, photos: np.ndarray, conf: float) -> list[np.ndarray]:
    """Our own detections of square photos, the reference."""
    with torch.inference_mode():
        head = detector(torch.from_numpy(images_of(photos)))[-1]
        boxes, scores = decode(head, detector.strides, detector.reg_max, IMGSZ)
    if detector.dual:
        rows = detect_one_to_one(boxes, scores, conf=conf, max_det=300)
    else:
        rows = detect_nms(boxes, scores, conf=conf, iou=0.7, max_det=300)
    return [one.numpy() for one in rows]


def assert_same_rows(got: np.ndarray, want: np.ndarray) -> None:
    """Equal but for the order of scores that are equal to six digits."""
    assert got.shape == want.shape
    order = [
        np.lexsort((*np.round(rows[:, :4], 1).T, rows[:, 5], np.round(-rows[:, 4], 4)))
        for rows in (got, want)
    ]
    np.testing.assert_allclose(got[order[0]], want[order[1]], atol=0.02, rtol=0)


@pytest.mark.parametrize("layout", ["raw", "nms", "best"])
def test_a_file_gives_our_boxes(
    layout: str, files: dict[str, Path], detector: Detector, dual: Detector
) -> None:
    ours = dual if layout == "best" else detector
    photos = made_up_photos(IMGSZ, 6)[3:]  # others than the export looked at, and an odd number
    forward = OnnxForward(files[layout])
    assert (forward.file.layout, forward.file.imgsz) == (layout, IMGSZ)
    boxes, scores = forward(torch.from_numpy(photos.transpose(0, 3, 1, 2).copy()))
    if layout == "raw":
        rows = detect_nms(boxes, scores, conf=CONF, iou=0.7, max_det=300)
    else:
        rows = detect_one_to_one(boxes, scores, conf=CONF, max_det=300)
    wanted = torch_rows(ours, photos, CONF)
    assert sum(map(len, wanted)) > 20
    for got, want in zip(rows, wanted, strict=True):
        assert_same_rows(got.numpy(), want)


@pytest.mark.parametrize("layout", ["raw", "nms", "best"])
def test_ultralytics_finds_the_same_boxes(
    layout: str, files: dict[str, Path], detector: Detector, dual: Detector, tmp_path: Path
) -> None:
    from ultralytics import YOLO
    from ultralytics.nn.autobackend import AutoBackend
    from ultralytics.utils.nms import non_max_suppression

    ours = dual if layout == "best" else detector
    photos = made_up_photos(IMGSZ, 2)
    wanted = torch_rows(ours, photos, CONF)
    backend: Any = AutoBackend(str(files[layout]), device=torch.device("cpu"))
    assert backend.names == dict(enumerate(ours.names)) and backend.stride == 32
    answers = backend(torch.from_numpy(images_of(photos)))
    given: Any = non_max_suppression(
        answers, CONF, 0.7, multi_label=True, max_det=300, end2end=backend.end2end
    )
    for got, want in zip(given, wanted, strict=True):
        assert_same_rows(got.numpy(), want)
    path, busiest = tmp_path / "a.png", int(np.argmax([len(rows) for rows in wanted]))
    write_photo(path, photos[busiest])
    # Its predictor keeps the best class of a box only; ours, like its validation, all of them.
    model: Any = YOLO(str(files[layout]), task="detect")
    result = model.predict(
        str(path), conf=CONF, iou=0.7, imgsz=IMGSZ, verbose=False, device="cpu", save=False
    )[0]
    assert result.names == dict(enumerate(ours.names))
    theirs = result.boxes.data.numpy()
    assert len(theirs) > 1
    for row in theirs:
        inside = np.clip(wanted[busiest][:, :4], 0, IMGSZ)
        near = np.abs(inside - row[:4]).max(1) < 0.05
        assert (
            near
            & (wanted[busiest][:, 5] == row[5])
            & (np.abs(wanted[busiest][:, 4] - row[4]) < 1e-3)
        ).any()


def test_files_hold_no_word_of_this_machine(files: dict[str, Path]) -> None:
    for path in files.values():
        content = path.read_bytes()
        assert str(Path(__file__).resolve().parents[2]).encode() not in content
        assert not re.search(rb"site-packages|\.py\"", content)


def test_input_and_metadata_are_ultralytics(files: dict[str, Path]) -> None:
    model = onnx.load(str(files["raw"]))
    entry = model.graph.input[0]
    dims = entry.type.tensor_type.shape.dim
    assert (entry.name, [dim.dim_value for dim in dims][1:]) == ("images", [3, IMGSZ, IMGSZ])
    assert dims[0].dim_param == "batch"
    told = {prop.key: prop.value for prop in model.metadata_props}
    assert told["names"] == "{0: 'a', 1: 'b', 2: 'c'}"
    assert (told["task"], told["imgsz"], told["stride"]) == ("detect", f"[{IMGSZ}, {IMGSZ}]", "32")


def test_a_failed_check_leaves_no_file(
    detector: Detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph whose weights are not those of the network, as a broken exporter would make it."""
    path = tmp_path / "a.torchscript"
    path.write_bytes(b"old")
    other = Deployed(detector, ExportPlan(IMGSZ))
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    kind = FORMATS["torchscript"]
    monkeypatch.setitem(
        FORMATS,
        "torchscript",
        type(kind)(kind.suffix, lambda _, *rest: kind.build(other, *rest), kind.open),
    )
    with pytest.raises(CheckFailed, match=r"is not written.*differ by up to"):
        export_detector(detector, path, "torchscript", ExportPlan(IMGSZ))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("nms", [False, True])
def test_torchscript(nms: bool, detector: Detector, tmp_path: Path) -> None:
    plan = ExportPlan(IMGSZ, nms=nms, conf=CONF)
    done = export_detector(detector, tmp_path / "a.torchscript", "torchscript", plan)
    assert done.layout == ("nms" if nms else "raw") and done.figures["boxes_compared"] > 100
    if nms:
        assert done.figures["nms_boxes"] > 100
        photos = made_up_photos(IMGSZ, 3)
        rows = FORMATS["torchscript"].open(done.path)(images_of(photos))
        for got, want in zip(rows, torch_rows(detector, photos, CONF), strict=True):
            assert_same_rows(got[got[:, 4] > 0], want)


@pytest.mark.parametrize("kind", ["torchscript", "onnx"])
def test_half(kind: str, folder: Path, tmp_path: Path) -> None:
    """With fresh weights: the lively ones make a thousandth of the last digit as large as a box."""
    fresh = build_detector(tiny_model(folder), ("a", "b", "c"), imgsz=IMGSZ, seed=0).eval()
    plan = ExportPlan(IMGSZ, nms=True, half=True, dynamic_batch=False)
    path = tmp_path / f"a.{kind}"
    figures = export_detector(fresh, path, kind, plan).figures
    assert figures["boxes_compared"] > 100 and 0 < figures["max_score"] < 1e-3
    if kind == "onnx":
        assert OnnxForward(path).file.batch == 1
        scores = OnnxForward(path)(torch.zeros(3, 3, IMGSZ, IMGSZ, dtype=torch.uint8))[1]
        assert scores.shape == (3, 300, 3) and scores.dtype == torch.float32


def test_ultralytics_opens_torchscript(detector: Detector, tmp_path: Path) -> None:
    from ultralytics.nn.autobackend import AutoBackend

    path = export_detector(
        detector, tmp_path / "a.torchscript", "torchscript", ExportPlan(IMGSZ)
    ).path
    backend: Any = AutoBackend(str(path), device=torch.device("cpu"))
    images = torch.from_numpy(images_of(made_up_photos(IMGSZ, 2)))
    with torch.inference_mode():
        want = Deployed(detector, ExportPlan(IMGSZ))(images)
    torch.testing.assert_close(backend(images), want, atol=1e-3, rtol=1e-5)
    assert backend.names == {0: "a", 1: "b", 2: "c"} and backend.imgsz == [IMGSZ, IMGSZ]


@pytest.mark.slow
def test_aoti(detector: Detector, tmp_path: Path) -> None:
    done = export_detector(detector, tmp_path / "a.pt2", "aoti", ExportPlan(IMGSZ))
    assert done.figures["boxes_compared"] > 100 and list(tmp_path.iterdir()) == [done.path]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["yolo11n", "yolo26n", "yolov10n", "yolo12n", "yolov9t", "yolov8n", "yolov5n"]
)
def test_every_family_as_onnx(family: str, tmp_path: Path) -> None:
    """Passes its own check, which compares with torch."""
    ours = lively_detector(f"{family}.yaml", imgsz=IMGSZ)
    for nms in (False, True):
        figures = export_detector(
            ours, tmp_path / "a.onnx", "onnx", ExportPlan(IMGSZ, nms=nms)
        ).figures
        assert figures["boxes_compared"] > 100


def test_aoti_without_a_compiler_is_a_sentence(
    detector: Detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match="no compiler"):
        export_detector(detector, tmp_path / "a.pt2", "aoti", ExportPlan(IMGSZ))
    with pytest.raises(UserError, match="has no nms=true"):
        export_detector(detector, tmp_path / "a.pt2", "aoti", ExportPlan(IMGSZ, nms=True))


def test_a_side_that_does_not_fit_is_refused(detector: Detector, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use imgsz=128"):
        export_onnx(detector, tmp_path / "a.onnx", imgsz=100, nms=False)


def test_files_that_are_no_detectors_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(files["raw"].read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be opened as ONNX"):
        OnnxForward(path)
    model = onnx.load(str(files["raw"]))
    del model.metadata_props[:]
    onnx.save(model, str(path))
    with pytest.raises(UserError, match="which classes"):
        OnnxForward(path)
    with pytest.raises(UserError, match="not a file"):
        OnnxForward(tmp_path / "none.onnx")


def test_the_checks_can_fail() -> None:
    rng = np.random.default_rng(0)
    raw = rng.random((2, 7, 400), np.float32) * np.array([90] * 4 + [1] * 3, np.float32)[:, None]
    exact = Tolerance(0.1, 1e-3, 0.0)
    assert check_raw(raw, raw + 1e-4, exact)["boxes_compared"] == 800
    with pytest.raises(CheckFailed, match="boxes differ"):
        check_raw(raw, raw + 0.2, exact)
    with pytest.raises(CheckFailed, match="not finite"):
        check_raw(raw, raw * np.nan, exact)
    with pytest.raises(CheckFailed, match="its answer is"):
        check_raw(raw, raw[:1], exact)
    boxes, scores = split_raw(torch.from_numpy(raw))
    rows = best_rows(boxes, scores, 300).numpy()
    assert check_best(rows, rows[:, ::-1][:, ::-1], exact)["boxes_compared"] > 500
    moved = rows.copy()
    moved[:, 5] = (moved[:, 5] + 1) % 3
    with pytest.raises(CheckFailed):
        check_best(rows, moved, exact)
    plan = ExportPlan(96, nms=True)
    kept = np.zeros((2, 300, 6), np.float32)
    with pytest.raises(CheckFailed, match="otherwise"):
        check_nms(raw, [(0.5, kept)], plan)


def test_best_rows_are_the_best_pairs() -> None:
    rng = np.random.default_rng(1)
    boxes, scores = (
        torch.from_numpy(rng.random((2, 20, 4))),
        torch.from_numpy(rng.random((2, 20, 3))),
    )
    rows = best_rows(boxes, scores, 300)
    assert rows.shape == (2, 300, 6) and not rows[:, 60:].any()
    for image, want in enumerate(detect_one_to_one(boxes, scores, conf=0.0, max_det=60)):
        torch.testing.assert_close(rows[image, :60].float(), want)
