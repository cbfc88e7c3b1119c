"""Steps that freeze and unfreeze modules by themselves: each micro-batch has the flags that it has set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.parity import compare
from tests.support.rows import compat
from tests.support.small import Small

PIPELINES = [{"devices": 1, "num_microbatches": 1}, {"devices": 2, "num_microbatches": 3}]


def _frozen_for_one_of_two_losses(module: Any, batch: Any) -> Tensor:
    module.body[:3].requires_grad_(False)
    loss = module.loss(batch)
    module.body[:3].requires_grad_(True)
    return loss + 0.1 * module(batch[0]).square().mean()


def _frozen_for_the_second_loss(module: Any, batch: Any) -> Tensor:
    loss = 0.1 * module(batch[0]).square().mean()
    module.body[:3].requires_grad_(False)
    loss = loss + module.loss(batch)
    module.body[:3].requires_grad_(True)
    return loss


def _weights_frozen_for_the_forward(module: Any, batch: Any) -> Tensor:
    for block in module.body:
        block[0].weight.requires_grad = False
    loss = module.loss(batch)
    for block in module.body:
        block[0].weight.requires_grad = True
    return loss


def _frozen_for_good(module: Any, batch: Any) -> Tensor:
    if module.current_epoch == 1:
        module.body[1:3].requires_grad_(False)
    return module.loss(batch)


def _frozen_by_turns(module: Any, batch: Any) -> Tensor:
    module.body[::2].requires_grad_(module.global_step % 2 == 0)
    module.head.weight.requires_grad = module.global_step % 2 == 1
    return module.loss(batch)


LOSSES: list[Callable[[Any, Any], Tensor]] = [
    _frozen_for_one_of_two_losses,
    _frozen_for_the_second_loss,
    _weights_frozen_for_the_forward,
    _frozen_for_good,
    _frozen_by_turns,
]


def _in_turns(self: Any, batch: Any, batch_idx: int) -> None:
    body, head = self.optimizers()
    self.body.requires_grad_(False)
    head.zero_grad()
    self.manual_backward(self.loss(batch))
    head.step()
    self.body.requires_grad_(True)
    self.head.requires_grad_(False)
    body.zero_grad()
    self.manual_backward(_frozen_for_one_of_two_losses(self, batch))
    body.step()
    self.head.requires_grad_(True)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=["one", "three"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@compat("LightningModule hook", "training_step (freezes and unfreezes)")
def test_freezing_in_a_step(pipeline: dict[str, int], loss: Any) -> None:
    make = type("Learns", (Small,), {"training_step": lambda self, batch, batch_idx: loss(self, batch)})
    compare(make, max_epochs=2, ours=pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=["one", "three"])
def test_freezing_by_hand_in_manual_optimization(pipeline: dict[str, int]) -> None:
    class Turns(Small):
        training_step = _in_turns

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.body, self.head)]

    compare(Turns, max_epochs=2, ours=pipeline)
