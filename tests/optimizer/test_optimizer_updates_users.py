"""Overlapped updates and what users do: optimizers that write elsewhere, signal handlers, threads, forks, autocast."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.optimizer import updates as overlapped
from lightning_roundpipe.optimizer.stale import StaleWeights
from lightning_roundpipe.optimizer.updates import Updates, why_not_separable
from lightning_roundpipe.weights import futures
from lightning_roundpipe.weights.futures import ParameterFuture, PendingParameter, is_pending
from tests.optimizer.held_updates import TIMEOUT_S, Held, fill_gradients, make_weights, outcome_of

_PACKAGE = str(Path(overlapped.__file__).parents[1])


def one_by_one(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [[weight] for weight in weights]


# --- optimizers that are not what they say ---------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """Gradient descent with the parts that others do in another way."""

    is_separable = True

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.1, "step": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.count(group)
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group["lr"])

    def count(self, group: dict[str, Any]) -> None:
        pass

    def update(self, weight: Any, lr: float) -> None:
        weight.add_(weight.grad, alpha=-lr)


MEMORY = "gives a parameter other memory instead of writing it in place"
GRADIENT = "gives a parameter another gradient instead of writing it in place"
OPTIONS = "writes the options of its parameter groups"
# name -> (method of :class:`Plain`, what it is replaced by, what the error says)
LOST: dict[str, tuple[str, Callable[..., Any], str]] = {
    "data": ("update", lambda self, weight, lr: setattr(weight, "data", weight.data - lr * weight.grad), MEMORY),
    "gradient": ("update", lambda self, weight, lr: setattr(weight, "grad", weight.grad.sign()), GRADIENT),
    "no gradient": ("update", lambda self, weight, lr: setattr(weight, "grad", None), GRADIENT),
    "option": ("count", lambda self, group: group.update(lr=0.2), OPTIONS),
    "new option": ("count", lambda self, group: group.update(begun=True), OPTIONS),
    "option in a tensor": ("count", lambda self, group: group["step"].add_(1), OPTIONS),
    "attribute": ("count", lambda self, group: setattr(self, "num_steps", 1), "writes attributes of the optimizer"),
    "state": (
        "count",
        lambda self, group: self.state["all"].update(step=1),
        "keeps state that belongs to no parameter",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_an_optimizer_writes_is_an_error_where_it_would_be_lost(name: str) -> None:
    method, function, what = LOST[name]
    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)
    updates.start(type("Lossy", (Plain,), {method: function})(weights), one_by_one(weights))
    with pytest.raises(RuntimeError, match=re.escape(f"the step of Lossy {what}")) as caught:
        updates.wait()
    assert "Leave out is_separable = True, or use optimizer_overlap='off'" in str(caught.value)
    assert not is_pending(weights)


def test_state_of_no_parameter_that_is_only_read() -> None:
    optimizer = Plain(make_weights())
    assert why_not_separable(optimizer) is None
    optimizer.state["all"] = {"scale": 2.0}  # type: ignore[index]
    expected = "Plain keeps state that belongs to no parameter"
    assert why_not_separable(optimizer) == expected
    Updates(1).guard(optimizer)
    assert why_not_separable(optimizer) == expected


class AsksForFlags(Plain):
    """Trains what says that it is trained, at its own pace."""

    def update(self, weight: Any, lr: float) -> None:
        if weight.requires_grad and isinstance(weight, nn.Parameter):
            super().update(weight, lr * weight.lr_scale)


def test_optimizers_find_flags_and_attributes_of_weights() -> None:
    ends = []
    for updates in (None, Updates(1)):
        weights = make_weights()
        fill_gradients(weights, 0)
        weights[1].requires_grad_(False)
        for index, weight in enumerate(weights):
            weight.lr_scale = 1.0 / (1 + index)  # type: ignore[attr-defined]
        optimizer = AsksForFlags(weights)
        if updates is None:
            optimizer.step()
        else:
            updates.start(optimizer, one_by_one(weights))
            updates.wait()
        ends.append([weight.detach().clone() for weight in weights])
    changed = [not torch.equal(a, b) for a, b in zip(ends[0], make_weights(), strict=True)]
    assert changed == [index != 1 for index in range(len(changed))]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Multiplies(Plain):
    def update(self, weight: Any, lr: float) -> None:
        if weight.dim() == 2:
            weight.sub_(lr * (weight.grad @ weight.grad.T @ weight.grad))


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_is_that_of_the_call(autocast: bool) -> None:
    """Also where the call is made without it and the caller waits with it."""
    ends = []
    for updates in (None, Updates(1)):
        weights = make_weights()
        fill_gradients(weights, 0)
        optimizer = Multiplies(weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if updates is None:
                optimizer.step()
            else:
                updates.start(optimizer, one_by_one(weights))
        if updates is not None:
            with torch.autocast("cpu", torch.bfloat16, enabled=not autocast):
                updates.wait()
        ends.append([weight.detach().clone() for weight in weights])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert not torch.equal(ends[0][0], make_weights()[0])


# --- signal handlers -------------------------------------------------------------------------------------------------


def interrupted(program: Callable[[], None], handler: Callable[[], None], line: int) -> bool:
    """Runs ``program``, and ``handler`` within it, as Python runs signal handlers: on this thread, before the line of
    the package with this number, counted as they are run; whether there is one."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                handler()
                return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        program()
    finally:
        sys.settrace(before)
    return left < 0


@pytest.fixture
def no_endless_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who would wait for ever fails."""

    def wait(future: ParameterFuture) -> None:
        future._update.begin()
        assert future._done.wait(TIMEOUT_S), "waits for an update that does not end"

    monkeypatch.setattr(ParameterFuture, "await_end", wait)


@pytest.fixture
def make_untouched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Held]:
    """Two weights with gradients and an optimizer; no update has begun."""

    def make() -> Held:
        with monkeypatch.context() as patch:
            patch.setattr(Updates, "start", lambda *args: None)
            return Held(num_weights=2)

    return make


def assert_old_or_new(seen: list[Tensor], held: Held) -> None:
    assert len(seen) == len(held.weights)
    for weight, old, new in zip(seen, held.old, held.new, strict=True):
        assert torch.equal(weight, new) or torch.equal(weight, old)


def assert_updated(held: Held) -> None:
    assert all(torch.equal(weight, new) for weight, new in zip(held.weights, held.new, strict=True))
    assert [type(weight) for weight in held.weights] == [nn.Parameter] * len(held.weights)


@pytest.mark.usefixtures("no_endless_waits")
def test_a_signal_handler_looks_at_weights_while_an_update_begins(make_untouched: Callable[[], Held]) -> None:
    line, is_there = 0, True
    while is_there:
        held, seen = make_untouched(), []
        held.gate.set()

        def begin(held: Held = held) -> None:
            held.updates.start(held.optimizer, held.order)

        def look(held: Held = held, seen: list[Tensor] = seen) -> None:
            seen.extend(weight.detach().clone() for weight in held.weights)

        is_there = interrupted(begin, look, line)
        held.release()
        assert_updated(held)
        if is_there:
            assert_old_or_new(seen, held)
        line += 1
    assert line > 50


def test_ctrl_c_at_any_line_of_the_begin_updates_all_weights_or_none(make_untouched: Callable[[], Held]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    def begin(line: int) -> tuple[bool, set[bool], bool]:
        held, is_there = make_untouched(), True
        held.gate.set()
        with contextlib.suppress(KeyboardInterrupt):
            is_there = interrupted(lambda: held.updates.start(held.optimizer, held.order), interrupt, line)
        held.updates.wait()
        changed = {torch.equal(weight, new) for weight, new in zip(held.weights, held.new, strict=True)}
        return is_there, changed, is_pending(held.weights)

    line, is_there, ends = 0, True, set()
    while is_there:
        # On a thread of its own: an error before the last line of a "with" would leave torch's modes as they are.
        thread, found = outcome_of(lambda line=line: begin(line))
        thread.join(TIMEOUT_S)
        assert len(found) == 1, f"hangs in line {line}"
        is_there, changed, is_left = found[0]
        assert len(changed) == 1, f"in line {line}"
        assert not is_left, f"in line {line}"
        ends |= changed
        line += 1
    assert ends == {True, False}


@pytest.mark.usefixtures("no_endless_waits")
def test_a_signal_handler_looks_at_weights_around_a_stale_step(make_untouched: Callable[[], Held]) -> None:
    """The update goes on while the handler looks, and not before."""
    line, is_there = 0, True
    while is_there:
        held, seen, stale = make_untouched(), [], StaleWeights()
        held.updates = Updates(1, stale.updating)
        with stale.computing(held.weights):
            pass
        held.updates.start(held.optimizer, held.order)

        def compute(held: Held = held, stale: StaleWeights = stale) -> None:
            with stale.computing(held.weights):
                pass

        def look(held: Held = held, seen: list[Tensor] = seen) -> None:
            held.gate.set()
            seen.extend(weight.detach().clone() for weight in held.weights)

        is_there = interrupted(compute, look, line)
        held.release()
        assert_updated(held)
        if is_there:
            assert_old_or_new(seen, held)
        line += 1
    assert line > 50


# --- threads ---------------------------------------------------------------------------------------------------------


class SlowTable(dict[int, ParameterFuture]):
    """The table of futures: a thread of the name "reader" is held up once, after it has looked into it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.came, self.looks = threading.Event(), threading.Event()
        self.looked, self.goes_on = threading.Event(), threading.Event()

    def get(self, key: int, default: Any = None) -> Any:
        if threading.current_thread().name != "reader" or self.came.is_set():
            return super().get(key, default)
        self.came.set()
        assert self.looks.wait(TIMEOUT_S)
        found = super().get(key, default)
        self.looked.set()
        assert self.goes_on.wait(TIMEOUT_S)
        return found


def test_a_late_reader_does_not_unmark_the_next_update(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread finds that the update of a weight has ended, and sets its class when the next one has begun."""
    table = SlowTable(futures._futures)
    monkeypatch.setattr(futures, "_futures", table)
    weight, moved = held.weights[0], threading.Event()
    original = ParameterFuture.wait

    def wait(future: ParameterFuture) -> None:
        if threading.current_thread().name == "reader":
            moved.set()
        original(future)

    found: list[Tensor] = []

    def read() -> None:
        try:
            found.append(weight.detach().clone())
        finally:
            moved.set()

    reader = threading.Thread(target=read, name="reader", daemon=True)
    reader.start()
    assert table.came.wait(TIMEOUT_S)
    held.release()
    table.looks.set()
    assert table.looked.wait(TIMEOUT_S)
    monkeypatch.setattr(ParameterFuture, "wait", wait)
    held.gate.clear()
    held.updates.start(held.optimizer, held.order)
    table.goes_on.set()
    assert moved.wait(TIMEOUT_S)
    assert type(weight) is PendingParameter
    assert not found
    held.release()
    reader.join(TIMEOUT_S)
    assert torch.equal(found[0], weight)
    assert not torch.equal(found[0], held.new[0])


# --- forks -----------------------------------------------------------------------------------------------------------


def status_of_child(sees: Callable[[], bool]) -> int:
    """Forks; 0 if the child ``sees`` what it should."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if sees() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@needs_fork
def test_a_child_finds_finished_weights(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker of a data loader that reads weights. It has no thread that could end an update."""
    original = ParameterFuture.await_end

    def go_on_and_wait(future: ParameterFuture) -> None:
        held.gate.set()
        original(future)

    monkeypatch.setattr(ParameterFuture, "await_end", go_on_and_wait)

    def is_finished() -> bool:
        if is_pending(held.weights):  # would wait for ever
            return False
        return all(torch.equal(weight, new) for weight, new in zip(held.weights, held.new, strict=True))

    assert status_of_child(is_finished) == 0


class Forks(Plain):
    """Starts a child process in its step, as a logger or a compiler may."""

    statuses: list[int]

    def count(self, group: dict[str, Any]) -> None:
        self.statuses.append(status_of_child(lambda: True))


@needs_fork
def test_an_update_that_forks_does_not_wait_for_itself() -> None:
    weights = make_weights()[:2]
    fill_gradients(weights, 0)
    optimizer, updates = Forks(weights), Updates(1)
    optimizer.statuses = []
    updates.start(optimizer, one_by_one(weights))
    thread, found = outcome_of(updates.wait)
    thread.join(TIMEOUT_S)
    assert found == [None]
    assert optimizer.statuses == [0] * len(weights)
