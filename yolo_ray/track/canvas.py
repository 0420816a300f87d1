"""How figures of this project look: an empty one, a plain pair of axes, and how it is written."""

from __future__ import annotations

import warnings
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, which draws to files alone."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write it; the folder is made. Raises OSError if the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # A class name in Chinese, say: boxes in its place are seen, a warning for each sign helps nobody.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        figure.savefig(path)


def style(axes: Axes, title: str, x: str, y: str) -> None:
    """Title and labels of the axes, in gray, on a grid."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x, color="0.35")
    axes.set_ylabel(y, color="0.35")
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.7")
    axes.tick_params(colors="0.35", labelsize=9)
