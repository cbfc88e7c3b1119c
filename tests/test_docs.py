"""The pages about planning show what the commands on them print, and pictures that the package drew."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.forks import Forks

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ("explanation/planning.md", "how-to/tuning.md")
MAX_PICTURE_BYTES = 256 * 1024
REMEDY = "run python docs/assets/make_planning_pictures.py and look at what has changed"


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
    """A copy of the documentation without pictures, brought up to date."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("*.svg", "*.png", "*.json"))
    forks.run(DOCS / "assets" / "make_planning_pictures.py", str(folder), folder=folder)
    return folder / "docs"


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_the_page_shows(again: Path, page: str) -> None:
    """Fails when the planner, the simulator or a command has changed: the page must follow."""
    shown = (DOCS / page).read_text(encoding="utf-8")
    assert shown.count("\n$ roundpipe ") >= 3
    assert (again / page).read_text(encoding="utf-8") == shown, REMEDY


@pytest.mark.parametrize("page", PAGES)
def test_pictures_are_drawn(again: Path, page: str) -> None:
    pictures = re.findall(r"!\[.*?\]\(\.\./(assets/.*?)\)", (DOCS / page).read_text(encoding="utf-8"))
    assert len(pictures) >= 2
    for picture in pictures:
        assert_is_picture(again / picture)
        assert (DOCS / picture).is_file(), REMEDY


def test_profile(again: Path) -> None:
    name = Path("assets", "llama-3.1-8b-profile.json")
    assert (again / name).read_text(encoding="utf-8") == (DOCS / name).read_text(encoding="utf-8"), REMEDY


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
