"""How threads run in tests of the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_per_operator(fixed_global_state: None) -> None:
    """A second one only costs where models are so small."""
    torch.set_num_threads(1)


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads of Python take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
