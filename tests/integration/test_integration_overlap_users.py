"""Optimizer steps behind the pipeline and what users do: clipping in hooks, weights in the same memory, trainers within
callbacks. The updates are late, see :class:`Late`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.planning import CallCost, CostProfile
from lightning_roundpipe.weights.futures import PendingParameter
from tests.support.late_updates import Late, copied
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small


def num_pending(module: nn.Module) -> int:
    return sum(type(parameter) is PendingParameter for parameter in module.parameters())


# --- clipping, autocast ----------------------------------------------------------------------------------------------


def _clip(module: Any, optimizer: Any) -> Any:
    module.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    return copied([parameter.grad for parameter in module.parameters()])


class Clips(cb.Callback):
    """Clips before the Trainer does, and looks at what has come of it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(_clip(pl_module, optimizer))


# With Trainer(gradient_clip_val=0.05), gradients are clipped that have this norm already.
@pytest.mark.parametrize("clip_val", [None, 0.05])
@pytest.mark.parametrize("where", ["module", "callback"])
def test_clipping_in_a_hook(compare_modes: Any, clip_val: float | None, where: str) -> None:
    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if where == "module":
                self.seen.append(_clip(self, optimizer))

    compare_modes(Learns, (lambda: [Clips()]) if where == "callback" else list, gradient_clip_val=clip_val)


# --- weights in the same memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
def test_updates_of_weights_in_the_same_memory_do_not_overlap(
    compare_modes: Any, is_part: bool, is_frozen: bool
) -> None:
    """Tied by ``data``, or in parts, and a frozen alias of a trained weight."""

    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            first, last = self.body[0][0].weight, self.body[3][0].weight
            last.data = first.data
            if is_part:
                memory = torch.cat([first.detach(), last.detach()])
                first.data, last.data = memory[: len(first)], memory[2 : 2 + len(last)]
            last.requires_grad_(not is_frozen)

    compare_modes(Learns, overlaps=False)


# --- weights that are not used by one call of one unit alone ----------------------------------------------------------


CALLS = (*(f"body.{i}.0" for i in range(4)), "head")


def tied(module: Any) -> None:
    module.body[2][0].weight = module.body[1][0].weight


def with_batch_norms(module: Any) -> None:
    for block in module.body:
        block[1] = nn.BatchNorm1d(6)


def twice(module: Any, x: Tensor) -> Tensor:
    return module.head(module.body[3](module.body[3](module.body[2](module.body[1](module.body[0](x))))))


def used_outside_units(module: Any, x: Tensor) -> Tensor:
    return module.head(module.body(x * module.head.weight.mean()))


def used_detached(module: Any, x: Tensor) -> Tensor:
    return module.head(module.body(nn.functional.linear(x, module.body[3][0].weight.detach())))


def checkpointed(module: Any, x: Tensor) -> Tensor:
    x = module.body[2](checkpoint(module.body[1], module.body[0](x), use_reentrant=False))
    return module.head(checkpoint(module.body[3], x, use_reentrant=False))


def penalised_later(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    return loss + 0.1 * sum(w.square().sum() for w in module.parameters()) if batch_idx >= 2 else loss


@dataclass(frozen=True)
class Form:
    """What differs from the small model."""

    change: Callable[[Any], None] = lambda module: None
    forward: Callable[[Any, Tensor], Tensor] = lambda module, x: module.head(module.body(x))
    loss: Callable[[Any, Tensor, int], Tensor] = lambda module, loss, batch_idx: loss
    thaws: bool = False
    calls: tuple[str, ...] = CALLS


FORMS = {
    "tied": Form(change=tied),
    "batch norms": Form(change=with_batch_norms, calls=(*(f"body.{i}.{j}" for i in range(4) for j in (0, 1)), "head")),
    "called twice": Form(forward=twice, calls=(*CALLS[:4], "body.3.0", "head")),
    "outside units": Form(forward=used_outside_units),
    "outside units, later": Form(loss=penalised_later),
    "outside units, detached": Form(forward=used_detached),
    "checkpointed": Form(forward=checkpointed),
    "trained later": Form(thaws=True),
}


@pytest.mark.parametrize(
    ("name", "has_copies"), [*((name, True) for name in FORMS), ("tied", False), ("outside units", False)]
)
def test_every_use_of_a_weight_waits_for_its_update(compare_modes: Any, name: str, has_copies: bool) -> None:
    form = FORMS[name]

    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            form.change(self)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if form.thaws:
                self.body[1].requires_grad_(batch_idx >= 2)

        def forward(self, x: Tensor) -> Tensor:
            return form.forward(self, x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return form.loss(self, self.loss(batch), batch_idx)

    # A plan that is given is the same in both runs, and so is the order in which gradients are added up.
    costs = CostProfile(tuple(CallCost(call, 1.0, 2.0) for call in form.calls))
    compare_modes(Learns, options={"virtual_copies": has_copies, "cost_profile": costs})


# --- trainers, references, ends --------------------------------------------------------------------------------------


def test_another_trainer_in_a_callback(compare_modes: Any) -> None:
    pending: list[bool] = []

    class Validates(cb.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            class Judges(Small):
                def validation_step(self, batch: Any, batch_idx: int) -> None:
                    self.log("val", self.loss(batch))

            judge = Judges()
            judge.body, judge.head = pl_module.body, pl_module.head
            pending.append(num_pending(judge) > 0)
            self.seen.append(make_trainer().validate(judge, make_loader(16), verbose=False))

    compare_modes(Small, lambda: [Validates()])
    assert pending[-5:] == [False, True, True, True, False]  # of the run with overlap


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_batch_start"])
def test_a_reference_to_the_state_sees_all_of_it(compare_modes: Any, hook: str) -> None:
    """Taken before the first step of the optimizer."""

    class Watches(cb.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []
            self.state: Any = None
            setattr(self, hook, self.take)

        def take(self, trainer: L.Trainer, *args: Any) -> None:
            if self.state is None:
                self.state = trainer.optimizers[0].state

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append(copied([self.state[parameter] for parameter in args[1].parameters()]))

    compare_modes(Small, lambda: [Watches()])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 1, 1, 0]),  # the first update makes the state, and is over at once
        ({"max_epochs": 2}, [0, 1, 1, 1, 0, 1, 1, 1, 1, 0]),
        ({"limit_train_batches": 3}, [0, 1, 0]),
        ({"max_steps": 4}, [0, 1, 1, 0]),
        ({"max_steps": 7, "max_epochs": 2}, [0, 1, 1, 1, 0, 1, 0]),
        ({"accumulate_grad_batches": 2, "max_steps": 2}, [0, 0, 0, 0]),
        ({"accumulate_grad_batches": 2}, [0, 0, 0, 1, 0]),
    ],
)
def test_updates_before_something_else_are_waited_for(
    late: Late, settings: dict[str, Any], expected: list[int]
) -> None:
    """After the last batch of an epoch and after the last step come exports, other trainers and new workers."""
    found: list[int] = []

    class Learns(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            found.append(int(num_pending(self) > 0))

        def on_train_epoch_end(self) -> None:
            assert num_pending(self) == 0

        def on_train_end(self) -> None:
            assert num_pending(self) == 0

    make_trainer(options={"optimizer_overlap": "exact"}, **settings).fit(Learns(), make_loader(40))
    assert found == expected
