"""Models whose units are compiled, and what they give without compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.engine.partitions import recomputed_elsewhere
from tests.support.engine.steps import Parts, Steps
from tests.support.identical import assert_identical

WIDTH = 8
EAGER_KERNELS = {"backend": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks in a row; what the first one is given requires a gradient, as it does behind an embedding."""

    def __init__(self, make: Callable[[], nn.Module] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(torch.is_grad_enabled()).clone()
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Graphs:
    """A backend that runs graphs as they are, and notes which operators they have and whether for a backward."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        calls = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        kind = next((name for name in ("gelu", "embedding") if any(name in c for c in calls)), "linear")
        self.seen.append((kind, torch.is_grad_enabled()))
        return graph


def parts_of(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, 3, WIDTH) for size in sizes]


def steps_of(model: nn.Module, options: Any, *, num_devices: int = 2, copies: bool = False) -> Steps:
    return Steps(model, recomputed_elsewhere, num_devices=num_devices, copies=copies, compile_units=options)


def results(model: nn.Module, parts: Parts, options: Any, *, num_steps: int = 2, copies: bool = False) -> list[Any]:
    """Losses and gradients of some steps, buffers, then losses of an evaluation."""
    steps = steps_of(model, options, copies=copies)
    found: list[Any] = []
    for seed in range(num_steps):
        result = steps.train(parts, seed)
        found += [*result.outputs, *(result.gradients.get(p) for p in model.parameters())]
    found += [buffer.clone() for buffer in model.buffers()]
    model.eval()
    found += steps.evaluate(parts).outputs
    model.train()
    return found


def expect(make: Callable[[], Model], *options: Any, parts: Parts | None = None, **kwargs: Any) -> list[Any]:
    """Results without compiling; those with each of the options are the same."""
    parts = parts or parts_of(2, 2, 2)
    found = []
    for one in (None, *options):
        torch.manual_seed(1)
        found.append(results(make(), parts, one, **kwargs))
    for other in found[1:]:
        assert_identical(other, found[0])
    return found[0]
