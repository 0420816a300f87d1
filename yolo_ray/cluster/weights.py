"""A weights file on the driver and on every node: opened, judged, and sent along."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from yolo_ray.errors import UserError
from yolo_ray.export.network import check_imgsz
from yolo_ray.export.session import OnnxForward
from yolo_ray.model.build import load_detector

DEFAULT_IMGSZ = 640
# A name of weights and the address of MLflow -> the file, for as long as it is needed
WeightsAt = Callable[[str, str | None], AbstractContextManager[Path]]


@dataclass(frozen=True)
class Weights:
    """What a driver must know of a weights file.

    Attributes:
        names: class names by id.
        imgsz: side that it was trained or exported with in px, None if it does not say.
        fixed: whether it takes no other side.
        strides: of the network.
        dual: whether it has an NMS-free head to choose.
        layout: of an exported file's answers; "raw" for a .pt.
        conf: score limit that is part of the file.
    """

    path: Path
    names: tuple[str, ...]
    imgsz: int | None
    fixed: bool
    strides: tuple[int, ...]
    dual: bool
    layout: str = "raw"
    conf: float = 0.0

    def side(self, imgsz: int | None) -> int:
        """The side of the square photos: what is asked for, or its own.

        Raises:
            UserError: it does not take that side.
        """
        side = imgsz or self.imgsz or DEFAULT_IMGSZ
        if self.fixed and side != self.imgsz:
            raise UserError(
                f"imgsz={side}, but {self.path.name} was exported for imgsz={self.imgsz} alone: leave imgsz out, "
                f"or export it again with imgsz={side}"
            )
        check_imgsz(side, self.strides)
        return side

    def check_choice(self, *, conf: float, nms: bool) -> None:
        """Refuse options that this file cannot follow.

        Raises:
            UserError: with the remedy.
        """
        if conf < self.conf:
            raise UserError(
                f"conf={conf:g}, but {self.path.name} holds its own NMS, which drops scores below {self.conf:g}: "
                f"pass conf={self.conf:g} or more, or export it with nms=false"
            )
        if not nms and self.layout == "raw" and not self.dual:
            raise UserError(
                f"nms=false needs a model with an NMS-free head (YOLOv10 or YOLO26), which {self.path.name} has not: "
                "leave nms=true"
            )


def open_weights(path: Path) -> Weights:
    """Read a .pt or an .onnx.

    Raises:
        UserError: it cannot be read, or is no detector.
    """
    if path.suffix.lower() == ".onnx":
        file = OnnxForward(path, threads=1).file
        return Weights(
            path,
            file.names,
            file.imgsz,
            file.imgsz is not None,
            (file.stride,),
            False,
            file.layout,
            file.conf,
        )
    detector = load_detector(path)
    return Weights(
        path, tuple(detector.names), detector.trained_imgsz, False, detector.strides, detector.dual
    )


@contextmanager
def in_place(name: str, uri: str | None) -> Iterator[Path]:
    """The file of that path."""
    yield Path(name).expanduser().resolve()


def digest_of(path: Path) -> str:
    """sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_of(path: Path) -> ray.ObjectRef:
    """The file in the object store."""
    return ray.put(path.read_bytes())


@contextmanager
def held_weights(name: str, content: ray.ObjectRef) -> Iterator[Path]:
    """A file of that content, in a folder of this process's own: no node needs to see the driver's disk."""
    with tempfile.TemporaryDirectory(prefix="yolo_ray-weights-") as folder:
        path = Path(folder) / Path(name).name
        path.write_bytes(ray.get(content))
        yield path
