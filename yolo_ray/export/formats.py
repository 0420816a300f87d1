"""The formats: how each is built from a network, written and opened again. A table, by the name of the option."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision  # noqa: F401  (its operators, which a TorchScript file with NMS calls)
from torch import Tensor, nn

from yolo_ray.errors import UserError
from yolo_ray.export.check import Run
from yolo_ray.export.graph import INPUT, trace_onnx, with_metadata, with_nms
from yolo_ray.export.network import Deployed, ExportPlan
from yolo_ray.export.session import open_content
from yolo_ray.model.detect import MAX_CANDIDATES

Metadata = Mapping[str, object]
CONFIG = "config.txt"  # where Ultralytics looks for the metadata of a TorchScript file


@dataclass(frozen=True)
class Built:
    """A network in a format, not yet written.

    Attributes:
        write: to a path, with the plan's own suppression if it has one.
        raw: its answer without any.
        rows_above: with suppression above another score; only called for a plan with NMS.
    """

    write: Callable[[Path], None]
    raw: Run
    rows_above: Callable[[float], Run]


@dataclass(frozen=True)
class Format:
    """One value of ``format=``."""

    suffix: str
    build: Callable[[Deployed, ExportPlan, Metadata], Built]
    open: Callable[[Path], Run]


def _build_onnx(network: Deployed, plan: ExportPlan, metadata: Metadata) -> Built:
    plain = trace_onnx(network, plan)

    def content(conf: float | None) -> bytes:
        return with_metadata(plain if conf is None else with_nms(plain, plan, conf), metadata)

    def run(conf: float | None) -> Run:
        return _onnx_run(open_content(content(conf)))

    raw = run(None)
    wanted = content(plan.conf if plan.nms else None)
    return Built(lambda path: _keep(path, wanted), raw, run)


def _keep(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _onnx_run(session: Any) -> Run:
    wanted = np.float16 if "float16" in session.get_inputs()[0].type else np.float32
    return lambda images: session.run(None, {INPUT: images.astype(wanted)})[0]


def _open_onnx(path: Path) -> Run:
    return _onnx_run(open_content(path.read_bytes()))


class Suppressed(nn.Module):
    """Class-aware suppression behind a traced network, as TorchScript can say it: rows [B,max_det,6]."""

    def __init__(self, network: nn.Module, plan: ExportPlan, conf: float) -> None:
        """``network`` gives raw answers."""
        super().__init__()
        self.network = network
        self.conf, self.iou, self.max_det = conf, plan.iou, plan.max_det
        self.most = MAX_CANDIDATES

    def forward(self, images: Tensor) -> Tensor:
        """Images [B,3,S,S] to rows; zeros fill up."""
        raw = self.network(images)
        rows = torch.zeros(raw.shape[0], self.max_det, 6, device=raw.device)
        for image in range(raw.shape[0]):
            boxes = torch.cat(
                (raw[image, :2] - raw[image, 2:4] / 2, raw[image, :2] + raw[image, 2:4] / 2)
            ).transpose(0, 1)
            scores = raw[image, 4:].transpose(0, 1)
            found = (scores > self.conf).nonzero()
            best, order = scores[found[:, 0], found[:, 1]].sort(descending=True, stable=True)
            found, best = found[order][: self.most], best[: self.most]
            picked, kinds = boxes[found[:, 0]], found[:, 1].to(boxes.dtype)
            # Classes lie apart, each in a place of its own, so that one call sees them all.
            apart = picked + (kinds * (boxes.abs().max() * 2 + 1)).unsqueeze(1)
            kept = torch.ops.torchvision.nms(apart, best, self.iou)[: self.max_det]
            columns = (picked[kept], best[kept].unsqueeze(1), kinds[kept].unsqueeze(1))
            rows[image, : kept.shape[0]] = torch.cat(columns, 1)
        return rows


def _build_torchscript(network: Deployed, plan: ExportPlan, metadata: Metadata) -> Built:
    images = torch.zeros(plan.example_batch, 3, plan.imgsz, plan.imgsz)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter(
            "ignore"
        )  # of shapes that tracing makes constants: the check has another batch
        traced: Any = torch.jit.trace(
            network, (images.half() if plan.half else images,), check_trace=False
        )

    def module(conf: float) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(Suppressed(traced, plan, conf).eval())

    def write(path: Path) -> None:
        chosen = module(plan.conf) if plan.nms else traced
        chosen.save(str(path), _extra_files={CONFIG: json.dumps(dict(metadata))})

    return Built(
        write, _torch_run(traced, plan.half), lambda conf: _torch_run(module(conf), plan.half)
    )


def _torch_run(module: Callable[[Tensor], Tensor], half: bool) -> Run:
    def run(images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            given = torch.from_numpy(np.ascontiguousarray(images))
            return module(given.half() if half else given).float().numpy()

    return run


def _open_torchscript(path: Path) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = torch.jit.load(str(path), map_location="cpu")
    half = any(parameter.dtype == torch.float16 for parameter in module.parameters())
    return _torch_run(module, half)


def _build_aoti(network: Deployed, plan: ExportPlan, metadata: Metadata) -> Built:
    if plan.nms:
        raise UserError(
            "format=aoti has no nms=true: its graph has fixed shapes, which suppression has not; "
            "leave nms=false and suppress afterwards, or use format=onnx"
        )
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler or not shutil.which(compiler):
        raise UserError(
            "format=aoti compiles C++ and this machine has no compiler: install g++ (or set CXX), or use format=onnx"
        )
    images = torch.zeros(plan.example_batch, 3, plan.imgsz, plan.imgsz)
    batch = {0: torch.export.Dim("batch", max=1024)} if plan.dynamic_batch else {}
    program = torch.export.export(
        network, (images.half() if plan.half else images,), dynamic_shapes=(batch,)
    )

    def write(path: Path) -> None:
        described = {str(key): str(value) for key, value in metadata.items()}
        package = path.with_suffix(".pt2")  # no other name is taken
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(package),
            inductor_configs={"aot_inductor.metadata": described},
        )  # fmt: skip
        os.replace(package, path)

    return Built(write, _torch_run(network, plan.half), _no_rows)


def _no_rows(conf: float) -> Run:
    raise AssertionError("refused before")


def _open_aoti(path: Path) -> Run:
    package: Any = torch._inductor.aoti_load_package(str(path))
    return _torch_run(package, half=False)


FORMATS: dict[str, Format] = {
    "onnx": Format(".onnx", _build_onnx, _open_onnx),
    "torchscript": Format(".torchscript", _build_torchscript, _open_torchscript),
    "aoti": Format(".pt2", _build_aoti, _open_aoti),
}
