"""Replicas: device copies of units, and what must not outlive them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.support.engine.partitions import recomputed_elsewhere
from tests.support.engine.steps import Steps

WIDTH = 4


class OwnWeight(nn.Module):
    """Returns its weight and a view of it, as modules for positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.weight, self.weight[:2]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OwnWeight() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.new_zeros(())
        for block in self.blocks:
            x, weight, view = block(x)
            scale = scale + weight.square().sum() + view.sum()
        return (x * scale).square().mean()


def steps_of(model: nn.Module, *, copies: bool) -> Steps:
    return Steps(model, recomputed_elsewhere, num_devices=2, copies=copies)


def wanted_gradients(model: nn.Module, parts: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(torch.stack([model(part) for part in parts]).mean(), list(model.parameters())))


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
def test_a_unit_may_return_its_own_weight(copies: bool) -> None:
    model = Model()
    parts = torch.randn(6, WIDTH).chunk(3)
    losses = [model(part).detach() for part in parts]
    steps = steps_of(model, copies=copies)
    for _ in range(2):
        torch.testing.assert_close(steps.gradients(parts), wanted_gradients(model, parts))
        torch.testing.assert_close(steps.evaluate(parts).outputs, losses)


class OnAGraph(nn.Module):
    """Keeps the edges of a graph in a sparse buffer, which it may write."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.decay = decay
        self.register_buffer("edges", torch.rand(WIDTH, WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        if self.decay < 1.0:
            self.edges *= self.decay
        return torch.tanh(self.linear(torch.sparse.mm(self.edges.clone(), x.t()).t()))


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
@pytest.mark.parametrize("decay", [1.0, 0.5], ids=["read", "written"])
def test_a_unit_may_have_sparse_buffers(decay: float, copies: bool) -> None:
    model = nn.Sequential(*(OnAGraph(decay) for _ in range(4)))
    plain = copy.deepcopy(model)
    parts = torch.randn(6, WIDTH).chunk(3)
    steps = Steps(model, recomputed_elsewhere, num_devices=2, copies=copies)
    for _ in range(2):
        wanted = torch.autograd.grad(
            torch.stack([plain(part).square().mean() for part in parts]).mean(), list(plain.parameters())
        )
        torch.testing.assert_close(
            steps.train(parts, function=lambda part: model(part).square().mean()).gradients,
            dict(zip(model.parameters(), wanted, strict=True)),
        )
        for ours, theirs in zip(model, plain, strict=True):
            torch.testing.assert_close(ours.edges.to_dense(), theirs.edges.to_dense())


class Compiled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Holds(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(3))
        for block in self.blocks:
            if how == "in place":
                block.inner.compile(backend="eager")
            elif how == "wrapped":
                block.inner = torch.compile(block.inner, backend="eager")
        if how == "unit wrapped":
            self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Holds(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("how", ["in place", "wrapped", "unit wrapped"])
def test_submodules_that_the_user_compiled_compute_with_the_replica(how: str) -> None:
    model = Compiled(how)
    parts = torch.randn(6, WIDTH).chunk(3)
    steps = steps_of(model, copies=True)
    for _ in range(2):
        torch.testing.assert_close(steps.gradients(parts), wanted_gradients(model, parts))
    facts = [facts for unit in steps.engine._current_table().units.values() for facts in unit.facts.values()]
    assert [one.has_loose for one in facts] == [False] * len(facts)  # no unit computed with masters
    assert facts


def test_what_was_freed_in_inference_mode_may_be_unfrozen() -> None:
    model = Model().requires_grad_(False)
    parts = torch.randn(6, WIDTH).chunk(3)
    steps = steps_of(model, copies=True)
    with torch.inference_mode():
        steps.evaluate(parts)
    model.requires_grad_(True)
    torch.testing.assert_close(steps.gradients(parts), wanted_gradients(model, parts))


def test_a_transposed_weight_is_seen_by_replicas() -> None:
    model = Model()
    rows = torch.randn(4, WIDTH)
    steps = steps_of(model, copies=False)
    for _ in range(2):
        torch.testing.assert_close(steps.train([rows]).outputs[0], model(rows).detach())
        weight = model.blocks[1].linear.weight
        weight.data = weight.data.t()  # same memory, shape and dtype


def test_a_module_that_is_replaced_in_the_middle_of_a_step_is_an_error() -> None:
    model = Model()
    rows = torch.randn(4, WIDTH)

    def step(part: Tensor) -> Tensor:
        x, *_ = model.blocks[0](part)
        model.blocks[2].linear = nn.Linear(WIDTH, WIDTH)
        return model(x)

    steps = steps_of(model, copies=False)
    message = "a module in a OwnWeight of the unit 'blocks.2' was replaced .* or in on_train_batch_start"
    with pytest.raises(RuntimeError, match=message):
        steps.train([rows], function=step)
    steps.train([rows])
