"""A version as a folder that MLflow loads: the ONNX network, the weights, the code that serves them, and where all
of it comes from."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from yolo_ray.gate.parts import Comparison, Package

REQUIREMENTS = ("mlflow", "numpy", "onnxruntime", "opencv-python-headless")
WEIGHTS, ONNX = "best.pt", "model.onnx"  # names below artifacts/
EXAMPLE_PX = (32, 48)  # height and width
CODE = Path(__file__).with_name(
    "served_model.py"
)  # imports mlflow: not before client.py has prepared that


def save_package(package: Package, comparison: Comparison, folder: Path) -> Path:
    """Write the pyfunc model of a version into ``folder / "model"``, and return that.

    Raises:
        OSError: the disk refuses.
    """
    import mlflow

    # MLflow names a copied artifact as it finds it.
    files = {"weights": folder / WEIGHTS, "onnx": folder / ONNX}
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(package.candidate.weights, files["weights"])
    shutil.copyfile(package.onnx, files["onnx"])
    path = folder / "model"
    levels = {name: logging.getLogger(name).level for name in ("mlflow.pyfunc", "mlflow.models")}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # hints on type hints, which an array with a signature lacks
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            mlflow.pyfunc.save_model(
                path=str(path), python_model=str(CODE),
                artifacts={name: str(file) for name, file in files.items()},
                signature=_signature(), input_example=np.full((1, *EXAMPLE_PX, 3), 114, np.uint8),
                pip_requirements=requirements(), metadata=_metadata(package, comparison),
            )  # fmt: skip
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
    for cache in path.rglob("__pycache__"):
        shutil.rmtree(cache, ignore_errors=True)
    return path


def requirements() -> list[str]:
    """What serving a version needs, in the versions that are installed here."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in REQUIREMENTS]


def serve(onnx: Path) -> tuple[int, Callable[[np.ndarray], object]]:
    """An ONNX file by the code that serves it: its side in px, and photo uint8 [H,W,3] -> rows [k,6]."""
    from yolo_ray.track import served_model

    served = served_model.ServedDetector()
    served.open(str(onnx))
    return served.imgsz, lambda photo: served.detect(photo, served_model.DEFAULTS)


def _signature() -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ParamSchema, ParamSpec, Schema, TensorSpec

    from yolo_ray.track.served_model import DEFAULTS

    kinds = {"conf": "double", "iou": "double", "max_det": "long"}
    casts: dict[str, Callable[[float], Any]] = {"double": float, "long": int}
    return ModelSignature(
        # Unnamed: a named tensor would reach the model as an object column. Any height and width, since photos of
        # different sizes and encoded ones may come in an object array only then.
        inputs=Schema([TensorSpec(np.dtype(np.uint8), (-1, -1, -1, 3))]),
        params=ParamSchema(
            [ParamSpec(name, kind, casts[kind](DEFAULTS[name])) for name, kind in kinds.items()]
        ),
    )


def _metadata(package: Package, comparison: Comparison) -> dict[str, Any]:
    judged = comparison.challenger
    return {
        "names": list(package.names),
        "imgsz": judged.imgsz,
        "metrics": {name: float(value) for name, value in judged.summary.items()},
        "val_digest": package.val_digest,
        "val_data": comparison.data,
        "config": package.candidate.config,
        "source": package.candidate.source,
        **package.candidate.facts,
    }
