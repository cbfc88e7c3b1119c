"""Bring the pages up to date: run the commands whose output they show, draw the pictures that they refer to.

A block of README.md or of a page below ``docs`` that begins with ``$ roundpipe`` or ``$ python -m``, and goes on with
output, is a command and what it printed. The command is run again in the folder that holds ``docs``, and what it prints
now takes the place of what it printed then; where it says so, it draws a picture. A block without output stays as it
is. Nothing is measured here: commands plan, simulate and estimate, from a profile that the RoundPipe paper publishes.

    python docs/assets/make_pages.py [FOLDER]     # a folder with a copy of README.md and docs; default: the repository
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lightning_roundpipe.cli import main  # noqa: E402  (the package of this checkout, installed or not)
from tests.planning.paper import MODELS  # noqa: E402

# The command, which goes on behind a backslash at the end of a line, and its output.
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>(?:roundpipe|python -m) (?:[^\n]*\\\n)*[^\n]*)\n"
    r"(?P<output>(?:(?!```|\$ )[^\n]*\n)+)```$",
    re.MULTILINE,
)


def output_of(command: str) -> str:
    """Run a command of the pages, which may end with ``| head -n K``; what it prints, errors included.

    Raises:
        ValueError: If the command line is wrong.
    """
    words, limit = shlex.split(command.replace("\\\n", " ")), None
    if "|" in words:
        at = words.index("|")
        words, (head, option, count) = words[:at], words[at + 1 :]
        if (head, option) != ("head", "-n"):
            raise ValueError(f"{command!r}: only '| head -n K' may follow a command.")
        limit = int(count)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if words[0] == "roundpipe":
                main(words[1:])
            else:
                runpy.run_module(words[2], run_name="__main__")
    except SystemExit as error:
        raise ValueError(f"{command!r} is no command of this package: {printed.getvalue()}") from error
    return "".join(printed.getvalue().splitlines(keepends=True)[:limit])


def pages(folder: Path) -> list[Path]:
    """README.md and what is below ``docs``, in the order of their names."""
    return [folder / "README.md", *sorted((folder / "docs").rglob("*.md"))]


def update(folder: Path) -> None:
    """Write the profile, the pictures and the pages of ``folder``."""
    MODELS["Llama-3.1-8B"].profile().save(folder / "docs" / "assets" / "llama-3.1-8b-profile.json")
    os.chdir(folder)
    for page in pages(folder):
        text = page.read_text(encoding="utf-8")
        renewed = BLOCK.sub(lambda block: f"```console\n$ {block[1]}\n{output_of(block[1])}```", text)
        if renewed != text:
            page.write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    update(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT).resolve())
