"""The options of exporting and predicting, and how their arguments are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from yolo_ray.config.document import parse_setting, read_settings
from yolo_ray.config.options import RECORD, build, find_option, sections_of
from yolo_ray.config.schema import Configuration, ServerConfig, WorkersConfig
from yolo_ray.config.section import Fraction
from yolo_ray.errors import UserError

Deploy = TypeVar("Deploy", bound=Configuration)
Output = Literal["parquet", "coco", "pictures"]
WEIGHTS = (
    "a .pt, an .onnx, a run's folder, the id of an MLflow run, or models:/NAME@ALIAS or /VERSION"
)


def _list_of(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class ExportConfig(Configuration):
    """What one export depends on."""

    weights: str | None = Field(default=None, description=WEIGHTS)
    out: str | None = Field(
        default=None,
        description="file to write; none: beside the weights, with the format's suffix",
    )
    format: Literal["onnx", "torchscript", "aoti"] = Field(
        default="onnx", description="aoti: a compiled package of torch.export, for this kind of CPU"
    )
    imgsz: Annotated[int, Field(ge=32)] | None = Field(
        default=None, description="side of the square input in px; none: what it was trained with"
    )
    nms: bool = Field(default=False, description="suppression in the graph")
    half: bool = Field(default=False, description="float16 weights and input")
    dynamic: bool = Field(default=True, description="any number of images at once, not only one")
    conf: Fraction = Field(default=0.25, description="score that nms=true asks of a box")
    iou: Fraction = Field(default=0.7, description="overlap from which nms=true drops the weaker")
    max_det: Annotated[int, Field(ge=1)] = Field(default=300, description="rows of an answer")
    source: str | None = Field(
        default=None, description="photos to check the file on, beside made-up ones"
    )

    mlflow: ServerConfig = ServerConfig()


class PredictConfig(Configuration):
    """What one prediction depends on."""

    weights: str | None = Field(default=None, description=WEIGHTS)
    source: str | None = Field(
        default=None,
        description="folder, photo, pattern, .txt, data.yaml or video; photos also s3://, gs://, http(s)://",
    )
    out: str | None = Field(
        default=None,
        description="folder to write to; again: goes on there; none: the next free runs/predict",
    )
    imgsz: Annotated[int, Field(ge=32)] | None = Field(
        default=None, description="side of the square photos in px; none: what it was trained with"
    )
    conf: Fraction = Field(default=0.25, description="detections with a lower score are left out")
    iou: Fraction = Field(default=0.7, description="overlap from which NMS drops the weaker box")
    max_det: Annotated[int, Field(ge=1)] = Field(
        default=300, description="detections kept per photo"
    )
    nms: bool = Field(
        default=True, description="false: the NMS-free head of YOLOv10 and YOLO26, of a .pt"
    )
    clip: bool = Field(
        default=True, description="boxes end at the photo's edge; false: as evaluation judges them"
    )
    save: Annotated[
        tuple[Output, ...], BeforeValidator(_list_of, json_schema_input_type=list[Output] | str)
    ] = Field(default=("parquet",), description="parquet (always), coco, pictures")
    split: Literal["train", "val"] = Field(default="val", description="of a data.yaml")
    vid_stride: Annotated[int, Field(ge=1)] = Field(
        default=1, description="every that many frames of a video"
    )
    batch: Annotated[int, Field(ge=1)] = Field(
        default=16, description="photos a worker looks at together"
    )
    shard: Annotated[int, Field(ge=1)] = Field(
        default=200,
        description="photos of one Parquet file, what a kill loses at most for each worker",
    )

    cluster: WorkersConfig = WorkersConfig()
    mlflow: ServerConfig = ServerConfig()


def load_deploy(argv: Sequence[str], schema: type[Deploy]) -> Deploy:
    """The configuration that YAML files and ``key=value`` ask for, left to right.

    Raises:
        UserError: unknown, doubled or wrong options, or an unreadable file.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for argument in argv:
        sections = sections_of(schema)
        is_file = "=" not in argument and argument.lower().endswith((".yaml", ".yml"))
        read = (
            read_settings(Path(argument), sections)
            if is_file
            else parse_setting(argument, sections)
        )
        for setting in read:
            option = find_option(schema, setting.key, setting.place)
            as_text = option.is_text and setting.text is not None
            is_null = option.is_nullable and setting.text in ("", "null", "none")
            values[option.name] = None if is_null else setting.text if as_text else setting.value
            places[option.name] = setting.place
    return build(schema, values | {RECORD: tuple(sorted(values))}, places)


def needed(value: str | None, option: str, example: str) -> str:
    """An option that has no default.

    Raises:
        UserError: it was not given.
    """
    if not value:
        raise UserError(f"no {option} given: pass {option}={example}")
    return value
