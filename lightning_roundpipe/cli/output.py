"""What a command prints: one JSON object, or text and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
    """Print what a command found out: the document as JSON, in which infinity ("no limit") is null, or its report for
    people, paragraphs and tables as wide as they need to be, with an empty line between them."""
    if as_json:
        print(json.dumps(_finite(document), indent=2, allow_nan=False))
    else:
        print("\n\n".join(part if isinstance(part, str) else part.format() for part in report))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value
