"""Independent pieces of work through Ray Data's pool of actors, results as they come."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import ray.data


def run_shards(
    worker: type,
    arguments: tuple[Any, ...],
    numbers: Sequence[int],
    *,
    workers: int,
    cpus: float,
    gpus: float,
) -> Iterator[dict[str, Any]]:
    """``worker(*arguments)(number)`` for each number, by ``workers`` actors that are made once; rows as they are ready.

    The worker answers a dict of plain values. An actor whose process dies is started again, and its shard too.
    """
    # It writes a plan and a bar of its own for each call.
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    dataset = ray.data.from_blocks([pa.table({"number": [number]}) for number in numbers])
    dataset.context.enable_progress_bars = False
    mapped = dataset.map_batches(
        cast(Any, _Batched),
        fn_constructor_args=(worker, arguments),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(numbers))),
        num_cpus=cpus,
        num_gpus=gpus,
    )
    for rows in mapped.iter_batches(batch_size=1, prefetch_batches=0, batch_format="pyarrow"):
        yield from cast(pa.Table, rows).to_pylist()


class _Batched:
    """One shard as a table of one row, as Ray Data wants it."""

    def __init__(self, worker: type, arguments: tuple[Any, ...]) -> None:
        self.worker = worker(*arguments)

    def __call__(self, batch: dict[str, Any]) -> pa.Table:
        return pa.Table.from_pylist([self.worker(int(batch["number"][0]))])
