"""What a prediction's actors and driver do, without a cluster: the boxes, the shards, the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pytest

from pipelines.predict import main
from tests.lively import save_lively, tiny_model
from yolo_ray.augment.images import decode_photo, letterbox, read_photo, write_photo
from yolo_ray.augment.video import count_frames, read_frames
from yolo_ray.cluster import predict as predict_module
from yolo_ray.cluster import predicting
from yolo_ray.cluster.predicting import PredictJob, Predictor, Shard
from yolo_ray.config.deploy import PredictConfig
from yolo_ray.config.load import load
from yolo_ray.config.schema import JudgeConfig
from yolo_ray.data.records import load_records
from yolo_ray.errors import UserError
from yolo_ray.model.build import load_detector
from yolo_ray.track.pictures import annotated_jpeg
from yolo_ray.train.evaluate import eval_batch, evaluate

SIDE = 96


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    return save_lively(folder / "w.pt", tiny_model(folder), imgsz=SIDE)


def make_video(path: Path, frames: int) -> Path:
    """Frame n is as bright as 10 n."""
    video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (96, 64))
    for number in range(frames):
        video.write(np.full((64, 96, 3), 10 * number, np.uint8))
    video.release()
    return path


def predictor(
    weights: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Predictor:
    monkeypatch.setattr(predicting, "held_weights", lambda name, content: nullcontext(Path(name)))
    names = tuple(load_detector(weights).names)
    choice = JudgeConfig(conf=0.05, iou=0.7, max_det=300, nms=True)
    given: dict[str, Any] = {"choice": choice, "clip": False, "batch": 3, "threads": 2, **options}
    content: Any = None
    return Predictor(PredictJob((shard,), str(weights), content, names, SIDE, gpu=False, **given))


def table_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return pa.ipc.open_stream(answer["table"]).read_all().to_pylist()


def test_boxes_are_those_of_evaluation(
    weights: Path, tiny_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = load_records(tiny_dataset(train=1, val=7, size=120), "val", max_bad=0.0)
    paths = tuple(str(path) for path in records.paths)
    rows = table_of(predictor(weights, Shard(paths), monkeypatch, clip=True)(0))
    photos = np.stack([letterbox(read_photo(path), SIDE)[0] for path in paths])
    judged = evaluate(
        load_detector(weights),
        [eval_batch(np.arange(len(paths)), photos)],
        records,
        imgsz=SIDE,
        options=JudgeConfig(conf=0.05),
        gather=lambda item: [item],
    )
    assert sum(len(row["boxes"]) for row in rows) > 20
    for row, (_, boxes, scores, classes) in zip(rows, judged.samples, strict=True):
        order = np.argsort(-scores, kind="stable")
        mine = np.argsort(-np.array(row["scores"]), kind="stable")
        found = np.array(row["boxes"], np.float32).reshape(-1, 4)
        np.testing.assert_array_equal(found[mine], boxes[order])
        np.testing.assert_array_equal(np.array(row["scores"], np.float32)[mine], scores[order])
        assert [row["classes"][k] for k in mine] == classes[order].tolist()


def test_frames_bad_photos_and_pictures(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = make_video(tmp_path / "v.avi", 9)
    assert count_frames(str(video)) == 9
    for frames in (range(0, 9, 2), range(6, 9)):
        levels = [round(frame.mean() / 10) for _, frame in read_frames(str(video), frames)]
        assert levels == list(frames)
    shard = Shard((str(video),), range(1, 20, 4))  # the file ends before
    rows = table_of(predictor(weights, shard, monkeypatch)(0))
    assert [row["frame"] for row in rows] == [1, 5]
    good, bad = tmp_path / "good.png", tmp_path / "bad.jpg"
    write_photo(good, np.random.default_rng(0).integers(0, 255, (50, 80, 3), dtype=np.uint8))
    bad.write_bytes(b"\xff\xd8 no photo")
    answer = predictor(
        weights, Shard((str(bad), str(good))), monkeypatch, draw=annotated_jpeg, clip=True
    )(0)
    refused, found = table_of(answer)
    assert "truncated" in refused["error"] and refused["boxes"] is None and found["error"] is None
    boxes = np.array(found["boxes"])
    assert (boxes >= 0).all() and (boxes[:, [0, 2]] <= 80).all() and (boxes[:, [1, 3]] <= 50).all()
    assert answer["pictures"][0] == b""
    assert decode_photo("picture", answer["pictures"][1]).shape == (50, 80, 3)


def test_shards_keep_the_order_and_split_videos(tmp_path: Path) -> None:
    video = str(make_video(tmp_path / "m.avi", 9))
    config = load(["shard=2", "vid_stride=2"], PredictConfig)
    shards = predict_module._shards(["a.jpg", "b.jpg", "c.jpg", video, "n.jpg"], config)
    assert [shard.places for shard in shards] == [
        ("a.jpg", "b.jpg"), ("c.jpg",), (video,), (video,), (video,), ("n.jpg",),
    ]  # fmt: skip
    frames = [number for shard in shards if shard.frames for number in shard.frames]
    assert frames == [0, 2, 4, 6, 8]
    (tmp_path / "x.mp4").write_bytes(b"no video")
    for place in (str(tmp_path / "x.mp4"), "s3://bucket/x.mp4"):
        with pytest.raises(UserError, match="source="):
            predict_module._shards([place], config)


def test_a_folder_of_another_prediction_is_refused_or_left(tmp_path: Path) -> None:
    record = {"weights": "a", "photos": "b", "options": {"conf": 0.25}}
    given = load([f"out={tmp_path}/out"], PredictConfig)
    folder = predict_module._folder(given, record)
    (folder / "predict.json").write_text(json.dumps(record))
    assert predict_module._folder(given, record) == folder
    with pytest.raises(UserError, match="other options"):
        predict_module._folder(given, record | {"options": {"conf": 0.5}})
    (folder / "predict.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        predict_module._folder(given, record)


def test_predictions_never_lie_among_other_files(tmp_path: Path) -> None:
    photo = tmp_path / "mine" / "photo.jpg"
    photo.parent.mkdir()
    photo.write_bytes(b"mine")
    for out in (photo.parent, photo):
        with pytest.raises(UserError, match=r"is a file, or holds files.* new or empty"):
            predict_module._folder(load([f"out={out}"], PredictConfig), {})
    assert [path.name for path in photo.parent.iterdir()] == ["photo.jpg"]


def test_a_file_where_predictions_go_by_default_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "predict").write_bytes(b"mine")
    assert predict_module._folder(load([], PredictConfig), {}).name == "predict2"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["source=x"], "no weights given"),
        (["weights={weights}"], "no source given"),
        (["weights={weights}", "source={folder}/none"], "is not there"),
        (["weights={weights}", "source={folder}"], "holds no photo"),
        (["weights={folder}/none.pt", "source={folder}"], "none.pt is not there"),
        (["weights={weights}", "source={folder}", "imgsz=100"], "multiple"),
        (["weights={weights}", "source={folder}", "nms=false"], "NMS-free"),
    ],
)
def test_mistakes_are_told_before_a_cluster_starts(
    arguments: list[str], told: str, weights: Path, tmp_path: Path
) -> None:
    given = [text.format(weights=weights, folder=tmp_path) for text in arguments]
    with pytest.raises(UserError, match=told):
        main(given)


@pytest.mark.parametrize(
    ("argument", "told"), [("save=jpeg", "save"), ("conf=2", "conf"), ("scource=x", "did you mean")]
)
def test_wrong_options_are_named(argument: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load([argument], PredictConfig)
