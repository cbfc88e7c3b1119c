"""The site builds without a warning, asks nothing of the network, and is searched without a server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return folder


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert loaded == [], page


def test_the_reference_is_made_of_the_docstrings(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in ("RoundPipeStrategy", "RoundPipeTimeline", "BatchSplitError", "planning.plan_training"):
        assert f'id="lightning_roundpipe.{name}"' in page
    assert ":class:" not in page


@pytest.mark.skipif(BROWSER is None, reason="needs a browser")
def test_search_finds_pages_without_a_server(site: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    switches = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=8000",
    )
    done = subprocess.run(
        [BROWSER, *switches, "--dump-dom", f"file://{site}/index.html?q=packing"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        check=True,
    )
    assert re.search(r"\d+ matching document", done.stdout)
    assert re.search(r'<a href="[^"]*/how-to/packing.html[^"]*" class="md-search-result__link', done.stdout)
