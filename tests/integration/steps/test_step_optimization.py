"""Optimizers, accumulation, clipping, schedulers, precision, and everything a module may override about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.support.rows import compat, compat_each

SETTINGS: dict[str, dict[str, Any]] = {
    "accumulate past the epoch": {"accumulate_grad_batches": 5},
    "clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulate and clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "validation between accumulated steps": {"accumulate_grad_batches": 3, "val_check_interval": 1},
    "detect_anomaly": {"detect_anomaly": True, "limit_val_batches": 0, "limit_train_batches": 2},
    "deterministic": {"deterministic": True},
}


@compat_each(
    "Trainer argument",
    "accumulate_grad_batches gradient_clip_val gradient_clip_algorithm val_check_interval detect_anomaly deterministic",
)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(small: Any, fit_alike: Any, make_loader: Any, name: str) -> None:
    class Learns(small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

    fit_alike(Learns, max_epochs=2, val_loader=make_loader(10, 4), **SETTINGS[name])


def test_parameter_groups_and_frozen_parameters(small: Any, fit_alike: Any) -> None:
    class Learns(small):
        def configure_optimizers(self) -> Any:
            self.body[0].requires_grad_(False)
            groups = [{"params": self.body[1:].parameters(), "lr": 0.05}, {"params": self.head.parameters()}]
            return torch.optim.SGD(groups, lr=0.2, momentum=0.9)

    _, ours = fit_alike(Learns)
    assert ours.module.body[0][0].weight.grad is None


def test_unused_parameters_have_no_gradient(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    class Learns(small):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4, weight_decay=0.1)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.unused.weight.grad is None

    plain, ours = fit_both(lambda: Learns())
    assert ours.module.unused.weight not in ours.trainer.optimizers[0].state
    weights = [
        {name: p for name, p in run.module.state_dict().items() if "unused" not in name} for run in (ours, plain)
    ]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-4, atol=1e-6)


# --- precision ---------------------------------------------------------------------------------------------------


# --- overrides and hooks: once per batch, with the final gradients ------------------------------------------------

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Spying(L.Callback):
    """Notes the hooks that are called, and the gradients they see."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


def _make_spy(name: str) -> Callable[..., None]:
    def hook(self: Spying, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        self.calls.append({"hook": name, "step": trainer.global_step, "gradients": gradients})

    return hook


for _name in HOOKS:
    setattr(Spying, _name, _make_spy(_name))


@compat_each(
    "Callback hook",
    "on_train_batch_start on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step "
    "on_train_batch_end",
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_see_the_hooks_and_gradients_of_plain(
    small: Any, fit_both: Any, assert_alike: Any, accumulate: int
) -> None:
    runs = fit_both(small, callbacks=lambda: [Spying()], max_epochs=2, accumulate_grad_batches=accumulate)
    plain, ours = (next(c for c in run.trainer.callbacks if isinstance(c, Spying)).calls for run in runs)
    assert {call["hook"] for call in plain} == set(HOOKS)
    assert any(call["gradients"] for call in plain)
    assert_alike(ours, plain)


class Overriding:
    """Mixed into the small model: overrides all that concerns the optimizer step, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def backward(self, loss: Any) -> None:
        self.notes.append({"backward": loss.detach().clone()})
        (loss * 2.0).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.notes.append({"step": batch_idx, "norm": self.head.weight.norm().item()})
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.notes.append({"zero": batch_idx})
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.notes.append({"clip": norm.item(), "given": gradient_clip_val})
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="value")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.notes.append({"scheduler": scheduler.last_epoch})
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@compat_each(
    "LightningModule hook",
    "backward optimizer_step optimizer_zero_grad configure_gradient_clipping lr_scheduler_step",
)
@compat("LightningModule method", "clip_gradients")
def test_overrides_of_the_module(small: Any, fit_alike: Any, assert_alike: Any) -> None:
    class Learns(Overriding, small):
        pass

    plain, ours = fit_alike(Learns, max_epochs=2)
    assert sum("backward" in note for note in plain.module.notes) == 6
    assert_alike(ours.module.notes, plain.module.notes)


def test_gradients_after_fit(small: Any, fit_both: Any, assert_alike: Any) -> None:
    plain, ours = fit_both(small)
    gradients = [{n: p.grad for n, p in run.module.named_parameters()} for run in (ours, plain)]
    assert all(gradient is not None for gradient in gradients[1].values())
    assert_alike(*gradients)


def test_backward_twice_is_an_error(small: Any, make_trainer: Any, make_loader: Any) -> None:
    class Learns(small):
        def backward(self, loss: Any) -> None:
            loss.backward(retain_graph=True)
            loss.backward()

    with pytest.raises(RuntimeError, match="call backward once per training_step"):
        make_trainer().fit(Learns(), make_loader())
