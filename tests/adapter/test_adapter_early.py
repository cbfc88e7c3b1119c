"""Updates before the end of the backward, in whole trainings: who looks at something, or changes it, in between."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import overlap
from tests.adapter import early_trainings
from tests.adapter.early_trainings import (
    NUM_AWAITED,
    Arrivals,
    Does,
    Look,
    Train,
    assert_kept,
    assert_nothing_has_begun,
    assert_taken_back,
)

arrivals = early_trainings.arrivals
copies = early_trainings.copies
gated = early_trainings.gated
train = early_trainings.train
unknown_code = early_trainings.unknown_code


# --- the same numbers -------------------------------------------------------------------------------------------------


def _groups(module: Any) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in module.body.parameters() if p.dim() == dim] for dim in (2, 1))
    return [
        {"params": module.head.parameters(), "lr": 0.05},
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(_groups(m), lr=0.01),
    "AdamW fused": lambda m: torch.optim.AdamW(_groups(m), lr=0.01, fused=True),
    "SGD": lambda m: torch.optim.SGD(_groups(m), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_schedulers(gated: Any, train: Train, copies: bool, name: str) -> None:
    class Scheduled(gated):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = OPTIMIZERS[name](self)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert_kept(train(Scheduled, options={"virtual_copies": copies}), 4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions(gated: Any, train: Train, copies: bool, precision: str) -> None:
    assert_kept(train(gated, options={"virtual_copies": copies}, precision=precision), 4)


def test_norms_for_clipping_are_taken_early(gated: Any, train: Train, copies: bool, arrivals: Arrivals) -> None:
    counts = train(gated, options={"virtual_copies": copies}, gradient_clip_val=0.05)
    assert_nothing_has_begun(counts)
    assert arrivals.num_norms >= NUM_AWAITED * 4


# --- what looks at weights in between ---------------------------------------------------------------------------------


def _saved(trainer: L.Trainer, module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


LOOKS: dict[str, Look] = {
    "a weight": lambda t, m: m.head.weight.detach().clone(),
    "data": lambda t, m: m.head.bias.data.clone(),
    "copy": lambda t, m: copy.deepcopy(m.head).state_dict(),
    "file": _saved,
    "optimizer state": lambda t, m: copy.deepcopy(dict(t.optimizers[0].state[m.head.weight])),
    "optimizer's state_dict": lambda t, m: copy.deepcopy(t.optimizers[0].state_dict()),
}


IN_BETWEEN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


@pytest.mark.parametrize("hook", IN_BETWEEN)
def test_nothing_is_early_where_hooks_are_known_to_run_in_between(gated: Any, train: Train, hook: str) -> None:
    assert_nothing_has_begun(train(gated, lambda: [Does(hook, LOOKS["file"])]))
    own = type("Own", (gated,), {hook: lambda module, *args: module.seen.append(_saved(module.trainer, module))})
    assert_nothing_has_begun(train(own))


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_sees_old_values(gated: Any, train: Train, unknown_code: None, look: str) -> None:
    assert_taken_back(train(gated, lambda: [Does("on_before_optimizer_step", LOOKS[look])]))


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_in_the_backward_sees_old_values(gated: Any, train: Train, look: str) -> None:
    class Looks(gated):  # type: ignore[misc]
        def in_backward(self) -> None:
            self.seen.append(LOOKS[look](self.trainer, self))

    assert_taken_back(train(Looks, options={"virtual_copies": True}))


def test_who_looks_at_gradients_alone_changes_nothing(gated: Any, train: Train, unknown_code: None) -> None:
    norms: Look = lambda t, m: [p.grad.norm() for p in m.parameters()]  # noqa: E731
    assert_kept(train(gated, lambda: [Does("on_before_optimizer_step", norms)]), 4)


# --- what changes something in between --------------------------------------------------------------------------------


def _set(trainer: L.Trainer, module: Any, change: Callable[[nn.Parameter], None]) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            change(parameter)


def _replace_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def _set_rate(trainer: L.Trainer, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (trainer.global_step + 1)


def _regroup(trainer: L.Trainer, module: Any) -> None:
    (group, *others) = trainer.optimizers[0].param_groups
    if not others:
        group["params"] = [*module.body.parameters()]
        trainer.optimizers[0].add_param_group({"params": module.head.parameters(), "lr": 0.3})


CHANGES: dict[str, Look] = {
    "gradients in place": lambda t, m: _set(t, m, lambda p: p.grad.mul_(0.5)),  # type: ignore[union-attr]
    "gradients by value": lambda t, m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "gradients replaced": lambda t, m: _set(t, m, _replace_gradient),
    "a gradient less": lambda t, m: setattr(m.head.weight, "grad", None),
    "learning rate": _set_rate,
    "weights": lambda t, m: _set(t, m, lambda p: p.mul_(0.5)),
    "data": lambda t, m: _set(t, m, lambda p: setattr(p, "data", p.data * 0.5)),
    "state": lambda t, m: t.optimizers[0].state[m.head.weight]["momentum_buffer"].mul_(0.5),
    "another group": _regroup,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_between_counts(gated: Any, train: Train, unknown_code: None, change: str) -> None:
    def make() -> list[Any]:
        return [Does("on_before_optimizer_step", lambda t, m: (CHANGES[change](t, m), None)[1], first=2)]

    counts = train(gated, make, options={"virtual_copies": len(change) % 2 == 0})
    assert counts.is_mistaken
    assert counts.kept > 0
    assert counts.taken_back > 0


def test_a_rate_that_training_step_sets(gated: Any, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sets(gated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _set_rate(self.trainer, self)
            return super().training_step(batch, batch_idx)

    messages: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", messages.append)
    assert_taken_back(train(Sets, max_epochs=2))
    (message,) = messages
    assert message.startswith("optimizer updates begin after the backward from now on")


def test_a_scaled_backward(gated: Any, train: Train, unknown_code: None) -> None:
    assert_taken_back(train(type("Own", (gated,), {"backward": lambda module, loss: (loss * 0.5).backward()})))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_weights_with_hooks_on_their_gradient_wait(gated: Any, train: Train, kind: str) -> None:
    def halve(value: Tensor) -> None:  # leaves no trace in the version
        (value if value.grad is None else value.grad).data.mul_(0.5)

    class Hooked(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            getattr(self.head.weight, kind)(halve)

    counts = train(Hooked)
    assert counts.kept >= (NUM_AWAITED - 1) * 4
    assert counts.taken_back == 0


@pytest.mark.parametrize("clips", [False, True])
def test_a_closure_that_changes_gradients_without_a_trace(gated: Any, train: Train, clips: bool) -> None:
    class Wraps(gated):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            def wrapped() -> Any:
                loss = closure()
                for weight in self.parameters():
                    weight.grad.data.mul_(0.5)
                return loss

            super().optimizer_step(epoch, batch_idx, optimizer, wrapped)

    train(Wraps, gradient_clip_val=0.05 if clips else None)
