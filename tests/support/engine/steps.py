"""Steps of the engine, on virtual devices unless others are chosen, for tests of what happens in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, Planner, StepRequest, StepResult
from lightning_roundpipe.planning import CostProfile, Machine, Partition, partition, partition_forward
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.modelled import recomputed

Parts = Sequence[Tensor]


def balanced(num_devices: int) -> Planner:
    """The planner of the package, for so many devices."""

    def plan(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        make: Callable[..., Partition] = partition if training else partition_forward
        return make(costs, num_devices=num_devices, num_microbatches=num_microbatches)

    return plan


class Steps:
    """An engine for a model whose output is its loss.

    Args:
        planner: everything but the last call is recomputed, by default.
        copies: whether the devices have copies of their own, made as late as is allowed.
        device_type: of the devices.
        options: of :class:`Engine`.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: Any = recomputed,
        *,
        num_devices: int = 1,
        copies: bool = False,
        device_type: str = "cpu",
        **options: Any,
    ) -> None:
        self.model = model
        devices = [torch.device("cpu" if device_type == "cpu" else f"{device_type}:{i}") for i in range(num_devices)]
        self.pool = DevicePool(devices, link=LazyLink() if copies else None)
        self.engine = Engine(model, self.pool, planner, num_threads=1, **options)

    def train(self, parts: Parts, seed: int = 0, function: Callable[[Any], Any] | None = None) -> StepResult:
        """A step on these micro-batches, whose rows have the same weight."""
        total = sum(map(len, parts))
        weights = [len(part) / total for part in parts]
        request = StepRequest(function or self.model, parts, weights, "train", seed, loss_of=lambda loss: loss)
        return self.engine.run(request)

    def evaluate(self, parts: Parts) -> StepResult:
        """A step without gradients."""
        with torch.no_grad():
            return self.engine.run(StepRequest(self.model, parts, [1.0] * len(parts), "evaluate", 0))

    def gradients(self, parts: Parts, seed: int = 0) -> list[Tensor | None]:
        """Those of all parameters after :meth:`train`; None for those that got none."""
        found = self.train(parts, seed).gradients
        return [found.get(parameter) for parameter in self.model.parameters()]
