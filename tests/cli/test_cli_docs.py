"""The pages ``command-line.md`` and ``estimate.md``: their commands run, and print what the pages show.

``python -m tests.cli.test_cli_docs`` writes the present output into the pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_roundpipe.cli import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {"how-to/command-line.md": ["plan", "simulate"], "how-to/estimate.md": ["estimate", "estimate"]}
BLOCK = re.compile(r"^```console\n\$ (?P<command>.*)\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A folder with the profile of cli.md, as the current one."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            program = re.search(
                r"```python\n(.*?)```", (DOCS / "how-to/command-line.md").read_text(encoding="utf-8"), re.DOTALL
            )
            assert program is not None
            exec(program.group(1), {})
            yield
        finally:
            os.chdir(before)


def output_of(command: str) -> str:
    """What the command prints, errors too."""
    name, *arguments = shlex.split(command)
    assert name == "roundpipe"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(arguments)
    return printed.getvalue()


def blocks(page: str) -> list[re.Match[str]]:
    """The commands of a page whose output it shows."""
    return [block for block in BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")) if block["output"]]


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, id=" ".join(shlex.split(block["command"])[1:4])) for page in PAGES for block in blocks(page)],
)
def test_the_page_shows_what_is_printed(block: re.Match[str]) -> None:
    with workplace():
        printed = output_of(block["command"])
    assert block["output"] == printed, "run python -m tests.cli.test_cli_docs"


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_show_outputs(page: str) -> None:
    assert [shlex.split(block["command"])[1] for block in blocks(page)] == PAGES[page]


def update() -> None:
    """Write the present output into the pages."""

    def renewed(block: re.Match[str]) -> str:
        return f"```console\n$ {block['command']}\n{output_of(block['command'])}```" if block["output"] else block[0]

    with workplace():
        for page in PAGES:
            text = BLOCK.sub(renewed, (DOCS / page).read_text(encoding="utf-8"))
            (DOCS / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    update()
