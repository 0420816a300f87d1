"""The gate: whether a new version is better than the champion. Pure functions of two judgements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_CLASS_ROWS = 20  # of the comparison; those that lost most


@dataclass(frozen=True)
class Judged:
    """What one version scored on the validation photos.

    Attributes:
        name: what the table calls it.
        imgsz: side of its input in px.
        summary: map50_95, map50, map75, precision and recall.
        classes: mAP50-95 by class name; NaN or absent where no photo shows the class.
        latency_ms: median time of one photo, from pixels to boxes; None: not measured.
    """

    name: str
    imgsz: int
    summary: Mapping[str, float]
    classes: Mapping[str, float]
    latency_ms: float | None = None

    @property
    def score(self) -> float:
        """mAP50-95, which versions are ranked by."""
        return self.summary["map50_95"]


@dataclass(frozen=True)
class Bounds:
    """What a challenger must keep to.

    Attributes:
        min_gain: mAP50-95 that it must gain; 0: it must be better at all.
        max_class_drop: mAP50-95 that a class may lose.
        max_latency: its latency over the champion's; None: not judged.
        min_map: mAP50-95 of a first version.
    """

    min_gain: float = 0.0
    max_class_drop: float = 0.02
    max_latency: float | None = 1.1
    min_map: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    what: str
    champion: float
    challenger: float
    allowed: str
    ok: bool


@dataclass(frozen=True)
class Verdict:
    """Whether the challenger becomes champion, and why not: a sentence for each bound that it breaks."""

    promoted: bool
    reasons: tuple[str, ...] = ()
    rows: tuple[Row, ...] = field(default=(), repr=False)


def decide(champion: Judged | None, challenger: Judged, bounds: Bounds) -> Verdict:
    """Judge a challenger; without a champion only ``min_map`` counts."""
    rows = (
        [_first(challenger, bounds)]
        if champion is None
        else [
            _gain(champion, challenger, bounds),
            *_drops(champion, challenger, bounds),
            *_slower(champion, challenger, bounds),
        ]
    )
    broken = tuple(_sentence(row) for row in rows if not row.ok)
    return Verdict(not broken, broken, tuple(rows))


def _first(challenger: Judged, bounds: Bounds) -> Row:
    ok = challenger.score >= bounds.min_map
    return Row("mAP50-95", math.nan, challenger.score, f">= {bounds.min_map:g}", ok)


def _gain(champion: Judged, challenger: Judged, bounds: Bounds) -> Row:
    gain = challenger.score - champion.score
    ok = gain > 0 if bounds.min_gain == 0 else gain >= bounds.min_gain
    least = "better" if bounds.min_gain == 0 else f"gain >= {bounds.min_gain:g}"
    return Row("mAP50-95", champion.score, challenger.score, least, ok)


def _drops(champion: Judged, challenger: Judged, bounds: Bounds) -> list[Row]:
    """Classes, those that lost most first. A class without a truth box has no mAP and is left out."""
    rows = []
    for name, before in champion.classes.items():
        after = challenger.classes.get(name, math.nan)
        if math.isfinite(before) and math.isfinite(after):
            ok = before - after <= bounds.max_class_drop
            rows.append(Row(name, before, after, f"drop <= {bounds.max_class_drop:g}", ok))
    return sorted(rows, key=lambda row: row.challenger - row.champion)


def _slower(champion: Judged, challenger: Judged, bounds: Bounds) -> list[Row]:
    before, after = champion.latency_ms, challenger.latency_ms
    if before is None or after is None:
        return []
    limit = bounds.max_latency
    ok = limit is None or after <= before * limit
    allowed = "not judged" if limit is None else f"<= {limit:g} x"
    return [Row("latency, ms", before, after, allowed, ok)]


def _sentence(row: Row) -> str:
    if math.isnan(row.champion):
        return f"{row.what} is {row.challenger:.4f}, {row.allowed} is asked"
    return f"{row.what} {row.champion:.4f} -> {row.challenger:.4f}, {row.allowed} is asked"


def shown_rows(verdict: Verdict) -> list[Row]:
    """The rows that a table shows: of many classes those that lost most."""
    named = [row for row in verdict.rows if row.what not in ("mAP50-95", "latency, ms")]
    hidden = {id(row) for row in named[MAX_CLASS_ROWS:]}
    return [row for row in verdict.rows if id(row) not in hidden]


def markdown(champion: Judged | None, challenger: Judged, verdict: Verdict, data: str) -> str:
    """The comparison for a version's description, at most 4900 characters."""
    outcome = "promoted to champion" if verdict.promoted else "refused by the gate"
    over = "no champion before" if champion is None else f"against version {champion.name}"
    lines = [f"**{outcome}**, {over}, on {data}.", ""]
    lines += [f"- {reason}" for reason in verdict.reasons[:MAX_CLASS_ROWS]]
    lines += ["", "| | champion | this version | asked | |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.what.replace('|', '/')} | {number(row.champion)} | {number(row.challenger)} | {row.allowed} | "
        f"{'ok' if row.ok else '**no**'} |"
        for row in shown_rows(verdict)
    ]
    text = "\n".join(lines)
    return text if len(text) <= 4900 else f"{text[:4890]}\n..."


def number(value: float) -> str:
    """A figure in a table; a dash for none."""
    return "-" if math.isnan(value) else f"{value:.4f}"
