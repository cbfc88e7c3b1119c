"""What all pages keep to: links that lead somewhere, Python that is Python, complete tables, and few words."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import yaml

import lightning_roundpipe
from lightning_roundpipe import RoundPipeStrategy
from tests.docs.pages import DOCS, ROOT, anchors_of, links_of, pages, python_of, text_of

MOST_WORDS = 18_000
MOST_WORDS_OF_README = 650
LINKING = [page for page in (*pages(), "CHANGELOG.md", "CONTRIBUTING.md") if (ROOT / page).is_file()]


def leads_somewhere(page: str, link: str) -> bool:
    """Whether there is the file, and the heading in it."""
    name, _, anchor = link.partition("#")
    target = ((ROOT / page).parent / name if name else ROOT / page).resolve()
    return target.exists() and (not anchor or anchor in anchors_of(str(target.relative_to(ROOT))))


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_to_files_and_headings(page: str) -> None:
    assert [link for link in links_of(page) if not leads_somewhere(page, link)] == []


def test_links_of_the_site_stay_in_the_site() -> None:
    """A page of the site cannot link to a file beside ``docs``."""
    pages_of_docs = [page for page in pages() if page.startswith("docs/")]
    targets = {
        (page, link): (ROOT / page).parent / link.partition("#")[0] for page in pages_of_docs for link in links_of(page)
    }
    outside = [where for where, target in targets.items() if not target.resolve().is_relative_to(DOCS)]
    assert outside == []


@pytest.mark.parametrize("page", [page for page in pages() if python_of(page)])
def test_blocks_of_python_can_be_parsed(page: str) -> None:
    for block in python_of(page):
        ast.parse(block, filename=page)


def test_the_documentation_is_short() -> None:
    words = {page: len(text_of(page).split()) for page in pages()}
    assert words.pop("README.md") <= MOST_WORDS_OF_README
    assert sum(words.values()) <= MOST_WORDS, words


def names_in(entry: object) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(parts, (list, type({}.values())))
    return [name for part in parts for name in names_in(part)]


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(names_in(navigation)) == sorted(page.removeprefix("docs/") for page in pages()[1:])


def test_options_are_those_of_the_strategy() -> None:
    """Each one once, with its default."""
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text_of("docs/reference/options.md"), flags=re.MULTILINE)
    parameters = inspect.signature(RoundPipeStrategy).parameters.values()
    assert [(name, ast.literal_eval(default)) for name, default in rows] == [(p.name, p.default) for p in parameters]


def test_the_reference_has_all_public_names() -> None:
    named = set(re.findall(r"^::: ([\w.]+)$", text_of("docs/reference/api.md"), flags=re.MULTILINE))
    public = {f"lightning_roundpipe.{name}" for name in lightning_roundpipe.__all__ if name != "__version__"}
    assert public | {"lightning_roundpipe.planning"} <= named


def test_no_page_is_on_a_folder_of_its_machine() -> None:
    """Figures and paths of one machine do not belong on a page."""
    assert [page for page in pages() if re.search(r"/(home|root|tmp|work)/", text_of(page))] == []


def test_files_that_the_site_uses_are_there() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    for name in (*settings["extra_css"], *settings["extra"]["polyfills"]):
        assert Path(DOCS, name).is_file(), name
