"""The comparison of a challenger with the champion, for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from yolo_ray.gate.compare import number, shown_rows
from yolo_ray.gate.parts import Comparison


def show(name: str, comparison: Comparison, console: Console | None = None) -> None:
    """Print the table and the verdict; stderr unless a console is given."""
    console = console or Console(stderr=True)
    champion, verdict = comparison.champion, comparison.verdict
    before = "no champion" if champion is None else f"champion {champion.name}"
    table = Table(title=Text(f"{name} on {comparison.data}"), title_justify="left")
    for heading in ("mAP50-95 by class", before, "challenger", "asked", ""):
        table.add_column(heading, justify="right" if heading in (before, "challenger") else "left")
    for row in shown_rows(verdict):
        mark = Text("ok", "green") if row.ok else Text("no", "red")
        table.add_row(
            Text(row.what), number(row.champion), number(row.challenger), row.allowed, mark
        )
    console.print(table)
    if verdict.promoted:
        console.print(Text("promoted to @champion", "green"))
        return
    console.print(Text("refused, it stays @challenger:", "red"))
    for reason in verdict.reasons:
        console.print(Text(f"  {reason}"), soft_wrap=True)
