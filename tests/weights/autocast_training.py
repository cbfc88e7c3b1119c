"""Trainings of a small model under autocast on devices that copy lazily, compared with each other bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import CostProfile, Machine, Partition
from lightning_roundpipe.weights.low_precision import WorkingCopies
from lightning_roundpipe.weights.units import Unit
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.partitions import recomputed_elsewhere

LOW = torch.bfloat16
AUTOCAST = (True, LOW)
WIDTH = 8
TOKENS = 11


class Block(nn.Module):
    """Two weights that autocast casts, two with their biases that it does not."""

    def __init__(self, inside: Callable[[Block, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.inside is None else x + y + self.inside(self, x)


class Model(nn.Module):
    def __init__(self, inside: Callable[[Block, Tensor], Tensor] | None = None, trained: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trained in name)

    def step(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Training:
    """A model in an engine on devices that copy lazily, with SGD."""

    def __init__(
        self,
        model: Model,
        *,
        uses_copies: bool = True,
        link: bool = True,
        num_devices: int = 2,
        memory_limit: int | None = None,
        lr: float = 0.1,
        pool: DevicePool | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        pool = pool or DevicePool(
            [torch.device("cpu")] * num_devices, link=LazyLink() if link else None, memory_limit=memory_limit
        )
        self.device_type = pool.devices[0].torch_device.type
        self.engine = Engine(self.model, pool, self._plan, num_threads=1)
        self.planner: Callable[[int, bool], Partition] | None = None
        self.weights: WorkingCopies = self.engine._replicas.weights
        if not uses_copies:
            self.weights.is_low = lambda unit, autocast=None: False  # type: ignore[method-assign]
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=lr)
        self.num_steps = 0

    def _plan(self, costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        if self.planner is not None:
            return self.planner(len(costs.calls), training)
        return recomputed_elsewhere(costs, machine, num_microbatches, training)

    def train(self, *, autocast: bool = True, num_microbatches: int = 4) -> StepResult:
        self.num_steps += 1
        result = self._run("train", num_microbatches, autocast, lambda loss: loss)
        self.optimizer.zero_grad()
        for parameter, gradient in result.gradients.items():
            assert gradient.isfinite().all()
            parameter.grad = gradient
        self.optimizer.step()
        return result

    def evaluate(self, *, autocast: bool = True, num_microbatches: int = 4, key: str = "evaluate") -> StepResult:
        self.model.eval()
        with torch.no_grad():
            result = self._run(key, num_microbatches, autocast, None)
        self.model.train()
        return result

    def _run(self, key: str, num_microbatches: int, autocast: bool, loss_of: Any) -> StepResult:
        tokens = torch.randint(TOKENS, (8, 6), generator=torch.Generator().manual_seed(self.num_steps))
        request = StepRequest(
            self.model.step,
            tokens.chunk(num_microbatches),
            [1 / num_microbatches] * num_microbatches,
            key,
            self.num_steps,
            loss_of=loss_of,
            autocast_device=self.device_type,
        )
        with torch.autocast(self.device_type, dtype=LOW, cache_enabled=False) if autocast else nullcontext():
            return self.engine.run(request)

    def unit(self, name: str) -> Unit:
        table = self.engine._table
        assert table is not None
        return table.units[self.model.get_submodule(name)]

    def low_names(self, name: str) -> set[str]:
        """Parameters of a unit that travel in the low dtype."""
        unit = self.unit(name)
        return {n for n, p in unit.module.named_parameters() if self.weights.dtype_of(unit, p) is LOW}


def assert_same(one: Training, other: Training, results: list[tuple[StepResult, StepResult]]) -> None:
    """Losses, last gradients and parameters, bit for bit."""
    for left, right in results:
        assert [loss.item() for loss in left.outputs] == [loss.item() for loss in right.outputs]
    wanted = dict(other.model.named_parameters())
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
        assert (parameter.grad is None) == (wanted[name].grad is None)
        if parameter.grad is not None:
            assert parameter.grad.dtype is torch.float32
            assert torch.equal(parameter.grad, wanted[name].grad), name
