"""Ray Data as the way photos flow: (step, slot) numbers in, decoded uint8 photos out. The only import of ray.data.

Every worker streams its own slots: datasets of row numbers, in blocks of steps, whose tasks call the pure plan and
decode on any node of the cluster. Nothing is split by Ray, so no row is ever dropped or moved to another worker, and a
restart at step k is a dataset that starts at k.

The stream comes in bounded chunks that are materialised ahead of the one being used. A single long dataset would be
simpler, but Ray's executor spins at full speed in the worker's process while the consumer is the slower side
(measured: a whole core, and the interpreter lock, taken from training).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, cast

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data._internal.execution.resource_manager import ResourceManager
from ray.data.block import BlockAccessor
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from yolo_ray.data.batch import Encoded
from yolo_ray.data.plan import KeptBoxes, Plan
from yolo_ray.data.reading import Reading
from yolo_ray.data.tasks import Columns, EvalTask, Reported, TrainTask, encoded_photos, get_ready
from yolo_ray.errors import UserError

# Small, so that training starts soon; each further chunk is twice as long, up to the budget.
FIRST_CHUNK_STEPS = 12
STEWARDS = 3  # processes that each compute a chunk for a worker with a GPU
# Ray spends some 15 ms of the process that runs it on a block, whatever is in it, and splits one above 128 MiB.
BLOCK_BYTES = 96 * 2**20

# An execution of Ray Data 2.60 begins without knowing any CPU, runs one task at a time, and looks again after a second:
# longer than the other CPUs need for a whole chunk. What it looks at is a value in its own process.
cast(Any, ResourceManager).GLOBAL_LIMITS_UPDATE_INTERVAL_S = 0.02

Warn = Callable[[str], None]
TaskOf = Callable[[range], Callable[[Columns], Columns]]  # the task that decodes a chunk of steps


@dataclass(frozen=True)
class StreamLimits:
    """What the decode tasks of one worker may take."""

    cpus: float  # of all its concurrent tasks together
    task_cpus: float  # of one task
    chunk_bytes: int  # of the object store, by one chunk of photos: one in use and ``ahead``
    # Ray Data's own work is done in processes beside the worker's: the thread that launches a GPU's steps would share
    # the interpreter with it, and took 13 to 15 ms for a step instead of 9 to 11.
    apart: bool = False
    # Others use the CPUs beside ``cpus``. Else each of the chunks may take all of them, and Ray counts the node's.
    strict: bool = False

    @property
    def ahead(self) -> int:
        """Chunks that are decoded at a time: as one begins or ends CPUs are idle, too long for a GPU."""
        most = min(STEWARDS, self.tasks) if self.strict else STEWARDS
        return most if self.apart else 1

    @property
    def tasks(self) -> int:
        """That may run at the same time."""
        return max(1, int(self.cpus / self.task_cpus))

    def of_chunk(self, number: int) -> ChunkLimits:
        """Of one chunk; ``ahead`` that follow each other keep the limits together."""
        tasks = self.tasks
        if self.strict:
            place = number % self.ahead
            tasks = tasks // self.ahead + (place < tasks % self.ahead)
        return ChunkLimits(tasks, self.task_cpus)


@dataclass(frozen=True)
class ChunkLimits:
    """What the tasks of one chunk may take."""

    tasks: int  # at the same time
    task_cpus: float  # of one

    def steps_per_block(self, steps: int, step_bytes: int) -> int:
        """Steps of one block of a chunk of ``steps``: many, for their cost, and yet enough blocks for all tasks."""
        return max(1, min(BLOCK_BYTES // step_bytes, steps // self.tasks))


@dataclass(frozen=True)
class StepPhotos:
    """This worker's rows of one step: ids int64 [b], photos uint8 [b,S,S,3] at the top left, moved boxes by slot.

    With ``Reading.encoded`` the photos are b ``Encoded`` ones. ``read_ms`` is what they took of the CPU that read them.
    """

    step: int
    ids: np.ndarray
    photos: np.ndarray | tuple[Encoded, ...]
    kept: KeptBoxes
    read_ms: float


def _blocks(
    rows: int, block: int, limits: ChunkLimits, task: Callable[[Columns], Columns]
) -> list[Any]:
    """``rows`` numbers in blocks of ``block``, in order, through ``task`` within the limits, all computed."""
    # Not ray.data.range: its reading tasks take a whole CPU each, which a small or full cluster may never have.
    starts = range(0, rows, block)
    dataset = ray.data.from_blocks(
        [pa.table({"id": np.arange(start, min(start + block, rows))}) for start in starts]
    )
    context = dataset.context
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(
        cpu=limits.tasks * limits.task_cpus
    )
    mapped = dataset.map_batches(
        cast(Any, Reported(task)),
        batch_size=block,
        num_cpus=limits.task_cpus,
        zero_copy_batch=True,
        udf_modifying_row_count=False,
    )
    # Ray keeps metrics and a log file for every dataset it has seen, for ever: 0.5 MiB a chunk in its actor and as much
    # in its agent. So all chunks of a stream are one dataset to it.
    owner = ray.get_runtime_context().get_worker_id()
    cast(Any, mapped)._set_uuid(f"{type(task).__name__}-{owner}")
    bundles = list(mapped.iter_internal_ref_bundles())
    return [block for bundle in bundles for block in bundle.block_refs]


class _Steward:
    """Computes blocks in a process of its own, which owns them."""

    def blocks(
        self, rows: int, block: int, limits: ChunkLimits, task: Callable[[Columns], Columns]
    ) -> list[Any]:
        """As ``_blocks``."""
        return _blocks(rows, block, limits, task)


@lru_cache(maxsize=STEWARDS)
def _steward(number: int) -> Any:
    """This process's own, on its node, for as long as it lives; a training and an evaluation stream may share it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(_Steward)
        .options(num_cpus=0, max_concurrency=2, scheduling_strategy=here)
        .remote()
    )


def _blocks_apart(
    number: int, rows: int, block: int, limits: ChunkLimits, task: Callable[[Columns], Columns]
) -> list[Any]:
    """As ``_blocks``, in the process of the steward ``number``."""
    return ray.get(_steward(number).blocks.remote(rows, block, limits, task))


def start_readers(limits: StreamLimits, albumentations: Any) -> None:
    """Begin to start the processes that read photos, which takes seconds: meanwhile the caller builds its model."""
    task = ray.remote(get_ready).options(
        num_cpus=limits.task_cpus, scheduling_strategy="SPREAD", max_retries=0
    )
    for _ in range(limits.tasks):
        task.remote(albumentations)
    for number in range(limits.ahead if limits.apart else 0):
        _steward(number)


def _batches(blocks: list[Any], batch: int, warn: Warn) -> Iterator[Columns]:
    """Columns of ``batch`` rows, whatever the blocks hold. ``warn`` is told what a task reports.

    Raises:
        UserError: what a task reported.
    """
    waiting: list[Columns] = []
    for place in range(len(blocks)):
        columns = cast(Columns, BlockAccessor.for_block(ray.get(blocks[place])).to_numpy())
        if "mistake" in columns:
            raise UserError(str(columns["mistake"][0]))
        if "trouble" in columns:
            warn(str(columns.pop("trouble")[0]))
        waiting.append(columns)
        blocks[place] = None  # the store may free it
        while sum(len(part["id"]) for part in waiting) >= batch:
            columns = waiting[0] if len(waiting) == 1 else _joined(waiting)
            yield {name: column[:batch] for name, column in columns.items()}
            rest = {name: column[batch:] for name, column in columns.items()}
            waiting = [rest] if len(rest["id"]) else []
    assert not waiting, "blocks do not add up to whole batches"


def _joined(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _chunks(steps: range, longest: int) -> Iterator[range]:
    """Runs of ``steps``: short first, each twice as long as the one before, up to ``longest``."""
    start, length = steps.start, min(FIRST_CHUNK_STEPS, longest)
    while start < steps.stop:
        stop = min(start + length, steps.stop)
        yield range(start, stop)
        start, length = stop, min(length * 2, longest)


def _stream(
    steps: range, batch: int, step_bytes: int, limits: StreamLimits, task_of: TaskOf, warn: Warn
) -> Iterator[tuple[int, Columns]]:
    """``(step, columns of batch rows)``; while one chunk of steps is used, the next ones are decoded."""
    warn = _once(warn)

    def decode(number: int, chunk: range) -> list[Any]:
        own = limits.of_chunk(number)
        block = own.steps_per_block(len(chunk), step_bytes) * batch
        compute = partial(_blocks_apart, number % limits.ahead) if limits.apart else _blocks
        return compute(len(chunk) * batch, block, own, task_of(chunk))

    chunks = _chunks(steps, max(1, limits.chunk_bytes // step_bytes))
    with ThreadPoolExecutor(limits.ahead, thread_name_prefix="chunk") as pool:
        coming = (
            (chunk, pool.submit(decode, number, chunk)) for number, chunk in enumerate(chunks)
        )
        ahead = deque(islice(coming, limits.ahead))
        while ahead:
            chunk, decoded = ahead.popleft()
            blocks = decoded.result()
            ahead.extend(islice(coming, 1))
            yield from zip(chunk, _batches(blocks, batch, warn), strict=True)


def _once(warn: Warn) -> Warn:
    """``warn`` for texts that are new: each of a node's processes meets the same full disk."""
    told: set[str] = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            warn(text)

    return tell


def train_photos(
    plan_handle: ray.ObjectRef,
    slots: range,
    steps: range,
    albumentations: Any,
    reading: Reading,
    limits: StreamLimits,
    warn: Warn,
) -> Iterator[StepPhotos]:
    """The worker's photos of ``steps`` (negative ones are the mosaic's forerunners), in order.

    ``warn`` is told what reading on some node cannot do.
    """
    plan: Plan = ray.get(plan_handle)

    def task_of(chunk: range) -> TrainTask:
        return TrainTask(plan_handle, slots, chunk.start, albumentations, reading)

    # Encoded photos take less, but a data set may be full of those that are decoded after all.
    step_bytes = len(slots) * 3 * plan.imgsz**2
    for step, columns in _stream(steps, len(slots), step_bytes, limits, task_of, warn):
        yield _step_photos(step, slots, columns)


def _step_photos(step: int, slots: range, columns: Columns) -> StepPhotos:
    assert (columns["step"] == step).all() and (columns["slot"] == slots).all(), "rows out of order"
    kept = {}
    if "boxes" in columns:
        kept = {
            (step, slot): (rows[:, :4], rows[:, 4].astype(np.int64))
            for slot, rows in zip(slots, columns["boxes"], strict=True)
        }
    photos = columns["photo"] if "photo" in columns else encoded_photos(columns)
    return StepPhotos(step, columns["id"], photos, kept, float(columns["read_ms"].sum()))


def eval_photos(
    records_handle: ray.ObjectRef,
    ids: np.ndarray,
    reading: Reading,
    *,
    batch: int,
    limits: StreamLimits,
    warn: Warn,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """``(ids [batch], photos uint8 [batch,S,S,3])``; the last batch is padded with id -1. No ids, no batches."""
    steps = range(-(-len(ids) // batch))

    def task_of(chunk: range) -> EvalTask:
        return EvalTask(records_handle, ids[chunk.start * batch : chunk.stop * batch], reading)

    step_bytes = batch * 3 * reading.imgsz**2
    for _, columns in _stream(steps, batch, step_bytes, limits, task_of, warn):
        yield columns["id"], columns["photo"]
