"""Predict on any number of photos: shards given to the cluster, one Parquet file each, resumable."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from yolo_ray.augment.integrity import PhotoError
from yolo_ray.augment.video import VIDEO_SUFFIXES, count_frames, is_video
from yolo_ray.cluster.folder import CLAIM, check_writable, claimed
from yolo_ray.cluster.predicting import SCHEMA, Draw, PredictJob, Predictor, Shard
from yolo_ray.cluster.preflight import Placement, connect, place
from yolo_ray.cluster.scan import Counted
from yolo_ray.cluster.weights import Weights, WeightsAt, content_of, digest_of, open_weights
from yolo_ray.config.address import absolute_out, is_remote
from yolo_ray.config.deploy import PredictConfig, needed
from yolo_ray.config.options import RECORD as GIVEN
from yolo_ray.config.schema import JudgeConfig
from yolo_ray.data.listing import photos_of
from yolo_ray.data.shards import run_shards
from yolo_ray.data.storage import access_of
from yolo_ray.errors import UserError

RECORD = "predict.json"
DEFAULT_OUT = "runs/predict"
PARTS = "predictions"
# Options that change neither which boxes are found nor which files hold them.
_FREE = ("out", "batch", "cluster", "mlflow", GIVEN, "weights", "source")


def predict(
    config: PredictConfig, weights_at: WeightsAt, counted: Counted, draw: Draw
) -> dict[str, Any]:
    """Detections of ``config.source`` in ``config.out``; what is printed as JSON.

    A folder of the same weights, photos and options is gone on with: parts that are there stay.

    Raises:
        UserError: no such weights or photos, a folder of another prediction, a disk that is full.
    """
    reference = needed(config.weights, "weights", "runs/NAME/weights/best.pt")
    source = needed(config.source, "source", "folder/of/photos")
    with weights_at(reference, config.mlflow.uri) as path:
        weights = open_weights(path)
        weights.check_choice(conf=config.conf, nms=config.nms)
        imgsz = weights.side(config.imgsz)
        places = photos_of(source, config.split, VIDEO_SUFFIXES)
        shards = _shards(places, config)
        record = _record(config, weights, imgsz, shards)
        folder = _folder(config, record)
        with _disk_explained(folder), claimed(folder):
            _keep(folder / RECORD, json.dumps(record, indent=1) + "\n")
            missing = [n for n in range(len(shards)) if not _part(folder, n).exists()]
            if missing:
                connect(config.cluster.address)
                placement = place(config.cluster)
                job = _job(config, weights, imgsz, shards, placement)
                if "pictures" in config.save:
                    job = replace(job, draw=draw)
                _predict_missing(job, missing, placement, folder, counted)
            return {
                "out": str(folder),
                "weights": reference,
                "imgsz": imgsz,
                "kept_parts": len(shards) - len(missing),
            } | _finish(folder, config, weights.names, len(shards))


def _shards(places: list[str], config: PredictConfig) -> tuple[Shard, ...]:
    """Photos in groups, each video in runs of frames, in the order of the source."""
    shards: list[Shard] = []
    for video, group in itertools.groupby(places, is_video):
        photos = list(group)
        if not video:
            starts = range(0, len(photos), config.shard)
            shards += [Shard(tuple(photos[start : start + config.shard])) for start in starts]
            continue
        for place_ in photos:
            shards += _video_shards(place_, config)
    return tuple(shards)


def _video_shards(path: str, config: PredictConfig) -> list[Shard]:
    if is_remote(path):
        raise UserError(f"source={path}: a video is read from a disk; copy it here first")
    try:
        frames = range(0, count_frames(path), config.vid_stride)
    except PhotoError as error:
        raise UserError(f"source={error}: leave it out, or convert it to .mp4") from error
    starts = range(0, len(frames), config.shard)
    return [Shard((path,), frames[start : start + config.shard]) for start in starts]


def _record(
    config: PredictConfig, weights: Weights, imgsz: int, shards: tuple[Shard, ...]
) -> dict[str, Any]:
    """What a folder's parts depend on."""
    options = config.model_dump(mode="json", exclude=set(_FREE)) | {"imgsz": imgsz}
    places = dict.fromkeys(place_ for shard in shards for place_ in shard.places)
    content = json.dumps([*places, sum(map(_size, shards))])
    return {
        "weights": digest_of(weights.path),
        "photos": hashlib.sha256(content.encode()).hexdigest(),
        "options": options,
    }


def _folder(config: PredictConfig, record: dict[str, Any]) -> Path:
    """The folder asked for, or the first of runs/predict, runs/predict2 ... that is free or holds this prediction."""
    wanted = absolute_out(config.out or DEFAULT_OUT)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}{number}")
        there = _read_record(folder)
        if there is None and _holds_other_files(folder):
            if not config.out:
                continue
            raise UserError(
                f"out={config.out} is a file, or holds files of something else that predictions would lie among: "
                "pass a folder that is new or empty"
            )
        if there is None or there == record:
            check_writable(folder, "out")
            return folder
        if config.out:
            changed = [key for key in record if there.get(key) != record[key]]
            raise UserError(
                f"out={config.out} holds a prediction with other {' and '.join(changed)}: pass another out=, or "
                "repeat that one as it was"
            )
    raise AssertionError("counting never ends")


def _holds_other_files(folder: Path) -> bool:
    if not folder.is_dir():
        return folder.exists()
    # A run that was killed before its record was there left these.
    ours = (CLAIM, RECORD)
    return any(not one.name.startswith(ours) for one in folder.iterdir())


def _read_record(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RECORD} cannot be read ({error}): pass another out=") from error


def _job(
    config: PredictConfig,
    weights: Weights,
    imgsz: int,
    shards: tuple[Shard, ...],
    placement: Placement,
) -> PredictJob:
    return PredictJob(
        shards=shards,
        weights=str(weights.path),
        content=content_of(weights.path),
        names=weights.names,
        imgsz=imgsz,
        choice=JudgeConfig(
            conf=config.conf, iou=config.iou, max_det=config.max_det, nms=config.nms
        ),
        clip=config.clip,
        batch=config.batch,
        threads=max(1, int(placement.cpus + placement.data.cpus)),
        gpu=placement.use_gpu,
        access=access_of(place_ for shard in shards for place_ in shard.places),
    )


def _predict_missing(
    job: PredictJob, missing: list[int], placement: Placement, folder: Path, counted: Counted
) -> None:
    """Write the parts that are not there yet."""
    with counted("predicting", sum(_size(job.shards[number]) for number in missing)) as done:
        # A worker's CPUs lie on one node; those for reading may lie anywhere, and an actor that asks for them too
        # might fit nowhere.
        results = run_shards(
            Predictor, (job,), missing,
            workers=placement.workers, cpus=placement.cpus, gpus=float(placement.use_gpu),
        )  # fmt: skip
        for result in results:
            if "mistake" in result:
                raise UserError(result["mistake"])
            _write_part(folder, result)
            done(_size(job.shards[result["number"]]))


def _size(shard: Shard) -> int:
    return len(shard.places if shard.frames is None else shard.frames)


def _part(folder: Path, number: int) -> Path:
    return folder / PARTS / f"part-{number:06d}.parquet"


def _write_part(folder: Path, result: dict[str, Any]) -> None:
    """Pictures first: a part that is there is whole."""
    table = pa.ipc.open_stream(result["table"]).read_all()
    part = _part(folder, result["number"])
    pictures = folder / "pictures"
    for row, (place_, frame, picture) in enumerate(
        zip(table["path"].to_pylist(), table["frame"].to_pylist(), result["pictures"], strict=False)
    ):
        if picture:
            pictures.mkdir(exist_ok=True)
            # Photos of several folders may have one name.
            stem = Path(place_).stem + ("" if frame is None else f"_{frame:06d}")
            (pictures / f"{result['number']:06d}_{row:04d}_{stem}.jpg").write_bytes(picture)
    part.parent.mkdir(exist_ok=True)
    unfinished = part.with_suffix(".tmp")
    pq.write_table(table, unfinished)
    os.replace(unfinished, part)


def _finish(
    folder: Path, config: PredictConfig, names: tuple[str, ...], parts: int
) -> dict[str, Any]:
    """The list of bad photos, the COCO file, and counts."""
    photos = boxes = 0
    bad: list[tuple[str, str]] = []
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for row in _rows(folder, parts):
        if row["error"] is not None:
            bad.append((row["path"], row["error"]))
            continue
        photos, boxes = photos + 1, boxes + len(row["boxes"])
        if "coco" in config.save:
            images.append(_coco_image(row, len(images) + 1))
            annotations += _coco_boxes(row, len(images), len(annotations) + 1)
    _write_bad(folder / "bad.csv", bad)
    if "coco" in config.save:
        categories = [{"id": index, "name": name} for index, name in enumerate(names)]
        content = {"images": images, "categories": categories, "annotations": annotations}
        _keep(folder / "coco.json", json.dumps(content))
    return {"photos": photos, "boxes": boxes, "bad": len(bad), "parts": parts}


def _rows(folder: Path, parts: int) -> Iterator[dict[str, Any]]:
    for number in range(parts):
        try:
            yield from pq.read_table(_part(folder, number), schema=SCHEMA).to_pylist()
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{_part(folder, number)} is damaged: delete it and run again, only it is made anew"
            ) from error


def _coco_image(row: dict[str, Any], number: int) -> dict[str, Any]:
    image = {"id": number, "file_name": row["path"], "height": row["height"], "width": row["width"]}
    return image | ({} if row["frame"] is None else {"frame": row["frame"]})


def _coco_boxes(row: dict[str, Any], image: int, first: int) -> Iterator[dict[str, Any]]:
    for number, (box, score, kind) in enumerate(
        zip(row["boxes"], row["scores"], row["classes"], strict=True), start=first
    ):
        left, top, right, bottom = box
        width, height = right - left, bottom - top
        yield {
            "id": number, "image_id": image, "category_id": kind, "bbox": [left, top, width, height],
            "area": width * height, "iscrowd": 0, "score": score,
        }  # fmt: skip


def _write_bad(path: Path, bad: list[tuple[str, str]]) -> None:
    if not bad:
        path.unlink(missing_ok=True)
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "reason"), *bad])


def _keep(path: Path, content: str) -> None:
    unfinished = path.with_suffix(path.suffix + ".tmp")
    unfinished.write_text(content)
    os.replace(unfinished, path)


@contextmanager
def _disk_explained(folder: Path) -> Iterator[None]:
    """A full or vanished disk, in a sentence.

    Raises:
        UserError: instead of OSError.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(folder)):
            raise
        raise UserError(
            f"{folder} cannot be written ({error.strerror or error}): free some space, then run again; the parts "
            "written before stay"
        ) from error
