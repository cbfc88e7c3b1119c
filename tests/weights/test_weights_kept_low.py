"""Weights that are kept in low precision alone: what looks at them, and what does not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.weights.kept_low import is_alone, keep_low, low_of, make_whole, watch
from lightning_roundpipe.weights.low_precision import WorkingCopies

Told = list[tuple[nn.Parameter, bool]]


@pytest.fixture
def weight() -> Iterator[nn.Parameter]:
    """Of three rows and two columns."""
    weight = nn.Parameter(torch.randn(3, 2, generator=torch.Generator().manual_seed(1)))
    yield weight
    make_whole(weight)


@pytest.fixture
def told(weight: nn.Parameter) -> Told:
    """What the one who watches is told; the weight is kept low."""
    found: Told = []
    watch(weight, lambda parameter, was_low: found.append((parameter, was_low)))
    keep_low(weight, weight_values(weight))
    found.clear()
    return found


def weight_values(weight: nn.Parameter) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(weight.shape, generator=generator).bfloat16()


NO_LOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "metadata": lambda w: (w.shape, w.dtype, w.numel(), w.nbytes, w.requires_grad, w.is_leaf, w._version),
    "gradient": lambda w: (setattr(w, "grad", torch.ones(3, 2)), w.grad.mul_(2.0), setattr(w, "grad", None)),
    "hooks": lambda w: w.register_hook(lambda gradient: None).remove(),
    "flag": lambda w: w.requires_grad_(False).requires_grad_(True),
    "dict": lambda w: {w: 1}[w],
}
LOOKS: dict[str, Callable[[nn.Parameter], Any]] = {
    "function": lambda w: w + 1.0,
    "data": lambda w: w.data,
    "in a list": lambda w: torch.cat([w, w]),
    "numpy": lambda w: w.detach().numpy(),
    "text": repr,
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "state": lambda w: nn.ParameterList([w]).state_dict(),
    "write": lambda w: w.data.mul_(1.0),
}


@pytest.mark.parametrize("name", NO_LOOKS)
def test_what_sees_no_value_is_no_look(weight: nn.Parameter, told: Told, name: str) -> None:
    NO_LOOKS[name](weight)
    assert told == []
    assert low_of(weight) is not None


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_finds_the_values_of_the_copy_in_a_plain_parameter(weight: nn.Parameter, told: Told, name: str) -> None:
    LOOKS[name](weight)
    assert [(parameter is weight, was_low) for parameter, was_low in told] == [(True, True)]
    assert low_of(weight) is None
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, weight_values(weight).float())


def test_a_look_at_a_watched_weight_ends_the_watch_and_changes_nothing(weight: nn.Parameter) -> None:
    before, found = weight.detach().clone(), Told()
    watch(weight, lambda parameter, was_low: found.append((parameter, was_low)))
    assert torch.equal(weight, before)
    assert torch.equal(weight, before)
    assert [was_low for _, was_low in found] == [False]


def test_gradients_come_in_the_dtype_of_the_master(weight: nn.Parameter, told: Told) -> None:
    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return None, torch.full((3, 2), 1.0 + 2**-20)

    for _ in range(2):
        Gives.apply(torch.zeros((), requires_grad=True), weight).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, torch.full((3, 2), 2.0 + 2**-19))
    assert told == []


def test_the_engine_uploads_the_copy_itself_and_makes_others_of_it(weight: nn.Parameter, told: Told) -> None:
    copies = WorkingCopies()
    copies.begin_step("train", training=True)
    version = copies.version(weight, torch.bfloat16)
    assert copies.source(weight, torch.bfloat16) is low_of(weight)
    assert torch.equal(copies.source(weight, torch.float32), weight_values(weight).float())
    assert copies.host_bytes == 0
    assert copies.version(weight, torch.bfloat16) == version
    assert told == []
    make_whole(weight, torch.ones(3, 2))
    assert copies.version(weight, torch.bfloat16) != version
    assert torch.equal(copies.source(weight, torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16))


def test_a_weight_whose_memory_is_held_elsewhere_is_not_alone() -> None:
    memory = torch.randn(6)
    first, other = nn.Parameter(torch.randn(3, 2)), nn.Parameter(memory[:3])
    del memory
    assert is_alone(first)
    assert is_alone(other)
    views: list[Callable[[nn.Parameter], Any]] = [
        lambda w: w.data,
        lambda w: w.detach().numpy(),
        lambda w: nn.Parameter(w.detach()),
        lambda w: w.view(-1).expand(2, -1),
    ]
    for view in views:
        held = view(first)
        assert not is_alone(first)
        del held
        assert is_alone(first)
    assert not is_alone(nn.Parameter(torch.randn(3, 2).t()))
