"""Units that draw: the recomputation sees the numbers of the forward, wherever they come from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as imported_grad
from torch.autograd.graph import get_gradient_edge

from lightning_roundpipe.autograd.recompute import GradientCutError
from tests.support.engine.modelled import kept, recomputed
from tests.support.engine.steps import Steps
from tests.support.identical import assert_identical

WIDTH = 4
GENERATOR = torch.Generator().manual_seed(5)

Draw = Callable[[Tensor], Tensor]
DRAWS: dict[str, Draw] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "rand": lambda x: x * torch.rand(WIDTH),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "own generator": lambda x: x * torch.rand(WIDTH, generator=GENERATOR),
    "own generator by position": lambda x: x * torch.bernoulli(torch.full((WIDTH,), 0.5), generator=GENERATOR),
    "python": lambda x: x * random.random(),
    "numpy": lambda x: x * float(np.random.rand()),
}


class Block(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.draw(x)))


class DrawingTwice(Block):
    """Draws behind the hook, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(super().forward(x))


class Model(nn.Module):
    def __init__(self, draw: Draw, block: type[Block] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(draw) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def results_of(model: Model, planner: Any, num_devices: int, parts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Losses, and gradients of all parameters, of the second step: the first one records, this one runs the plan."""
    steps = Steps(model, planner, num_devices=num_devices)
    steps.train(parts, 1)
    result = steps.train(parts, 2)
    return result.outputs, [result.gradients[p] for p in model.parameters()]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_kept_and_recomputed_draw_the_same_numbers(draw: Draw) -> None:
    model = Model(draw)
    parts = torch.randn(6, WIDTH).chunk(3)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    found = [results_of(model, kept, 1, parts), results_of(model, recomputed, 2, parts)]
    assert len({float(output) for output in found[0][0]}) == len(parts)
    assert_identical(found[1], found[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    if draw not in (DRAWS["python"], DRAWS["numpy"]):  # there a draw of the recording, which learns, is the user's own
        assert random.getstate() == before[1]
        assert (np.random.get_state()[1] == before[2]).all()


class Hooked(Model):
    """User code and hooks inside units draw as well, from the same generators or others: each of ``hooks`` in one block
    that it only looks at, and in one whose output it changes."""

    def __init__(self, draw: Draw, hooks: Sequence[Draw], drawn_by_user: Draw) -> None:
        super().__init__(draw, DrawingTwice, num_blocks=2 * len(hooks))
        self.draw = drawn_by_user
        for block, (hook, changes_output) in zip(self.blocks, itertools.product(hooks, (False, True)), strict=True):
            block.linear.register_forward_hook(self.hook(hook, changes_output))

    def hook(self, draw: Draw, changes_output: bool) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            drawn = draw(output)
            return drawn if changes_output else None

        return hook

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.draw(x))


@pytest.mark.parametrize("user", ["python", "rand"])
@pytest.mark.parametrize("hooks", [("python", "numpy"), ("rand", "dropout")], ids="-".join)
@pytest.mark.parametrize("draw", ["python", "rand", "dropout"])
def test_hooks_that_draw_inside_a_unit_change_nothing_in_what_the_unit_draws(
    draw: str, hooks: tuple[str, ...], user: str
) -> None:
    """Python's and NumPy's generators are swapped where they are drawn from: some models do, some do not."""
    model = Hooked(DRAWS[draw], [DRAWS[hook] for hook in hooks], DRAWS[user])
    parts = torch.randn(6, WIDTH).chunk(3)
    found = [results_of(model, kept, 1, parts), results_of(model, recomputed, 2, parts)]
    torch.testing.assert_close(found[1], found[0])


def run_once(function: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    Steps(model).train(torch.randn(4, WIDTH, requires_grad=True).chunk(2), function=function)


TAKES: dict[str, Callable[[Tensor, Tensor, nn.Module], Any]] = {
    "of an input": lambda loss, x, model: torch.autograd.grad(loss, x),
    "of an input, or none": lambda loss, x, model: torch.autograd.grad(loss, x, allow_unused=True),
    "by an imported name": lambda loss, x, model: imported_grad(loss, x, materialize_grads=True),
    "of an input that comes another way, too": lambda loss, x, model: torch.autograd.grad(loss + x.sum(), x),
    "of an edge": lambda loss, x, model: torch.autograd.grad(get_gradient_edge(loss + x.sum()), x),
    "of several at once": lambda loss, x, model: torch.vmap(lambda v: torch.autograd.grad(loss + x.sum(), x, v))(
        torch.ones(2)
    ),
    "of a weight that is used outside, too": lambda loss, x, model: torch.autograd.grad(
        loss + sum(w.sum() for w in model.parameters()), list(model.parameters())
    ),
    "of weights": lambda loss, x, model: torch.autograd.grad(loss, list(model.parameters())),
    "backward": lambda loss, x, model: loss.backward(),
}


@pytest.mark.parametrize("copies", [False, True], ids=["aliases", "copies"])
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES.keys())
def test_a_gradient_taken_through_a_unit_in_an_evaluation_is_refused(
    take: Callable[[Tensor, Tensor, nn.Module], Any], copies: bool
) -> None:
    class Sensitive(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                loss = super().forward(x)
                assert loss.requires_grad
                take(loss, x, self)
            return loss

    with pytest.raises(GradientCutError, match=r"blocks\.2"):
        Steps(Sensitive(torch.tanh), copies=copies).evaluate(torch.randn(4, WIDTH).chunk(2))


def test_a_gradient_taken_within_user_code_is_fine() -> None:
    model = Model(torch.tanh)

    def penalty(x: Tensor) -> Tensor:
        scale = torch.ones((), requires_grad=True)
        (slope,) = torch.autograd.grad((3 * scale).square(), scale)
        return model(x) * slope

    run_once(penalty, model)

    def of_results(x: Tensor) -> Tensor:
        result = model(x)
        scale = result.new_ones(WIDTH, requires_grad=True)
        torch.autograd.grad((result * scale).sum(), (result, scale), retain_graph=True)
        return result

    run_once(of_results, model)


@dataclass
class Collected:
    last: Any = None


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, collected: Collected) -> Tensor:
        collected.last = x
        return self.linear(x)


def test_a_unit_that_changes_an_object_it_was_given_is_refused() -> None:
    model = nn.ModuleDict({"a": Collector(), "b": Collector()})

    def step(x: Tensor) -> Tensor:
        collected = Collected()
        return model["b"](model["a"](x, collected), collected).mean()

    with pytest.raises(RuntimeError, match="changes an object that it was given"):
        run_once(step, model)
