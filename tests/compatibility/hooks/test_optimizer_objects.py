"""Manual optimization with optimizers of users: with methods of their own, and in objects around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.parity import compare
from tests.support.small import Small


class SharpnessAware(torch.optim.SGD):
    """As projects write it: the two halves of its step are methods of their own."""

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["way"] = 0.1 * parameter.grad
            parameter.add_(self.state[parameter]["way"])
        if zero_grad:
            self.zero_grad()

    def second_step(self, loss_of: Callable[[], Tensor]) -> Tensor:
        loss = loss_of()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.state[parameter]["way"])
        self.step()
        return loss


class Warming:
    """An optimizer with its own schedule, as in many implementations of transformers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.02 * self.count
        self.optimizer.step()


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def backward_of(self, batch: Any) -> Tensor:
        loss = self.loss(batch)
        self.manual_backward(loss)
        return loss


class Sharp(Manual):
    """The optimizer of the Trainer, which wraps it."""

    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), lr=0.1, momentum=0.5)

    def optimizer(self) -> Any:
        return self.optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizer()
        optimizer.zero_grad()
        self.log("loss", self.backward_of(batch))
        optimizer.first_step(zero_grad=True)
        self.log("loss there", optimizer.second_step(lambda: self.backward_of(batch)))


class SharpBeside(Sharp):
    """An optimizer that the Trainer does not know."""

    def configure_optimizers(self) -> None:
        self.own = super().configure_optimizers()

    def optimizer(self) -> Any:
        return self.own


class Warmed(Manual):
    """An object around an optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.warming = Warming(optimizer)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.warming.zero_grad()
        self.backward_of(batch)
        self.warming.step()
        self.log("lr", self.warming.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("module", [Sharp, SharpBeside, Warmed])
def test_equal_to_one_device(module: type[Manual]) -> None:
    compare(module, max_epochs=2, also=lambda run: vars(run.module.warming)["count"] if module is Warmed else None)
