"""A training with weights that are large enough to travel as those of real models do, on any pool."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from tests.support.engine.partitions import two_calls_fused
from tests.support.engine.steps import Steps

# Weights from 1 MiB on are page-locked, so that the host does not wait while they are copied.
WIDTH = 512
WEIGHT_BYTES = 4 * WIDTH * WIDTH
NUM_UNITS, NUM_MICROBATCHES, NUM_STEPS = 5, 4, 3


class Unit(nn.Module):
    """Its graph does not keep its input, which user code changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(NUM_UNITS))

    def step(self, x: Tensor) -> Tensor:
        for unit in self.units:
            y = unit(x)
            with torch.no_grad():
                x *= 0.5
            x = x + y
        return x.square().mean()


def train(pool: DevicePool, *, rows: int = 2) -> dict[str, Tensor]:
    """Losses and gradients of a few steps, on the host; disposes of the pool.

    Args:
        rows: of a micro-batch.
    """
    torch.manual_seed(0)
    network = Network()
    steps = Steps(network, two_calls_fused, pool=pool)
    names = {parameter: name for name, parameter in network.named_parameters()}
    found: dict[str, Tensor] = {}
    try:
        for step in range(NUM_STEPS):
            batches = list(torch.randn(rows * NUM_MICROBATCHES, WIDTH).chunk(NUM_MICROBATCHES))
            result = steps.train(batches, step)
            found |= {f"loss {step} {i}": loss.detach().cpu() for i, loss in enumerate(result.outputs)}
            found |= {f"gradient {step} {names[p]}": gradient.clone() for p, gradient in result.gradients.items()}
            with torch.no_grad():
                for parameter, gradient in result.gradients.items():
                    parameter -= 0.1 * gradient
    finally:
        steps.engine.close()
        pool.dispose()
    return found
