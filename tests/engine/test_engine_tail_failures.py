"""Steps with tails, when something goes wrong, somebody looks, or nothing must be left behind."""

from __future__ import annotations

import _thread
import gc
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.engine.glue import GlueLock, current
from lightning_roundpipe.engine.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine
from lightning_roundpipe.engine.virtual import TimedLink
from tests.engine.plain_loop import ALL, WIDTH, Network, random_schedule
from tests.engine.test_engine_tails import Trained, assert_equal, batches_of, both_modes, copied, pair

TIMEOUT_S = 60.0  # nothing here takes so long: what hangs fails


@pytest.fixture(autouse=True)
def one_thread_per_operator() -> None:
    torch.set_num_threads(1)


class Visited(torch.autograd.Function):
    """Calls somebody in the backward of a unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, visit: Callable[[], None]) -> Tensor:
        ctx.visit = visit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.visit()
        return gradient, None


class Layer(nn.Module):
    """A unit; ``forwards`` and ``backwards`` (in lists, which replicas share) are called when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.forwards: list[Callable[[], None]] = []
        self.backwards: list[Callable[[], None]] = []

    def forward(self, x: Tensor) -> Tensor:
        for visit in self.forwards:
            visit()
        return torch.tanh(self.linear(Visited.apply(x, lambda: [visit() for visit in self.backwards])))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def rows(count: int = 4) -> list[Tensor]:
    return [torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def trained_before(copies: bool) -> tuple[Trained, Trained]:
    """Two steps have run, the second one has a tail."""
    trailing, plain = pair(Stack(), 2, copies=copies)
    for seed in range(2):
        batches = rows()
        assert trailing.train(batches, seed).has_tail == (seed > 0)
        plain.train(batches, seed, may_trail=False)
    return trailing, plain


def goes_on(trailing: Trained, plain: Trained) -> None:
    """Both run two more steps; all the gradients are the same."""
    for seed in range(2, 4):
        batches = rows()
        trailing.train(batches, seed)
        plain.train(batches, seed, may_trail=False)
    trailing.engine.finish_tail()
    assert_equal(trailing, plain)


def failing() -> None:
    raise ValueError("from the unit")


@both_modes
def test_the_next_step_begins_before_the_tail_is_over(copies: bool) -> None:
    trailing, plain = trained_before(copies)
    first, begun = trailing.model.layers[0], threading.Event()
    assert isinstance(first, Layer)
    waited: list[bool] = []
    first.backwards.append(lambda: waited.append(begun.wait(TIMEOUT_S)))
    first.forwards.append(lambda: torch.is_grad_enabled() or begun.set())  # not when it is run again
    goes_on(trailing, plain)
    assert waited
    assert all(waited)


@both_modes
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_tail_that_fails(copies: bool, is_alone: bool) -> None:
    trailing, plain = trained_before(copies)
    first = trailing.model.layers[0]
    assert isinstance(first, Layer)
    first.backwards.append(failing)
    with pytest.raises(ValueError, match="from the unit"):
        trailing.engine.finish_tail() if is_alone else trailing.train(rows(), 7)
    first.backwards.clear()
    plain.gradients.pop()  # those of the tail are lost
    goes_on(trailing, plain)


@both_modes
@pytest.mark.parametrize("place", ["forwards", "backwards"])
@pytest.mark.parametrize("index", [0, 3])
def test_a_step_that_fails_leaves_the_tail_alone(copies: bool, place: str, index: int) -> None:
    trailing, plain = trained_before(copies)
    layer = trailing.model.layers[index]

    def fail() -> None:
        state = current()
        assert state is not None
        if state.seed == 7:
            failing()

    getattr(layer, place).append(fail)
    if (place, index) == ("backwards", 0):  # is in its tail
        assert trailing.train(rows(), 7).has_tail
        with pytest.raises(ValueError, match="from the unit"):
            trailing.engine.finish_tail()
    else:
        with pytest.raises(ValueError, match="from the unit"):
            trailing.train(rows(), 7)
    getattr(layer, place).clear()
    assert len(trailing.gradients) == 2, "of the step before"
    goes_on(trailing, plain)


@both_modes
def test_an_interrupt_waits_for_the_tail(copies: bool) -> None:
    trailing, plain = trained_before(copies)
    first = trailing.model.layers[0]
    assert isinstance(first, Layer)
    interrupts = iter([_thread.interrupt_main])
    first.backwards.append(lambda: next(interrupts, lambda: None)())
    with pytest.raises(KeyboardInterrupt):
        trailing.train(rows(), 7)
    first.backwards.clear()
    assert len(trailing.gradients) == 2
    goes_on(trailing, plain)


def changeable(model: nn.Module) -> list[Any]:
    """What a step changes outside itself."""
    return [
        nn.Module.__setattr__,
        nn.Module.register_forward_hook,
        Tensor.register_hook,
        torch.autograd.grad,
        warnings.showwarning,
        torch.get_num_threads(),
        [set(vars(module)) for module in model.modules()],
    ]


def test_between_steps_nothing_is_changed() -> None:
    trailing, _ = pair(Network(range(4), ALL), 2, copies=False)
    model = trailing.model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = changeable(model)
    state = torch.get_rng_state()
    for seed in range(3):
        found = trailing.train([(torch.ones(2, WIDTH, dtype=torch.float64), frozenset())] * 4, seed)
    assert found.has_tail
    assert changeable(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    trailing.engine.finish_tail()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_a_step_held_goes_with_its_tail() -> None:
    trailing, _ = pair(Stack(), 2, copies=False)
    held: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()  # without help: cycles would keep a step until the next collection
    try:
        for seed in range(5):
            batches = rows()
            held.append(weakref.ref(batches[0]))
            trailing.train(batches, seed)
            del batches
        assert [ref() is None for ref in held] == [True, True, True, True, False]
        trailing.engine.finish_tail()
        assert held[-1]() is None
    finally:
        gc.enable()


@both_modes
def test_a_parameter_that_glue_uses_for_the_first_time(copies: bool) -> None:
    class Late(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))
            self.is_used = False

        def step(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x * self.scale if self.is_used else x)
            return x.square().mean()

    trailing, plain = pair(Late(), 2, copies=copies)
    for seed in range(6):
        for one in (trailing, plain):
            one.model.is_used = seed >= 2
        batches = rows()
        trailing.train(batches, seed)
        plain.train(batches, seed, may_trail=False)
    trailing.engine.finish_tail()
    assert len(trailing.gradients[3]) == len(trailing.gradients[1]) + 1
    for found, expected in zip(trailing.gradients, plain.gradients, strict=True):  # added up as they came at first
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule(seed: int) -> None:
    """Where the actions of one step lie does not matter to those of the next."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    models = copied(Network([0, 1, 2, 1], frozenset({"dropout", "skip"})))
    trailing, plain = (Trained(model, 3, copies=seed % 2 == 0) for model in models)
    engine = Engine(
        trailing.model,
        trailing.engine._pool,
        lambda profile, num_microbatches, training: trailing.planner(len(profile.calls), training),
        scheduler=lambda num_stages, num_microbatches, *_: (random_schedule(rng, num_stages, num_microbatches, 3), 0),
        num_threads=1,
    )
    trailing.engine = engine
    for step in range(6):
        batches = batches_of(rng.randint(2, 5))
        result, wanted = trailing.train(batches, step), plain.train(batches, step, may_trail=False)
        assert all(map(torch.equal, result.outputs, wanted.outputs))
    engine.finish_tail()
    for found, expected in zip(trailing.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_tail_within_a_budget() -> None:
    models = copied(Stack())
    trailing, plain = (Trained(model, 2, copies=True) for model in models)
    pool = DevicePool([torch.device("cpu")] * 2, link=TimedLink(latency_ms=0.05), memory_limit=4000)
    trailing.engine = Engine(
        trailing.model,
        pool,
        lambda profile, num_microbatches, training: trailing.planner(len(profile.calls), training),
        num_threads=1,
    )
    for seed in range(8):
        batches = rows()
        found = trailing.train(batches, seed)
        assert found.has_tail == (seed > 0)
        plain.train(batches, seed, may_trail=False)
    trailing.engine.finish_tail()
    assert_equal(trailing, plain)
    for device in pool.devices:
        assert device.memory.peak is not None
        assert device.memory.peak <= 4000


@both_modes
def test_a_stage_that_the_next_step_skips(copies: bool) -> None:
    """Its micro-batches leave the stage before the tail has left the device."""
    trailing, plain = pair(Network(range(4), frozenset({"dropout"})), 2, copies=copies)
    for seed in range(12):
        skipped = frozenset({1}) if seed % 2 else frozenset()
        batches = [(torch.randn(2, WIDTH, dtype=torch.float64), skipped) for _ in range(4)]
        trailing.train(batches, seed)
        plain.train(batches, seed, may_trail=False)
    trailing.engine.finish_tail()
    assert_equal(trailing, plain)


@both_modes
def test_a_frozen_weight_that_is_written_without_a_trace(copies: bool) -> None:
    trailing, plain = pair(Network(range(4), frozenset()), 2, copies=copies)
    for one in (trailing, plain):
        one.model.layers[1].requires_grad_(False)
    for seed in range(6):
        batches = batches_of(4)
        found, wanted = trailing.train(batches, seed), plain.train(batches, seed, may_trail=False)
        assert all(map(torch.equal, found.outputs, wanted.outputs))
        trailing.engine.finish_tail()  # what is left computes with the weights of its step
        for one in (trailing, plain):
            one.model.layers[1].linear.weight.data.mul_(1.5)
    assert_equal(trailing, plain)


def test_an_interrupt_before_the_tail_goes_on_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trailing, _ = trained_before(False)
    take_in = GlueLock.take_in

    def interrupted(self: GlueLock, states: Any) -> None:
        monkeypatch.setattr(GlueLock, "take_in", take_in)
        raise KeyboardInterrupt

    monkeypatch.setattr(GlueLock, "take_in", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trailing.engine.finish_tail()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roundpipe")]
