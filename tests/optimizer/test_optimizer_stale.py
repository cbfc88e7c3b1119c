"""Weights from before the last update: while updates are held back, and when users interfere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.optimizer.stale import StaleWeights
from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights.futures import PendingParameter, is_pending
from tests.optimizer.held_updates import TIMEOUT_S, Gated


def _sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01)


def make_net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def inputs(count: int) -> Tensor:
    return torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(count))


def values_of(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


class Training:
    """Steps of a net whose weights are one update behind; an optimizer step is one of :class:`Updates`."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.net = make_net()
        self.weights = list(self.net.parameters())
        self.optimizer = make(self.weights)
        self.stale = StaleWeights()
        self.updates = Updates(1, self.stale.updating)
        self.used: list[list[Tensor]] = []

    def gradients(self, x: Tensor) -> list[Tensor]:
        """Of a training step, which notes the weights that it computes with."""
        trained = [w for w in self.weights if w.requires_grad]
        with self.stale.computing(trained):
            self.used.append(values_of(self.net))
            return list(torch.autograd.grad(self.net(x).square().mean(), trained))

    def step(self, x: Tensor, without: int | None = None) -> None:
        """A training step and its optimizer step, in which one weight may have no gradient."""
        found = self.gradients(x)
        self.optimizer.zero_grad()
        for i, (weight, gradient) in enumerate(zip((w for w in self.weights if w.requires_grad), found, strict=True)):
            weight.grad = None if i == without else gradient
        self.updates.start(self.optimizer, [[weight] for weight in self.weights])


@pytest.fixture
def ours() -> Iterator[Training]:
    training = Training(_sgd)
    yield training
    training.updates.join()


@pytest.fixture
def gated() -> Iterator[tuple[Training, threading.Event]]:
    """A training whose updates begin when the gate is open."""
    training, gate = Training(Gated), threading.Event()
    training.optimizer.gates[training.weights[0].data_ptr()] = gate
    yield training, gate
    gate.set()
    training.updates.join()


def test_a_step_is_not_kept_waiting_and_everybody_else_is(gated: tuple[Training, threading.Event]) -> None:
    ours, gate = gated
    first, second = inputs(2)
    ours.step(first)
    assert all(type(w) is PendingParameter for w in ours.weights)
    gradients = ours.gradients(second)  # would hang here if it waited
    assert all(type(w) is PendingParameter for w in ours.weights)
    torch.testing.assert_close(ours.used[1], ours.used[0], rtol=0, atol=0)
    seen: list[Tensor] = []
    reader = threading.Thread(target=lambda: seen.append(ours.weights[0].detach().clone()))
    reader.start()
    assert not seen
    gate.set()
    reader.join(TIMEOUT_S)
    assert not torch.equal(seen[0], ours.used[0][0])
    ours.updates.wait()
    assert not is_pending(ours.weights)
    assert len(gradients) == len(ours.weights)


def test_an_update_may_end_during_a_step(gated: tuple[Training, threading.Event]) -> None:
    ours, gate = gated
    ours.step(inputs(1)[0])
    with ours.stale.computing(ours.weights):
        before = values_of(ours.net)
        gate.set()
        ours.updates.wait()
        torch.testing.assert_close(values_of(ours.net), before, rtol=0, atol=0)
    assert all(type(w) is nn.Parameter for w in ours.weights)
    assert not torch.equal(ours.weights[0], before[0])


def _add(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1.0)


def _load(weight: nn.Parameter) -> None:
    nn.ParameterDict({"w": weight}).load_state_dict({"w": weight.detach() + 1.0})


def _replace(weight: nn.Parameter) -> None:
    weight.data = weight.detach() + 1.0


@pytest.mark.parametrize(("write", "num_steps"), [(_add, 1), (_add, 2), (_add, 3), (_load, 2), (_replace, 3)])
def test_the_next_step_sees_what_a_user_has_written(
    ours: Training, write: Callable[[nn.Parameter], None], num_steps: int
) -> None:
    x = inputs(1)[0]
    for _ in range(num_steps):
        ours.step(x)
    write(ours.weights[0])
    written, others = ours.weights[0].detach().clone(), ours.used[-1][1:] if num_steps == 1 else None
    ours.step(x)
    assert torch.equal(ours.used[-1][0], written)
    if others is not None:  # the other weights are one update behind, as ever
        torch.testing.assert_close(ours.used[-1][1:], others, rtol=0, atol=0)
    after = ours.weights[0].detach().clone()
    assert not torch.equal(after, written)
    ours.step(x)
    assert torch.equal(ours.used[-1][0], written)  # one update behind again
    ours.step(x)
    assert torch.equal(ours.used[-1][0], after)


def test_a_write_without_a_trace_arrives_two_steps_later(ours: Training) -> None:
    x = inputs(1)[0]
    ours.step(x)
    ours.step(x)
    ours.weights[0].data.add_(100.0)
    for is_there in (False, False, True):
        ours.step(x)
        assert bool((ours.used[-1][0] > 50.0).all()) is is_there


def test_a_write_after_the_step_and_before_its_update(ours: Training) -> None:
    x = inputs(1)[0]
    ours.step(x)
    found = ours.gradients(x)
    _add(ours.weights[0])
    for weight, gradient in zip(ours.weights, found, strict=True):
        weight.grad = gradient
    ours.updates.start(ours.optimizer, [ours.weights])
    after = values_of(ours.net)
    ours.gradients(x)
    assert torch.equal(ours.used[-1][0], after[0])


def test_a_weight_without_gradient_is_what_it_is(ours: Training) -> None:
    x = inputs(1)[0]
    for _ in range(2):
        ours.step(x)
    before = values_of(ours.net)
    ours.step(x, without=0)
    ours.step(x)
    torch.testing.assert_close(ours.used[-1], before, rtol=0, atol=0)
    assert torch.equal(ours.used[-1][0], before[0])


def test_weights_are_frozen_and_unfrozen(ours: Training) -> None:
    x = inputs(1)[0]
    ours.weights[0].requires_grad_(False)
    for _ in range(3):
        ours.step(x)
    assert torch.equal(ours.used[0][0], ours.used[-1][0])
    ours.weights[0].requires_grad_(True)
    first = ours.weights[0].detach().clone()
    ours.step(x)
    after = ours.weights[0].detach().clone()
    ours.step(x)
    ours.step(x)
    assert torch.equal(ours.used[-2][0], first)
    assert torch.equal(ours.used[-1][0], after)
    assert not torch.equal(after, first)


def test_a_weight_of_another_shape(ours: Training) -> None:
    x = inputs(1)[0]
    ours.step(x)
    ours.updates.wait()
    ours.weights[3].data = torch.zeros(1)
    ours.optimizer.state.clear()
    for _ in range(3):
        ours.step(x)
    assert [used[3].shape for used in ours.used] == [(3,), (1,), (1,), (1,)]
