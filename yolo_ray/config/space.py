"""Search spaces: what values a study may try for an option, judged before anything starts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yolo_ray.config.options import Option, find_option
from yolo_ray.config.schema import AUTO_BATCH, TrainConfig
from yolo_ray.errors import UserError

# How many numbers each kind takes; None: a list of values.
KINDS: dict[str, int | None] = {
    "uniform": 2,
    "loguniform": 2,
    "quniform": 3,
    "randint": 2,
    "choice": None,
}
_EXAMPLE = "write, for example, lr0: {loguniform: [1e-4, 1e-1]}"
_PLACES = "says where or how a run works, not what is learned; set it for the whole study"
_MEASURES = (
    "changes how trials are measured, so they could not be compared; set it for the whole study"
)
# What no trial may choose: an option's dotted name or its section.
NOT_SEARCHED = {
    "data": "is the same for all trials, or they could not be compared",
    "project": _PLACES,
    "name": _PLACES,
    "resume": _PLACES,
    "log_steps": _PLACES,
    "cluster": _PLACES,
    "mlflow": _PLACES,
    "checkpoint": _PLACES,
    "eval": _MEASURES,
}


@dataclass(frozen=True)
class Domain:
    """The values that one option may take. Both ends of a range belong to it.

    Attributes:
        name: the option's dotted name.
        kind: a key of ``KINDS``.
        values: low and high (and the step of ``quniform``), or the choices.
    """

    name: str
    kind: str
    values: tuple[Any, ...]

    @property
    def ends(self) -> tuple[Any, ...]:
        """What the schema has to accept: both ends, or every choice."""
        if self.kind == "choice":
            return self.values
        if self.kind == "quniform":
            return (self.values[0], self.nearest(self.values[1]))
        return self.values[:2]

    def grid(self) -> list[Any] | None:
        """All values, in order; None where there are infinitely many."""
        if self.kind == "choice":
            return list(self.values)
        if self.kind == "randint":
            return list(range(self.values[0], self.values[1] + 1))
        if self.kind == "quniform":
            low, high, step = self.values
            steps = math.floor((high - low) / step + 1e-9)
            return [_round(low + number * step) for number in range(steps + 1)]
        return None

    def holds(self, value: Any) -> bool:
        """Whether a value belongs to it."""
        values = self.grid()
        if self.kind == "choice" and values is not None:
            return any(_key(one) == _key(value) for one in values)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if values is not None:
            return any(math.isclose(one, value) for one in values)
        return self.values[0] <= value <= self.values[1]

    def nearest(self, value: float) -> Any:
        """The number of a range that lies nearest to ``value``."""
        low, high = self.values[:2]
        value = min(max(value, low), high)
        if self.kind == "randint":
            return round(value)
        if self.kind == "quniform":
            step = self.values[2]
            most = math.floor((high - low) / step + 1e-9)
            return _round(low + min(round((value - low) / step), most) * step)
        return value


def parse_domain(key: str, value: Any, place: str) -> Domain:
    """One entry of a search space, such as ``lr0`` with ``{loguniform: [1e-4, 1e-1]}``.

    Raises:
        UserError: no such option, one that cannot be searched, or a range that is none.
    """
    option = find_option(TrainConfig, key, place)
    for name in (option.name, option.section):
        if name in NOT_SEARCHED:
            raise UserError(f"{place}: {key!r} {NOT_SEARCHED[name]}")
    if isinstance(value, Mapping) and len(value) > 1:
        raise UserError(
            f"{place}: {key!r} has {len(value)} kinds of range, {', '.join(map(str, value))}: keep one"
        )
    if not isinstance(value, Mapping) or not value:
        raise UserError(f"{place}: the values of {key!r} are not understood; {_EXAMPLE}")
    ((kind, values),) = value.items()
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(f"{place}: {kind!r} is no kind of range; use one of {known}")
    if kind == "choice" and isinstance(values, list | tuple) and not values:
        raise UserError(f"{place}: choice of {key!r} needs at least one value; {_EXAMPLE}")
    if not isinstance(values, list | tuple) or not values:
        raise UserError(f"{place}: {kind} of {key!r} needs a list; {_EXAMPLE}")
    if kind != "choice":
        _check_numbers(option, kind, values, place)
    return Domain(option.name, kind, tuple(values))


def _check_numbers(
    option: Option, kind: str, values: list[Any] | tuple[Any, ...], place: str
) -> None:
    """A range of numbers, low before high, of a kind that the option takes."""
    named = f"{place}: {option.leaf}: {kind} {list(values)}"
    count = KINDS[kind]
    if len(values) != count:
        words = "[low, high, step]" if count == 3 else "[low, high]"
        raise UserError(f"{named} is wrong: it takes {words}")
    for number in values:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise UserError(
                f"{named} is wrong: {number!r} is no number; use choice for other values"
            )
        if not math.isfinite(number):
            raise UserError(f"{named} is wrong: a bound must be finite")
        if kind == "randint" and not isinstance(number, int):
            raise UserError(f"{named} is wrong: {number} is no whole number; use uniform")
    if values[0] >= values[1]:
        raise UserError(f"{named} is wrong: the first number must be less than the second")
    if kind == "loguniform" and values[0] <= 0:
        raise UserError(f"{named} is wrong: a logarithmic range begins above 0")
    if kind == "quniform" and not 0 < values[2] <= values[1] - values[0]:
        raise UserError(f"{named} is wrong: the step must be above 0 and fit between the bounds")
    whole = kind == "randint" or (kind == "quniform" and all(isinstance(v, int) for v in values))
    parts = option.spec.get("anyOf", [option.spec])
    kinds = {part.get("type") for part in parts}
    if "number" not in kinds and not ("integer" in kinds and whole):
        remedy = "randint" if "integer" in kinds else "choice"
        raise UserError(f"{named} is wrong: {option.leaf} takes no such numbers; use {remedy}")


def check_domain(domain: Domain, config: TrainConfig, place: str) -> None:
    """Both ends of a range, and every choice, must be values that the option takes.

    Raises:
        UserError: one is not; the sentence of the schema with the place of the range.
    """
    for value in domain.ends:
        try:
            changed = config.override({domain.name: value})
        except UserError as error:
            raise UserError(f"{place}: {str(error).removeprefix('override: ')}") from error
        if domain.name == "batch" and changed.batch == AUTO_BATCH:
            raise UserError(f"{place}: a study cannot choose batch=auto; name numbers")


def domains_of(space: Mapping[str, Mapping[str, Any]]) -> dict[str, Domain]:
    """The domains of a space that was judged before, by dotted name."""
    return {name: parse_domain(name, value, "space") for name, value in space.items()}


def _key(value: Any) -> str:
    """Equal values have equal texts; 1, 1.0 and true do not."""
    return json.dumps(value, sort_keys=True, default=list)


def _round(value: float) -> Any:
    """Without the dust of binary fractions: 0.1 + 2 * 0.1 is 0.3."""
    return value if isinstance(value, int) else float(f"{value:.12g}")
