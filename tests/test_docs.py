"""The pages show what the commands on them print, and pictures that the package drew."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.forks import Forks

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SCRIPT = DOCS / "assets" / "make_pages.py"
BLOCK = runpy.run_path(str(SCRIPT))["BLOCK"]
MAX_PICTURE_BYTES = 256 * 1024
REMEDY = "run python docs/assets/make_pages.py and look at what has changed"
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if BLOCK.search(page.read_text(encoding="utf-8"))
]
PICTURE = re.compile(r"!\[[^\]]*\]\((?:\.\./|docs/)?(assets/[^)]*)\)")


def assert_is_picture(path: Path) -> None:
    """A file of the kind that its suffix says, with something in it, and not too much for a page."""
    content = path.read_bytes()
    assert 10_000 < len(content) < MAX_PICTURE_BYTES
    if path.suffix == ".svg":
        assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
    else:
        assert content.startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture(scope="module")
def again(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of README.md and the documentation without pictures, brought up to date."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copy(ROOT / "README.md", folder)
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("*.svg", "*.png", "*.json"))
    forks.run(SCRIPT, str(folder), folder=folder)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(again: Path, page: str) -> None:
    """Fails when the planner, the simulator, an estimate or a command has changed: the page must follow."""
    assert (again / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8"), REMEDY


def test_every_command_that_plans_has_a_page_with_its_output() -> None:
    shown = [block["command"] for page in PAGES for block in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))]
    for command in ("roundpipe estimate", "roundpipe plan", "roundpipe simulate", "python -m tests.cli.test_cli_paper"):
        assert any(line.startswith(command) for line in shown), command


def test_pictures_are_drawn_and_shown(again: Path) -> None:
    drawn = {path.relative_to(again / "docs").as_posix() for path in (again / "docs" / "assets").glob("*.*g")}
    assert drawn
    pages = (ROOT / "README.md", *DOCS.rglob("*.md"))
    shown = {name for page in pages for name in PICTURE.findall(page.read_text(encoding="utf-8"))}
    kept = {path.relative_to(DOCS).as_posix() for path in (DOCS / "assets").glob("*.*g")}
    assert drawn <= kept == shown, REMEDY
    for picture in drawn:
        assert_is_picture(again / "docs" / picture)


def test_profile(again: Path) -> None:
    name = Path("docs", "assets", "llama-3.1-8b-profile.json")
    assert (again / name).read_text(encoding="utf-8") == (ROOT / name).read_text(encoding="utf-8"), REMEDY


def test_schedule_picture(forks: Forks, tmp_path: Path) -> None:
    forks.run(DOCS / "assets" / "make_schedule_picture.py", str(tmp_path), folder=tmp_path)
    assert_is_picture(tmp_path / "schedule.svg")


def test_planning_example_of_the_tuning_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "how-to/tuning.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(from lightning_roundpipe\.planning .*?)```", page, flags=re.DOTALL)
    exec(compile(example, "how-to/tuning.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "fused" in printed
    assert "device 3 |" in printed
    assert "bound by" in printed
