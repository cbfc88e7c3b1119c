"""Units that do something else when they are run again for their backward are refused in the first step."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.autograd import repeats
from lightning_roundpipe.engine.runner import StepResult
from tests.support.engine.partitions import everything_recomputed
from tests.support.engine.steps import Steps

WIDTH, ROWS = 4, 6


class Block(nn.Module):
    """What its forward does to the product is up to the test, which sees how often it was called."""

    def __init__(self, change: Callable[[Tensor, Block], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls: deque[int] = deque()  # shared by all runs, unlike a list
        self.change = change

    def forward(self, x: Tensor, given: Any = None) -> Any:
        self.calls.append(1)
        if given is not None:
            given.rows.append(x.detach())
            return self.linear(torch.cat(given.rows)).tanh()
        return self.change(self.linear(x).tanh(), self)


class Opaque:
    """Something that a unit fills."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []


def steps(change: Callable[[Tensor, Block], Any], *, copies: bool, is_filled: bool = False) -> Iterator[StepResult]:
    """Steps with two units on two devices, all of it recomputed."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block(change) for _ in range(2))

    def training_step(x: Tensor) -> Tensor:
        for block in model:
            found = block(x, Opaque()) if is_filled else block(x)
            x = found[0] if isinstance(found, tuple) else found
        return x.nan_to_num().square().mean()

    run = Steps(model, everything_recomputed, num_devices=2, copies=copies)
    parts = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).chunk(3)
    for seed in itertools.count():
        yield run.train(parts, seed, training_step)


PYTHON, NUMPY = random.Random(0), np.random.default_rng(0)
OTHERS: dict[str, Callable[[Tensor, Block], Any]] = {
    "a generator of Python of its own": lambda x, block: x * PYTHON.random(),
    "a generator of NumPy of its own": lambda x, block: x * NUMPY.random(),
    "noise": lambda x, block: x + 0.05 * torch.from_numpy(NUMPY.standard_normal(x.shape)).float(),
    "a count of calls": lambda x, block: x * len(block.calls),
    "in the second result": lambda x, block: (x, x * len(block.calls)),
}
ALIKE: dict[str, Callable[[Tensor, Block], Any]] = {
    "the same": lambda x, block: x,
    "rounding": lambda x, block: x * (1 + 1e-4 * len(block.calls)),
    "rounding in low precision": lambda x, block: (x * (1 + 4e-3 * len(block.calls))).bfloat16().float(),
    "not a number": lambda x, block: x / torch.zeros(WIDTH),
    "generators of the process": lambda x, block: x * random.random() * np.random.rand() * torch.rand(()),
    "integers": lambda x, block: (x, torch.tensor(len(block.calls))),
    "nothing": lambda x, block: (x, x[:0]),
}


@pytest.mark.parametrize("copies", [False, True], ids=["aliases", "copies"])
@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_units_that_give_something_else_when_they_are_run_again_are_refused(
    change: Callable[[Tensor, Block], Any], copies: bool
) -> None:
    with pytest.raises(RuntimeError, match=r"unit '1' gave another result .* must do the same .*units=\[\.\.\.\]"):
        next(steps(change, copies=copies))


def test_units_that_fill_an_object_that_they_are_given_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"unit '1' gave another result .* the shape was \(2, 4\), and is \(4, 4\)"):
        next(steps(lambda x, block: x, copies=False, is_filled=True))


@pytest.mark.parametrize("change", ALIKE.values(), ids=ALIKE.keys())
def test_rounding_and_what_repeats_is_no_difference(change: Callable[[Tensor, Block], Any]) -> None:
    assert len(next(steps(change, copies=True)).outputs) == 3


def test_results_are_compared_in_the_first_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Tensor] = []
    is_alike = repeats._is_alike

    def noted(before: Tensor, after: Tensor) -> bool:
        compared.append(after)
        return is_alike(before, after)

    monkeypatch.setattr(repeats, "_is_alike", noted)
    run = steps(lambda x, block: x, copies=False)
    next(run)
    num_compared = len(compared)
    assert num_compared >= 2
    next(run)
    next(run)
    assert len(compared) == num_compared


class Counting(nn.Module):
    """Counts its calls in a buffer; for negative numbers it has a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.count += 1
        result = self.linear(x)
        return result, result.tanh() if x[0, 0] < 0 else None


@pytest.mark.parametrize("copies", [False, True], ids=["aliases", "copies"])
def test_a_unit_that_gives_more_than_before_is_run_once_more_from_the_same_buffers(copies: bool) -> None:
    unit = Counting()
    run = Steps(nn.ModuleList([unit]), num_devices=2, copies=copies)

    def function(x: Tensor) -> Tensor:
        result, other = unit(x)
        return (result.square() if other is None else result * other).mean()

    parts = torch.ones(6, WIDTH).chunk(3)
    run.train(parts, function=function)
    assert unit.count == 3
    found = run.train([-part for part in parts], function=function).gradients
    assert unit.count == 6
    wanted = torch.autograd.grad(function(-parts[0]), unit.linear.weight)
    torch.testing.assert_close([found[unit.linear.weight]], list(wanted))
