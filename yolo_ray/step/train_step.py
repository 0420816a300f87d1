"""The eager training step: the reference that a graph replays. Fixed shapes, and nothing is read on the host.

Legend: B photos of the global batch, P trained elements, H heads.
The loss of a global batch is ``B * sum_h head_gain_h * gains . items_h / max(scores_h, 1)``. Ranks back-propagate the
un-normalised sums; gradient, score sums and loss sums are reduced together; the division comes after. So the gradient
of N ranks is that of one rank with the same global batch, whatever their boxes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from yolo_ray.augment.device import normalised
from yolo_ray.data.batch import Batch, micro_batches
from yolo_ray.model.build import Detector
from yolo_ray.model.loss import DetectionLoss
from yolo_ray.step.flat import TAIL, FlatModel
from yolo_ray.step.host import HostCopy
from yolo_ray.step.optim import OPTIMIZERS, Rates, keep
from yolo_ray.step.precision import Forward, put_gradients
from yolo_ray.step.reduce import AllReduce, reduce_in_buckets
from yolo_ray.step.scale import LossScale
from yolo_ray.step.schedule import Controls

NUM_TERMS = 3  # box, cls, dfl
RATES = ("lr", "lr_bias", "momentum", "weight_decay", "ema_decay")


@dataclass(frozen=True)
class StepOptions:
    """What a step needs beside the model."""

    batch: int  # photos of the global batch
    gains: tuple[float, float, float]  # box, cls, dfl
    clip_norm: float
    optimizer: str
    momentum: float
    precision: str = "fp32"  # as resolve_precision gives it
    compile: str = (
        "off"  # what torch.compile fuses: nothing, the model, or the loss and the update too
    )
    micro_batch: int | None = None  # rows of this worker that go through the network at once


class StepSums:
    """The sums of some steps, on their way to the host."""

    def __init__(self, sums: Tensor, skipped: Tensor) -> None:
        self._copy = HostCopy({"sums": sums, "skipped": skipped})

    def read(self) -> dict[str, float]:
        """Mean losses, skipped steps and stop requests of those steps, and all skipped ones; waits for the last."""
        copies = self._copy.read()
        box, cls, dfl, steps, skipped, stop = copies["sums"].tolist()
        steps = max(steps, 1.0)
        means = {"box": box / steps, "cls": cls / steps, "dfl": dfl / steps}
        return means | {
            "skipped": skipped,
            "stop": stop,
            "all_skipped": float(copies["skipped"].item()),
        }


class TrainStep:
    """``step(batch, update=...)``: one training step on the device.

    Attributes:
        flat: parameters, gradients, buffers and EMA.
        optimizer: its ``slots`` are the optimizer's state.
        pending: float32 [P], normalised gradients accumulated since the last update.
        stop: float32 0-dim, 1 where this rank was asked to stop: summed over ranks by the step's own collective, so
            that all ranks learn of it at the same step.
        scale: the factor on the loss, 1 but for float16.
        sums: float32 [6]: box, cls, dfl (gained and normalised), steps, skipped steps, stops since ``take_sums``.
    """

    def __init__(
        self, detector: Detector, flat: FlatModel, options: StepOptions, reduce: AllReduce
    ) -> None:
        self.detector, self.flat, self.options, self.reduce = detector, flat, options, reduce
        self.loss = DetectionLoss(detector)
        self.forward = Forward(
            detector, flat, precision=options.precision, compile=options.compile != "off"
        )
        self.scale = LossScale(options.precision, options.batch, flat.state.device)
        self.optimizer = OPTIMIZERS[options.optimizer](flat, options.momentum)
        self.num_heads = 2 if detector.dual else 1
        device = flat.state.device
        self.pending = torch.zeros_like(flat.grads)
        self.sums = torch.zeros(NUM_TERMS + 3, device=device)
        self.stop = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        # One small tensor holds every value that changes over time; it is written once before a step.
        self.controls = torch.zeros(len(RATES) + NUM_TERMS + self.num_heads, device=device)
        self.gains, self.head_gains = self.controls[len(RATES) :].split([NUM_TERMS, self.num_heads])
        tail = self.num_heads * (NUM_TERMS + 1) + 1
        assert tail <= TAIL
        self._tail = flat.wire[flat.num_trained : flat.num_trained + tail]
        self._places = [view.of(flat.grads) for view in flat.views[: flat.num_views_trained]]
        self._compute, self._apply = self.loss.__call__, self.optimizer.update
        if options.compile == "step":
            self._compute = torch.compile(self._compute, dynamic=False)
            self._apply = torch.compile(self._apply, dynamic=False)

    def set_controls(self, controls: Controls, head_gains: tuple[float, ...]) -> None:
        """Write the step's rates and gains to the device, in one copy."""
        values = [*(getattr(controls, name) for name in RATES), *self.options.gains, *head_gains]
        # Fresh pinned memory each time: the copy of an earlier step may still be waiting for its turn.
        staged = torch.tensor(values, pin_memory=self.controls.is_cuda)
        self.controls.copy_(staged, non_blocking=True)

    def __call__(self, batch: Batch, *, update: bool) -> None:
        """Train on one batch; ``update`` says whether the optimizer acts or gradients go on adding up."""
        buffers_before = self.flat.buffers.clone()
        self._gradients(batch)
        ok = self._absorb()
        # Batch norm moved its statistics in the forward pass: a skipped step must not leave even those.
        keep(~ok, self.flat.buffers, buffers_before)
        if update:
            self._update(ok)

    def _gradients(self, batch: Batch) -> None:
        """Forward, loss and backward of this rank's rows into the flat gradient; then the one all-reduce."""
        self.flat.wire.zero_()  # the padding too, which a skipped step may have filled with NaN
        for part in micro_batches(batch, self.options.micro_batch):
            self._add_gradients(part)
        self._tail[-1].copy_(self.stop)
        reduce_in_buckets(self.flat.wire, self.reduce)

    def _add_gradients(self, batch: Batch) -> None:
        """Add the un-normalised gradient of some rows, and their sums, to the flat buffer."""
        heads = self.forward(normalised(batch, self.forward.dtype, self.forward.channels))
        sums = self._compute(
            heads,
            batch.boxes,
            batch.classes,
            batch.image_index,
            batch.valid,
            imgsz=batch.side,
        )
        weighted = (sums.items * self.gains).sum(1) * self.head_gains * self.options.batch
        gradients = torch.autograd.grad(
            self.scale.scaled(weighted.sum()),
            self.forward.leaves,
            allow_unused=True,
            materialize_grads=True,
        )
        self.forward.join()
        is_only = self.options.micro_batch is None
        put_gradients(self._places, self.forward.narrowed(gradients), add=not is_only)
        self._tail[:-1] += torch.cat([sums.scores, sums.items.detach().flatten()])

    def _absorb(self) -> Tensor:
        """Normalise the reduced gradient and add it up; returns whether every number is finite, 0-dim bool."""
        heads, tail, gradient = self.num_heads, self._tail, self.flat.grads
        divisors = tail[:heads].clamp(min=1)
        for branch, part in self.flat.branch_slices().items():
            gradient[part] /= self.scale.divisor(divisors[branch])
        items = tail[heads:-1].view(heads, NUM_TERMS) / divisors[:, None] * self.gains
        ok = torch.isfinite(gradient.sum()) & torch.isfinite(items.sum())
        self.scale.follow(ok)
        keep(ok, self.pending, self.pending + gradient)
        # Both heads' losses are reported together, weighted as they are trained.
        reported = (items * self.head_gains[:, None]).sum(0)
        zero = torch.zeros_like(reported)
        self.sums[:NUM_TERMS] += torch.where(ok, reported, zero)
        self.sums[NUM_TERMS] += ok
        self.sums[NUM_TERMS + 1] += ~ok
        self.sums[NUM_TERMS + 2] += tail[-1]
        self.skipped += ~ok
        return ok

    def _update(self, ok: Tensor) -> None:
        """Clip, optimizer, EMA; nothing of it where this step or the accumulated gradient is not finite.

        What was accumulated before a step that is not finite is dropped with it.
        """
        norm = torch.linalg.vector_norm(self.pending)
        ok = ok & torch.isfinite(norm)
        clip = (self.options.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        rates = Rates(*(self.controls[index] for index in range(4)))
        self._apply(self.pending * clip, rates, ok)
        decay = self.controls[RATES.index("ema_decay")]
        keep(ok, self.flat.ema, torch.lerp(self.flat.state, self.flat.ema, decay))
        self.pending.zero_()

    def take_sums(self) -> StepSums:
        """What came together since the last call; the device does not wait until it is read."""
        taken = StepSums(self.sums, self.skipped)
        self.sums.zero_()
        return taken
