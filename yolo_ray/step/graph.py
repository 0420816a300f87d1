"""The whole training step as one CUDA graph: the eager step captured once, then replayed.

One graph for each (image side, box capacity, update or accumulate), captured when it is first needed, all in one
memory pool. What a step reads lies in tensors that never move: the flat buffers, the controls, the photo ring, and the
static batch that every batch is copied into.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from yolo_ray.data.batch import TENSORS, Batch
from yolo_ray.errors import UserError
from yolo_ray.step.flat import FlatModel
from yolo_ray.step.optim import Optimizer
from yolo_ray.step.schedule import Controls
from yolo_ray.step.train_step import StepOptions, TrainStep

WARM_UP_STEPS = (
    3  # cuDNN and Triton choose and compile kernels in these; none may do so in a capture
)
SMALL = tuple(name for name in TENSORS if name != "photos")
Key = tuple[int, int, bool]  # image side, box capacity, update


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Batch


class GraphedStep:
    """``GraphedStep(step)(batch, update=...)``: the same numbers as ``step``, by one graph launch.

    Attributes:
        mode: "auto" (a capture that fails leaves the run eager, with one warning), "require" or "off".
        captures, replays: how many there were.
        reason: why steps run eagerly; empty while they are replayed.
    """

    def __init__(
        self, step: TrainStep, *, mode: str = "auto", warn: Callable[[str], None] = warnings.warn
    ) -> None:
        """Wrap ``step``.

        Raises:
            UserError: mode "require" without a GPU.
        """
        self.step, self.mode, self.warn = step, mode, warn
        self.captures = self.replays = 0
        self.reason = "graph.mode=off" if mode == "off" else ""
        if not step.flat.state.is_cuda:
            if mode == "require":
                raise UserError(
                    "graph.mode=require needs a GPU: use graph.mode=auto or cluster.gpu=true"
                )
            self.reason = "there is no GPU"
        self._graphs: dict[Key, _Captured] = {}
        self._inputs: dict[tuple[int, int], Batch] = {}  # by image side and capacity
        self._stream = torch.cuda.Stream() if not self.reason else None
        self._pool = torch.cuda.graph_pool_handle() if not self.reason else None

    def __call__(self, batch: Batch, *, update: bool) -> None:
        """Train on one batch, as ``TrainStep`` does.

        Raises:
            UserError: mode "require" and a step that cannot be captured.
        """
        if self.reason:
            self.step(batch, update=update)
            return
        key = (batch.side, len(batch.boxes), update)
        if key not in self._graphs and not self._try_capture(key, batch):
            self.step(batch, update=update)
            return
        captured = self._graphs[key]
        _load(captured.inputs, batch)
        captured.graph.replay()
        self.replays += 1

    def release(self) -> None:
        """Free all graphs. Call it before the process group is destroyed, which otherwise waits for ever."""
        if self._graphs:
            torch.cuda.synchronize()
        self._graphs.clear()
        self._inputs.clear()
        self._pool = self._stream = None
        self.reason = self.reason or "the graphs were released"

    def _try_capture(self, key: Key, batch: Batch) -> bool:
        kept = _Snapshot(self.step)
        try:
            self._graphs[key] = self._capture(key, batch)
        except RuntimeError as error:  # what torch raises for calls that a capture refuses
            text = str(error).strip().splitlines()
            reason = text[0] if text else type(error).__name__
            if self.mode == "require":
                raise UserError(
                    f"graph.mode=require, but the training step cannot be captured: {reason}; "
                    "use graph.mode=auto to train without a graph"
                ) from error
            self.reason = f"the training step cannot be captured: {reason}"
            self._graphs.clear()
            self.warn(f"{self.reason}; steps run without a graph, which is slower")
        kept.put_back()
        return key in self._graphs

    def _capture(self, key: Key, batch: Batch) -> _Captured:
        shape, update = key[:2], key[2]
        if shape not in self._inputs:
            small = {name: getattr(batch, name).clone() for name in SMALL}
            self._inputs[shape] = Batch(photos=batch.photos, side=batch.side, **small)
        inputs = self._inputs[shape]
        _load(inputs, batch)
        current, side = torch.cuda.current_stream(), self._stream
        assert side is not None
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                self.step(inputs, update=update)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads that read photos may go on allocating while this one captures.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            self.step(inputs, update=update)
        self.captures += 1
        return _Captured(graph, inputs)

    def set_controls(self, controls: Controls, head_gains: tuple[float, ...]) -> None:
        """Write the step's rates and head gains to the device; the next replay reads them there."""
        self.step.set_controls(controls, head_gains)

    def read_sums(self) -> dict[str, float]:
        """Mean losses since the last call; waits for the device."""
        return self.step.read_sums()

    @property
    def flat(self) -> FlatModel:
        """The wrapped step's; its tensors may be written into, never replaced."""
        return self.step.flat

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped step's."""
        return self.step.optimizer

    @property
    def options(self) -> StepOptions:
        """The wrapped step's."""
        return self.step.options

    @property
    def num_heads(self) -> int:
        """The wrapped step's."""
        return self.step.num_heads

    @property
    def pending(self) -> Tensor:
        """The wrapped step's."""
        return self.step.pending

    @property
    def stop(self) -> Tensor:
        """The wrapped step's."""
        return self.step.stop

    @property
    def skipped(self) -> Tensor:
        """The wrapped step's."""
        return self.step.skipped


Step = TrainStep | GraphedStep


class _Snapshot:
    """Everything a step changes, to be put back bit for bit after the warm-up."""

    def __init__(self, step: TrainStep) -> None:
        flat = step.flat
        self.device = flat.state.device
        slots = step.optimizer.slots.values()
        self.tensors = [
            flat.state,
            flat.ema,
            flat.counters,
            step.pending,
            step.sums,
            step.skipped,
            *slots,
        ]
        self.values = [tensor.clone() for tensor in self.tensors]
        self.random = torch.cuda.get_rng_state(self.device)

    def put_back(self) -> None:
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value)
        torch.cuda.set_rng_state(self.random, self.device)


def _load(inputs: Batch, batch: Batch) -> None:
    """Copy a batch into the static one."""
    assert batch.photos.data_ptr() == inputs.photos.data_ptr(), (
        "the graph reads the ring it was captured with"
    )
    places = [getattr(inputs, name) for name in SMALL]
    sources = [getattr(batch, name) for name in SMALL]
    for name, place, source in zip(SMALL, places, sources, strict=True):
        if place.shape != source.shape or place.dtype != source.dtype:
            raise ValueError(
                f"batch.{name} is {source.dtype} {tuple(source.shape)}, the graph was captured with "
                f"{place.dtype} {tuple(place.shape)}: the rows of a worker and the image size never change"
            )
    torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateImportUsage]
