"""What a study makes large: one metric, or a weighted sum of several."""

from __future__ import annotations

from collections.abc import Mapping

from yolo_ray.errors import UserError

# Of the model and not of an evaluation: measured once, before training.
COSTS = ("latency_ms", "parameters_m")
METRICS = ("val/map50_95", "val/map50", "val/map75", "val/precision", "val/recall")


def weights_of(objective: str | Mapping[str, float]) -> dict[str, float]:
    """The weight of each metric.

    Raises:
        UserError: a metric that no run has, or nothing but costs.
    """
    weights = {objective: 1.0} if isinstance(objective, str) else dict(objective)
    for name in weights:
        if name not in METRICS + COSTS and not _is_of_a_class(name):
            known = ", ".join(METRICS + COSTS)
            raise UserError(
                f"tune.objective: no run has a metric {name!r}; use {known}, or val/CLASS/map50_95"
            )
    if not any(name not in COSTS for name in weights):
        raise UserError("tune.objective: costs alone are no aim; add val/map50_95 with a weight")
    return weights


def value_of(weights: Mapping[str, float], metrics: Mapping[str, float]) -> float:
    """The weighted sum.

    Raises:
        UserError: a metric is missing, such as that of a class that the data does not have.
    """
    missing = [name for name in weights if name not in metrics]
    if missing:
        raise UserError(f"tune.objective: this run has no metric {missing[0]!r}")
    return sum(weight * metrics[name] for name, weight in weights.items())


def needs_costs(weights: Mapping[str, float]) -> bool:
    """Whether the model itself has to be measured."""
    return any(name in COSTS for name in weights)


def _is_of_a_class(name: str) -> bool:
    return name.startswith("val/") and name.endswith("/map50_95")
