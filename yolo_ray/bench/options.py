"""What a benchmark is told: ``key=value`` arguments, checked like those of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from yolo_ray.config.document import parse_setting
from yolo_ray.config.options import build, find_option
from yolo_ray.config.schema import Section
from yolo_ray.errors import UserError

Count = Annotated[int, Field(ge=1)]
CPU_CASES = ("yolo11n.yaml:2",)
GPU_CASES = ("yolo11n.yaml:16", "yolo11n.yaml:64", "yolo26n.yaml:16", "yolo11m.yaml:32")


class BenchConfig(Section):
    """One benchmark; what is null is chosen by the device."""

    cases: tuple[str, ...] = Field(
        default=(), description="list of model.yaml:batch; empty: by device"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: a GPU if there is one"
    )
    imgsz: Annotated[int, Field(ge=32)] | None = Field(
        default=None, description="side of the photos in pixels; null: 640 on a GPU, 160 on a CPU"
    )
    boxes: Count = Field(default=20, description="boxes an image")
    optimizer: Literal["SGD", "AdamW", "MuSGD"] = Field(
        default="SGD", description="of all variants"
    )
    precision: Literal["auto", "bf16", "tf32", "fp32"] = Field(
        default="auto", description="auto: bf16 on a GPU that has it"
    )
    compile: bool = Field(
        default=False, description="time the graph with torch.compile too; takes minutes"
    )
    rival: bool = Field(default=True, description="time Ultralytics beside it")
    eager: bool = Field(default=True, description="time our step without a graph too")
    deterministic: bool = Field(
        default=False, description="deterministic kernels only, for all variants"
    )
    steps: Count | None = Field(
        default=None, description="steps of a block; null: 30 on a GPU, 2 on a CPU"
    )
    blocks: Count = Field(default=5, description="blocks; the median is reported")
    profile: Annotated[int, Field(ge=0)] = Field(
        default=0, description="list that many kernels of each variant by their time"
    )
    out: str = Field(default="runs/benchmark", description="folder of step.json and step.md")


def parse(argv: Sequence[str]) -> BenchConfig:
    """The benchmark that the arguments ask for.

    Raises:
        UserError: unknown or wrong options.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for argument in argv:
        for setting in parse_setting(argument, {}):
            option = find_option(BenchConfig, setting.key, setting.place)
            values[option.name] = setting.value
            places[option.name] = setting.place
    return build(BenchConfig, values, places)


def split_case(case: str) -> tuple[str, int]:
    """``yolo11n.yaml:16`` -> its model and batch.

    Raises:
        UserError: it does not look like that.
    """
    model, _, batch = case.rpartition(":")
    if not model or not batch.isdigit() or int(batch) < 1:
        raise UserError(f"cases: {case!r} is not model:batch, as in cases=[yolo11n.yaml:16]")
    return model, int(batch)
