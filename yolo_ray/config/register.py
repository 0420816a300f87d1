"""The options of registering: which run, under which name, and what the gate asks of it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from yolo_ray.config.schema import Configuration, PhotosConfig, ReplayConfig, WorkersConfig
from yolo_ray.config.section import Fraction, Name, Positive, Section


class RegistryConfig(Section):
    """Where MLflow is."""

    uri: str | None = Field(
        default=None, description="none: where the run is tracked, or sqlite under the project"
    )
    experiment: Name = Field(
        default="yolo_ray", description="MLflow experiment of a run that was not tracked"
    )


class RegisterConfig(Configuration):
    """Everything that registering one version, or rolling back, depends on."""

    run: str | None = Field(
        default=None, description="folder of a run, or the id of its run in MLflow"
    )
    name: str = Field(default="", description="name of the registered model")
    rollback: bool = Field(default=False, description="give @champion back to the one before")
    to: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="give @champion to that version"
    )
    min_gain: Annotated[float, Field(ge=-1.0, le=1.0)] = Field(
        default=0.0, description="mAP50-95 to gain over the champion; 0: any gain"
    )
    max_class_drop: Fraction = Field(
        default=0.02, description="mAP50-95 that a class may lose against the champion"
    )
    max_latency: Positive | None = Field(
        default=1.1, description="latency of a photo over the champion's; null: not judged"
    )
    min_map: Fraction = Field(default=0.0, description="mAP50-95 that a first version must have")
    imgsz: Annotated[int, Field(ge=32)] | None = Field(
        default=None, description="side of the network's input; null: what it was trained with"
    )
    val_batch: Annotated[int, Field(ge=1)] = Field(
        default=16, description="images a worker evaluates at once"
    )
    project: Name = Field(
        default="runs", description="folder of all runs, where a run's id is looked for"
    )

    data: PhotosConfig = PhotosConfig()
    cluster: WorkersConfig = WorkersConfig()
    graph: ReplayConfig = ReplayConfig()
    mlflow: RegistryConfig = RegistryConfig()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.name.strip() or set(self.name) & set("/:\\") or self.name.startswith("."):
            raise ValueError(
                f"name={self.name!r} names no model: pass name=pcb-detector, without / : \\ and a leading dot"
            )
        backward = self.rollback or self.to is not None
        if self.rollback and self.to is not None:
            raise ValueError("rollback=true and to= exclude each other: pass one of them")
        if backward and self.run is not None:
            raise ValueError("run= registers and rollback=true or to= go back: pass one of them")
        if not backward and self.run is None:
            raise ValueError(
                "nothing to register: pass run=runs/NAME or the id of an MLflow run; rollback=true goes back"
            )
        return self
