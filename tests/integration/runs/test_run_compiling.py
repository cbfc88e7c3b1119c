"""The option compile_units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from lightning_roundpipe import RoundPipeStrategy


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("virtual_copies", [False, True])
def test_compiled_units_train_like_plain_lightning(small: Any, fit_alike: Any, virtual_copies: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    options = {"compile_units": {"backend": backend}, "virtual_copies": virtual_copies}
    fit_alike(small, ours={"options": options})
    assert graphs


def test_arguments_of_torch_compile() -> None:
    assert RoundPipeStrategy().options.compile_arguments is None
    assert RoundPipeStrategy(compile_units=True).options.compile_arguments == {}
    given = {"mode": "max-autotune-no-cudagraphs", "dynamic": True}
    assert RoundPipeStrategy(compile_units=given).options.compile_arguments == given


def test_an_unknown_backend_is_an_error(small: Any, make_trainer: Any, make_loader: Any) -> None:
    trainer = make_trainer(options={"compile_units": {"backend": "nonsense"}})
    with pytest.raises(RuntimeError, match="nonsense"):
        trainer.fit(small(), make_loader())
