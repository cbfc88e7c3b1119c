"""Profiles as files, and commands run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli import main
from lightning_roundpipe.planning import CostProfile
from tests.planning.paper import MODELS
from tests.support.engine.partitions import search_briefly

RunJson = Callable[..., dict[str, Any]]
RunFailing = Callable[..., str]


@contextmanager
def quick_search() -> Iterator[None]:
    """Plans are searched for in fewer attempts: test_cli_paper.py has what the best ones take."""
    with pytest.MonkeyPatch.context() as patch:
        search_briefly(patch.setattr)
        yield


@pytest.fixture(scope="module")
def quick_plans() -> Iterator[None]:
    with quick_search():
        yield


@pytest.fixture
def llama() -> CostProfile:
    """12 layers of Llama-3.1-8B and its head, with the times that the RoundPipe paper measured."""
    return replace(MODELS["Llama-3.1-8B"], num_layers=12).profile()


@pytest.fixture
def llama_file(llama: CostProfile, tmp_path: Path) -> str:
    path = tmp_path / "llama.json"
    llama.save(path)
    return str(path)


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> RunJson:
    """Run a command with ``--json``; return the one object it prints."""

    def run(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        document = json.loads(printed.out)
        assert isinstance(document, dict)
        return document

    return run


@pytest.fixture
def run_failing(capsys: pytest.CaptureFixture[str]) -> RunFailing:
    """Run a command that the user got wrong; return the message."""

    def run(*arguments: str) -> str:
        try:
            status: object = main(arguments)
        except SystemExit as error:  # from argparse
            status = error.code
        printed = capsys.readouterr()
        assert status == 2
        assert printed.out == ""
        assert "Traceback" not in printed.err
        return printed.err

    return run
