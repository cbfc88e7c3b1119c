"""docs/cli.md: its profile is made, its commands run, and what they print is what the page shows.

``python -m tests.cli.test_cli_docs`` writes the present output into the page.
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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
BLOCK = re.compile(r"^```console\n\$ (?P<command>.*)\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)
FILES = {"wrong.txt": "schedule stages=2 microbatches=2 devices=1\ndevice 0: 0:0 1:0 1:1 0:1\n"}
# They need the network, or a recorded step: only their arguments are checked elsewhere.
NOT_RUN = ("roundpipe estimate", "roundpipe timeline")


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """A folder with the page's profile, as the current one."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, text in FILES.items():
                Path(name).write_text(text, encoding="utf-8")
            program = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
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


def blocks() -> list[re.Match[str]]:
    found = BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    return [block for block in found if not block["command"].startswith(NOT_RUN)]


@pytest.mark.parametrize("block", blocks(), ids=lambda block: " ".join(shlex.split(block["command"])[1:2]))
def test_the_page_shows_what_is_printed(block: re.Match[str]) -> None:
    with workplace():
        printed = output_of(block["command"])
    assert block["output"] == printed, "run python -m tests.cli.test_cli_docs"


def test_the_page_shows_plan_and_simulate() -> None:
    assert [shlex.split(block["command"])[1] for block in blocks()] == ["plan", "simulate", "simulate"]


def update() -> None:
    """Write the present output into the page."""

    def renewed(block: re.Match[str]) -> str:
        command = block["command"]
        return block[0] if command.startswith(NOT_RUN) else f"```console\n$ {command}\n{output_of(command)}```"

    with workplace():
        text = BLOCK.sub(renewed, PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    update()
