"""Units that draw: the recomputation sees the numbers of the forward, wherever they come from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint": lambda x: x * torch.randint(1, 5, (WIDTH,)),
    "randperm": lambda x: x[:, torch.randperm(WIDTH)],
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
    def __init__(self, draw: Draw, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(draw) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_kept_and_recomputed_draw_the_same_numbers(draw: Draw) -> None:
    model = Model(draw)
    parts = torch.randn(6, WIDTH).chunk(3)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    found = []
    for planner, num_devices in ((kept, 1), (recomputed, 1), (recomputed, 2)):
        steps = Steps(model, planner, num_devices=num_devices)
        steps.train(parts, 1)  # records; the second one runs the plan
        result = steps.train(parts, 2)
        found.append([*result.outputs, *(result.gradients[p] for p in model.parameters())])
    assert len({float(output) for output in found[0][: len(parts)]}) == len(parts)
    assert_identical(found[1], found[0])
    assert_identical(found[2], found[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    if draw not in (DRAWS["python"], DRAWS["numpy"]):  # there a draw of the recording, which learns, is the user's own
        assert random.getstate() == before[1]
        assert (np.random.get_state()[1] == before[2]).all()


class Hooked(Model):
    """User code and hooks inside units draw as well, from the same generators or others."""

    def __init__(self, draw: Draw, drawn_by_hook: Draw, drawn_by_user: Draw, *, changes_output: bool) -> None:
        super().__init__(draw, DrawingTwice)
        self.draw = drawn_by_user

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            drawn = drawn_by_hook(output)
            return drawn if changes_output else None

        for block in self.blocks:
            block.linear.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.draw(x))


@pytest.mark.parametrize("changes_output", [False, True], ids=["looks", "changes"])
@pytest.mark.parametrize("user", ["python", "rand"])
@pytest.mark.parametrize("hook", ["python", "numpy", "rand", "dropout"])
@pytest.mark.parametrize("draw", ["python", "rand", "dropout"])
def test_a_hook_that_draws_inside_a_unit_changes_nothing_in_what_the_unit_draws(
    draw: str, hook: str, user: str, changes_output: bool
) -> None:
    model = Hooked(DRAWS[draw], DRAWS[hook], DRAWS[user], changes_output=changes_output)
    parts = torch.randn(6, WIDTH).chunk(3)
    found = []
    for planner, num_devices in ((kept, 1), (recomputed, 2)):
        steps = Steps(model, planner, num_devices=num_devices)
        for seed in range(3):
            result = steps.train(parts, seed)
        found.append([*result.outputs, *(result.gradients[p] for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def run_once(function: Callable[[Tensor], Tensor], model: nn.Module) -> None:
    Steps(model).train(torch.randn(4, WIDTH, requires_grad=True).chunk(2), function=function)


TAKES: dict[str, Callable[[Tensor, Tensor, nn.Module], Any]] = {
    "of an input": lambda loss, x, model: torch.autograd.grad(loss, x),
    "of an input, or none": lambda loss, x, model: torch.autograd.grad(loss, x, allow_unused=True),
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


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:
        collected.append(x)
        return self.linear(x)


def test_a_unit_that_fills_a_list_it_was_given_is_refused() -> None:
    model = nn.ModuleDict({"a": Collector(), "b": Collector()})

    def step(x: Tensor) -> Tensor:
        collected: list[Tensor] = []
        return model["b"](model["a"](x, collected), collected).mean()

    with pytest.raises(RuntimeError, match="changes a list or dict that it was given"):
        run_once(step, model)
