"""The forward pass in the wanted precision: float32, or half precision with float32 weights.

Legend: P trained elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from yolo_ray.errors import UserError
from yolo_ray.model.boxes import HeadOutput
from yolo_ray.model.build import Detector
from yolo_ray.step.flat import FlatModel

IMAGE_CHANNELS, PADDED_CHANNELS = 3, 8
Heads = tuple[HeadOutput, ...]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of products and activations


def resolve_precision(precision: str, device: torch.device) -> str:
    """What ``auto`` means: bf16 on a GPU that has it, fp16 on an older one, fp32 elsewhere.

    Raises:
        UserError: a precision that this device does not have.
    """
    is_gpu = device.type == "cuda"
    if precision == "auto":
        if not is_gpu:
            return "fp32"
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if (
        precision == "bf16"
        and is_gpu
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError(
            "precision=bf16 is not in this GPU: use precision=auto, which takes fp16 then"
        )
    if precision != "fp32" and not is_gpu:
        raise UserError(f"precision={precision} needs a GPU: use precision=auto or precision=fp32")
    return precision


def set_kernels(precision: str, *, deterministic: bool) -> None:
    """Tell torch which kernels may run: call it once, before the first step.

    tf32 rounds the operands of float32 products to 10 bits. Without ``deterministic`` cuDNN measures its
    kernels and keeps the fastest.
    """
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # Filling fresh memory with NaN is a debugging aid that costs a kernel for every tensor.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (untyped)


class Forward:
    """``forward(images)``: the detector's raw heads.

    Attributes:
        leaves: the tensors to differentiate by, in the order of the flat model's trained views.
        dtype: of the images it wants.
        join: makes the current stream wait for gradients of ``leaves``; call it before they are read.
        channels: of the images it wants. Half precision convolutions are fast on multiples of 8 only, so the first
            filters see five more channels of zeros; they get weights and gradients that are dropped.
    """

    def __init__(
        self, detector: Detector, flat: FlatModel, *, precision: str, compile: bool
    ) -> None:
        self.detector, self.flat = detector, flat
        self.dtype = DTYPES.get(precision, torch.float32)
        self.leaves: list[Tensor] = list(flat.parameters)
        self.call: Callable[[dict[str, Tensor], Tensor], Heads] = self._call
        self.weights: dict[str, Tensor] = {}
        self.channels = IMAGE_CHANNELS
        self.layers: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.join: Callable[[], None] = _no_lane
        if flat.state.is_cuda and not compile:
            # Triton: on a GPU only.
            from yolo_ray.model.fused_conv import WeightLane
            from yolo_ray.model.fused_head import HeadLanes
            from yolo_ray.model.fused_mode import fused_layers

            lane = WeightLane(flat.state.device)
            heads = HeadLanes(detector.head, flat.state.device)
            self.layers, self.join = partial(fused_layers, lane, heads), lane.join
        if self.dtype != torch.float32:
            self._round_weights()
        if compile:
            self.call = torch.compile(self._call, dynamic=False)

    def _round_weights(self) -> None:
        """Filters get half precision twins in one flat buffer: one kernel rounds them all.

        Autocast would round every filter by a kernel of its own, and widen every gradient by another.
        """
        self.rounded = torch.zeros_like(self.flat.params, dtype=self.dtype)
        for index, view in enumerate(self.flat.views[: self.flat.num_views_trained]):
            if len(view.shape) == 4:
                twin = nn.Parameter(view.of(self.rounded))
                self.leaves[index] = self.weights[view.name] = twin
        self._widen_first_filters()

    def _widen_first_filters(self) -> None:
        name = first_filters(self.detector.net)
        if name not in self.weights:
            return
        self.narrow = self.weights[name].detach()
        shape = (len(self.narrow), PADDED_CHANNELS, *self.narrow.shape[2:])
        wide = torch.zeros(shape, dtype=self.dtype, device=self.narrow.device)
        self.wide = nn.Parameter(wide.contiguous(memory_format=torch.channels_last))
        self.index = next(i for i, leaf in enumerate(self.leaves) if leaf is self.weights[name])
        self.leaves[self.index] = self.weights[name] = self.wide
        self.channels = PADDED_CHANNELS

    def narrowed(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of ``leaves`` in the shapes of the flat views."""
        out = list(gradients)
        if self.channels != IMAGE_CHANNELS:
            out[self.index] = out[self.index][:, :IMAGE_CHANNELS]
        return out

    def __call__(self, images: Tensor) -> Heads:
        """Heads of ``images`` [b,3,S,S]; they keep the graph to ``leaves``."""
        if not self.weights:
            return self.call({}, images)
        with torch.no_grad():
            self.rounded.copy_(self.flat.params)
            if self.channels != IMAGE_CHANNELS:
                self.wide[:, :IMAGE_CHANNELS].copy_(self.narrow)
        return self.call(self.weights, images)

    def _call(self, weights: dict[str, Tensor], images: Tensor) -> Heads:
        if not weights:
            with self.layers():
                return self.detector(images)
        # Nothing is worth caching: the filters are rounded already, and a replay has no cache.
        with (
            torch.autocast(images.device.type, dtype=self.dtype, cache_enabled=False),
            self.layers(),
        ):
            return functional_call(self.detector, weights, (images,))


def _no_lane() -> None:
    """All gradients are computed in line."""


def first_filters(net: nn.Module) -> str:
    """Name of the weight of the convolution that reads the images; empty if that is not plain."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            return (
                f"{name}.weight"
                if module.in_channels == IMAGE_CHANNELS and module.groups == 1
                else ""
            )
    return ""


def put_gradients(views: Sequence[Tensor], gradients: Sequence[Tensor], *, add: bool) -> None:
    """Copy (or add) gradients to their places, in one kernel for each dtype where memory layouts agree."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for view, gradient in zip(views, gradients, strict=True):
        places, sources = by_dtype.setdefault(gradient.dtype, ([], []))
        places.append(view)
        sources.append(_laid_out_as(view, gradient))
    for places, sources in by_dtype.values():
        put = torch._foreach_add_ if add else torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        put(places, sources)


def _laid_out_as(view: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == view.stride():
        return gradient
    if view.ndim == 4 and view.shape[2:] == (1, 1) and gradient.is_contiguous():
        # A 1x1 filter reads the same in both layouts; only its strides are written differently.
        return gradient.as_strided(view.shape, view.stride())
    dense = torch.empty_strided(
        view.shape, view.stride(), dtype=gradient.dtype, device=gradient.device
    )
    return dense.copy_(gradient)
