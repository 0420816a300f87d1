"""What a benchmark is told: ``key=value`` arguments, checked like those of training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from yolo_ray.config.options import parse_flat
from yolo_ray.config.schema import Section
from yolo_ray.errors import UserError

Count = Annotated[int, Field(ge=1)]
CPU_CASES = ("yolo11n.yaml:2",)
GPU_CASES = ("yolo11n.yaml:16", "yolo11n.yaml:64", "yolo26n.yaml:16", "yolo11m.yaml:32")
ALLOWED = {
    "precision": ("auto", "bf16", "fp16", "tf32", "fp32"),
    "optimizer": ("SGD", "AdamW", "MuSGD"),
}


class BenchConfig(Section):
    """One benchmark; what is null is chosen by the device."""

    cases: tuple[str, ...] = Field(
        default=(), description="list of model.yaml:batch, or one; empty: by device"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: a GPU if there is one"
    )
    imgsz: Annotated[int, Field(ge=32)] | None = Field(
        default=None, description="side of the photos in pixels; null: 640 on a GPU, 160 on a CPU"
    )
    boxes: Count = Field(default=20, description="boxes an image")
    optimizer: tuple[str, ...] = Field(
        default=("SGD",), description="of all variants: SGD, AdamW, MuSGD, or a list of them"
    )
    precision: tuple[str, ...] = Field(
        default=("auto",),
        description="auto, bf16, fp16, tf32, fp32, or a list of them; auto: bf16 on a GPU that has it",
    )
    table: bool = Field(default=True, description="time every case; false: only what is asked for")
    compile: bool = Field(
        default=False,
        description="with torch.compile too, Ultralytics' own way and in our graph (not in the sweep); takes minutes",
    )
    rival: bool = Field(default=True, description="time Ultralytics beside it")
    eager: bool = Field(
        default=True, description="time our step without a graph too (the sweep always does)"
    )
    sweep: bool = Field(
        default=False, description="the first case's model over batch sizes, with a picture"
    )
    sweep_max: Count = Field(default=256, description="largest batch of the sweep (powers of two)")
    startup: bool = Field(
        default=False,
        description="time from process start to the first replay, cold and warm cache; takes minutes",
    )
    static_assignment: bool = Field(
        default=False, description="our graph beside one with the assignment frozen for each batch"
    )
    static_steps: Annotated[int, Field(ge=5)] | None = Field(
        default=None,
        description="steps of that comparison, 5 or more; null: 200 on a GPU, 12 on a CPU",
    )
    deterministic: bool = Field(
        default=False, description="deterministic kernels only, for all variants"
    )
    steps: Count | None = Field(
        default=None, description="steps of a block; null: what 0.6 s holds, 5 to 30 (2 on a CPU)"
    )
    blocks: Count = Field(default=5, description="blocks; the median is reported")
    profile: Annotated[int, Field(ge=0)] = Field(
        default=0, description="on a GPU: list that many kernels of each variant by their time"
    )
    out: str = Field(
        default="runs/benchmark",
        description="folder of step.json, step.md, sweep.png; one that holds a result gets a number appended",
    )

    @field_validator("cases", "optimizer", "precision", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, list) and not all(isinstance(word, str) for word in value):
            raise ValueError("expected words, as in [a,b]")
        return (value,) if isinstance(value, str) else value

    @field_validator("optimizer", "precision", mode="after")
    @classmethod
    def _known(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
        allowed = ALLOWED[info.field_name]
        if not value or any(word not in allowed for word in value):
            raise ValueError(f"expected one or a list of {', '.join(allowed)}")
        return tuple(dict.fromkeys(value))


def parse(argv: Sequence[str]) -> BenchConfig:
    """The benchmark that the arguments ask for.

    Raises:
        UserError: unknown or wrong options, or a case that is not ``model:batch``.
    """
    config = parse_flat(BenchConfig, argv)
    for case in config.cases:
        split_case(case)
    if not (config.table or config.sweep or config.startup or config.static_assignment):
        raise UserError(
            "table=false leaves nothing to measure: add sweep=true, startup=true or static_assignment=true"
        )
    return config


def split_case(case: str) -> tuple[str, int]:
    """``yolo11n.yaml:16`` -> its model and batch.

    Raises:
        UserError: it does not look like that.
    """
    model, _, batch = case.rpartition(":")
    if "," in case:
        raise UserError(f"cases: several of them need brackets: cases=[{case}]")
    if not model or not re.fullmatch("0*[1-9][0-9]*", batch):
        raise UserError(f"cases: {case!r} is not model:batch, as in cases=[yolo11n.yaml:16]")
    return model, int(batch)
