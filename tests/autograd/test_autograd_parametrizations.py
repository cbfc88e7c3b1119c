"""Tables of cached parametrizations: one per thread while a step runs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_roundpipe.autograd.parametrizations import parametrizations_apart
from tests.support.engine.steps import Steps


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.num_calls += 1
        return 2 * weight


def doubled() -> tuple[nn.Linear, Doubled]:
    linear, parametrization = nn.Linear(2, 2), Doubled()
    parametrize.register_parametrization(linear, "weight", parametrization)
    parametrization.num_calls = 0
    return linear, parametrization


def test_a_thread_that_comes_back_finds_nothing_that_it_had_cached() -> None:
    """Although another one has been inside all the time."""
    linear, parametrization = doubled()
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with parametrize.cached():
            is_inside.set()
            may_leave.wait()

    other = threading.Thread(target=stay)
    with parametrizations_apart():
        other.start()
        is_inside.wait()
        with torch.no_grad(), parametrize.cached():
            assert linear.weight is linear.weight
            assert not linear.weight.requires_grad
        assert parametrization.num_calls == 1
        with parametrize.cached():
            assert linear.weight.requires_grad
            with parametrize.cached():  # another one inside shares the table
                assert linear.weight is linear.weight
        assert parametrization.num_calls == 2
        assert linear.weight is not linear.weight  # outside nothing is kept
        may_leave.set()
        other.join()
    assert parametrize._cache_enabled == 0


class Cached(nn.Module):
    """A unit is called several times inside ``cached()``, as in the example of torch; the last call keeps its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, _ = doubled()

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return x.square().mean()


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
def test_units_called_inside_a_table_of_user_code_compute_their_weights_in_each_call(copies: bool) -> None:
    model, parts = Cached(), list(torch.randn(8, 2).chunk(4))
    wanted = torch.autograd.grad(torch.stack([model(part) for part in parts]).mean(), list(model.parameters()))
    steps = Steps(model, num_devices=2, copies=copies)
    for _ in range(2):
        torch.testing.assert_close(steps.gradients(parts), list(wanted))


def test_everything_is_as_before_afterwards() -> None:
    before = parametrize.cached, parametrize._cache, parametrize._maybe_set
    with parametrizations_apart():
        pass
    assert (parametrize.cached, parametrize._cache, parametrize._maybe_set) == before
    linear, _ = doubled()
    with parametrize.cached():
        assert linear.weight is linear.weight


def test_to_parametrize_a_weight_does_not_change_it() -> None:
    linear = nn.Linear(2, 2)
    weight = linear.weight
    with parametrizations_apart():
        version = weight._version
        parametrize.register_parametrization(linear, "weight", Doubled())
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=False)
        assert weight._version == version
        parametrize.register_parametrization(linear, "weight", Doubled())
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)
        assert weight._version > version
