"""A shard of photos or of a video's frames to a table of detections: what the actors of a prediction do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import ray
import torch

from yolo_ray.augment.images import PhotoError, letterbox, read_photo
from yolo_ray.augment.video import read_frames
from yolo_ray.cluster.weights import held_weights
from yolo_ray.config.schema import JudgeConfig
from yolo_ray.data.storage import use_access
from yolo_ray.errors import UserError
from yolo_ray.export.session import OnnxForward
from yolo_ray.model.build import load_detector
from yolo_ray.step.precision import resolve_precision, set_kernels
from yolo_ray.train.evaluate import Forward, detect, to_original
from yolo_ray.train.graphed_eval import GraphedEval

SCHEMA = pa.schema(
    {
        "path": pa.string(),
        "frame": pa.int64(),
        "height": pa.int32(),
        "width": pa.int32(),
        "boxes": pa.list_(pa.list_(pa.float32(), 4)),
        "scores": pa.list_(pa.float32()),
        "classes": pa.list_(pa.int32()),
        "names": pa.list_(pa.string()),
        "error": pa.string(),
    }
)
T = TypeVar("T")
# Photo uint8 [h,w,3], boxes xyxy px [k,4], classes [k], scores [k], class names -> a JPEG
Draw = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Sequence[str]], bytes]


@dataclass(frozen=True)
class Shard:
    """Some photos, or some frames of one video."""

    places: tuple[str, ...]
    frames: range | None = None


@dataclass(frozen=True)
class PredictJob:
    """What every actor knows.

    Attributes:
        weights: name of the file, whose bytes are ``content``.
        clip: boxes end at the photo's edge.
        batch: photos that the network sees together.
        choice: which boxes stay.
        threads: of torch or ONNX Runtime, and as many read photos; never more than a node has CPUs.
        access: how object stores are reached.
        draw: makes an annotated picture; None: none is wanted.
    """

    shards: tuple[Shard, ...]
    weights: str
    content: ray.ObjectRef
    names: tuple[str, ...]
    imgsz: int
    choice: JudgeConfig
    clip: bool
    batch: int
    threads: int
    gpu: bool
    access: Mapping[str, str] = field(default_factory=dict)
    draw: Draw | None = None


@dataclass(frozen=True)
class _Photo:
    place: str
    frame: int | None
    pixels: np.ndarray | None  # None: it cannot be read
    error: str | None = None


class Predictor:
    """``predictor(number)``: the shard's table as Arrow bytes, its pictures, or the user's mistake."""

    def __init__(self, job: PredictJob) -> None:
        self.job = job
        use_access(job.access)
        self.threads = min(job.threads, os.cpu_count() or 1)
        torch.set_num_threads(self.threads)
        self.forward = _forward(job, self.threads)
        # What an exported file chose itself is not chosen from again.
        raw = not isinstance(self.forward, OnnxForward) or self.forward.file.layout == "raw"
        self.choice = job.choice if raw else job.choice.model_copy(update={"nms": False})

    def __call__(self, number: int) -> dict[str, Any]:
        """``number, table, pictures``, or ``number, mistake``."""
        try:
            rows, pictures = self.rows(self.job.shards[number])
        except UserError as error:  # Ray Data would wrap it beyond recognition
            return {"number": number, "mistake": str(error)}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
        return {"number": number, "table": sink.getvalue().to_pybytes(), "pictures": pictures}

    def rows(self, shard: Shard) -> tuple[list[dict[str, Any]], list[bytes]]:
        """A row of ``SCHEMA`` for each photo, in order; a JPEG for each, empty for one that cannot be read."""
        rows, pictures = [], []
        for photos in _groups(_photos(shard, self.threads), self.job.batch):
            for photo, row, picture in self._look_at(photos):
                rows.append({"path": photo.place, "frame": photo.frame, "error": photo.error} | row)
                pictures.append(picture)
        return rows, pictures if self.job.draw else []

    def _look_at(self, photos: Sequence[_Photo]) -> Iterator[tuple[_Photo, dict[str, Any], bytes]]:
        size = self.job.imgsz
        # A captured forward pass takes batches of one size.
        squares = np.zeros((self.job.batch, size, size, 3), np.uint8)
        for square, photo in zip(squares, photos, strict=False):
            if photo.pixels is not None:
                square[:] = letterbox(photo.pixels, size)[0]
        if self.forward.device.type == "cpu":
            squares = squares[: len(photos)]
        images = torch.from_numpy(squares).permute(0, 3, 1, 2).contiguous()
        found = detect(self.forward, images.to(self.forward.device), self.choice)
        for photo, detections in zip(photos, found, strict=False):
            yield photo, *self._row(photo, detections)

    def _row(self, photo: _Photo, found: np.ndarray) -> tuple[dict[str, Any], bytes]:
        if photo.pixels is None:
            return {}, b""
        height, width = photo.pixels.shape[:2]
        boxes = to_original(found[:, :4], height, width, self.job.imgsz)
        if self.job.clip:
            boxes = boxes.clip(0, np.array([width, height, width, height], np.float32))
        scores, classes = found[:, 4], found[:, 5].astype(np.int32)
        row = {
            "height": height,
            "width": width,
            "boxes": boxes.tolist(),
            "scores": scores.tolist(),
            "classes": classes.tolist(),
            "names": [self.job.names[index] for index in classes],
        }
        draw = self.job.draw
        return row, draw(photo.pixels, boxes, classes, scores, self.job.names) if draw else b""


def _forward(job: PredictJob, threads: int) -> Forward:
    device = torch.device("cuda" if job.gpu else "cpu")
    with held_weights(job.weights, job.content) as path:
        if path.suffix.lower() == ".onnx":
            return OnnxForward(path, threads=threads, gpu=job.gpu)
        # The kernels of training's evaluations, so that the boxes are theirs.
        set_kernels(resolve_precision("auto", device), deterministic=True)
        detector = load_detector(path).to(device).eval()
        return GraphedEval(detector, nms=job.choice.nms, mode="auto")


def _photos(shard: Shard, threads: int) -> Iterator[_Photo]:
    """The shard's photos in order; those of a folder are read ahead."""
    if shard.frames is not None:
        for number, pixels in read_frames(shard.places[0], shard.frames):
            yield _Photo(shard.places[0], number, pixels)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
        for some in _groups(shard.places, 4 * threads):
            yield from pool.map(_read, some)


def _read(place: str) -> _Photo:
    try:
        return _Photo(place, None, read_photo(place))
    except PhotoError as error:
        return _Photo(place, None, None, error.reason)


def _groups(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group
