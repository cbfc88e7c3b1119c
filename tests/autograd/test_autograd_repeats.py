"""Units that do something else when they are run again for their backward are refused."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

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
    "a small branch": lambda x, block: x * (1 + 1e-4 * len(block.calls)),
    "in the second result": lambda x, block: (x, x * len(block.calls)),
}
ALIKE: dict[str, Callable[[Tensor, Block], Any]] = {
    "the same": lambda x, block: x,
    "rounding": lambda x, block: x * (1 + 1e-6 * len(block.calls)),
    "rounding in low precision": lambda x, block: (x, (x * (1 + 1e-3 * len(block.calls))).bfloat16()),
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


class Branch(nn.Module):
    """A branch beside a layer, which begins at zero, as an adapter does. The step turns it on, by ``options``."""

    options: ClassVar[dict[str, float]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.branch.weight)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.options.get("scale")
        result = self.linear(x)
        return result if scale is None else result + scale * self.branch(x)


def trained_branches(**options: float) -> Iterator[int]:
    """Steps of a training of two units, on one micro-batch; what they find outside of the call is ``options``."""
    torch.manual_seed(0)
    model = nn.ModuleList(Branch() for _ in range(2))

    def training_step(x: Tensor) -> Tensor:
        Branch.options = {"scale": 1.0}
        for block in model:
            x = block(x).tanh()
        Branch.options = options
        return x.square().mean()

    run = Steps(model, everything_recomputed)
    for step in itertools.count(1):
        yield step
        for weight, gradient in run.train(
            [torch.linspace(-1, 1, WIDTH).expand(2, -1)], 0, training_step
        ).gradients.items():
            weight.data -= 0.1 * gradient


def test_a_branch_that_begins_at_zero_is_seen_as_soon_as_it_has_moved() -> None:
    run = trained_branches(scale=0.99)
    assert [next(run), next(run)] == [1, 2]
    with pytest.raises(
        RuntimeError, match=r"unit '[01]' gave another result .* some differ.*objects that the step sets"
    ):
        next(run)


def test_a_branch_that_begins_at_zero_and_is_not_there_again_is_seen_at_once() -> None:
    run = trained_branches()
    next(run)
    with pytest.raises(RuntimeError, match=r"unit '1' gave another result .* do not depend on branch\.weight any more"):
        next(run)


def test_units_that_fill_an_object_that_they_are_given_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"unit '1' gave another result .* the shape was \(2, 4\), and is \(4, 4\)"):
        next(steps(lambda x, block: x, copies=False, is_filled=True))


@pytest.mark.parametrize("change", ALIKE.values(), ids=ALIKE.keys())
def test_rounding_and_what_repeats_is_no_difference(change: Callable[[Tensor, Block], Any]) -> None:
    assert len(next(steps(change, copies=True)).outputs) == 3


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The samples of recomputations that were compared."""
    found: list[Tensor] = []
    is_alike = repeats._is_alike

    def noted(before: Tensor, after: Tensor, tolerance: float) -> bool:
        found.append(after)
        return is_alike(before, after, tolerance)

    monkeypatch.setattr(repeats, "_is_alike", noted)
    return found


def test_results_are_compared_ever_more_rarely_as_long_as_the_same_weights_are_trained(compared: list[Tensor]) -> None:
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    run = Steps(model, everything_recomputed, num_devices=2)

    def training_step(x: Tensor) -> Tensor:
        for block in model:
            x = block(x).tanh()
        return x.mean()

    def comparing(steps: range) -> list[int]:
        found = []
        for step in steps:
            run.train(torch.ones(6, WIDTH).chunk(3), step, training_step)
            if compared:
                found.append(step)
            compared.clear()
        return found

    assert comparing(range(1, 11)) == [1, 2, 4, 8]
    model[1].bias.requires_grad_(False)
    assert comparing(range(1, 7)) == [1, 2, 4]
    model[1].bias.requires_grad_(True)  # as in ten steps before
    assert comparing(range(11, 18)) == [11, 16]  # in the first one because the unit is called in another way


def test_every_recomputed_call_is_compared(compared: list[Tensor]) -> None:
    run = steps(lambda x, block: x, copies=False)
    next(run)
    assert len(compared) == 2 + 1 + 1  # both units when they are recorded; then the second one keeps its graph
    compared.clear()
    next(run)
    assert len(compared) == 3


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
