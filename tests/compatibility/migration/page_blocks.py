"""The code of a page about migration, as its reader would run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "migration"


def text_of(page: str) -> str:
    """The page as it is written."""
    return (FOLDER / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[str]:
    """Its blocks of Python, in their order."""
    return re.findall(r"^```python\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)


def run_block(page: str, mark: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs the one block that has ``mark`` in it; its names, with those given, are changed and returned."""
    (code,) = (block for block in blocks_of(page) if mark in block)
    exec(compile(code, f"{page}: {mark}", "exec"), names)
    return names
