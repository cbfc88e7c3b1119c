"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(?P<language>\w+)(?P<title> title=\S+)?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """README.md and what is below ``docs``."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_of(page: str) -> str:
    """All blocks of Python of a page, but for files with a title, as one program."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n\n".join(
        block["text"] for block in BLOCK.finditer(text) if block["language"] == "python" and not block["title"]
    )
