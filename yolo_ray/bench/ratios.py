"""What follows from measured rows: ratios, the step at which a start-up cost is paid back, the crossing of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from yolo_ray.bench.variants import EAGER, GRAPH, REFERENCE, ULTRALYTICS

Row = dict[str, Any]
NO_HELP = 1.05  # below this ratio of eager to graph a graph is said not to help


def add_ratios(rows: Sequence[Row]) -> None:
    """Add to rows of one setting: speed over Ultralytics eager, memory over our eager, pay-back in steps.

    A failed row has no ``step_ms``, and nothing is compared with it.
    """
    by_variant = {row["variant"]: row for row in rows if "step_ms" in row}
    rival, eager = by_variant.get(ULTRALYTICS), by_variant.get(EAGER)
    for variant, row in by_variant.items():
        if rival:
            row["ratio"] = round(rival["step_ms"] / row["step_ms"], 2)
        if eager and "peak_gib" in row and eager.get("peak_gib"):
            row["memory_ratio"] = round(row["peak_gib"] / eager["peak_gib"], 3)
        slower = by_variant.get(REFERENCE.get(variant, ""))
        if slower:
            # A graph runs the eager step's own kernels: whichever came first in this process made them ready.
            extra_s = row["capture_s"] if variant == GRAPH else row["start_s"] - slower["start_s"]
            steps = payback_steps(extra_s, slower["step_ms"], row["step_ms"])
            row["payback_steps"] = "never" if steps is None else steps


def payback_steps(extra_s: float, slow_ms: float, fast_ms: float) -> int | None:
    """Steps after which ``extra_s`` of start-up are won back by steps of ``fast_ms`` instead of ``slow_ms``.

    0 where nothing is to be paid, None where it is never won back.
    """
    if extra_s <= 0:
        return 0
    if slow_ms <= fast_ms:
        return None
    return math.ceil(extra_s * 1e3 / (slow_ms - fast_ms))


def sweep_points(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """``(batch, eager ms / graph ms)`` for every batch that has both, ascending."""
    times = {(r["batch"], r["variant"]): r["step_ms"] for r in rows if "step_ms" in r}
    batches = sorted({batch for batch, _ in times})
    return [
        (batch, times[batch, EAGER] / times[batch, GRAPH])
        for batch in batches
        if (batch, EAGER) in times and (batch, GRAPH) in times
    ]


def crossing(points: Sequence[tuple[int, float]], limit: float = NO_HELP) -> float | None:
    """The batch from which on a graph helps by less than ``limit``; None while it helps at the largest.

    Between two measured batches it lies on the line through their ratios over log2(batch).
    """
    if not points or points[-1][1] >= limit:
        return None
    helping = [index for index, (_, ratio) in enumerate(points) if ratio >= limit]
    if not helping:
        return float(points[0][0])
    (low, high_ratio), (high, low_ratio) = points[helping[-1]], points[helping[-1] + 1]
    share = (high_ratio - limit) / (high_ratio - low_ratio)
    return 2 ** (math.log2(low) + share * (math.log2(high) - math.log2(low)))
