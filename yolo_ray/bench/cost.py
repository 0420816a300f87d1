"""What a step must at least compute and move, and what a card could do: shares of the peak.

Operations: three times those of a forward pass by ``torch.utils.flop_counter`` (a multiply-add is two); its rule for
the backward pass miscounts grouped convolutions. Loss and optimizer are not counted. Bytes: a lower bound, every
convolution and matrix product reading and writing its tensors once in the step's precision, forward and backward,
and optimizer and EMA passing once over the parameters in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from yolo_ray.bench.scene import make_records
from yolo_ray.model.build import build_detector

PHOTOS = 2  # counted together: batch norm wants more than one value where a level is 1 x 1
STEP_OF_FORWARD = 3  # the backward pass has a product for each operand
# Operands: read forward, read backward, their gradients written. Results: written, their gradients read.
OPERAND_PASSES, RESULT_PASSES = 3, 2
BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
# Parameter, momentum and EMA are read and written, the gradient is read, 4 bytes each.
BYTES_A_PARAMETER = 28


@dataclass(frozen=True)
class Peak:
    """What a card does at best: TFLOP/s by precision (dense), TB/s of its memory."""

    tflops: dict[str, float]
    tbytes: float


PEAKS = {
    # NVIDIA H200 data sheet, SXM; tensor-core numbers without sparsity, fp32 outside of tensor cores.
    "NVIDIA H200": Peak({"bf16": 989.0, "fp16": 989.0, "tf32": 494.0, "fp32": 67.0}, 4.8),
    # NVIDIA H100 data sheet, SXM.
    "NVIDIA H100 80GB HBM3": Peak(
        {"bf16": 989.0, "fp16": 989.0, "tf32": 494.0, "fp32": 67.0}, 3.35
    ),
    # NVIDIA A100 data sheet, 80 GB SXM.
    "NVIDIA A100-SXM4-80GB": Peak(
        {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}, 2.039
    ),
}


@dataclass(frozen=True)
class Cost:
    """Forward and backward: what one photo costs, and what a step costs whatever its batch.

    ``flops`` operations a photo; ``elements`` read and written a photo, ``weights`` a step; trained ``parameters``.
    """

    flops: float
    elements: float
    weights: float
    parameters: int

    def step_flops(self, batch: int) -> float:
        """Operations of a step."""
        return self.flops * batch

    def step_bytes(self, batch: int, precision: str) -> float:
        """Bytes that a step moves at least."""
        elements = self.elements * batch + self.weights
        return elements * BYTES[precision] + BYTES_A_PARAMETER * self.parameters


def count_cost(model: str, imgsz: int) -> Cost:
    """Count a model's step on the meta device: shapes only, nothing is computed.

    Raises:
        UserError: unknown model.
    """
    detector = build_detector(model, make_records(1).names, imgsz=imgsz, seed=0).to("meta").train()
    images = torch.empty(PHOTOS, 3, imgsz, imgsz, device="meta")
    traffic = _Traffic()
    with torch.no_grad(), FlopCounterMode(display=False) as flops, traffic:
        detector(images)
    parameters = sum(p.numel() for p in detector.parameters() if p.requires_grad)
    return Cost(
        flops=STEP_OF_FORWARD * flops.get_total_flops() / PHOTOS,
        elements=traffic.elements / PHOTOS,
        weights=traffic.weights,
        parameters=parameters,
    )


def shares(
    cost: Cost | None, device: str, precision: str, step: tuple[int, float]
) -> dict[str, Any]:
    """Reached TFLOP/s of a ``step`` = (batch, ms), and in percent of the card's peaks if it is known."""
    if cost is None:
        return {}
    batch, step_ms = step
    tflops = cost.step_flops(batch) / step_ms / 1e9
    row: dict[str, Any] = {"tflops": round(tflops, 3)}
    peak = PEAKS.get(device)
    if peak:
        tbytes = cost.step_bytes(batch, precision) / step_ms / 1e9
        row["flops_share"] = round(100 * tflops / peak.tflops[precision], 1)
        row["bandwidth_share"] = round(100 * tbytes / peak.tbytes, 1)
    return row


class _Traffic(TorchDispatchMode):
    """Adds up the elements that convolutions and matrix products of a forward pass read and write in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.weights = 0
        aten = torch.ops.aten
        self.products = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
        self.convolution = aten.convolution

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is self.convolution:
            self.weights += OPERAND_PASSES * args[1].numel()
            self.elements += OPERAND_PASSES * args[0].numel() + RESULT_PASSES * out.numel()
        elif func.overloadpacket in self.products:
            operands = sum(tensor.numel() for tensor in args if isinstance(tensor, Tensor))
            self.elements += OPERAND_PASSES * operands + RESULT_PASSES * out.numel()
        return out
