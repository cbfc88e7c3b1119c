"""Updates that begin before the end of the backward, in whole trainings: nobody can tell but by the time they take.

The backward of the first block waits until the head has been updated, so that early updates are there in every run when
something happens in the first block, and behind the backward. Every training is compared bit by bit with one whose
updates do not overlap.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe import misuse, overlap
from lightning_roundpipe.engine import early as engine_early
from lightning_roundpipe.engine import shares
from lightning_roundpipe.engine.early import EarlyWork
from lightning_roundpipe.engine.pending import PendingParameter
from lightning_roundpipe.planning import CallCost, CostProfile

_TIMEOUT_S = 60.0
CALLS = (*(f"body.{i}.0" for i in range(4)), "head")
NUM_AWAITED = 4  # weights of the fused stage: the last block and the head
Look = Callable[[L.Trainer, Any], Any]


class Arrivals:
    """Lets others wait until something has been done with the gradients of a weight.

    Attributes:
        num_offers: gradients that somebody took before the end of the backward.
        num_norms: that were asked for and had been taken early.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_offers = self.num_norms = 0
        self._seen: set[nn.Parameter] = set()
        self._changed = threading.Condition()
        take, known_norm = EarlyWork._take, EarlyWork.known_norm

        def noting(early: EarlyWork, offers: Any) -> None:
            take(early, offers)
            with self._changed:
                self.num_offers += len(offers)
                self._seen.update(parameter for masters, _ in offers for parameter in masters)
                self._changed.notify_all()

        def counting(early: EarlyWork, gradient: Tensor) -> Tensor | None:
            norm = known_norm(early, gradient)
            self.num_norms += norm is not None
            return norm

        monkeypatch.setattr(EarlyWork, "_take", noting)
        monkeypatch.setattr(EarlyWork, "known_norm", counting)

    def wait(self, weights: Sequence[nn.Parameter]) -> None:
        """Until early work on ``weights`` is done."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._seen.issuperset(weights), _TIMEOUT_S)

    def forget(self) -> None:
        """A new step begins."""
        with self._changed:
            self._seen.clear()


@pytest.fixture(autouse=True)
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    """Small weights are updated early as well, unit by unit, from the second step on."""
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)
    monkeypatch.setattr(shares, "SHARE_BYTES", 1)
    monkeypatch.setattr(engine_early, "SHARE_BYTES", 1)
    monkeypatch.setattr(misuse, "_NUM_SAMPLED_STEPS", 0)
    return Arrivals(monkeypatch)


@pytest.fixture(params=[False, True], ids=["aliases", "copies"])
def copies(request: pytest.FixtureRequest) -> bool:
    """Whether devices have a memory of their own."""
    return bool(request.param)


@pytest.fixture
def unknown_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows that hooks run between the last gradient and the step of the optimizer."""
    monkeypatch.setattr(overlap, "runs_in_between", lambda module: False)


def early_of(trainer: L.Trainer) -> EarlyWork:
    return trainer.strategy._updates._updates.early  # type: ignore[attr-defined, no-any-return]


class Gate(torch.autograd.Function):
    """Calls something in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.call()
        return gradient, None


@pytest.fixture
def gated(small: Any, arrivals: Arrivals) -> type[Any]:
    """The small model. In its backward, before that of the first block, early work on the last stage is awaited."""

    class Gated(small):  # type: ignore[misc]
        calls = CALLS
        fails = is_second = False

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def awaited(self) -> list[nn.Module]:
            return [self.body[3], self.head]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            arrivals.forget()

        def forward(self, x: Tensor) -> Tensor:
            x = Gate.apply(self.body[0](x), self.gate)
            for block in self.body[1:]:
                x = block(x)
            return self.head(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def gate(self) -> None:
            early = early_of(self.trainer)
            if self.trainer.global_step >= 1 and early.is_open and not (early.is_mistaken or self.is_second):
                arrivals.wait([weight for module in self.awaited() for weight in module.parameters()])
            self.in_backward()

        def in_backward(self) -> None:
            """What a test does there."""

    return Gated


class Counts(L.Callback):
    """What has become of early updates, so far; and that no thread of theirs is there between steps."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.kept = self.taken_back = 0
        self.is_mistaken = False
        self._limit_bytes = limit_bytes

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._limit_bytes is not None:
            trainer.strategy._updates.set_aside(self._limit_bytes)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        early = early_of(trainer)
        self.kept = max(self.kept, early.num_kept)
        self.taken_back = max(self.taken_back, early.num_taken_back)
        self.is_mistaken |= early.is_mistaken
        assert not any(thread.name == "roundpipe-early" for thread in threading.enumerate())

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_batch_end(trainer)


Train = Callable[..., Counts]


@pytest.fixture
def train(make_trainer: Any, make_loader: Any, assert_alike: Any, arrivals: Arrivals) -> Train:
    """Trains without overlap and with it, compares every bit, and tells what has become of early updates."""

    def run(
        make_module: Callable[[], Any],
        callbacks: Callable[[], list[Any]] = list,
        *,
        raises: Any = None,
        limit_bytes: int | None = None,
        options: dict[str, Any] | None = None,
        plugins: Callable[[], list[Any]] = list,
        **kwargs: Any,
    ) -> Counts:
        found = []
        for mode in ("off", "exact"):
            torch.manual_seed(3)
            module, own, counts, ends = make_module(), callbacks(), Counts(limit_bytes), []
            costs = tuple(CallCost(name, 1.0, 2.0, weight_bytes=168, gradient_bytes=168) for name in module.calls)
            given = {
                "cost_profile": CostProfile(costs) if costs else None,
                **(options or {}),
                "optimizer_overlap": mode,
            }
            for error in (None,) if raises is None else (raises, None):  # with a second fit after one that fails
                trainer = make_trainer(options=given, callbacks=[counts, *own], plugins=plugins(), **kwargs)
                # What is left of a fit that has failed may hold the memory of weights: then those are not early.
                module.fails, module.is_second = error is not None, bool(ends)
                arrivals.forget()
                with contextlib.nullcontext() if error is None else pytest.raises(error):
                    trainer.fit(module, make_loader(40))
                assert not any(type(parameter) is PendingParameter for parameter in module.parameters())
                states = [optimizer.state_dict() for optimizer in trainer.optimizers]
                end = [dict(module.state_dict()), states, dict(trainer.callback_metrics), trainer.global_step]
                ends.append(copy.deepcopy(end))
            if mode == "off":
                assert_nothing_has_begun(counts)
            found.append([*ends, *(copy.deepcopy(x.seen) for x in (module, *own) if hasattr(x, "seen"))])
        assert_alike(found[1], found[0], rtol=0, atol=0)
        start = make_module().state_dict()
        assert any(not torch.equal(value, start[name]) for name, value in found[0][0][0].items())
        return counts

    return run


def assert_kept(counts: Counts, num_steps: int) -> None:
    assert counts.kept >= NUM_AWAITED * num_steps
    assert (counts.taken_back, counts.is_mistaken) == (0, False)


def assert_taken_back(counts: Counts) -> None:
    assert counts.taken_back >= NUM_AWAITED
    assert counts.is_mistaken


def assert_nothing_has_begun(counts: Counts) -> None:
    assert (counts.kept, counts.taken_back, counts.is_mistaken) == (0, 0, False)


class Does(L.Callback):
    """Does something in a hook, in all steps after the first ones."""

    def __init__(self, hook: str, look: Look, first: int = 0) -> None:
        self.seen: list[Any] = []
        self._look, self._first = look, first
        setattr(self, hook, self._take)

    def _take(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step >= self._first:
            self.seen.append(self._look(trainer, module))
