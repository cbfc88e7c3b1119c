"""The modules of the page on losses over the whole batch train as in plain Lightning, and as pipelined as it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.docs.pages import python_of
from tests.support.parity import compare

PAGE = "docs/how-to/whole-batch-losses.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page defines; its training is left out."""
    found: dict[str, Any] = {}
    for block in python_of(PAGE):
        exec(compile(block.split("\ndata = ")[0], PAGE, "exec"), found)
    return found


@pytest.mark.parametrize(("name", "count"), [("Clip", 4), ("Usual", 1), ("Moved", 4)])
def test_modules_of_the_page(names: dict[str, Any], name: str, count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    batches: list[tuple[Tensor, ...]] = [
        tuple(torch.randn(rows, 32, generator=generator) for _ in range(2)) for rows in (8, 7, 8, 5)
    ]
    tolerances = {"of_largest": 1e-3}  # Adam follows what rounding makes of gradients near zero
    _, ours = compare(names[name], batches, ours={"num_microbatches": "auto"}, max_epochs=2, tolerances=tolerances)
    assert set(ours.watch.num_microbatches) == {count}
