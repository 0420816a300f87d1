"""How many rows of a step fit in a GPU's memory: measured on two small steps, extended in a straight line."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from yolo_ray.data.batch import Batch, take_rows
from yolo_ray.step.train_step import TrainStep

# A graph keeps its memory, and the eager steps that warm the next one up need as much beside it.
COPIES = 2.1
# A capture's other streams round up what they allocate for themselves, and cuBLAS keeps a workspace for each.
STREAMS_BYTES = 128 * 2**20
LEAST_ROW_BYTES = 2.0**20  # no photo takes less: a difference below it is noise
SPARE = 0.92  # of the card: the context, libraries and fragments take the rest


@dataclass(frozen=True)
class Memory:
    """Bytes of a step: ``fixed + rows * per_row``, of ``limit`` that the process may have."""

    fixed: float
    per_row: float
    limit: float

    @property
    def rows(self) -> int:
        """The most rows that fit; 0: not even one does."""
        return max(int((self.limit * SPARE - self.fixed) / self.per_row), 0)


def measure_memory(step: TrainStep, batch: Batch, *, ring_row_bytes: int = 0) -> Memory:
    """Run two small eager steps of ``batch`` and see what they, and their graphs, take.

    The step's state changes, and its collectives run: for a process that is alone, whose state is put back.
    ``ring_row_bytes``: what one more row takes of the photo ring, if the ring is to grow with the rows.
    """
    small, large = 1, min(4, len(batch.picks))
    peaks = [_peak(step, batch, rows) for rows in (small, large)]
    per_row = max((peaks[1] - peaks[0]) / max(large - small, 1), LEAST_ROW_BYTES)
    fixed = peaks[0] - small * per_row - ring_row_bytes * len(batch.picks) + STREAMS_BYTES
    return Memory(fixed, COPIES * per_row + ring_row_bytes, memory_limit())


def memory_limit() -> float:
    """Bytes of the current GPU that this process may have."""
    free, total = torch.cuda.mem_get_info()
    allowed = torch.cuda.get_per_process_memory_fraction() * total
    return min(allowed, free + torch.cuda.memory_reserved())


def _peak(step: TrainStep, batch: Batch, rows: int) -> int:
    # The first step of a shape also tries kernels, whose workspace no later step needs.
    step(take_rows(batch, 0, rows), update=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(take_rows(batch, 0, rows), update=True)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
