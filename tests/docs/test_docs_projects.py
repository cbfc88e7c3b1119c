"""The page of real projects."""

from __future__ import annotations

from tests.real_projects import page
from tests.real_projects.environments import REQUIREMENTS


def test_the_page_is_what_the_results_give() -> None:
    results = page.read()
    assert page.PAGE.read_text(encoding="utf-8") == page.text_of(results), f"run {page.COMMAND}"
    assert set(results) == {path.stem for path in REQUIREMENTS.glob("*.txt")}, "run make test-projects"
