"""The picture of a sweep: milliseconds an image over the batch size, and where a graph stops helping."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from yolo_ray.bench.ratios import NO_HELP, Row, crossing, sweep_points
from yolo_ray.bench.variants import EAGER, GRAPH, ULTRALYTICS

LINES = {
    ULTRALYTICS: ("Ultralytics eager", "#d6277a"),
    EAGER: ("ours, eager", "#1f77dc"),
    GRAPH: ("ours, one CUDA graph", "#189a5a"),
}


def draw_sweep(rows: Sequence[Row], path: Path) -> None:
    """Draw rows with ``batch``, ``variant`` and ``step_ms`` (failed rows have none) into a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(8, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    batches = sorted({row["batch"] for row in rows})
    for variant, (label, color) in LINES.items():
        points = sorted(
            (row["batch"], row["step_ms"] / row["batch"])
            for row in rows
            if row["variant"] == variant and "step_ms" in row
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=label)
    _mark_crossing(axes, rows)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch, images")
    axes.set_ylabel("training step, ms an image")
    axes.set_title(_title(rows), loc="left", fontsize=11, fontweight="bold")
    axes.grid(True, which="both", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _mark_crossing(axes: Axes, rows: Sequence[Row]) -> None:
    where = crossing(sweep_points(rows))
    if where is None:
        return
    axes.axvline(where, color="0.4", linestyle="--", linewidth=1)
    text = f" from about {where:.0f} on a graph \n gains less than {NO_HELP - 1:.0%} "
    is_late = where > max(row["batch"] for row in rows) / 2
    axes.text(
        where, 0.9, text, transform=axes.get_xaxis_transform(), color="0.3", fontsize=9,
        horizontalalignment="right" if is_late else "left",
    )  # fmt: skip


def _title(rows: Sequence[Row]) -> str:
    if not rows:
        return "nothing measured"
    first = rows[0]
    return f"{first['model']}, {first['precision']}, {first['optimizer']}"
