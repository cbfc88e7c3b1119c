"""The option compile_units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from lightning_roundpipe import RoundPipeStrategy
from tests.support.parity import compare, make_loader, make_trainer
from tests.support.small import Small


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("virtual_copies", [False, True])
def test_compiled_units_train_like_plain_lightning(virtual_copies: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    options = {"compile_units": {"backend": backend}, "virtual_copies": virtual_copies}
    compare(Small, ours={"options": options})
    assert graphs


def test_arguments_of_torch_compile() -> None:
    assert RoundPipeStrategy().options.compile_arguments is None
    assert RoundPipeStrategy(compile_units=True).options.compile_arguments == {}
    given = {"mode": "max-autotune-no-cudagraphs", "dynamic": True}
    assert RoundPipeStrategy(compile_units=given).options.compile_arguments == given


def test_an_unknown_backend_is_an_error() -> None:
    trainer = make_trainer(options={"compile_units": {"backend": "nonsense"}})
    with pytest.raises(RuntimeError, match="nonsense"):
        trainer.fit(Small(), make_loader())
