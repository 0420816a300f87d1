"""All of a model's numbers in a few flat buffers: one kernel, or one collective, serves every tensor.

Legend: P trained elements (padded), Q constant and buffer elements (padded).
The module's parameters, gradients and batch-norm buffers become VIEWS of the flat buffers, so the model, its
state_dict and autograd work as before while clipping, optimizer, EMA and all-reduce each touch one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from yolo_ray.model.build import Detector

# 256 bytes: cuDNN and vectorised kernels want aligned pointers, and zero padding costs next to nothing.
ALIGN = 64
TAIL = 16  # room behind the gradient for a step's score sums, losses and stop request


@dataclass(frozen=True)
class Segment:
    """A run of the flat parameter buffer whose elements share one optimizer rule."""

    start: int
    stop: int
    branch: int  # whose target score sum divides the gradient: 0 one-to-many, 1 one-to-one
    kind: str  # "weight" (decayed), "norm", "bias", "muon" (decayed matrices of MuSGD)
    boost: float  # factor on the learning rate

    @property
    def span(self) -> slice:
        """Its elements in the flat parameters, gradients and optimizer slots."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class View:
    """Where one named tensor lives in its flat buffer; ``channels_last``: a filter stored [n,h,w,c]."""

    name: str
    start: int
    shape: torch.Size
    channels_last: bool = False

    @property
    def numel(self) -> int:
        """Elements of the tensor, padding not counted."""
        return self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        """The tensor as a view of ``flat``."""
        run = flat[self.start : self.start + self.numel]
        if not self.channels_last:
            return run.view(self.shape)
        filters, channels, height, width = self.shape
        return run.view(filters, height, width, channels).permute(0, 3, 1, 2)


def _kind(module: nn.Module, name: str, parameter: Tensor, muon: bool) -> str:
    if muon and parameter.ndim in (2, 4):
        return "muon"
    if "bias" in name:
        return "bias"
    return "norm" if isinstance(module, nn.modules.batchnorm._NormBase) else "weight"


def _classifiers(net: Any) -> set[int]:
    """Ids of the head's classification parameters: MuSGD trains them at three times the rate."""
    parts = dict(net.model[-1].named_children())
    return {
        id(p) for name in ("cv3", "one2one_cv3") if name in parts for p in parts[name].parameters()
    }


def _trained(
    detector: Detector, muon: bool
) -> dict[tuple[int, str, float], list[tuple[str, nn.Parameter]]]:
    one_to_one, frozen = detector.one_to_one_parameters(), detector.frozen_parameters()
    boosted = _classifiers(detector.net) if muon else set()
    groups: dict[tuple[int, str, float], list[tuple[str, nn.Parameter]]] = {}
    for module_name, module in detector.net.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}" if module_name else leaf
            if name in frozen or not parameter.requires_grad:
                parameter.requires_grad_(False)
                continue
            boost = 3.0 if id(parameter) in boosted else 1.0
            key = (int(name in one_to_one), _kind(module, name, parameter, muon), boost)
            groups.setdefault(key, []).append((name, parameter))
    return dict(sorted(groups.items(), key=lambda item: item[0]))


class FlatModel:
    """The flat buffers of a detector, which keeps working through views of them.

    Attributes:
        state: float32 [P+Q]: trained parameters, then frozen parameters and floating buffers.
        ema: float32 [P+Q], the running average of ``state``.
        wire: float32 [P+TAIL], what the ranks add up: the gradient and the step's own few sums.
        grads: its first P elements; each parameter's ``.grad`` is a view of them.
        segments: runs of the first P elements with one optimizer rule each.
        counters: int64 [N], the integer buffers (batch norm counts its batches), and ``counter_names``.
        parameters: the trained parameters, in the order of ``views``.
    """

    def __init__(
        self, detector: Detector, *, muon: bool = False, channels_last: bool = False
    ) -> None:
        """Take over the detector's tensors; ``channels_last``: filters lie as the GPU likes them."""
        self.views: list[View] = []
        self.segments: list[Segment] = []
        self.parameters: list[nn.Parameter] = []
        sources: list[Tensor] = []
        cursor = 0
        for (branch, kind, boost), members in _trained(detector, muon).items():
            start = cursor
            for name, parameter in members:
                is_filter = channels_last and parameter.ndim == 4
                self.views.append(View(name, cursor, parameter.shape, is_filter))
                self.parameters.append(parameter)
                cursor += -(-parameter.numel() // ALIGN) * ALIGN
            self.segments.append(Segment(start, cursor, branch, kind, boost))
        self.num_trained = cursor
        self.num_views_trained = len(self.views)
        sources += self.parameters
        for name, tensor in _rest(detector.net):
            is_filter = channels_last and tensor.ndim == 4  # of a frozen layer
            self.views.append(View(name, cursor, tensor.shape, is_filter))
            sources.append(tensor)
            cursor += -(-tensor.numel() // ALIGN) * ALIGN
        device = sources[0].device
        self.state = torch.zeros(cursor, device=device)
        self.wire = torch.zeros(self.num_trained + TAIL, device=device)
        self.grads = self.wire[: self.num_trained]
        self._adopt(sources)
        self.counter_names, self.counters = _adopt_counters(detector.net, device)
        self.ema = self.state.clone()

    def _adopt(self, sources: list[Tensor]) -> None:
        with torch.no_grad():
            for index, (view, source) in enumerate(zip(self.views, sources, strict=True)):
                place = view.of(self.state)
                place.copy_(source)
                source.data = place
                if index < self.num_views_trained:
                    source.grad = view.of(self.grads)

    @property
    def params(self) -> Tensor:
        """The trained part of ``state``, [P]."""
        return self.state[: self.num_trained]

    @property
    def buffers(self) -> Tensor:
        """Frozen parameters and floating buffers, [Q]."""
        return self.state[self.num_trained :]

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``(name, view)`` of every tensor in ``flat`` (``state`` or ``ema``)."""
        for view in self.views:
            yield view.name, view.of(flat)

    def branch_slices(self) -> dict[int, slice]:
        """The contiguous run of the flat gradient that each branch divides."""
        out: dict[int, slice] = {}
        for segment in self.segments:
            start = out[segment.branch].start if segment.branch in out else segment.start
            out[segment.branch] = slice(start, segment.stop)
        return out


def _rest(net: nn.Module) -> list[tuple[str, Tensor]]:
    """Everything else of the state_dict that is a floating number: it is averaged and kept, not trained."""
    frozen = [(n, p) for n, p in net.named_parameters() if not p.requires_grad]
    persistent = net.state_dict().keys()
    floating = [(n, b) for n, b in net.named_buffers() if b.is_floating_point() and n in persistent]
    return frozen + floating


def _adopt_counters(net: nn.Module, device: torch.device) -> tuple[list[str], Tensor]:
    """The integer buffers as views of one tensor, so that they are saved and put back at once."""
    named = {n: b for n, b in net.named_buffers() if b.dtype == torch.int64 and b.ndim == 0}
    buffers = list(named.values())
    counters = torch.zeros(len(buffers), dtype=torch.int64, device=device)
    for place, buffer in zip(counters.unbind(0), buffers, strict=True):
        place.copy_(buffer)
        buffer.data = place
    return list(named), counters
