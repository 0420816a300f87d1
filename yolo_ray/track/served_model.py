"""A detector as MLflow serves it. This file is copied into every registered version and needs nothing of yolo_ray.

Input: photos uint8 [n,H,W,3] RGB, or a one-dimensional object array of photos [H,W,3] of any sizes and of encoded
photos (bytes, or base64 text). Output: a dict a photo with ``boxes`` [k][4] xyxy px of that photo, ``scores`` [k],
``classes`` [k] and ``names`` [k], by descending score.

Letters: S side of the network's square input in px, A anchors, C classes, K rows of an answer.
"""

from __future__ import annotations

import ast
import base64
import binascii
from typing import Any

import cv2
import numpy as np
import onnxruntime
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

PAD_VALUE = 114
MAX_CANDIDATES = 30000
DEFAULTS: dict[str, float] = {"conf": 0.25, "iou": 0.7, "max_det": 300}


class ServedDetector(PythonModel):
    """The ONNX network with what the evaluation does around it: letterbox, suppression, pixels of the photo."""

    def load_context(self, context: Any) -> None:
        """Open the artifact ``onnx``."""
        self.open(context.artifacts["onnx"])

    def open(self, path: str, threads: int = 0) -> None:
        """Open an ONNX file; ``threads`` of the CPU, 0: all."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        told = self.session.get_modelmeta().custom_metadata_map
        self.input = self.session.get_inputs()[0]
        self.imgsz = int(self.input.shape[2])
        self.names = {int(key): str(name) for key, name in ast.literal_eval(told["names"]).items()}
        self.chooses_itself = told.get("end2end") == "True"

    def predict(
        self, context: Any, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> Any:
        """Boxes of every photo; ``params``: conf, iou, max_det. Photos go through one by one.

        Raises:
            ValueError: what is given is no photo; the message names which.
        """
        # The hint of ``model_input`` is the one that MLflow derives no signature from; a list is as good.
        # One by one, since kernels round the last bit by a photo's place in the batch.
        options = DEFAULTS | {
            key: value for key, value in (params or {}).items() if value is not None
        }
        return [
            self._told(self.detect(as_photo(item, index), options))
            for index, item in enumerate(model_input)
        ]

    def detect(self, photo: np.ndarray, options: dict[str, Any]) -> np.ndarray:
        """Rows float32 [k,6] of a photo uint8 [H,W,3]: xyxy px of the photo, score, class."""
        square, scale, padding = letterbox(photo, self.imgsz)
        images = np.ascontiguousarray(square.transpose(2, 0, 1)[None]).astype(np.float32) / 255
        answer = np.asarray(self.session.run(None, {self.input.name: images})[0])[0]
        conf, max_det = float(options["conf"]), int(options["max_det"])
        if self.chooses_itself:
            rows = answer[(answer[:, 4] > conf) & np.isfinite(answer).all(1)][:max_det]
        else:
            rows = suppress(*candidates(answer, conf), iou=float(options["iou"]), max_det=max_det)
        boxes = (rows[:, :4].astype(np.float64) - np.tile(padding, 2)) / np.tile(scale, 2)
        edges = np.tile(photo.shape[1::-1], 2)
        boxes = np.clip(boxes, 0, edges).astype(np.float32)
        return np.concatenate([boxes, rows[:, 4:]], 1)

    def _told(self, rows: np.ndarray) -> dict[str, list[Any]]:
        classes = rows[:, 5].astype(int).tolist()
        return {
            "boxes": rows[:, :4].tolist(),
            "scores": rows[:, 4].tolist(),
            "classes": classes,
            "names": [self.names[number] for number in classes],
        }


def as_photo(item: Any, index: int) -> np.ndarray:
    """A photo uint8 [H,W,3] RGB from an array, or from encoded bytes or base64 text.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(item, str | bytes | bytearray):
        return decoded(item, index)
    photo = np.asarray(item)
    if photo.ndim != 3 or photo.shape[2] != 3 or photo.dtype != np.uint8 or not photo.size:
        raise ValueError(
            f"photo {index} is {photo.dtype} {list(photo.shape)}: pass uint8 [height, width, 3] RGB, or the bytes "
            "of a JPEG or PNG file"
        )
    return photo


def decoded(item: str | bytes | bytearray, index: int) -> np.ndarray:
    """An encoded photo, upright, 16 bits a channel as 8."""
    try:
        data = base64.b64decode(item, validate=True) if isinstance(item, str) else bytes(item)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"photo {index} is text that is no base64: {error}") from error
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_ANYDEPTH
    photo = cv2.imdecode(np.frombuffer(data, np.uint8), flags) if data else None
    if photo is None or photo.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"photo {index} cannot be decoded: pass the bytes of a JPEG or PNG file")
    if photo.dtype == np.uint16:
        photo = ((photo.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return photo


def letterbox(photo: np.ndarray, imgsz: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The photo on a gray square uint8 [S,S,3], with scale [2] and padding [2] (x, y) from photo to square."""
    height, width = photo.shape[:2]
    ratio = imgsz / max(height, width)
    new = np.minimum(np.ceil(np.array([width, height]) * ratio), imgsz).astype(int)
    resized = photo
    if (width, height) != tuple(new.tolist()):
        resized = cv2.resize(photo, (int(new[0]), int(new[1])), interpolation=cv2.INTER_LINEAR)
    left, top = (imgsz - new) // 2
    square = np.full((imgsz, imgsz, 3), PAD_VALUE, np.uint8)
    square[top : top + new[1], left : left + new[0]] = resized
    return square, new / (width, height), (imgsz - new) // 2


def candidates(answer: np.ndarray, conf: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes [n,4] xyxy px of the square, scores [n] and classes [n] above ``conf``, best first.

    ``answer`` float32 [4+C,A]: centre, width and height in px, then probabilities.
    """
    centre, extent = answer[:2].T, answer[2:4].T
    boxes_A4 = np.concatenate([centre - extent / 2, centre + extent / 2], 1)
    finite_A1 = np.isfinite(boxes_A4).all(1, keepdims=True)
    anchors, classes = np.nonzero((answer[4:].T > conf) & finite_A1)
    scores = answer[4 + classes, anchors]
    order = np.argsort(-scores, kind="stable")[:MAX_CANDIDATES]
    return boxes_A4[anchors[order]], scores[order], classes[order]


def suppress(
    boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, *, iou: float, max_det: int
) -> np.ndarray:
    """Greedy suppression within each class; at most ``max_det`` rows [k,6], best first."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    left, kept = np.arange(len(boxes)), []
    while len(left) and len(kept) < max_det:
        best, left = left[0], left[1:]
        kept.append(best)
        low = np.maximum(boxes[best, :2], boxes[left, :2])
        high = np.minimum(boxes[best, 2:], boxes[left, 2:])
        shared = np.maximum(high - low, 0).prod(1)
        with np.errstate(invalid="ignore", divide="ignore"):  # of boxes without an area
            overlap = shared / (areas[best] + areas[left] - shared)
        left = left[~((overlap > iou) & (classes[left] == classes[best]))]
    rows = np.array(kept, dtype=int)
    return np.concatenate(
        [boxes[rows], scores[rows, None], classes[rows, None].astype(np.float32)], 1
    ).astype(np.float32)


if __name__ != "yolo_ray.track.served_model":  # MLflow runs the file under another name
    set_model(ServedDetector())
