"""The whole training step as one CUDA graph: the eager step captured once, then replayed.

One graph for each (image side, box capacity, update or accumulate), captured when it is first needed, all in one
memory pool. What a step reads lies in tensors that never move: the flat buffers, the controls, the photo ring, and the
static batch that every batch is copied into.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from yolo_ray.data.batch import TENSORS, Batch
from yolo_ray.errors import UserError
from yolo_ray.step.flat import FlatModel
from yolo_ray.step.memory import measure_memory, memory_limit
from yolo_ray.step.optim import Optimizer
from yolo_ray.step.scale import LossScale
from yolo_ray.step.schedule import Controls
from yolo_ray.step.train_step import StepOptions, StepSums, TrainStep

# cuDNN and Triton choose and compile kernels in these; none may do so in a capture. The last is timed.
WARM_UP_STEPS = 3
LATER_WARM_UP_STEPS = 1  # where only the box capacity is new
TIMED_REPLAYS = 2
# torch.compile takes a minute or more for each shape: rarer ones are captured as they are.
MAX_COMPILED = 4
SMALL = tuple(name for name in TENSORS if name != "photos")
Key = tuple[int, int, bool]  # image side, box capacity, update


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Batch


@dataclass(frozen=True)
class Cost:
    """What a capture cost and what a replay saves."""

    capture_s: float
    eager_ms: float
    replay_ms: float

    @property
    def break_even(self) -> float:
        """Steps after which the capture has paid for itself; infinite if a replay is no faster."""
        saved_ms = self.eager_ms - self.replay_ms
        return self.capture_s * 1000 / saved_ms if saved_ms > 0 else math.inf

    def sentence(self, steps: int) -> str:
        """For people; ``steps`` of the run."""
        pays = self.break_even <= steps
        when = f"after {self.break_even:.0f} of {steps} steps" if pays else "not in this run"
        return (
            f"the step is captured as a CUDA graph: {self.replay_ms:.1f} ms a replay, {self.eager_ms:.1f} ms without; "
            f"the capture took {self.capture_s:.1f} s, paid back {when}"
        )


class CaptureRefused(Exception):
    """What ran cannot be captured; the reason as torch has it."""


class CaptureFull(Exception):
    """Memory ran out in a capture. Torch's own error would keep the tensors of what ran alive."""


def capture(
    run: Callable[[], None], stream: torch.cuda.Stream, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """The graph of what ``run`` launches on ``stream``; its memory is of ``pool``, or of one of its own.

    Raises:
        CaptureRefused: something in it cannot be captured.
        CaptureFull: out of memory.
    """
    graph = torch.cuda.CUDAGraph()
    is_full = False
    try:
        # thread_local: the threads that read photos may go on allocating while this one captures.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                run()
            except torch.OutOfMemoryError:
                is_full = True  # ending the broken capture raises an error of its own
                raise
    except RuntimeError as error:  # what torch raises for calls that a capture refuses
        if not is_full:
            raise CaptureRefused(str(error)) from error
    if is_full:
        raise CaptureFull
    return graph


class GraphedStep:
    """``GraphedStep(step)(batch, update=...)``: the same numbers as ``step``, by one graph launch.

    Attributes:
        mode: "auto" (a capture that fails leaves the run eager, with one warning), "require" or "off".
        captures, replays: how many there were.
        reason: why steps run eagerly; empty while they are replayed.
        cost: of the first capture, once there is one.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        mode: str = "auto",
        warn: Callable[[str], None] = warnings.warn,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """Wrap ``step``.

        Args:
            step: the eager step.
            mode: see above.
            warn: called with a sentence when "auto" falls back.
            agree: collective: whether all ranks say yes; None: this one is alone.

        Raises:
            UserError: mode "require" without a GPU.
        """
        self.step, self.mode, self.warn, self.agree = step, mode, warn, agree
        self.captures = self.replays = 0
        self.cost: Cost | None = None
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
        begin, failure, graph = time.perf_counter(), None, None
        inputs = self._static(key, batch)
        is_full, eager_ms = False, 0.0
        is_rare = len(self._graphs) >= MAX_COMPILED
        try:
            with torch.compiler.set_stance("force_eager" if is_rare else "default"):
                is_known = any((key[0], key[2]) == (side, act) for side, _, act in self._graphs)
                # The first that is not compiled runs kernels that no other did.
                is_known = is_known and len(self._graphs) != MAX_COMPILED
                steps = LATER_WARM_UP_STEPS if is_known else WARM_UP_STEPS
                eager_ms = self._warm_up(inputs, steps, update=key[2])
                assert self._stream is not None
                update = key[2]
                graph = capture(lambda: self.step(inputs, update=update), self._stream, self._pool)
        except (torch.OutOfMemoryError, CaptureFull):
            is_full = True  # the error itself would keep the step's tensors alive
        except CaptureRefused as error:
            failure = error
        if is_full:
            raise self._out_of_memory(inputs, kept)
        # A rank alone in eager mode would be right, but no faster than it: all go the same way.
        everywhere = self.agree(failure is None) if self.agree else failure is None
        if everywhere and graph is not None:
            self._graphs[key] = _Captured(graph, inputs)
            self.captures += 1
            if self.cost is None:
                capture_s = time.perf_counter() - begin
                self.cost = Cost(capture_s, eager_ms, _timed_ms(graph.replay, TIMED_REPLAYS))
        kept.put_back()
        if not everywhere:
            self._give_up(failure)
        return everywhere

    def _give_up(self, failure: CaptureRefused | None) -> None:
        lines = str(failure or "").strip().splitlines()
        why = lines[0] if lines else "another worker could not"
        if self.mode == "require":
            raise UserError(
                f"graph.mode=require, but the training step cannot be captured: {why}; "
                "use graph.mode=auto to train without a graph"
            ) from failure
        self.reason = f"the training step cannot be captured: {why}"
        self._graphs.clear()
        self.warn(f"{self.reason}; steps run without a graph, which is slower")

    def _static(self, key: Key, batch: Batch) -> Batch:
        """The inputs that all graphs of a side and capacity read, holding ``batch``."""
        shape = key[:2]
        if shape not in self._inputs:
            small = {name: getattr(batch, name).clone() for name in SMALL}
            self._inputs[shape] = Batch(photos=batch.photos, side=batch.side, **small)
        _load(self._inputs[shape], batch)
        return self._inputs[shape]

    def _warm_up(self, inputs: Batch, steps: int, *, update: bool) -> float:
        """Eager steps on the capturing stream; milliseconds of the last. What they raise is the step's own fault."""
        current, side = torch.cuda.current_stream(), self._stream
        assert side is not None
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(steps - 1):
                self.step(inputs, update=update)
            last_ms = _timed_ms(lambda: self.step(inputs, update=update), 1)
        current.wait_stream(side)
        return last_ms

    def _out_of_memory(self, inputs: Batch, kept: _Snapshot) -> UserError:
        """What does not fit and what would."""
        kept.put_back()
        self._graphs.clear()
        rows, options = len(inputs.picks), self.step.options
        remedy = "lower batch or imgsz, or set micro_batch"
        if self.agree is None:  # alone: two small steps tell how much a photo takes
            with suppress(torch.OutOfMemoryError):
                self.step.options = replace(
                    options, micro_batch=None
                )  # what a photo takes by itself
                fits = min(measure_memory(self.step, inputs).rows, rows - 1)
                if fits > 0:
                    remedy = f"about batch={fits} would fit; lower batch or imgsz, or set micro_batch={fits}"
            self.step.options = options
            kept.put_back()
        return UserError(
            f"the step of {rows} photos of {inputs.side} px on this worker does not fit in the "
            f"{memory_limit() / 2**30:.1f} GiB of GPU memory there are for it: {remedy}"
        )

    def set_controls(self, controls: Controls, head_gains: tuple[float, ...]) -> None:
        """Write the step's rates and head gains to the device; the next replay reads them there."""
        self.step.set_controls(controls, head_gains)

    def take_sums(self) -> StepSums:
        """What came together since the last call; the device does not wait until it is read."""
        return self.step.take_sums()

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
    def scale(self) -> LossScale:
        """The wrapped step's."""
        return self.step.scale

    @property
    def skipped(self) -> Tensor:
        """The wrapped step's."""
        return self.step.skipped


Step = TrainStep | GraphedStep


class _Snapshot:
    """Everything a step changes, to be put back bit for bit after the warm-up; kept in the host's memory."""

    def __init__(self, step: TrainStep) -> None:
        flat = step.flat
        self.device = flat.state.device
        slots = step.optimizer.slots.values()
        own = (step.pending, step.sums, step.skipped, step.scale.state)
        self.tensors = [flat.state, flat.ema, flat.counters, *own, *slots]
        self.values = [tensor.cpu() for tensor in self.tensors]
        self.random = torch.cuda.get_rng_state(self.device)

    def put_back(self) -> None:
        for tensor, value in zip(self.tensors, self.values, strict=True):
            tensor.copy_(value)
        torch.cuda.set_rng_state(self.random, self.device)


def _timed_ms(call: Callable[[], None], times: int) -> float:
    """Milliseconds of one call, waiting for the device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times * 1000


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
