"""Latency of several versions, measured alike: blocks in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Photo = TypeVar("Photo")

BLOCKS = 5
MIN_CALLS = 8  # of a block


def alternating_medians(
    calls: Mapping[str, Callable[[Photo], object]],
    photos: Sequence[Photo],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median milliseconds of one call by name: the median over blocks of each block's median.

    Every block calls each version on the same photos; odd blocks in reverse order. One call of each before does
    what a first call alone does.
    """
    for call in calls.values():
        call(photos[0])
    rounds = -(-MIN_CALLS // len(photos))
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(BLOCKS):
        for name in list(calls)[:: -1 if block % 2 else 1]:
            times = []
            for photo in list(photos) * rounds:
                begin = clock()
                calls[name](photo)
                times.append(clock() - begin)
            medians[name].append(statistics.median(times))
    return {name: 1000 * statistics.median(values) for name, values in medians.items()}
