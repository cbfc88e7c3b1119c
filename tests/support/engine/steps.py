"""Steps of the engine, on virtual devices unless others are chosen, for tests of what happens in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.modelled import recomputed

Parts = Sequence[Any]  # micro-batches


class Steps:
    """An engine for a model that gives its loss, by ``step`` if it has one.

    Args:
        planner: everything but the last call is recomputed, by default.
        copies: whether the devices have copies of their own, made as late as is allowed.
        device_type: of the devices.
        pool: the devices, if not so many of this type.
        trace: whether steps are traced.
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
        pool: DevicePool | None = None,
        trace: bool = False,
        **options: Any,
    ) -> None:
        self.model = model
        self.function: Callable[[Any], Any] = getattr(model, "step", model)
        if pool is None:
            types = [torch.device("cpu" if device_type == "cpu" else f"{device_type}:{i}") for i in range(num_devices)]
            pool = DevicePool(types, link=LazyLink() if copies else None)
        self.pool = pool
        self.engine = Engine(model, pool, planner, **{"num_threads": 1, **options})
        self.engine.trace = trace

    def train(
        self, parts: Parts, seed: int = 0, function: Callable[[Any], Any] | None = None, **request: Any
    ) -> StepResult:
        """A step on these micro-batches, whose rows have the same weight.

        Args:
            request: other attributes of :class:`StepRequest`.
        """
        total = sum(map(len, parts))
        weights = [len(part) / total for part in parts]
        request = {"key": "train", "seed": seed, "loss_of": lambda loss: loss, **request}
        return self.engine.run(StepRequest(function or self.function, parts, weights, **request))

    def evaluate(self, parts: Parts) -> StepResult:
        """A step without gradients."""
        with torch.no_grad():
            return self.engine.run(StepRequest(self.function, parts, [1.0] * len(parts), "evaluate", 0))

    def gradients(self, parts: Parts, seed: int = 0) -> list[Tensor | None]:
        """Those of all parameters after :meth:`train`; None for those that got none."""
        found = self.train(parts, seed).gradients
        return [found.get(parameter) for parameter in self.model.parameters()]
