"""A detector as an ONNX graph, with the metadata that Ultralytics reads."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping

import onnx
import torch

from yolo_ray.export.network import Deployed, ExportPlan
from yolo_ray.export.suppression import append_nms

INPUT, OUTPUT = "images", "output0"
OPSET = 18  # the oldest that torch's exporter writes without converting


def trace_onnx(network: Deployed, plan: ExportPlan) -> onnx.ModelProto:
    """The network as a graph: ``images`` [B,3,S,S] -> ``output0``, raw or best.

    Stack traces and parameter records that torch puts into graphs go: they name folders of this machine.
    """
    images = torch.zeros(plan.example_batch, 3, plan.imgsz, plan.imgsz)
    images = images.half() if plan.half else images
    batch = {0: torch.export.Dim("batch")} if plan.dynamic_batch else {}
    with _quiet():
        program = torch.onnx.export(
            network, (images,), dynamo=True, input_names=[INPUT], output_names=[OUTPUT],
            dynamic_shapes=(batch,), opset_version=OPSET, external_data=False, verbose=False,
        )  # fmt: skip
    assert program is not None
    model = program.model_proto
    _strip(model)
    return model


def with_nms(raw: onnx.ModelProto, plan: ExportPlan, conf: float) -> onnx.ModelProto:
    """The graph with suppression above the score ``conf`` behind it."""
    _rename(raw, raw.graph.output[0].name, "raw")
    return append_nms(raw, conf=conf, iou=plan.iou, max_det=plan.max_det, output=OUTPUT)


def with_metadata(model: onnx.ModelProto, metadata: Mapping[str, object]) -> bytes:
    """The graph as a file's content, checked by ONNX's own checker, values as text."""
    del model.metadata_props[:]
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=str(value))
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in (*model.graph.output, *model.graph.value_info):
        value.name = new if value.name == old else value.name


def _strip(model: onnx.ModelProto) -> None:
    graph = model.graph
    parts = (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info)
    for part in (*parts, *graph.initializer, *model.functions):
        part.doc_string = ""
        del part.metadata_props[:]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter writes its progress to stdout, which belongs to the pipeline, and warns of its own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
