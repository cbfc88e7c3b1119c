"""Steps that end before their backward, and everybody who is there when it comes: whoever looks sees what he would."""

from __future__ import annotations

import _thread
import contextlib
import copy
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn

from lightning_roundpipe.engine.late import ComingGradients
from lightning_roundpipe.engine.protocol import following
from tests.adapter import test_adapter_tails
from tests.adapter.test_adapter_tails import (
    WIDTH,
    Block,
    Deep,
    Outcome,
    assert_same,
    both_modes,
    make_trainer,
    train,
)
from tests.identical import assert_identical

tails = test_adapter_tails.tails
without_tails = test_adapter_tails.without_tails
pytestmark = pytest.mark.filterwarnings("ignore:optimizer_overlap='stale'")
Look = Callable[[L.LightningModule], Any]


class Batches:
    """Batches of a loader, before each of which somebody looks at the module."""

    def __init__(self, module: L.LightningModule, look: Look, count: int = 14) -> None:
        self.module, self.look, self.count = module, look, count
        self.seen: list[Any] = []
        self.rows = torch.randn(count, 8, WIDTH)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            self.seen.append(self.look(self.module))
            yield self.rows[index]


def looked_at(
    look: Look, make: Callable[[], L.LightningModule] = Deep, *, overlap: str = "exact", **settings: Any
) -> tuple[list[Any], Outcome]:
    """What was seen, and what was left, of a training."""
    torch.manual_seed(1)
    module = make()
    trainer = make_trainer(overlap, **{"max_epochs": 1, **settings})
    batches = Batches(module, look)
    trainer.fit(module, batches)
    return batches.seen, Outcome(module, trainer)


def _gradient(module: Any) -> Any:
    gradient = module.blocks[0].linear.weight.grad
    return None if gradient is None else gradient.clone()


def _state(module: Any) -> Any:
    return [copy.deepcopy(dict(state)) for state in module.trainer.optimizers[0].state.values()]


def _saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _on_a_thread(module: Any) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(_gradient(module)))
    thread.start()
    thread.join(60.0)
    return seen


def _without_grad(module: Any) -> Any:
    with torch.inference_mode():
        seen = _gradient(module)
    return None if seen is None else seen.clone()


LOOKS: dict[str, Look] = {
    "a gradient": _gradient,
    "all gradients": lambda module: [None if p.grad is None else float(p.grad.sum()) for p in module.parameters()],
    "the state of the optimizer": _state,
    "a weight": lambda module: module.head.weight.detach().clone(),
    "what is saved": _saved,
    "a copy": lambda module: [p.detach().clone() for p in copy.deepcopy(module.blocks).parameters()],
    "a gradient, on a thread": _on_a_thread,
    "a gradient, in inference mode": _without_grad,
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_between_batches(name: str, tails: list[bool]) -> None:
    found, wanted = (looked_at(LOOKS[name], overlap=overlap) for overlap in ("exact", "off"))
    assert sum(tails[:14]) >= 9
    assert_identical(found[0], wanted[0])
    assert_identical(vars(found[1]), vars(wanted[1]))


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_between_stale_steps(name: str, tails: list[bool], without_tails: Callable[[], None]) -> None:
    settings = {"overlap": "stale", "accumulate_grad_batches": 1, "gradient_clip_val": 0.01}
    found = looked_at(LOOKS[name], **settings)
    assert sum(tails) >= 9
    without_tails()
    wanted = looked_at(LOOKS[name], **settings)
    assert_identical(found[0], wanted[0])
    assert_identical(vars(found[1]), vars(wanted[1]))


def test_nobody_looks_and_the_updates_begin_in_the_middle_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[bool] = []
    arrive = ComingGradients.arrive

    def noting(self: ComingGradients, gradients: Any, *, are_apart: bool = False) -> None:
        apart.append(are_apart)
        arrive(self, gradients, are_apart=are_apart)

    monkeypatch.setattr(ComingGradients, "arrive", noting)
    looked_at(lambda module: None, overlap="stale", accumulate_grad_batches=1)
    assert any(apart)  # not all: an update that is not over in time lets the next gradients come


# --- other things that happen between batches -------------------------------------------------------------------------


def test_validation_between_accumulated_batches(tails: list[bool]) -> None:
    assert_same(Deep, validates=True, val_check_interval=3)
    assert any(tails)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true", "bf16-true"])
@pytest.mark.parametrize("overlap", ["exact", "stale"])
def test_precisions(precision: str, overlap: str, tails: list[bool], without_tails: Callable[[], None]) -> None:
    settings = {"precision": precision, "accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "overlap": overlap}
    settings["max_epochs"] = 1
    found = train(Deep, **settings)
    assert any(tails)
    without_tails()
    assert_identical(vars(found), vars(train(Deep, **settings)))


def test_checkpoints_between_stale_steps(tmp_path: Path, tails: list[bool], without_tails: Callable[[], None]) -> None:
    def saved(name: str) -> list[Any]:
        callback = ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        train(Deep, overlap="stale", accumulate_grad_batches=1, enable_checkpointing=True, callbacks=[callback])
        files = sorted((tmp_path / name).glob("*.ckpt"))
        found = [torch.load(file, weights_only=False) for file in files]
        return [{key: one[key] for key in ("state_dict", "optimizer_states", "global_step")} for one in found]

    found = saved("with")
    assert len(found) >= 10
    assert any(tails)
    without_tails()
    assert_identical(found, saved("without"))


def test_the_batches_that_are_left_when_training_stops(tails: list[bool]) -> None:
    def stop(module: Any) -> None:
        module.trainer.should_stop = module.trainer.fit_loop.epoch_loop.batch_idx >= 6

    found, wanted = (looked_at(stop, overlap=overlap) for overlap in ("exact", "off"))
    assert_identical(vars(found[1]), vars(wanted[1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_between_batches(tails: list[bool]) -> None:
    def fork(module: Any) -> Any:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if all(torch.isfinite(p.detach()).all() for p in module.parameters()) else 1)
        return os.waitpid(pid, 0)[1]

    for overlap, accumulate in (("exact", 5), ("stale", 1)):
        seen, _ = looked_at(fork, overlap=overlap, accumulate_grad_batches=accumulate)
        assert seen == [0] * 14
    assert any(tails)


# --- what user code changes while there is a tail ---------------------------------------------------------------------


class TemperedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Changes(Deep):
    """Calls somebody at the begin of every training step and of every validation."""

    def __init__(self, change: Callable[[Any, int], None], place: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TemperedBlock() for _ in self.blocks)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.change, self.place = change, place

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.place == "step":
            self.change(self, batch_idx)
        return super().training_step(batch * self.scale, batch_idx)

    def on_validation_start(self) -> None:
        if self.place == "validation":
            self.change(self, 7)


def _fill(module: Any, index: int) -> None:
    for block in module.blocks:
        block.temperature.fill_(1.0 / (1 + index))


def _assign(module: Any, index: int) -> None:
    for block in module.blocks:
        block.temperature = torch.full((1,), 1.0 / (1 + index))


def _shrink(module: Any, index: int) -> None:
    with torch.no_grad():
        module.blocks[0].linear.weight.mul_(0.9)


def _freeze(module: Any, index: int) -> None:
    if index == 7:
        module.blocks[1].requires_grad_(False)


def _follow(module: Any, index: int) -> None:
    if index == 7 and not module.head.weight._backward_hooks:
        module.head.weight.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize(("overlap", "accumulate"), [("exact", 5), ("stale", 1)])
@pytest.mark.parametrize(
    ("change", "place", "copies"),
    [
        (_fill, "step", True),
        (_fill, "validation", False),
        (_assign, "step", False),
        (_assign, "validation", True),
        (_shrink, "validation", False),
        (_freeze, "step", False),
        (_freeze, "validation", True),
        (_follow, "step", True),
        (_follow, "validation", False),
    ],
)
def test_what_is_changed_meanwhile(
    change: Any,
    place: str,
    overlap: str,
    accumulate: int,
    copies: bool,
    tails: list[bool],
    without_tails: Callable[[], None],
) -> None:
    settings = {"overlap": overlap, "accumulate_grad_batches": accumulate, "copies": copies, "validates": True}
    settings["max_epochs"] = 1
    if place == "validation":
        settings["val_check_interval"] = 3
    found = train(lambda: Changes(change, place), **settings)
    without_tails()
    assert_identical(vars(found), vars(train(lambda: Changes(change, place), **settings)))


def _unchanged() -> Changes:
    return Changes(lambda *_: None, "step")


@pytest.mark.parametrize("overlap", ["exact", "stale"])
def test_batches_whose_memory_is_used_again(overlap: str, tails: list[bool], without_tails: Callable[[], None]) -> None:
    class Reusing(Batches):
        def __iter__(self) -> Iterator[Tensor]:
            batch = torch.empty(8, WIDTH)
            for rows in self.rows:
                yield batch.copy_(rows)

    def left() -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[__name__], "Batches", Reusing)
            make = lambda: Changes(lambda *_: None, "step")  # noqa: E731
            return looked_at(
                lambda m: None, make, overlap=overlap, accumulate_grad_batches=5 if overlap == "exact" else 1
            )[1]

    found = left()
    without_tails()
    assert_identical(vars(found), vars(left()))


# --- where there are none ---------------------------------------------------------------------------------------------


class Hooked(Deep):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class OwnCallback(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        pass


def _followed() -> Deep:
    module = Deep()
    module.head.weight.register_hook(lambda gradient: gradient * 2)
    return module


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Hooked, {}),
        (Deep, {"callbacks": OwnCallback}),
        (Deep, {"callbacks": lambda: LambdaCallback(on_train_batch_end=lambda *_: None)}),
        (_followed, {}),
        (Deep, {"overlap": "off"}),
        (Deep, {"accumulate_grad_batches": 1}),
    ],
    ids=["a hook", "a callback", "functions", "a hook of a parameter", "off", "a step after each batch"],
)
def test_steps_that_wait_for_their_backward(
    make: Callable[[], Deep], settings: dict[str, Any], tails: list[bool]
) -> None:
    if "callbacks" in settings:
        settings = {"callbacks": [settings["callbacks"]()]}
    train(make, max_epochs=1, **settings)
    assert len(tails) == 14
    assert not any(tails)


# --- failures ---------------------------------------------------------------------------------------------------------


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Callable[[], None]) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.fail()
        return gradient, None


class FailingBlock(Block):
    """The first unit, whose backward is in the tail."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: list[Callable[[], None]] = []

    def forward(self, x: Tensor) -> Tensor:
        def fail() -> None:
            if self.fails:
                self.fails.pop()()

        return super().forward(_Failing.apply(x.requires_grad_(), fail))


class Fails(Deep):
    """Something goes wrong in the backward of the batch before batch 7, or in the forward of batch 7."""

    def __init__(self, error: Callable[[], None], place: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FailingBlock() for _ in self.blocks)
        self.error, self.place = error, place
        self.has_failed = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 7 and not self.has_failed:
            self.has_failed = True
            if self.place == "forward":
                self.error()
        return super().training_step(batch, batch_idx)

    def before(self, _: Any) -> None:
        first = self.blocks[0]
        assert isinstance(first, FailingBlock)
        if self.place == "backward" and self.trainer.fit_loop.epoch_loop.batch_idx == 6 and not self.has_failed:
            first.fails.append(self.error)


def _raise() -> None:
    raise ValueError("of the user")


@pytest.mark.parametrize("overlap", ["exact", "stale"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_errors_reach_the_caller(overlap: str, place: str, tails: list[bool]) -> None:
    module = Fails(_raise, place)
    accumulate = 5 if overlap == "exact" else 1
    with pytest.raises(ValueError, match="of the user"):
        looked_at(lambda m: m.before(m), lambda: module, overlap=overlap, accumulate_grad_batches=accumulate)
    assert tails[-1]
    module.place = ""
    looked_at(lambda m: None, lambda: module, overlap=overlap, accumulate_grad_batches=accumulate)  # works again


def _thread_looks(module: Any) -> None:
    def look() -> None:
        with contextlib.suppress(ValueError):
            _gradient(module)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60.0)


def _fork(module: Any) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("overlap", ["exact", "stale"])
@pytest.mark.parametrize("act", [_thread_looks, _fork])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_errors_in_a_tail_that_somebody_else_lets_come(act: Look, overlap: str) -> None:
    module = Fails(_raise, "")

    def before(_: Any) -> None:
        if module.trainer.fit_loop.epoch_loop.batch_idx == 6:
            first = module.blocks[0]
            assert isinstance(first, FailingBlock)
            first.fails.append(_raise)
            act(module)

    with pytest.raises(ValueError, match="of the user"):
        looked_at(before, lambda: module, overlap=overlap, accumulate_grad_batches=5 if overlap == "exact" else 1)


@pytest.mark.parametrize("overlap", ["exact", "stale"])
def test_an_error_in_the_last_tail_that_another_thread_has_got(overlap: str) -> None:
    class Short(Batches):
        def __iter__(self) -> Iterator[Tensor]:
            yield from self.rows[:7]
            first = self.module.blocks[0]  # type: ignore[index]
            assert isinstance(first, FailingBlock)
            first.fails.append(_raise)
            _thread_looks(self.module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Batches", Short)
        with pytest.raises(ValueError, match="of the user"):
            looked_at(
                lambda m: None,
                lambda: Fails(_raise, ""),
                overlap=overlap,
                accumulate_grad_batches=5 if overlap == "exact" else 1,
            )


def test_after_an_interrupt_the_weights_are_those_of_whole_steps(
    tails: list[bool], without_tails: Callable[[], None]
) -> None:
    def interrupted() -> Outcome:
        torch.manual_seed(1)
        module = Fails(_thread.interrupt_main, "forward")
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            looked_at(lambda m: None, lambda: module, overlap="stale", accumulate_grad_batches=1)
        return Outcome(module, module.trainer)

    found = interrupted()
    assert any(tails)
    without_tails()
    wanted = interrupted()
    assert_identical(found.weights, wanted.weights)
    assert_identical(found.optimizers, wanted.optimizers)


# --- protocol ---------------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("overlap", ["exact", "stale"])
def test_the_protocol_is_kept(copies: bool, overlap: str, tails: list[bool]) -> None:
    with following() as protocol:
        train(Deep, overlap=overlap, copies=copies, accumulate_grad_batches=2 if overlap == "exact" else 1)
    assert any(tails)
    assert protocol.counts
