"""Layers that are not trained: their parameters and the statistics of their batch norms stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yolo_ray.errors import UserError
from yolo_ray.model.build import Detector


def freeze_layers(detector: Detector, freeze: int | Sequence[int] | None) -> None:
    """Freeze the first ``freeze`` layers, or those with the indices ``freeze``; None freezes nothing.

    Their parameters get no gradient. Their batch norms normalise by the running statistics, which do
    not move, whatever mode the detector is put in. Call it before the flat model is built.

    Raises:
        UserError: a layer that the model does not have, or nothing is left to train.
    """
    layers: Any = detector.model
    last = len(layers) - 1
    chosen = range(freeze) if isinstance(freeze, int) else freeze or ()
    given = freeze if isinstance(freeze, int) else list(chosen)
    if any(not 0 <= index <= last for index in chosen):
        raise UserError(
            f"freeze={given} names layers that the model does not have: its layers are 0 to {last}, so "
            f"use a number up to {last} (the first so many layers) or a list of those"
        )
    detector.frozen_layers = tuple(sorted(set(chosen)))
    for index in detector.frozen_layers:
        layers[index].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in detector.parameters()):
        raise UserError(
            f"freeze={given} leaves nothing to train: freeze fewer of the layers 0 to {last}"
        )
    detector.train(detector.training)  # puts the frozen batch norms in their mode
