"""An ONNX file as a forward pass: what evaluation and prediction call. The door to onnxruntime.

Letters: b images, S side in px, A anchors, C classes, K rows of an answer.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from yolo_ray.errors import UserError
from yolo_ray.export.network import split_raw

REMEDY = "export it with python -m pipelines.export weights=... format=onnx, or with Ultralytics"


@dataclass(frozen=True)
class OnnxFile:
    """What an ONNX file says of itself.

    Attributes:
        names: class names by id.
        imgsz: side of its square input in px; None: any.
        batch: images that it takes at once; None: any number.
        layout: "raw", "best" (of an NMS-free head) or "nms".
        conf: score limit of suppression in the graph; 0 without one.
        stride: largest stride of the network.
    """

    names: tuple[str, ...]
    imgsz: int | None
    batch: int | None
    layout: str
    conf: float
    stride: int


class OnnxForward:
    """``forward(images uint8 [b,3,S,S])``: boxes float32 [b,A,4] xyxy px and probabilities [b,A,C], on the CPU.

    Rows [b,K,6] of a file that chooses boxes itself come out in the same form: K boxes, each with one probability
    that is not 0, for ``detect_one_to_one``.
    """

    def __init__(self, path: str | Path, *, threads: int = 0, gpu: bool = False) -> None:
        """Open a file. ``threads`` of the CPU (0: as many as there are); ``gpu``: if onnxruntime has CUDA.

        Raises:
            UserError: it is missing, no ONNX file, or not one of a detector.
        """
        self.path = str(path)
        self.session = _open(path, threads, gpu)
        self.file = _described(self.session, self.path)
        self.device = torch.device("cpu")  # of what it returns
        self.replays = 0
        self._dtype = np.float16 if "float16" in self.session.get_inputs()[0].type else np.float32

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes and probabilities of a batch of any size."""
        scaled = (images.numpy().astype(np.float32) / 255).astype(self._dtype)
        answer = torch.from_numpy(self.run(scaled).astype(np.float32, copy=False))
        if self.file.layout == "raw":
            return split_raw(answer)
        scores = torch.zeros(*answer.shape[:2], len(self.file.names))
        kinds = answer[..., 5:6].long().clamp(0, len(self.file.names) - 1)
        return answer[..., :4], scores.scatter_(2, kinds, answer[..., 4:5])

    def run(self, images: np.ndarray) -> np.ndarray:
        """The file's own answer for images [b,3,S,S] in 0..1, in batches of the size that it takes."""
        size = self.file.batch or len(images)
        answers = []
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part)
            if missing:
                part = np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)])
            given: Any = self.session.run(None, {self.session.get_inputs()[0].name: part})[0]
            answers.append(given[: size - missing])
        return np.concatenate(answers)


def open_content(content: bytes) -> Any:
    """A session of a graph that is in memory."""
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def _open(path: str | Path, threads: int, gpu: bool) -> onnxruntime.InferenceSession:
    if not Path(path).is_file():
        raise UserError(f"weights={path} is not a file here: pass the path of an .onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    cuda = "CUDAExecutionProvider"
    providers = [cuda] if gpu and cuda in onnxruntime.get_available_providers() else []
    try:
        return onnxruntime.InferenceSession(
            str(path), options, providers=[*providers, "CPUExecutionProvider"]
        )
    # onnxruntime's own classes, all of them straight below RuntimeError or Exception
    except Exception as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise UserError(
            f"weights={path} cannot be opened as ONNX ({reason}): it is damaged or no ONNX file; {REMEDY}"
        ) from error


def _described(session: onnxruntime.InferenceSession, path: str) -> OnnxFile:
    inputs, outputs = session.get_inputs(), session.get_outputs()
    metadata = session.get_modelmeta().custom_metadata_map
    names = _read(metadata, "names")
    if not isinstance(names, dict) or len(inputs) != 1 or len(inputs[0].shape) != 4:
        raise UserError(f"weights={path} does not say which classes it knows: {REMEDY}")
    task = metadata.get("task", "detect")
    if task != "detect" or len(outputs) != 1 or len(outputs[0].shape) != 3:
        raise UserError(f"weights={path} is a model for {task!r} and no plain detector: {REMEDY}")
    batch, _, height, width = inputs[0].shape
    if height != width:
        raise UserError(
            f"weights={path} takes images of {height}x{width}, not square ones: {REMEDY}"
        )
    args = _read(metadata, "args")
    args = args if isinstance(args, dict) else {}
    nms, end2end = bool(args.get("nms")), _read(metadata, "end2end") is True
    stated = _read(metadata, "imgsz")
    side = height if isinstance(height, int) else stated[0] if isinstance(stated, list) else None
    return OnnxFile(
        names=tuple(str(name) for _, name in sorted(names.items())),
        imgsz=side,
        batch=batch if isinstance(batch, int) else None,
        layout="nms" if nms else "best" if end2end else "raw",
        conf=float(args.get("conf") or 0.25) if nms else 0.0,
        stride=int(metadata.get("stride", "32")),
    )


def _read(metadata: dict[str, str], key: str) -> Any:
    """A value that was written as Python text; None for what is not there or is no such text."""
    try:
        return ast.literal_eval(metadata[key])
    except (KeyError, ValueError, SyntaxError):
        return None
