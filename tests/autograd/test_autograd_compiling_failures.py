"""Units that cannot be compiled, or not again: one warning, and the results of eager units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from lightning_roundpipe.autograd import compiling
from tests.autograd.compiled import EAGER_KERNELS, WIDTH, Block, Graphs, Model, expect, parts_of, steps_of


class Breaking(Block):
    """Cannot be compiled whole."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def warnings_of(make: Callable[[], Model], backend: Any) -> list[str]:
    """About what was not compiled, while the results are those of eager units."""
    with pytest.warns(UserWarning, match="compile_units") as caught:
        expect(make, {"backend": backend})
    return [str(warning.message) for warning in caught if "compile_units" in str(warning.message)]


def test_one_warning_names_what_cannot_be_compiled(graphs: Graphs) -> None:
    (text,) = warnings_of(lambda: Model(Breaking), graphs)
    assert all(part in text for part in ("Breaking", "'blocks.", "graph_break"))
    assert graphs.seen == []


def test_a_backend_that_fails_costs_a_warning_per_structure() -> None:
    attempts: list[int] = []

    def failing(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        attempts.append(1)
        raise ValueError("no such instruction")

    (text,) = warnings_of(Model, failing)
    assert "ValueError: no such instruction" in text
    assert len(attempts) == 2  # with and without a graph


@pytest.mark.skipif(
    not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"),
    reason="this version of torch compiles a backward when it runs",
)
def test_a_backward_that_cannot_be_compiled_is_noticed_in_the_forward() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def fails(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        raise ValueError("no such backward")

    texts = warnings_of(Model, aot_autograd(fw_compiler=lambda graph, examples: graph, bw_compiler=fails))
    assert any("no such backward" in text for text in texts)


def test_a_structure_of_too_many_versions_is_given_up_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, graphs: Graphs
) -> None:
    """Each block computes with a number of its own, which torch compiles in."""
    monkeypatch.setattr(compiling, "_MAX_VERSIONS", 2)

    class Deep(Block):
        depth = 0

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.depth):
                x = x * 0.5
            return super().forward(x)

    def make() -> Model:
        model = Model(Deep)
        for depth, block in enumerate(model.blocks):
            block.depth = depth
        return model

    (text,) = warnings_of(make, graphs)
    assert "compiled 2 times" in text
    assert Counter(graphs.seen) == {("gelu", True): 2, ("gelu", False): 2}


class Choosy(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise LookupError("not two rows")
        return super().forward(x)


def test_an_error_of_the_unit_is_the_users_own() -> None:
    steps = steps_of(Model(Choosy), EAGER_KERNELS)
    steps.train(parts_of(3, 3, 3))
    with pytest.raises(LookupError, match="not two rows"):  # and no warning
        steps.train(parts_of(2, 2, 2))
    steps.train(parts_of(3, 3, 3))


def test_structures_do_not_share_a_limit(monkeypatch: pytest.MonkeyPatch, graphs: Graphs) -> None:
    monkeypatch.setattr(compiling, "_MAX_VERSIONS", 1)
    widths = iter(range(2, 100))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = next(widths)
            self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(nn.functional.gelu(self.up(x)))

    steps_of(Model(Wide), {"backend": graphs}).evaluate(parts_of(2, 2, 2))
    assert Counter(graphs.seen) == {("gelu", False): 3}
