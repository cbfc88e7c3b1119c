"""Optimizers, accumulation, clipping, schedulers, precision, and everything a module may override about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.support.rows import compat, compat_each

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    # A large eps: where the true gradient is nearly zero Adam follows the sign of rounding errors.
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-4),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@compat("LightningModule hook", "configure_optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(small: Any, fit_both: Any, assert_same_training: Any, name: str) -> None:
    class Learns(small):
        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.parameters())

    # LBFGS divides by differences of gradients, which magnifies rounding: compared where rounding is small.
    plain, ours = fit_both(Learns, max_epochs=2, precision="64-true" if name == "LBFGS" else "32-true")
    assert_same_training(plain, ours)


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_devices_and_microbatches(
    small: Any, fit_both: Any, assert_same_training: Any, devices: int, num_microbatches: int
) -> None:
    plain, ours = fit_both(small, ours={"devices": devices, "num_microbatches": num_microbatches})
    assert_same_training(plain, ours)


def test_real_copies_on_the_devices(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    plain, ours = fit_both(small, max_epochs=2, ours={"options": {"virtual_copies": True}})
    assert_same_training(plain, ours)


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate_grad_batches": 2},
    "accumulate past the epoch": {"accumulate_grad_batches": 5},
    "clip norm": {"gradient_clip_val": 0.05},
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
def test_settings(small: Any, fit_both: Any, make_loader: Any, assert_same_training: Any, name: str) -> None:
    class Learns(small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

    plain, ours = fit_both(Learns, max_epochs=2, val_loader=make_loader(10, 4), **SETTINGS[name])
    assert_same_training(plain, ours)


@compat("Callback", "GradientAccumulationScheduler")
def test_accumulation_scheduler(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    plain, ours = fit_both(small, max_epochs=3, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})])
    assert_same_training(plain, ours)


def test_schedulers(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    class Learns(small):
        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, *args: Any) -> None:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    plain, ours = fit_both(Learns, max_epochs=2)
    assert_same_training(plain, ours)
    assert len(set(plain.module.rates)) > 3
    assert ours.module.rates == plain.module.rates


def test_scheduler_on_a_logged_value(small: Any, fit_both: Any, make_loader: Any, assert_same_training: Any) -> None:
    class Learns(small):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            # No loss improves by 10: the rate falls after every epoch but the first.
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

    plain, ours = fit_both(Learns, max_epochs=3, val_loader=make_loader(10, 4))
    assert_same_training(plain, ours)
    rates = [run.trainer.optimizers[0].param_groups[0]["lr"] for run in (ours, plain)]
    assert rates[0] == rates[1] < 0.2


def test_parameter_groups_and_frozen_parameters(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    class Learns(small):
        def configure_optimizers(self) -> Any:
            self.body[0].requires_grad_(False)
            groups = [{"params": self.body[1:].parameters(), "lr": 0.05}, {"params": self.head.parameters()}]
            return torch.optim.SGD(groups, lr=0.2, momentum=0.9)

    plain, ours = fit_both(Learns)
    assert_same_training(plain, ours)
    assert ours.module.body[0][0].weight.grad is None


def test_unfreezing_while_training(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    class Learns(small):
        def on_train_epoch_start(self) -> None:
            self.body.requires_grad_(self.current_epoch >= 1)

    plain, ours = fit_both(Learns, max_epochs=2)
    assert_same_training(plain, ours)


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


@compat_each("Precision", "64-true bf16-true bf16-mixed")
@compat("Trainer argument", "precision")
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_precision(small: Any, fit_both: Any, assert_same_training: Any, precision: str) -> None:
    """Splitting a batch changes the order of sums only, so the tolerance is what the order is worth in the format.

    float64: rtol 1e-9. bfloat16 has 8 significant bits: one rounding is 2**-9 relative. A gradient is rounded once per
    micro-batch and layer, and with weights of at most 0.5 and 3 steps of lr 0.1 the weights differ by a few roundings:
    2**-7 relative, and absolutely for weights near zero 0.1 * 2**-7 in bf16-mixed (the masters are float32), 2**-7 in
    bf16-true (the weights themselves are rounded).
    """
    seen: list[Any] = []

    class Learns(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            logits = self(x)
            seen.append((x.dtype, logits.dtype, torch.get_default_dtype(), torch.is_autocast_enabled("cpu")))
            return torch.nn.functional.cross_entropy(logits, y)

    dtype = next(iter(Learns().parameters())).dtype
    assert dtype == torch.float32
    tolerances = {
        "64-true": {"rtol": 1e-9, "atol": 1e-12},
        "bf16-true": {"rtol": 2**-7, "atol": 2**-7},
        "bf16-mixed": {"rtol": 2**-7, "atol": 0.1 * 2**-7},
    }[precision]
    plain, ours = fit_both(Learns, precision=precision)
    assert len(set(seen)) == 1
    assert_same_training(plain, ours, **tolerances)
    assert [p.dtype for p in ours.module.parameters()] == [p.dtype for p in plain.module.parameters()]


def test_bf16_mixed_is_not_float32(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    """The comparison above can fail: without autocast the weights differ by more than the order of sums explains."""
    plain, ours = fit_both(small, plain={"precision": "bf16-mixed"}, ours={"precision": "32-true"})
    with pytest.raises(AssertionError, match="not close"):
        assert_same_training(plain, ours)


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
def test_overrides_of_the_module(small: Any, fit_both: Any, assert_same_training: Any, assert_alike: Any) -> None:
    class Learns(Overriding, small):
        pass

    plain, ours = fit_both(Learns, max_epochs=2)
    assert sum("backward" in note for note in plain.module.notes) == 6
    assert_alike(ours.module.notes, plain.module.notes)
    assert_same_training(plain, ours)


def test_overrides_on_the_instance(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    """A hook set on the object and not on its class counts as well."""

    def make() -> Any:
        module = small()
        module.backward = lambda loss: (loss / 4).backward()
        plain_loss = module.loss
        module.training_step = lambda batch, batch_idx: 3 * plain_loss(batch)
        return module

    plain, ours = fit_both(make)
    assert_same_training(plain, ours)
    reference, _ = fit_both(small)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_training(reference, plain)


@pytest.mark.parametrize("post", [False, True])
def test_parameter_hooks_act_once(small: Any, fit_both: Any, assert_same_training: Any, post: bool) -> None:
    counts: list[int] = []

    def make() -> Any:
        module = small()
        parameter = module.body[1][0].weight
        count = len(counts)
        counts.append(0)

        def scale(gradient: Any) -> Any:
            counts[count] += 1
            return 3 * gradient

        def scale_post(parameter: Any) -> None:
            counts[count] += 1
            parameter.grad.mul_(3)

        if post:
            parameter.register_post_accumulate_grad_hook(scale_post)
        else:
            parameter.register_hook(scale)
        return module

    plain, ours = fit_both(make)
    assert counts == [3, 3]
    assert_same_training(plain, ours)


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


def test_toggled_optimizer_of_two_is_rejected_clearly(small: Any, make_trainer: Any, make_loader: Any) -> None:
    """Several optimizers need manual optimization, in plain Lightning as here."""

    class Two(small):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]

    for kind in ("plain", "roundpipe"):
        with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
            make_trainer(kind).fit(Two(), make_loader())
