"""The batch of one worker: fixed shapes, and the ring of photos on the device that it points into.

b rows of this worker, R photos a row in the ring, S the image side, G box capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from yolo_ray.data.plan import PlanStep
from yolo_ray.errors import UserError

GRAY = 114


@dataclass
class Batch:
    """Tensors of ONE worker's b rows; shapes depend on b, S and G alone; images on b and S'.

    With mixup a row's second image lies behind its own: [b,8], [b,8,2], [b,4], [b,2], [b,4,3].
    """

    photos: Tensor  # uint8 [R*b,3,S,S] the ring itself
    picks: Tensor  # int64 [b,4] rows of the ring
    origins: Tensor  # float32 [b,4,2] canvas xy of each photo's top-left corner
    extents: Tensor  # float32 [b,4,2] (w,h) of each resized photo, 0 for unused quadrants
    centre: Tensor  # float32 [b,2] canvas xy where the quadrants meet
    canvas: Tensor  # float32 [b] side of the canvas
    inverse: Tensor  # float32 [b,2,3] output pixel -> canvas pixel
    hsv: Tensor  # float32 [b,3] gains (hue turn, saturation factor, value factor)
    mix: Tensor  # float32 [b] weight of the row's own image, whole 4096ths
    boxes: Tensor  # float32 [G,4] xyxy px
    classes: Tensor  # int64 [G]
    image_index: Tensor  # int64 [G] row of each box
    valid: Tensor  # bool [G]
    side: int  # S' of the images in px; S, that of the photos, without multi_scale

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``; what is there already is not copied."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        moved = {k: v.to(device) for k, v in tensors.items()}
        return Batch(**moved, side=self.side)


TENSORS = tuple(field.name for field in fields(Batch) if field.name != "side")


def micro_batches(batch: Batch, rows: int | None) -> Iterator[Batch]:
    """The batch in parts of at most ``rows`` rows, each with the whole list of boxes; None: itself."""
    total = len(batch.picks)
    if rows is None or rows >= total:
        yield batch
        return
    for start in range(0, total, rows):
        yield take_rows(batch, start, min(start + rows, total))


def take_rows(batch: Batch, start: int, stop: int) -> Batch:
    """The rows [start, stop) of a batch; boxes of other rows stay in the list and are not valid."""
    per_row = ("picks", "origins", "extents", "centre", "canvas", "inverse", "hsv", "mix")
    parts = {name: getattr(batch, name)[start:stop] for name in per_row}
    index = batch.image_index - start
    inside = (index >= 0) & (index < stop - start)
    truth = {"image_index": torch.where(inside, index, 0), "valid": batch.valid & inside}
    return replace(batch, **parts, **truth)


@dataclass(frozen=True)
class Encoded:
    """A photo that the device shall decode: the bytes of a JPEG, or resized pixels where it is none.

    ``path`` names it in errors. ``shape``: (height, width) of the pixels; None: a JPEG.
    """

    path: str
    data: bytes
    shape: tuple[int, int] | None = None

    def pixels(self) -> np.ndarray:
        """uint8 [h,w,3], the caller's own."""
        assert self.shape is not None
        return np.frombuffer(self.data, np.uint8).reshape(*self.shape, 3).copy()


class PhotoRing:
    """The photos of this worker's rows in the last W + 2 steps: W in use, 2 for read-ahead."""

    def __init__(
        self, rows: int, imgsz: int, window: int, device: torch.device | str = "cpu"
    ) -> None:
        """A ring for ``rows`` rows of photos of side ``imgsz`` px and a window in steps."""
        self.size = window + 2
        self.rows = rows
        shape = (self.size * rows, 3, imgsz, imgsz)
        self.photos = torch.full(shape, GRAY, dtype=torch.uint8, device=device)
        self._steps: list[int | None] = [None] * self.size
        self._lane = _CopyLane(self.photos.device) if self.photos.is_cuda else None

    def stage(self, photos: np.ndarray) -> Tensor:
        """Photos [b,S,S,3] where a copy to the device starts from: any thread may do it ahead of ``put``."""
        source = torch.as_tensor(photos)
        return source if self._lane is None else source.pin_memory()

    def put(self, step: int, photos: np.ndarray | Tensor) -> None:
        """Store one step's photos, uint8 [b,S,S,3] RGB with the resized photo at the top left, from host or device.

        On a GPU the copy runs beside the training steps that are still waiting there. Steps are put in
        order, and at most two ahead of the last ``batch``.
        """
        place = step % self.size
        target = self.photos[place * self.rows : (place + 1) * self.rows]
        source = torch.as_tensor(photos)
        if self._lane is None:
            target.copy_(source.permute(0, 3, 1, 2))
        else:
            # The photos of step - size, which lie here, were last needed by the training step
            # step - 3: whatever was enqueued before the batch of step - 2 must have run.
            self._lane.copy(target, source, after=step - 2)
        self._steps[place] = step

    def copied_ms(self) -> float:
        """What copies to the device have taken there since the last call, as far as they are done."""
        return 0.0 if self._lane is None else self._lane.copied_ms()

    def batch(self, plan_step: PlanStep, slots: range, capacity: int) -> Batch:
        """This worker's batch of a step whose photos (and those of its window) were put.

        Args:
            plan_step: the global batch.
            slots: of this worker, as many as the ring has rows.
            capacity: G, from ``Plan.capacity_at``.

        Raises:
            UserError: albumentations gave more boxes than ``capacity``.
        """
        assert len(slots) == self.rows
        mine = slice(slots.start, slots.stop)
        places = (plan_step.step - plan_step.ages[mine]) % self.size
        self._check(plan_step.step, plan_step.ages[mine])
        per_row = {
            "picks": places * self.rows + np.arange(self.rows)[:, None],
            "origins": plan_step.origins[mine],
            "extents": plan_step.extents[mine],
            "centre": plan_step.centre[mine],
            "canvas": plan_step.canvas[mine],
            "inverse": plan_step.inverse[mine],
            "hsv": plan_step.hsv[mine],
            "mix": plan_step.mix[mine],
        }
        truth = _pad_boxes(plan_step, slots, capacity)
        tensors = {name: torch.from_numpy(value) for name, value in (per_row | truth).items()}
        if self._lane is None:
            return Batch(self.photos, **tensors, side=plan_step.side)
        self._lane.join(plan_step.step)
        sent = _sent_at_once(tensors, self.photos.device)
        return Batch(self.photos, **sent, side=plan_step.side)

    def _check(self, step: int, ages: np.ndarray) -> None:
        for age in np.unique(ages).tolist():
            held = self._steps[(step - age) % self.size]
            assert held == step - age, f"the ring holds step {held} where {step - age} is needed"


class _CopyLane:
    """A stream of its own for photos, so that neither the host nor the training steps wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.arrived = torch.cuda.Event()
        self.joined: dict[int, torch.cuda.Event] = {}
        self.timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def copy(self, target: Tensor, source: Tensor, *, after: int) -> None:
        """Copy photos [b,S,S,3] to ``target`` [b,3,S,S] once the work before batch ``after`` ran."""
        ready = source if source.is_cuda or source.is_pinned() else source.pin_memory()
        if after in self.joined:
            self.stream.wait_event(self.joined[after])
        self.joined = {step: event for step, event in self.joined.items() if step > after}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            begin.record()
            target.copy_(ready.to(self.device, non_blocking=True).permute(0, 3, 1, 2))
            end.record()
        if source.is_cuda:
            source.record_stream(self.stream)
        self.timed.append((begin, end))
        self.arrived.record(self.stream)

    def copied_ms(self) -> float:
        """Of the copies that ended since the last call."""
        done = [pair for pair in self.timed if pair[1].query()]
        self.timed = self.timed[len(done) :]
        return sum(begin.elapsed_time(end) for begin, end in done)

    def join(self, step: int) -> None:
        """What is enqueued from now on sees all photos; remember the moment as that of ``step``."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.arrived)
        event = torch.cuda.Event()
        event.record(current)
        self.joined[step] = event


def _sent_at_once(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on ``device``, all by one copy that the host does not wait for."""
    starts, total = {}, 0
    for name, tensor in tensors.items():
        starts[name] = total
        total += -(-tensor.nbytes // 256) * 256
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    for name, tensor in tensors.items():
        packed[starts[name] :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    sent = packed.to(device, non_blocking=True)
    return {
        name: sent[starts[name] :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for name, tensor in tensors.items()
    }


def _pad_boxes(plan_step: PlanStep, slots: range, capacity: int) -> dict[str, np.ndarray]:
    """The worker's boxes in ``capacity`` places; the rest is zero and not valid."""
    first, last = np.searchsorted(plan_step.slots, [slots.start, slots.stop])
    count = int(last - first)
    if count > capacity and plan_step.moved:
        raise UserError(
            f"step {plan_step.step} has {count} boxes after albumentations, more than the "
            f"{capacity} of its photos: remove the transform that adds boxes from "
            "augment.albumentations, it may drop and move boxes only"
        )
    assert count <= capacity, f"{count} boxes in a capacity of {capacity}"
    padded = {
        "boxes": np.zeros((capacity, 4), np.float32),
        "classes": np.zeros(capacity, np.int64),
        "image_index": np.zeros(capacity, np.int64),
        "valid": np.zeros(capacity, np.bool_),
    }
    padded["boxes"][:count] = plan_step.boxes[first:last]
    padded["classes"][:count] = plan_step.classes[first:last]
    padded["image_index"][:count] = plan_step.slots[first:last] - slots.start
    padded["valid"][:count] = True
    return padded
