"""Optimizer steps behind the pipeline and what users do: clipping in hooks, weights in the same memory, trainers within
callbacks, errors that somebody swallows. The updates are late, see :class:`Late`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.integration import overlap
from lightning_roundpipe.optimizer import buckets
from lightning_roundpipe.planning import CallCost, CostProfile
from lightning_roundpipe.weights.futures import PendingParameter
from tests.support.identical import assert_identical
from tests.support.late_updates import Late, assert_finished, copied


@pytest.fixture(autouse=True)
def small_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of small weights overlap as well, unit by unit."""
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """No update begins before somebody waits for it."""
    return Late(monkeypatch)


def num_pending(module: nn.Module) -> int:
    return sum(type(parameter) is PendingParameter for parameter in module.parameters())


@pytest.fixture
def compare(make_trainer: Any, make_loader: Any, late: Late) -> Callable[..., None]:
    """Trains the same without overlap and with it, and compares every bit of weights, optimizer state and of what
    modules and callbacks have noted in ``seen``."""

    def run(
        make_module: Callable[[], Any],
        callbacks: Callable[[], list[Any]] = list,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        found = []
        for mode in ("off", "exact"):
            module, own, before = make_module(), callbacks(), late.num_buckets
            given = {**(options or {}), "optimizer_overlap": mode}
            trainer = make_trainer(options=given, callbacks=own, **kwargs)
            trainer.fit(module, make_loader(40))
            assert (late.num_buckets > before) == (mode == "exact")
            assert_finished(trainer, module)
            states = [optimizer.state_dict() for optimizer in trainer.optimizers]
            found.append([module.state_dict(), states, [x.seen for x in (module, *own) if hasattr(x, "seen")]])
        assert_identical(found[1], found[0])
        assert not torch.equal(found[0][0]["head.weight"], make_module().head.weight)

    return run


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
def test_clipping_in_a_hook(small: Any, compare: Any, clip_val: float | None, where: str) -> None:
    class Learns(small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if where == "module":
                self.seen.append(_clip(self, optimizer))

    compare(Learns, (lambda: [Clips()]) if where == "callback" else list, gradient_clip_val=clip_val)


class Multiplies(torch.optim.Optimizer):
    """Autocast makes another product of its matrices."""

    is_separable = True

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.dim() == 2 and weight.grad is not None:
                    weight.sub_(weight.grad @ weight.grad.T @ weight.grad)


def test_manual_optimization_under_autocast(small: Any, compare: Any) -> None:
    """There, the step of the optimizer is within the autocast of ``training_step``."""

    class Learns(small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.seen: list[bool] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.seen.append(torch.is_autocast_enabled("cpu"))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return Multiplies(self.parameters())

    compare(Learns, precision="bf16-mixed", num_microbatches=1, devices=1)


# --- weights in the same memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_in_the_same_memory(small: Any, compare: Any, is_frozen: bool, looks: bool) -> None:
    """Tied by ``data``, or a frozen alias of a trained weight: who has waited for one of them sees both finished."""

    class Learns(small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.body[3][0].weight.data = self.body[0][0].weight.data
            self.body[3][0].weight.requires_grad_(not is_frozen)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if looks:
                first, second = (self.body[index][0].weight for index in ((0, 3) if batch_idx % 2 else (3, 0)))
                view = first.detach()
                self.seen.append(view.clone())
                assert torch.equal(second.detach(), view)
                assert torch.equal(self.seen[-1], view)

    compare(Learns)


def test_weights_that_share_a_part_of_their_memory(small: Any, compare: Any) -> None:
    class Learns(small):
        def __init__(self) -> None:
            super().__init__()
            first, last = self.body[0][0].weight, self.body[3][0].weight
            memory = torch.cat([first.detach(), last.detach()])
            first.data, last.data = memory[: len(first)], memory[2 : 2 + len(last)]

    compare(Learns)


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


@pytest.mark.parametrize("has_copies", [False, True], ids=["aliases", "copies"])
@pytest.mark.parametrize("name", FORMS)
def test_every_use_of_a_weight_waits_for_its_update(small: Any, compare: Any, name: str, has_copies: bool) -> None:
    form = FORMS[name]

    class Learns(small):
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
    compare(Learns, options={"virtual_copies": has_copies, "cost_profile": costs})


# --- trainers, references, ends --------------------------------------------------------------------------------------


def test_another_trainer_in_a_callback(small: Any, make_trainer: Any, make_loader: Any, compare: Any) -> None:
    pending: list[bool] = []

    class Validates(cb.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            class Judges(small):
                def validation_step(self, batch: Any, batch_idx: int) -> None:
                    self.log("val", self.loss(batch))

            judge = Judges()
            judge.body, judge.head = pl_module.body, pl_module.head
            pending.append(num_pending(judge) > 0)
            self.seen.append(make_trainer().validate(judge, make_loader(16), verbose=False))

    compare(small, lambda: [Validates()])
    assert pending[-5:] == [False, True, True, True, False]  # of the run with overlap


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_batch_start"])
def test_a_reference_to_the_state_sees_all_of_it(small: Any, compare: Any, hook: str) -> None:
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

    compare(small, lambda: [Watches()])


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
    small: Any, make_trainer: Any, make_loader: Any, late: Late, settings: dict[str, Any], expected: list[int]
) -> None:
    """After the last batch of an epoch and after the last step come exports, other trainers and new workers."""
    found: list[int] = []

    class Learns(small):
        def on_train_batch_end(self, *args: Any) -> None:
            found.append(int(num_pending(self) > 0))

        def on_train_epoch_end(self) -> None:
            assert num_pending(self) == 0

        def on_train_end(self) -> None:
            assert num_pending(self) == 0

    make_trainer(options={"optimizer_overlap": "exact"}, **settings).fit(Learns(), make_loader(40))
    assert found == expected


# --- errors ----------------------------------------------------------------------------------------------------------


class Fails(torch.optim.SGD):
    """Cannot update the head with a low learning rate."""

    is_separable = True

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            if group["lr"] < 0.03 and any(weight.shape == (3, 6) for weight in group["params"]):
                raise ZeroDivisionError("no update")
        return result


@pytest.fixture
def fails_in_fourth_step(small: Any) -> type[Any]:
    class Learns(small):
        def configure_optimizers(self) -> Any:
            return Fails(self.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 if batch_idx == 3 else 0.1

    return Learns


@pytest.mark.parametrize("on_a_thread", [True, False])
def test_an_error_that_somebody_swallows_ends_the_fit(
    fails_in_fourth_step: Any, make_trainer: Any, make_loader: Any, late: Late, on_a_thread: bool
) -> None:
    """A monitor that must never end the training looks at the weights first."""
    swallowed: list[str] = []

    class Monitor(cb.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            def look() -> None:
                try:
                    pl_module.head.weight.detach().norm()
                except ZeroDivisionError as error:
                    swallowed.append(str(error))

            if not on_a_thread:
                look()
                return
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

    module = fails_in_fourth_step()
    trainer = make_trainer(options={"optimizer_overlap": "exact"}, callbacks=[Monitor()])
    with pytest.raises(ZeroDivisionError, match="no update"):
        trainer.fit(module, make_loader(40))
    assert swallowed == ["no update"]
    assert_finished(trainer, module)


def test_no_checkpoint_of_weights_after_an_error(
    fails_in_fourth_step: Any, make_trainer: Any, make_loader: Any, tmp_path: Path
) -> None:
    """Also where the thread of the updates has ended before anybody looks."""

    class Quick(cb.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            for thread in threading.enumerate():
                if thread.name == "roundpipe-optimizer":
                    thread.join()

    files = {}
    for mode in ("off", "exact"):
        saves = cb.ModelCheckpoint(
            tmp_path / mode, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_weights_only=True
        )
        trainer = make_trainer(
            options={"optimizer_overlap": mode}, callbacks=[Quick(), saves], enable_checkpointing=True
        )
        with pytest.raises(ZeroDivisionError, match="no update"):
            trainer.fit(fails_in_fourth_step(), make_loader(40))
        files[mode] = sorted(os.listdir(tmp_path / mode))
    assert files["off"] == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert files["exact"] == files["off"]
