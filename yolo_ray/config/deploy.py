"""The options of exporting and predicting."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from yolo_ray.config.schema import Configuration, ServerConfig, WorkersConfig
from yolo_ray.config.section import Fraction
from yolo_ray.errors import UserError

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
        description="folder to write to, new or empty; again: goes on there; none: the next free runs/predict",
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


def needed(value: str | None, option: str, example: str) -> str:
    """An option that has no default.

    Raises:
        UserError: it was not given.
    """
    if not value:
        raise UserError(f"no {option} given: pass {option}={example}")
    return value
