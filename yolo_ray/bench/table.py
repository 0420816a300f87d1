"""The result as people read it: tables in a terminal and in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from yolo_ray.bench.ratios import NO_HELP, Row, crossing, sweep_points

RESULT = "step.json"
WHO = {"model": "model", "batch": "batch", "precision": "precision", "optimizer": "optimizer"}
TIMED = WHO | {"variant": "variant"}
SPEED = TIMED | {
    "step_ms": "step ms", "spread": "min-max", "images_per_s": "images/s", "ratio": "x Ultralytics",
    "kernel_ms": "kernel ms", "wall_ratio": "wall/kernel", "host_ms": "host ms",
    "launches": "launches", "graph_launches": "graph launches", "h2d_copies": "copies to device",
    "failed": "failed",
}  # fmt: skip
RESOURCES = TIMED | {
    "peak_gib": "peak GiB", "memory_ratio": "x eager's memory", "reserved_gib": "reserved GiB",
    "tflops": "TFLOP/s", "flops_share": "% of peak FLOP/s", "bandwidth_share": "% of bandwidth, >=",
    "build_s": "build s", "kernels_s": "first step s", "capture_s": "warm-up+capture s",
    "payback_steps": "paid back after, steps",
}  # fmt: skip
STARTUP = TIMED | {
    "cache": "cache",
    "import_s": "import s", "build_s": "build s", "kernels_s": "first step s",
    "capture_s": "warm-up+capture s", "total_s": "total s", "failed": "failed",
}  # fmt: skip
STATIC = WHO | {
    "assignment": "assignment", "steps": "steps",
    "step_ms": "step ms", "kernel_ms": "kernel ms", "box": "box", "cls": "cls", "dfl": "dfl",
    "total": "loss", "failed": "failed",
}  # fmt: skip
TITLES = {
    "rows": "Step", "sweep": "Sweep over batch sizes", "static": "Static assignment",
    "startup": "From process start to the first replay",
}  # fmt: skip
NOTES = (
    "Times are medians of the blocks, by CUDA events (wall clock on a CPU). Host ms: until the call of one step "
    "returns, nothing waiting on the device; waits of the step itself are part of it.",
    "Ultralytics gets images that are augmented and on the device; ours composes mosaics from uint8 photos in the "
    "step. Its model, loss, optimizer (grouped by its own trainer), loss scaler (fp16), clipping and EMA are its own; "
    "`ultralytics+compile` is its own attempt_compile. All run in one process; boxes and "
    "photos of all lie on the device before the clock starts.",
    "Peak GiB is what tensors took at most, reserved GiB what the allocator held; for Ultralytics without our photo "
    "ring. x Ultralytics compares with its eager step.",
    "FLOPs: three forward passes by torch.utils.flop_counter, a multiply-add is 2; peaks are NVIDIA's data sheets, "
    "dense. Bandwidth is a lower bound: convolutions and products touch their tensors once, the optimizer its own.",
    "First step s: kernels that an earlier row compiled are there already, and so is torch's compile cache on disk. "
    "Paid back: a graph's warm-up and capture, against eager; the extra start-up of compile, against the same without; "
    "over the gain a step.",
)


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """``step.json`` and ``step.md`` of what has been measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    (folder / "step.md").write_text(markdown(result))


def markdown(result: Mapping[str, Any]) -> str:
    """All sections that have rows, with conditions and notes."""
    lines = [", ".join(f"{key} {value}" for key, value in result["conditions"].items()), ""]
    for key, rows in _sections(result).items():
        lines += [f"## {TITLES[key]}", ""]
        for columns in _columns_of(key):
            lines += [*_markdown_table(columns, rows), ""]
        if key == "sweep":
            lines += [sweep_verdict(rows), "", "![ms an image over batch](sweep.png)", ""]
    lines += [f"* {note}" for note in (*NOTES, *result.get("notes", ()))]
    return "\n".join(lines) + "\n"


def show(result: Mapping[str, Any]) -> None:
    """Print the tables to stderr."""
    console = Console(stderr=True, width=200)
    console.print(", ".join(f"{key} {value}" for key, value in result["conditions"].items()))
    for key, rows in _sections(result).items():
        for columns in _columns_of(key):
            shown = _used(columns, rows)
            table = Table(*shown.values(), title=TITLES[key])
            for row in rows:
                table.add_row(*_cells(shown, row))
            console.print(table)
        if key == "sweep":
            console.print(sweep_verdict(rows))


def sweep_verdict(rows: Sequence[Row]) -> str:
    """One sentence: from which batch on a graph no longer helps."""
    points = sweep_points(rows)
    if not points:
        return "No batch has both an eager and a graph time."
    ratios = ", ".join(f"{batch}: {ratio:.2f}" for batch, ratio in points)
    where = crossing(points)
    if where is None:
        verdict = f"a graph helps (eager/graph >= {NO_HELP}) at every batch up to {points[-1][0]}"
    else:
        verdict = f"a graph stops helping (eager/graph < {NO_HELP}) at a batch of about {where:.0f}"
    return f"Eager/graph by batch: {ratios}; {verdict}."


def _sections(result: Mapping[str, Any]) -> dict[str, list[Row]]:
    return {key: result[key] for key in TITLES if result.get(key)}


def _columns_of(key: str) -> list[dict[str, str]]:
    return {"static": [STATIC], "startup": [STARTUP]}.get(key, [SPEED, RESOURCES])


def _used(columns: Mapping[str, str], rows: Sequence[Row]) -> dict[str, str]:
    """The columns that any row has a value for."""
    return {k: v for k, v in columns.items() if any(row.get(k) is not None for row in rows)}


def _markdown_table(columns: Mapping[str, str], rows: Sequence[Row]) -> list[str]:
    shown = _used(columns, rows)
    lines = [f"| {' | '.join(shown.values())} |", "|" + " --- |" * len(shown)]
    return lines + [f"| {' | '.join(_cells(shown, row))} |" for row in rows]


def _cells(columns: Mapping[str, str], row: Row) -> list[str]:
    values = [row.get(key) for key in columns]
    return ["" if value is None else str(value).replace("|", "/") for value in values]
