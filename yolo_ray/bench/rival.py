"""The rival: Ultralytics' own model, loss and EMA in the loop of its trainer, with bf16 autocast.

It is given images that are augmented and on the device already; nothing of its data loading is timed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from yolo_ray.data.batch import Batch
from yolo_ray.model.build import Detector

GAINS = {"box": 7.5, "cls": 0.5, "dfl": 1.5}


class Rival:
    """``rival(number)``: one training step on batch ``number``."""

    def __init__(
        self, detector: Detector, batches: list[tuple[Tensor, Batch]], *, bf16: bool
    ) -> None:
        """Take over ``detector``; ``batches`` hold uint8 images [b,3,S,S] and their boxes."""
        from ultralytics.utils.torch_utils import ModelEMA

        self.net: Any = detector.net
        self.net.args = SimpleNamespace(**GAINS, epochs=100)
        self.net.train()
        self.batches = [_as_ultralytics(images, batch) for images, batch in batches]
        self.optimizer = _sgd(self.net)
        self.ema = ModelEMA(self.net)
        self.device = batches[0][0].device
        self.bf16 = bf16

    def __call__(self, number: int) -> None:
        """Preprocess, forward, loss, backward, clip, optimizer, EMA, as its trainer does."""
        batch = dict(self.batches[number % len(self.batches)])
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            batch["img"] = batch["img"].float() / 255
            loss, _ = self.net(batch)
        loss.sum().backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), max_norm=10.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.net)


def _as_ultralytics(images: Tensor, batch: Batch) -> dict[str, Tensor]:
    valid = batch.valid
    low, high = batch.boxes[valid, :2], batch.boxes[valid, 2:]
    return {
        "img": images,
        "batch_idx": batch.image_index[valid].float(),
        "cls": batch.classes[valid, None].float(),
        "bboxes": torch.cat(((low + high) / 2, high - low), 1) / images.shape[-1],
    }


def _sgd(net: nn.Module) -> torch.optim.SGD:
    """SGD with the three parameter groups of its trainer: filters decay, norms and biases do not."""
    groups: dict[str, list[nn.Parameter]] = {"bias": [], "norm": [], "weight": []}
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_norm = isinstance(module, nn.BatchNorm2d)
            groups["bias" if "bias" in name else "norm" if is_norm else "weight"].append(parameter)
    return torch.optim.SGD(
        [
            {"params": groups["bias"]},
            {"params": groups["norm"]},
            {"params": groups["weight"], "weight_decay": 0.0005},
        ],
        lr=0.001,
        momentum=0.9,
        nesterov=True,
    )
