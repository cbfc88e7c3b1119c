"""Errors in updates behind the pipeline, interrupts while they begin, and updates that wait for each other."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights.futures import Training, Update, is_pending
from tests.optimizer.held_updates import (
    TIMEOUT_S,
    Gated,
    WaitSpy,
    fill_gradients,
    make_blocker,
    make_weights,
    outcome_of,
)
from tests.support.identical import assert_identical

o = torch.optim


class Broken(Gated):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if len(self.entered) == 2:
            self.fail_here()

    def fail_here(self) -> None:
        raise ZeroDivisionError("in the second bucket")


def break_update(weights: list[nn.Parameter]) -> tuple[Broken, Updates]:
    fill_gradients(weights, 0)
    optimizer, updates = Broken(weights), Updates(1)
    optimizer.gates[weights[0].data_ptr()] = threading.Event()
    updates.start(optimizer, [[w] for w in weights])
    return optimizer, updates


def test_an_error_reaches_everybody_until_training_knows(spy: WaitSpy) -> None:
    weights = make_weights()
    old = [w.detach().clone() for w in weights]
    optimizer, updates = break_update(weights)
    threads = [outcome_of(lambda w=w: w.detach().clone()) for w in weights[1:]]
    optimizer.gates[weights[0].data_ptr()].set()
    for thread, _ in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    updates.join()
    # Also who comes later, to a weight whose own update was made.
    threads.append(outcome_of(lambda: weights[0].detach().clone()))
    threads[-1][0].join(TIMEOUT_S)
    errors = [found[0] for _, found in threads]
    with pytest.raises(ZeroDivisionError, match="in the second bucket") as caught:
        weights[0].detach()
    assert all(error is caught.value for error in errors)
    assert "fail_here" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    # The thread that trains knows: what it does about the error may look at the weights.
    assert [type(w) for w in weights] == [nn.Parameter] * len(weights)
    assert torch.equal(weights[2].detach(), old[2])  # what comes later is not updated
    assert not torch.equal(weights[0].detach(), old[0])
    for goes_on in (updates.wait, updates.check, lambda: updates.start(o.SGD(weights, lr=0.1), [])):
        with pytest.raises(ZeroDivisionError, match="in the second bucket"):
            goes_on()
    assert torch.equal(weights[2].detach(), old[2])


def test_the_tear_down_after_an_error_does_not_raise_it_again() -> None:
    weights = make_weights()
    optimizer, updates = break_update(weights)
    optimizer.gates[weights[0].data_ptr()].set()
    updates.join()

    def fail_otherwise() -> None:
        try:
            weights[0].detach()
        except ZeroDivisionError as error:
            updates.wait()
            raise ValueError("another") from error

    with pytest.raises(ValueError, match="another") as caught:
        fail_otherwise()
    try:
        raise caught.value
    except ValueError:
        updates.wait()  # what is handled comes of it

    def handle_something_else() -> None:
        try:
            raise ValueError("that has nothing to do with it")
        except ValueError:
            updates.wait()

    with pytest.raises(ZeroDivisionError):
        handle_something_else()


@pytest.mark.parametrize("asks", ["wait", "start", "state", "weight"])
def test_an_error_is_raised_by_the_first_that_asks(asks: str) -> None:
    weights = make_weights()
    optimizer, updates = break_update(weights)

    def ask() -> None:
        optimizer.gates[weights[0].data_ptr()].set()
        if asks == "wait":
            updates.wait()
        elif asks == "state":
            len(optimizer.state)
        elif asks == "weight":
            for weight in weights:
                weight.detach()
        else:
            updates.start(optimizer, [])

    with pytest.raises(ZeroDivisionError, match="in the second bucket"):
        ask()
    updates.join()
    assert not is_pending(weights)
    len(optimizer.state)


def test_a_step_behind_a_failed_one_does_not_happen() -> None:
    weights, others = make_weights(), make_weights(1)
    optimizer, updates = break_update(weights)
    fill_gradients(others, 0)
    old = [w.detach().clone() for w in others]
    updates.start(o.SGD(others, lr=0.1), [])
    optimizer.gates[weights[0].data_ptr()].set()
    with pytest.raises(ZeroDivisionError):
        updates.wait()
    assert_identical([w.detach() for w in others], old)
    assert not is_pending([*weights, *others])


def test_nothing_is_updated_behind_an_error_that_has_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread is told of the error before the update's thread comes to the next bucket."""
    weights, told = make_weights(), threading.Event()
    fail = Training.fail

    def fail_and_stand_back(training: Training, *args: Any) -> None:
        fail(training, *args)
        assert told.wait(TIMEOUT_S)

    monkeypatch.setattr(Training, "fail", fail_and_stand_back)
    optimizer, updates = break_update(weights)
    optimizer.gates[weights[0].data_ptr()].set()
    with pytest.raises(ZeroDivisionError) as first:
        weights[1].detach()
    told.set()
    with pytest.raises(ZeroDivisionError) as second:
        updates.wait()
    assert first.value is second.value
    assert len(optimizer.entered) == 2
    assert not is_pending(weights)


def test_without_a_thread_no_update_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            updates.start(o.SGD(weights, lr=0.1), [])
    assert not is_pending(weights)
    assert_identical([w.detach() for w in weights], [w.detach() for w in make_weights()])
    updates.wait()
    updates.start(o.SGD(weights, lr=0.1), [])
    updates.wait()
    assert not torch.equal(weights[0].detach(), make_weights()[0].detach())


def test_who_waits_does_not_forget_an_update_that_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another thread waits while the Trainer's takes the next step."""
    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)
    blocker, gate = make_blocker()
    original, begun = Update.await_end, []

    def await_end(self: Update) -> None:
        original(self)
        if not begun:
            begun.append(True)
            updates.start(blocker, [])

    updates.start(o.SGD(weights, lr=0.1), [])
    with monkeypatch.context() as patch:
        patch.setattr(Update, "await_end", await_end)
        updates.wait()
    thread, found = outcome_of(lambda: len(blocker.state))
    assert not found
    gate.set()
    thread.join(TIMEOUT_S)
    assert found == [1]


def test_an_update_that_waits_for_itself_is_an_error() -> None:
    class Coupled(o.SGD):
        is_separable = True  # which is not true

        def __init__(self, weights: list[nn.Parameter]) -> None:
            super().__init__(weights, lr=0.1)
            self.all = weights

        def step(self, closure: Any = None) -> Any:
            self.norm = sum(w.norm() for w in self.all)
            return super().step(closure)

    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)
    updates.start(Coupled(weights), [])
    with pytest.raises(RuntimeError, match="in another way than through its param_groups"):
        updates.wait()
    assert not is_pending(weights)
