"""Pictures of a study: how the objective grew, every trial's curve, what options did, which of them mattered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from yolo_ray.config.space import Domain
from yolo_ray.study.trials import BASELINE, Trial, best_of
from yolo_ray.track.canvas import new_figure, save_figure, style

COLOURS = {"finished": "tab:blue", "stopped": "0.6", "failed": "tab:red", "running": "tab:cyan"}


def draw_history(trials: Sequence[Trial], path: Path) -> None:
    """The objective of each trial, the best so far, and the baseline.

    Raises OSError if the file cannot be written.
    """
    figure = new_figure(9.0, 4.6)
    axes = figure.add_subplot()
    style(axes, "Objective by trial", "trial", "objective")
    known = [(trial, trial.value) for trial in trials if trial.value is not None]
    for state, colour in COLOURS.items():
        points = [(trial.number, value) for trial, value in known if trial.state == state]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, label=state, zorder=3)
    numbers = [trial.number for trial, _ in known]
    best = np.maximum.accumulate([value for _, value in known])
    axes.step(numbers, best, where="post", color="tab:orange", label="best so far")
    for trial, value in known:
        if trial.number == BASELINE:
            axes.axhline(value, color="0.5", linestyle=":", label="baseline")
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_learning(trials: Sequence[Trial], path: Path) -> None:
    """The best objective so far of every trial by epoch; the best and the baseline stand out.

    Raises OSError if the file cannot be written.
    """
    figure = new_figure(9.0, 4.6)
    axes = figure.add_subplot()
    style(axes, "Best objective so far, every trial", "epoch", "objective")
    best = best_of(trials)
    for trial in trials:
        epochs = sorted(trial.reports)
        values = [trial.reports[epoch] for epoch in epochs]
        stands_out = trial is best or trial.number == BASELINE
        colour = "tab:orange" if trial is best else "0.2" if stands_out else COLOURS[trial.state]
        label = f"best ({trial.label})" if trial is best else "baseline" if stands_out else None
        axes.plot(
            epochs, values, color=colour, label=label, alpha=1.0 if stands_out else 0.6,
            linewidth=2.2 if stands_out else 1.0, marker="o" if len(epochs) < 20 else "", markersize=3,
        )  # fmt: skip
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_parallel(trials: Sequence[Trial], space: Mapping[str, Domain], path: Path) -> None:
    """A line a trial through the values of its options, coloured by the objective.

    Raises OSError if the file cannot be written.
    """
    shown = [t for t in trials if t.value is not None and all(name in t.options for name in space)]
    figure = new_figure(max(6.0, 1.6 * len(space) + 3.0), 5.0)
    axes = figure.add_subplot()
    style(axes, "Options of all trials, coloured by the objective", "", "")
    values = [trial.value or 0.0 for trial in shown]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    colours = matplotlib.colormaps["viridis"]
    for trial, value in sorted(zip(shown, values, strict=True), key=lambda pair: pair[1]):
        heights = [_height(domain, trial.options[name]) for name, domain in space.items()]
        share = (value - low) / (high - low) if high > low else 1.0
        axes.plot(range(len(space)), heights, color=colours(share), marker="o", markersize=3)
    axes.set_xticks(
        range(len(space)), [_axis_text(domain) for domain in space.values()], fontsize=8
    )
    axes.set_ylim(-0.05, 1.05)
    axes.set_yticks([])
    if values:
        norm = Normalize(low, high if high > low else low + 1e-9)
        figure.colorbar(ScalarMappable(norm, colours), ax=axes, label="objective")
    else:
        _say_nothing(axes, "no trial with sampled options has a value")
    save_figure(figure, path)


def draw_importance(shares: Mapping[str, float], path: Path) -> None:
    """A bar for each option's share in how the objective varies.

    Raises OSError if the file cannot be written.
    """
    figure = new_figure(7.5, max(2.6, 0.36 * len(shares) + 1.4))
    axes = figure.add_subplot()
    style(axes, "Importance of the options (fANOVA)", "share of the objective's variance", "")
    if shares:
        names = list(shares)[::-1]
        axes.barh(names, [shares[name] for name in names], color="tab:blue")
    else:
        _say_nothing(axes, "too few trials with different values")
    save_figure(figure, path)


def _height(domain: Domain, value: object) -> float:
    """Where a value lies on its axis, 0 to 1."""
    if domain.kind == "choice" or not isinstance(value, int | float):
        places = [str(one) for one in domain.values]
        return places.index(str(value)) / max(len(places) - 1, 1) if str(value) in places else 0.5
    low, high = domain.values[:2]
    if domain.kind == "loguniform":
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def _axis_text(domain: Domain) -> str:
    name = domain.name.rpartition(".")[2]
    if domain.kind == "choice":
        return f"{name}\n{len(domain.values)} choices"
    return f"{name}\n{domain.values[0]:g} to {domain.values[1]:g}" + (
        "\nlog" if domain.kind == "loguniform" else ""
    )


def _say_nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", color="0.5", transform=axes.transAxes)
