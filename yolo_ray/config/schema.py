"""The typed, frozen configuration: Ultralytics' option names and defaults, grouped in sections.

Leaf names are unique over the whole tree (a test keeps it), so ``lr0=0.02`` and ``optim.lr0=0.02``
are the same option. ``load.py`` merges YAML files and ``key=value`` into one of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from yolo_ray.config.options import build, find_option, values_of
from yolo_ray.config.section import (
    AUTO_BATCH,
    CacheKind,
    Fraction,
    Layer,
    Name,
    NonNegative,
    Positive,
    Precision,
    Section,
    batch_number,
    cache_kind,
    local_folder,
)


class PhotosConfig(Section):
    """Where the photos are and how strict their check is; ``data=x.yaml`` sets ``data.path``."""

    path: str | None = Field(
        default=None,
        description="YOLO-format data.yaml, a path or s3://, gs://, http(s)://; its folders are relative to it",
    )
    max_bad: Fraction = Field(
        default=0.01, description="refuse a split with a larger share of bad photos"
    )
    cache: Annotated[
        CacheKind,
        BeforeValidator(cache_kind, json_schema_input_type=bool | Literal["ram"] | CacheKind),
    ] = Field(
        default="off",
        description="keep resized photos on each node: memory (also true, ram), disk, or off",
    )
    cache_dir: Annotated[Name, AfterValidator(local_folder)] | None = Field(
        default=None,
        description="folder of cache=disk on each node; none: ~/.cache/yolo_ray/photos",
    )
    fast_decode: bool = Field(
        default=False,
        description="decode large JPEGs at 1/2, 1/4 or 1/8 size; pixels then differ a little",
    )


class DataConfig(PhotosConfig):
    """Training's photos."""

    decode: Literal["cpu", "gpu"] = Field(
        default="cpu", description="where JPEGs are decoded; gpu: by nvImageCodec, for few CPUs"
    )
    log_samples: bool = Field(
        default=False, description="write the photo ids of every step to samples/rank_<r>.csv"
    )


class OptimConfig(Section):
    """Optimizer and schedule."""

    optimizer: Literal["auto", "SGD", "AdamW", "MuSGD"] = Field(
        default="auto",
        description="auto: by the length of the run, with lr0 and momentum unless given",
    )
    lr0: Positive = Field(default=0.01, description="first learning rate, after the warm-up")
    lrf: Positive = Field(default=0.01, description="last learning rate = lr0 * lrf")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.937, description="momentum of SGD, first beta of AdamW"
    )
    weight_decay: NonNegative = Field(
        default=0.0005,
        description="decay of weights (not of biases and norms) at the nominal batch",
    )
    warmup_epochs: NonNegative = Field(
        default=3.0, description="epochs in which learning rates and momentum ramp up"
    )
    warmup_momentum: Fraction = Field(default=0.8, description="momentum at the first step")
    warmup_bias_lr: NonNegative = Field(
        default=0.1, description="learning rate of biases at the first step"
    )
    cos_lr: bool = Field(default=False, description="cosine schedule instead of the straight line")
    nbs: Annotated[int, Field(ge=1)] = Field(
        default=64, description="nominal batch: gradients add up to it"
    )
    clip_norm: Positive = Field(default=10.0, description="gradients are clipped to this norm")
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.9999, description="last decay of the averaged weights"
    )
    ema_tau: Positive = Field(default=2000.0, description="updates over which that decay ramps up")


class LossConfig(Section):
    """Gains of the three loss terms."""

    box: NonNegative = Field(default=7.5, description="gain of the box (CIoU) loss")
    cls: NonNegative = Field(default=0.5, description="gain of the class loss")
    dfl: NonNegative = Field(
        default=1.5, description="gain of the distribution focal loss (L1 where reg_max is 1)"
    )


class AugmentConfig(Section):
    """Drawn by the plan, done on the device; albumentations run on the CPU before it."""

    hsv_h: Fraction = Field(
        default=0.015, description="hue: largest turn, as a share of the circle"
    )
    hsv_s: Fraction = Field(default=0.7, description="saturation: factor in 1 +- hsv_s")
    hsv_v: Fraction = Field(default=0.4, description="brightness: factor in 1 +- hsv_v")
    degrees: Annotated[float, Field(ge=0.0, le=180.0)] = Field(
        default=0.0, description="rotation in +- degrees"
    )
    translate: Fraction = Field(default=0.1, description="shift in +- shares of the side")
    scale: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.5, description="zoom: factor in 1 +- scale"
    )
    shear: Annotated[float, Field(ge=0.0, lt=90.0)] = Field(
        default=0.0, description="shear in +- degrees"
    )
    flipud: Fraction = Field(default=0.0, description="probability of an upside-down flip")
    fliplr: Fraction = Field(default=0.5, description="probability of a left-right flip")
    mosaic: Fraction = Field(default=1.0, description="probability that four photos are joined")
    mixup: Fraction = Field(
        default=0.0,
        description="probability that a second image is blended in, while mosaic is open",
    )
    close_mosaic: Annotated[int, Field(ge=0)] = Field(
        default=10, description="last epochs without mosaic and mixup"
    )
    multi_scale: Fraction = Field(
        default=0.0,
        description="image side of each step in imgsz * (1 +- multi_scale), 5 sides at most",
    )
    albumentations: bool | tuple[dict[str, Any], ...] = Field(
        default=True,
        description="true: Blur, MedianBlur, ToGray, CLAHE at p=0.01; false: none; or a list of "
        "{transform: Name, ...its arguments}",
    )


class JudgeConfig(Section):
    """Evaluation protocol (Ultralytics' validation)."""

    conf: Fraction = Field(default=0.001, description="detections with a lower score are left out")
    iou: Fraction = Field(default=0.7, description="overlap from which NMS drops the weaker box")
    max_det: Annotated[int, Field(ge=1)] = Field(
        default=300, description="detections kept per photo"
    )
    nms: bool = Field(default=True, description="false: the NMS-free head of YOLOv10 and YOLO26")
    val_batch: Annotated[int, Field(ge=1)] = Field(
        default=16, description="images a worker evaluates at once"
    )


class EvalConfig(JudgeConfig):
    """The protocol, and when training evaluates."""

    val: bool = Field(default=True, description="evaluate while training")
    val_period: Annotated[int, Field(ge=1)] = Field(
        default=1, description="evaluate every that many epochs"
    )


class WorkersConfig(Section):
    """How many workers, with what."""

    workers: Annotated[int, Field(ge=1)] = Field(
        default=1,
        description="processes, one a GPU; not the loader threads of Ultralytics",
    )
    gpu: bool | Literal["auto"] = Field(
        default="auto", description="work on GPUs; auto: if the cluster has enough"
    )
    cpus_per_worker: Positive | Literal["auto"] = Field(
        default="auto", description="CPUs that one worker holds"
    )
    data_cpus: Positive | Literal["auto"] = Field(
        default="auto", description="CPUs left to Ray Data"
    )
    address: str | None = Field(
        default=None, description="a running Ray cluster; none: the one at hand or a local one"
    )


class ClusterConfig(WorkersConfig):
    """Training's workers, and how failures are met."""

    max_failures: Annotated[int, Field(ge=0)] = Field(
        default=3, description="worker deaths survived"
    )
    sync_bn: bool = Field(default=True, description="batch statistics over all workers")


class ReplayConfig(Section):
    """The work on a GPU as a CUDA graph."""

    mode: Literal["auto", "require", "off"] = Field(
        default="auto",
        description="auto: on a GPU, without a graph where that fails; require: refuse then",
    )


class GraphConfig(ReplayConfig):
    """The training step, and the evaluation's forward pass, as one CUDA graph each."""

    compile: Literal["off", "model", "step"] = Field(
        default="off",
        description="torch.compile in the graph, of the model or of loss and optimizer too; minutes, slower on an H200",
    )


class CheckpointConfig(Section):
    """How often state is written and how much is kept."""

    save_steps: Annotated[int, Field(ge=0)] = Field(
        default=500, description="also every that many steps; 0: never"
    )
    keep: Annotated[int, Field(ge=1)] = Field(default=2, description="newest checkpoints kept")


class ServerConfig(Section):
    """Where MLflow is."""

    uri: str | None = Field(default=None, description="none: sqlite under the project folder")


class MlflowConfig(ServerConfig):
    """Tracking."""

    experiment: Name = Field(default="yolo_ray", description="MLflow experiment")
    enabled: bool = Field(
        default=True, description="false: no MLflow; results.csv is written either way"
    )


class Configuration(Section):
    """Everything one pipeline depends on, and which of it the user gave."""

    explicit: tuple[str, ...] = Field(
        default=(), description="the options that the user gave, dotted and sorted"
    )

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A new configuration with those options (dotted or bare) changed, validated again.

        The changed options count as given. Raises UserError as ``load`` does.
        """
        values = values_of(self)
        given = set(self.explicit)
        for key, value in changes.items():
            name = find_option(type(self), "data.path" if key == "data" else key, "override").name
            values[name] = value
            given.add(name)
        places = dict.fromkeys(values, "override")
        return build(type(self), values | {"explicit": tuple(sorted(given))}, places)

    def is_given(self, key: str) -> bool:
        """Whether the user gave that option (dotted or bare), so that no ``auto`` may change it."""
        return find_option(type(self), key, "is_given").name in self.explicit

    def flat(self) -> dict[str, str | int | float | bool | None]:
        """Every option by its dotted name; a list becomes its JSON text."""
        return {
            name: value
            if value is None or isinstance(value, str | int | float)
            else json.dumps(value)
            for name, value in values_of(self).items()
        }


class TrainConfig(Configuration):
    """Everything one training run depends on."""

    model: Name = Field(
        default="yolo11n.yaml",
        description="an Ultralytics detection YAML, or a .pt file to start from",
    )
    epochs: Annotated[int, Field(ge=1)] = Field(
        default=100, description="times that every photo is seen"
    )
    batch: Annotated[int, BeforeValidator(batch_number), Field(ge=AUTO_BATCH)] = Field(
        default=16,
        description="photos of one step over ALL workers; auto (or -1): as many as the GPUs hold",
    )
    imgsz: Annotated[int, Field(ge=32)] = Field(
        default=640, description="side of the square photos in pixels, a multiple of the stride"
    )
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(
        default=0, description="seed of every random number"
    )
    micro_batch: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="photos of a worker that go through the network at once, to save memory; null: all",
    )
    precision: Precision = Field(
        default="auto",
        description="of products and activations, weights are float32; auto: bf16 or fp16 on GPUs",
    )
    freeze: Layer | tuple[Layer, ...] | None = Field(
        default=None,
        description="layers that are not trained: the first so many, or a list of indices such as [0, 1, 5]",
    )
    patience: Annotated[int, Field(ge=0)] = Field(
        default=100, description="epochs without gain; 0: never stop"
    )
    deterministic: bool = Field(default=True, description="deterministic kernels only")
    project: Name = Field(default="runs", description="folder of all runs")
    name: Name = Field(
        default="train",
        description="folder of the run under project; a number is appended if it exists",
    )
    resume: str | None = Field(default=None, description="a run folder to go on with")
    log_steps: Annotated[int, Field(ge=1)] = Field(
        default=10, description="steps between two progress lines"
    )

    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    augment: AugmentConfig = AugmentConfig()
    eval: EvalConfig = EvalConfig()
    cluster: ClusterConfig = ClusterConfig()
    graph: GraphConfig = GraphConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mlflow: MlflowConfig = MlflowConfig()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if set(self.name) & set("/\\") or self.name in (".", ".."):
            raise ValueError(
                f"name={self.name} is a path, and a run is a folder of project={self.project}: pass its name alone, "
                "and project= for the folder around it"
            )
        if AUTO_BATCH != self.batch < self.cluster.workers:
            raise ValueError(
                f"batch={self.batch} is less than cluster.workers={self.cluster.workers}, "
                "so a worker would have no photo; raise batch or lower cluster.workers"
            )
        if self.data.decode == "gpu":
            self._check_decode()
        if self.micro_batch and self.batch % self.cluster.workers:
            # Each part is a collective of batch norm: all workers need the same number of parts.
            raise ValueError(
                f"batch={self.batch} is not a multiple of cluster.workers={self.cluster.workers}, "
                "which micro_batch needs; change batch, or leave micro_batch out"
            )
        return self

    def _check_decode(self) -> None:
        needs_pixels = {
            "data.cache=off": self.data.cache != "off",
            "data.fast_decode=false": self.data.fast_decode,
            "augment.albumentations=false": bool(self.augment.albumentations),
        }
        if missing := [setting for setting, is_used in needs_pixels.items() if is_used]:
            raise ValueError(
                "data.decode=gpu, which needs a GPU, leaves no decoded photo on the CPU "
                "for a cache, fast_decode or albumentations; "
                f"use data.decode=cpu, or set {' '.join(missing)}"
            )


class EvaluateConfig(Configuration):
    """What one evaluation depends on: the weights, the data, the protocol and the workers."""

    weights: str | None = Field(
        default=None,
        description="a .pt, an .onnx, a run's folder, the id of an MLflow run, or models:/NAME@ALIAS or /VERSION",
    )
    imgsz: Annotated[int, Field(ge=32)] = Field(
        default=640,
        description="side of the square photos in pixels; unless given, what the weights were trained with",
    )
    precision: Precision = Field(
        default="auto",
        description="as training evaluates with it: weights are float32, fp32 forbids TF32 products",
    )
    deterministic: bool = Field(default=True, description="deterministic kernels only")

    data: PhotosConfig = PhotosConfig()
    eval: JudgeConfig = JudgeConfig()
    cluster: WorkersConfig = WorkersConfig()
    graph: ReplayConfig = ReplayConfig()
    mlflow: ServerConfig = ServerConfig()
