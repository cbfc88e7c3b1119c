"""Callbacks of the user that look at weights and gradients, and change them, in any hook."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.support.models import Logs
from tests.support.parity import COPIES, assert_alike, compare, make_loader
from tests.support.rows import compat
from tests.support.small import Small


def write(index: int, parameter: nn.Parameter, value: Tensor) -> None:
    """By one of the ways to write a weight: noticed by torch, unnoticed, and with other memory.

    Both weights of a layer by the same one, as one that is noticed may bring the other along.
    """
    way = index // 2 % 3
    if way == 0:
        with torch.no_grad():
            parameter.copy_(value)
    elif way == 1:
        parameter.data.copy_(value)
    else:
        parameter.data = value.clone()


class EmaByHand(Callback):
    """Follows the weights after every step, and lets validation see the average."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = copy.deepcopy(pl_module.state_dict())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 0.3)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = copy.deepcopy(pl_module.state_dict())
        self.put(pl_module, self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.put(pl_module, self.kept)

    def put(self, module: nn.Module, state: dict[str, Any]) -> None:
        for index, (name, parameter) in enumerate(module.named_parameters()):
            write(index, parameter, state[name])


class WeightNoise(Callback):
    """The forward and the backward see noisy weights, the optimizer the clean ones."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        generator = torch.Generator().manual_seed(trainer.global_step)
        self.noise = [0.1 * torch.randn(p.shape, generator=generator) for p in pl_module.parameters()]
        for parameter, noise in zip(pl_module.parameters(), self.noise, strict=True):
            parameter.data.add_(noise)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter, noise in zip(pl_module.parameters(), self.noise, strict=True):
            parameter.data.sub_(noise)


class Replacing(Callback):
    """Reads and writes weights and optimizers in many hooks, by many ways."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first = copy.deepcopy(pl_module.state_dict())
        pl_module.body[0][0].weight.data.mul_(0.5)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(sum(p.detach().norm() for p in pl_module.parameters())))
        if trainer.global_step == 1:
            optimizer.state.clear()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.head.weight.grad.clamp_(-0.01, 0.01)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.log_dict(grad_norm(pl_module, norm_type=2))
        pl_module.body[2][0].weight.grad.mul_(0.1)
        pl_module.body[0][0].bias.grad = None
        pl_module.head.bias.grad = torch.ones_like(pl_module.head.bias)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.optimizers[0].state.clear()
        if trainer.global_step == 4:
            pl_module.load_state_dict(self.first)
        if trainer.global_step == 5:
            pl_module.body[3][0].weight.data = torch.eye(6)
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.05)]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.head.weight[0] = 0.25
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(pl_module.body.parameters()) * 0.9, pl_module.body[:2].parameters()
        )


CALLBACKS = {"ema": EmaByHand, "noise": WeightNoise, "replacing": Replacing}


@pytest.mark.parametrize("name", CALLBACKS)
@compat("Callback", "Callback")
@compat("Callback hook", "on_after_backward; on_before_optimizer_step; on_before_zero_grad")
@compat("Library", "grad_norm")
def test_weights_and_gradients_in_hooks(name: str) -> None:
    """With copies on the devices, which must not be older than what the callback has written."""
    plain, ours = compare(
        Logs, None, make_loader(10, 5), callbacks=lambda: [CALLBACKS[name]()], max_epochs=2, ours=COPIES
    )
    logged = plain.trainer.callback_metrics
    assert "val" in logged
    if name == "replacing":
        assert len(logged) == 2 + 10 + 1
        assert_alike(ours.trainer.callbacks[0].norms, plain.trainer.callbacks[0].norms)


class Following(Callback):
    """A frozen teacher follows its student."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pairs = zip(pl_module.teacher.parameters(), pl_module.body.parameters(), strict=True)
        for index, (teacher, student) in enumerate(pairs):
            write(index, teacher, teacher.data * 0.8 + student.data * 0.2)


@compat("Callback", "Callback")
def test_a_teacher_that_follows() -> None:
    """Frozen weights stay on a device from step to step, but not if they change."""

    class Taught(Small):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.body).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                target = self.teacher(batch[0])
            return self.loss(batch) + 5.0 * nn.functional.mse_loss(self.body(batch[0]), target)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    compare(Taught, max_epochs=2, callbacks=lambda: [Following()], ours=COPIES)
