"""results.csv: one line an epoch, append-only, whole after any crash and any resume."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = dict[str, str]


def append_row(path: Path, values: Mapping[str, float], *, epoch: int) -> None:
    """Add the line of ``epoch``; lines of this and later epochs (before a resume) are replaced.

    The columns are those of the first line; a new name becomes a new column at the right end, empty
    for older epochs. Usually this is one append; else the file is rewritten under another name and
    renamed. Raises OSError when the folder cannot be written.
    """
    columns, rows, whole = _read(path)
    row = {"epoch": str(epoch)} | {_column(name): _number(value) for name, value in values.items()}
    kept = [old for old in rows if _epoch(old) < epoch]
    wanted = columns or ["epoch"]
    wanted = wanted + [name for name in row if name not in wanted]
    if whole and columns == wanted and len(kept) == len(rows):
        with path.open("a", newline="", encoding="utf-8") as file:
            file.write(_lines(wanted, [row]))
            file.flush()
            os.fsync(file.fileno())
        return
    text = _lines(wanted, [dict(zip(wanted, wanted, strict=True)), *kept, row])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_table(path: Path) -> dict[str, list[float]]:
    """The columns of results.csv, NaN where a line has no value; a torn last line is left out.

    A file that is not there gives no columns.
    """
    columns, rows, _ = _read(path)
    return {name: [_parse(row.get(name, "")) for row in rows] for name in columns}


def _read(path: Path) -> tuple[list[str], list[Row], bool]:
    """Columns, lines, and whether the file ends with a whole line."""
    if not path.is_file():
        return [], [], False
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(whole)))
    if not lines or "epoch" not in lines[0]:
        return [], [], False
    rows = [dict(zip(lines[0], line, strict=False)) for line in lines[1:] if line]
    return lines[0], rows, whole == text


def _lines(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writerows(rows)
    return buffer.getvalue()


def _column(name: str) -> str:
    """A line break in a class name would break the rule that a line is a row."""
    return " ".join(name.split())


def _epoch(row: Row) -> float:
    """NaN for a line that is not ours; it compares false and is dropped at the next rewrite."""
    return _parse(row.get("epoch", ""))


def _parse(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{float(value):.6g}"
