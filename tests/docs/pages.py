"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<title> title=\S+)?\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ +(?P<text>.*?)(?: *\{ *#(?P<id>[\w-]+) *\})?$", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)(?: \"[^\"]*\")?\)")


def pages() -> list[str]:
    """README.md and what is below ``docs``, from the root of the repository."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]


def text_of(page: str) -> str:
    """What the file holds."""
    return (ROOT / page).read_text(encoding="utf-8")


def python_of(page: str) -> list[str]:
    """The blocks of Python of a page, but for those that are files of their own, with a title."""
    found = [block for block in BLOCK.finditer(text_of(page)) if block["language"] == "python" and not block["title"]]
    return [re.sub(rf"^{block['indent']}", "", block["text"], flags=re.MULTILINE) for block in found]


def run_block(page: str, mark: str, names: dict[str, Any]) -> None:
    """Runs the one block that has ``mark`` in it, which changes ``names``."""
    (code,) = (block for block in python_of(page) if mark in block)
    exec(compile(code, f"{page}: {mark}", "exec"), names)


def links_of(page: str) -> list[str]:
    """Where the links and pictures of a page lead, those out of the repository left out."""
    found = (link["target"] for link in _LINK.finditer(_FENCED.sub("", text_of(page))))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors_of(page: str) -> set[str]:
    """The names by which the headings of a page are linked; the same for the site and for hosts of repositories."""
    times: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.finditer(_FENCED.sub("", text_of(page))):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"])
        name = heading["id"] or re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words.lower()).strip())
        found.add(f"{name}_{times[name]}" if times[name] else name)
        times[name] += 1
    return found
