"""What tests of benchmarks share."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from benchmarks.gpu import measuring, processes


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Measuring processes are run here: others would import everything again. Gives the commands."""
    commands: list[list[str]] = []

    def run(command: list[str], limit_s: float, **kwargs: Any) -> tuple[int, str]:
        assert command[:3] == [sys.executable, "-m", "benchmarks.gpu.measuring"]
        commands.append(command)
        monkeypatch.setattr(sys, "argv", command[2:])
        measuring.main()
        return 0, ""

    torch.set_num_threads(1)
    monkeypatch.setattr(processes, "run", run)
    return commands
