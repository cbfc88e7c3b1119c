"""Compiled units on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo

from tests.gpu.training import Transformer, assert_alike, tokens, train

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("error:compile_units")
@pytest.mark.parametrize("compile_units", [True, {"backend": "aot_eager"}], ids=["inductor", "aot_eager"])
def test_compiled_units(devices: list[int], compile_units: Any, tmp_path: Path) -> None:
    options = {"num_microbatches": 4, "compile_units": compile_units}
    # The fast path of evaluation of torch's encoder layer is an operator that torch cannot compile on GPUs.
    found = train(Transformer, tokens(), tmp_path, devices=devices, options=options, predicts=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_alike(found, train(Transformer, tokens(), tmp_path, predicts=False))
