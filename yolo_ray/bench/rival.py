"""The rival: Ultralytics' own model, loss, optimizer and EMA in the loop of its trainer.

It is given images that are augmented and on the device already; nothing of its data loading is timed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from yolo_ray.data.batch import Batch
from yolo_ray.model.build import Detector

GAINS = (7.5, 0.5, 1.5)  # box, cls, dfl: the defaults of both
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Rival:
    """``rival(number)``: one training step on batch ``number``."""

    def __init__(
        self,
        detector: Detector,
        batches: list[tuple[Tensor, Batch]],
        *,
        precision: str,
        optimizer: str,
        compile: bool = False,
    ) -> None:
        """Take over ``detector``; ``batches`` hold uint8 images [b,3,S,S] and their boxes.

        Raises:
            RuntimeError: ``compile`` where Ultralytics gives its model back as it was.
        """
        from ultralytics.engine.trainer import BaseTrainer
        from ultralytics.utils.torch_utils import ModelEMA, attempt_compile

        self.net: Any = detector.net
        self.net.args = SimpleNamespace(
            **dict(zip(("box", "cls", "dfl"), GAINS, strict=True)), epochs=100
        )
        self.net.train()
        self.batches = [_as_ultralytics(images, batch) for images, batch in batches]
        self.device = batches[0][0].device
        self.model: Any = attempt_compile(self.net, device=self.device, mode=compile)
        if compile and self.model is self.net:
            raise RuntimeError("Ultralytics' attempt_compile gave its model back uncompiled")
        # Its own grouping of parameters, MuSGD's faster classification heads included. The method reads its
        # trainer only to decide "auto", so a trainer with a data set need not be made.
        trainer: Any = SimpleNamespace()
        self.optimizer = BaseTrainer.build_optimizer(
            trainer, self.model, name=optimizer, lr=0.001, momentum=0.9, decay=0.0005
        )
        self.ema = ModelEMA(self.model)
        self.dtype = HALF.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")

    def __call__(self, number: int) -> None:
        """Preprocess, forward, loss, backward, clip, optimizer, EMA, as its trainer does."""
        batch = dict(self.batches[number % len(self.batches)])
        half = self.dtype is not None
        with torch.autocast(self.device.type, dtype=self.dtype or torch.bfloat16, enabled=half):
            batch["img"] = batch["img"].float() / 255
            if self.model is self.net:
                loss, _ = self.net(batch)
            else:  # its trainer keeps the loss outside of what is compiled
                loss, _ = self.net.loss(batch, self.model(batch["img"]))
        self.scaler.scale(loss.sum()).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update(self.model)


def _as_ultralytics(images: Tensor, batch: Batch) -> dict[str, Tensor]:
    valid = batch.valid
    low, high = batch.boxes[valid, :2], batch.boxes[valid, 2:]
    return {
        "img": images,
        "batch_idx": batch.image_index[valid].float(),
        "cls": batch.classes[valid, None].float(),
        "bboxes": torch.cat(((low + high) / 2, high - low), 1) / images.shape[-1],
    }
