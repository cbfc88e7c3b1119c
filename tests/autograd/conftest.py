"""What tests of compiled units get."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo

from tests.autograd.compiled import Graphs


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """One thread per operator, as in virtual devices; and no warning but those that a test expects."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile_units")
        yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()
