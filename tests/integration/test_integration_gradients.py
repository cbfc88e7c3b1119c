"""The host holds one set of gradients at a time, unless something of the user's may look at the old ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_roundpipe.weights.gradients import GradientStore
from tests.support.parity import make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small


class Counts(L.Callback):
    """Counts bytes of gradients when those of a step have come home: the old ones that are left, and the new ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.old: list[int] = []
        self.new: list[int] = []
        self._known: list[weakref.ref[Tensor]] = []
        self._taken: set[int] = set()
        take = GradientStore.take

        def counting(store: GradientStore) -> dict[Any, Tensor]:
            gradients = take(store)
            if not gradients:  # a step that was only tried
                return gradients
            self.old.append(sum(gradient.nbytes for known in self._known if (gradient := known()) is not None))
            self.new.append(sum(gradient.nbytes for gradient in gradients.values()))
            self._taken |= {gradient.data_ptr() for gradient in gradients.values()}
            return gradients

        monkeypatch.setattr(GradientStore, "take", counting)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        assert {gradient.data_ptr() for gradient in gradients} <= self._taken, "handed out without a copy"
        self._known = [weakref.ref(gradient) for gradient in gradients]


class Asks(L.Callback):
    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step:
            assert all(p.grad is not None for p in pl_module.parameters())


@pytest.fixture
def bytes_left(small_updates: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Trains; what was left of the old gradients in each step, as a part of all."""

    def run(kind: Any = None, *, callbacks: tuple[Any, ...] = (), **settings: Any) -> list[float]:
        counts = Counts(monkeypatch)
        settings["options"] = {"verify": 0, **settings.get("options", {})}
        trainer = make_trainer(callbacks=[*callbacks, counts], **settings)
        trainer.fit((kind or Small)(), make_loader(24))
        return [old / new for old, new in zip(counts.old, counts.new, strict=True)]

    return run


@pytest.mark.parametrize(("mode", "copies"), [("off", False), ("exact", True)])
def test_old_gradients_are_gone_when_new_ones_have_come(bytes_left: Any, mode: str, copies: bool) -> None:
    assert bytes_left(options={"optimizer_overlap": mode, "virtual_copies": copies}) == [0.0] * 3


@compat("LightningModule hook", "training_step (reads gradients)")
def test_training_step_finds_the_old_gradients(bytes_left: Any) -> None:
    norms: list[list[float]] = []

    class Reads(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            norms.append([float(p.grad.norm()) for p in self.parameters() if p.grad is not None])
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            wanted.append([float(p.grad.norm()) for p in self.parameters()])

    wanted: list[list[float]] = []
    assert bytes_left(Reads, num_microbatches=4, options={"check_split": "off"}) == [0.0] * 3
    assert norms == [[]] * 4 + [norm for norm in wanted[:-1] for _ in range(4)]


class Zeroes(Small):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Hooked(Small):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert (self.head.weight.grad is None) == (self.trainer.global_step == 0)


class Keeps(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.kept = [p.grad for group in self.param_groups for p in group["params"]]
        super().zero_grad(set_to_none)


class OwnOptimizer(Small):
    def configure_optimizers(self) -> Any:
        return Keeps(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [Zeroes, Hooked, OwnOptimizer])
def test_gradients_that_the_user_may_look_at_before_zero_grad_stay(bytes_left: Any, kind: Any) -> None:
    assert bytes_left(kind)[1:] == [1.0] * 2


def test_a_callback_before_zero_grad_finds_them(bytes_left: Any) -> None:
    assert bytes_left(callbacks=(Asks(),))[1:] == [1.0] * 2


def test_gradients_that_accumulate_stay(bytes_left: Any) -> None:
    assert bytes_left(accumulate_grad_batches=3)[1:] == [1.0] * 2
