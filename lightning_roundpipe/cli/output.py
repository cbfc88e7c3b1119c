"""What a command prints: one JSON object, or text and tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_NAMES = 4


@dataclass(frozen=True)
class Table:
    """Rows of text under a title.

    Args:
        title: Line above the table.
        columns: Names of the columns.
        rows: Cells, one for each column.
        num_text: How many columns from the left hold text (aligned left); the others hold numbers (aligned right).
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1

    def format(self) -> str:
        """Return the table as plain aligned text."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        rules = ["-" * width for width in widths]
        parts = [self.title] if self.title else []
        parts += [self._format_line(line, widths) for line in (self.columns, rules, *self.rows)]
        return "\n".join(parts)

    def _format_line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.ljust(width) if column < self.num_text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()


def show(document: dict[str, Any], *report: str | Table, as_json: bool) -> None:
    """Print what a command found out: the document as JSON, or its report for people."""
    if as_json:
        print_json(document)
    else:
        print_report(*report)


def print_report(*parts: str | Table) -> None:
    """Print paragraphs and tables, as wide as they need to be, with an empty line between them."""
    print("\n\n".join(part if isinstance(part, str) else part.format() for part in parts))


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object; what is infinite ("no limit") becomes null."""
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def compress_names(names: Sequence[str]) -> str:
    """Return the names in short, such as ``"embed, layers.0-6, norm"``.

    Names that count up in one number become a range, repeated ones a product (``"shared x3"``). What is long even so
    shows its ends.
    """
    runs: list[tuple[list[str], int | None]] = []  # names, and the place of the number in which they count
    for name in names:
        if runs:
            run, place = runs[-1]
            step = _counted_at(run[-1], name)
            if (step is not None or name == run[-1]) and (len(run) == 1 or step == place):
                runs[-1] = ([*run, name], step)
                continue
        runs.append(([name], None))
    if len(runs) > _MAX_NAMES:
        return f"{names[0]} ... {names[-1]} ({len(names)} calls)"
    return ", ".join(_format_run(run, place) for run, place in runs)


def _counted_at(first: str, second: str) -> int | None:
    """The place of the only number in which the names differ, if the second is one higher; None otherwise."""
    a, b = re.split(r"(\d+)", first), re.split(r"(\d+)", second)
    places = [place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) != len(b) or len(places) != 1 or places[0] % 2 == 0:
        return None
    return places[0] if int(a[places[0]]) + 1 == int(b[places[0]]) else None


def _format_run(run: list[str], place: int | None) -> str:
    if place is None:
        return run[0] if len(run) == 1 else f"{run[0]} x{len(run)}"
    parts = re.split(r"(\d+)", run[0])
    parts[place] += "-" + re.split(r"(\d+)", run[-1])[place]
    return "".join(parts)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value
