"""A training of units that call what they are given, at several places of their forward and their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest
from tests.support.engine.partitions import two_calls_fused

WIDTH, NUM_UNITS, NUM_MICROBATCHES, NUM_STEPS = 3, 4, 3, 2
# The plan has two stages for each of the first two units, and one for the others, whose graphs it keeps.
RECOMPUTED, KEPT = 0, 3
# "forward" or "backward", and "start", "middle" or "end" of the forward -> what is called there.
Visits = dict[str, Callable[[], None]]


def _nothing() -> None:
    pass


class Visit(torch.autograd.Function):
    """Calls what it is given on the way forward, or on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> Tensor:
        ctx.backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.backward()
        return gradients[0], None, None


class Unit(nn.Module):
    """Draws random numbers, writes buffers and attributes; may run out of memory before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.num_runs = 0
        self.visits: Visits = {}

    def visit(self, place: str, x: Tensor) -> Tensor:
        forward, backward = (self.visits.get(f"{way} {place}", _nothing) for way in ("forward", "backward"))
        visited: Tensor = Visit.apply(x, forward, backward)
        return visited

    def forward(self, x: Tensor) -> Tensor:
        x = self.visit("start", x)
        x = x + torch.tanh(self.first(self.norm(x)))
        self.num_runs = self.num_runs + 1
        x = self.visit("middle", self.dropout(x))
        return self.visit("end", self.second(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(NUM_UNITS))

    def step(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.square().mean()


def train(
    pool: DevicePool, visits: Visits, unit: int = RECOMPUTED, change: Callable[[Network], None] | None = None
) -> dict[str, Any]:
    """Losses, gradients, buffers and attributes of a few steps; the first one is recorded on one device.

    Args:
        visits: for the unit with this index.
        change: is made to the network before.
    """
    torch.manual_seed(0)
    network = Network()
    if change is not None:
        change(network)
    batches = list(torch.randn(4 * NUM_MICROBATCHES, WIDTH, dtype=torch.float64).chunk(NUM_MICROBATCHES))
    network.units[unit].visits = visits  # type: ignore[assignment]
    engine = Engine(network, pool, two_calls_fused, num_threads=1)
    names = {parameter: name for name, parameter in network.named_parameters()}
    found: dict[str, Any] = {}
    try:
        for step in range(NUM_STEPS):
            weights = [1 / NUM_MICROBATCHES] * NUM_MICROBATCHES
            result = engine.run(StepRequest(network.step, batches, weights, "train", step, loss_of=lambda loss: loss))
            found |= {f"loss {step} {i}": loss.detach() for i, loss in enumerate(result.outputs)}
            found |= {f"gradient {step} {names[p]}": gradient for p, gradient in result.gradients.items()}
    finally:
        engine.close()
    found |= dict(network.named_buffers())
    return found | {f"runs of {i}": torch.tensor(unit.num_runs) for i, unit in enumerate(network.units)}
