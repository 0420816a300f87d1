"""Which batch norms keep their statistics, against the installed Ultralytics' trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from ultralytics.engine.trainer import BaseTrainer

from yolo_ray.model.build import Detector, build_detector
from yolo_ray.model.freeze import freeze_layers


def norm_modes(detector: Detector) -> dict[str, bool]:
    named = detector.net.named_modules()
    return {name: part.training for name, part in named if isinstance(part, nn.BatchNorm2d)}


@pytest.mark.parametrize("freeze", [0, 1, 11, (0, 2, 10, 22)])
@pytest.mark.parametrize("model", ["yolov8n.yaml", "yolo26n.yaml"])
def test_modes_of_batch_norms(model: str, freeze: int | tuple[int, ...]) -> None:
    ours, theirs = (build_detector(model, ("a",), imgsz=64, seed=0) for _ in range(2))
    freeze_layers(ours, freeze)
    layers = range(freeze) if isinstance(freeze, int) else freeze
    trainer: Any = SimpleNamespace(
        model=theirs.net, freeze_layer_names=[f"model.{index}." for index in layers] + [".dfl"]
    )
    BaseTrainer._model_train(trainer)
    modes = norm_modes(ours)
    assert modes == norm_modes(theirs)
    assert (False in modes.values()) == bool(freeze) and True in modes.values()
