"""Replicas: device copies of units, and what must not outlive them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.planning import CostProfile, Machine, Partition, partition, partition_forward
from lightning_roundpipe.weights.parameters import GradientStore
from tests.support.engine.lazy_link import LazyLink

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


def make_engine(model: nn.Module, copies: bool, num_devices: int = 2) -> Engine:
    def plan(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        make: Callable[..., Partition] = partition if training else partition_forward
        return make(costs, num_devices=num_devices, num_microbatches=num_microbatches)

    return Engine(model, DevicePool([torch.device("cpu")] * num_devices, link=LazyLink() if copies else None), plan)


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
def test_a_unit_may_return_its_own_weight(copies: bool) -> None:
    model = Model()
    rows = torch.randn(6, WIDTH)
    parts = rows.chunk(3)
    losses = [model(part) for part in parts]
    wanted = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
    engine = make_engine(model, copies)
    for _ in range(2):
        result = engine.run(StepRequest(model, parts, [1 / 3] * 3, "train", 0, loss_of=lambda output: output))
        torch.testing.assert_close(result.outputs, [loss.detach() for loss in losses])
        found = [result.gradients[parameter] for parameter in model.parameters()]
        torch.testing.assert_close(found, list(wanted))
        with torch.no_grad():
            evaluated = engine.run(StepRequest(model, parts, [1 / 3] * 3, "evaluate", 0))
        torch.testing.assert_close(evaluated.outputs, [loss.detach() for loss in losses])


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
    wanted = torch.autograd.grad(torch.stack([model(p) for p in parts]).mean(), list(model.parameters()))
    engine = make_engine(model, True)
    for _ in range(2):
        result = engine.run(StepRequest(model, parts, [1 / 3] * 3, "train", 0, loss_of=lambda output: output))
        torch.testing.assert_close([result.gradients[p] for p in model.parameters()], list(wanted))
    facts = [facts for unit in engine._current_table().units.values() for facts in unit.facts.values()]
    assert [one.has_loose for one in facts] == [False] * len(facts)  # no unit computed with masters
    assert facts


def test_what_was_freed_in_inference_mode_may_be_unfrozen() -> None:
    model = Model().requires_grad_(False)
    parts = torch.randn(6, WIDTH).chunk(3)
    engine = make_engine(model, True)
    with torch.inference_mode():
        engine.run(StepRequest(model, parts, [1 / 3] * 3, "evaluate", 0))
    model.requires_grad_(True)
    wanted = torch.autograd.grad(torch.stack([model(p) for p in parts]).mean(), list(model.parameters()))
    result = engine.run(StepRequest(model, parts, [1 / 3] * 3, "train", 0, loss_of=lambda output: output))
    torch.testing.assert_close([result.gradients[p] for p in model.parameters()], list(wanted))


def test_a_transposed_weight_is_seen_by_replicas() -> None:
    model = Model()
    rows = torch.randn(4, WIDTH)
    engine = make_engine(model, copies=False)
    for _ in range(2):
        result = engine.run(StepRequest(model, [rows], [1.0], "train", 0, loss_of=lambda output: output))
        torch.testing.assert_close(result.outputs[0], model(rows).detach())
        weight = model.blocks[1].linear.weight
        weight.data = weight.data.t()  # same memory, shape and dtype


def test_a_module_that_is_replaced_in_the_middle_of_a_step_is_an_error() -> None:
    model = Model()
    rows = torch.randn(4, WIDTH)

    def step(part: Tensor) -> Tensor:
        x, *_ = model.blocks[0](part)
        model.blocks[2].linear = nn.Linear(WIDTH, WIDTH)
        return model(x)

    engine = make_engine(model, copies=False)
    message = "a module in a OwnWeight of the unit 'blocks.2' was replaced .* or in on_train_batch_start"
    with pytest.raises(RuntimeError, match=message):
        engine.run(StepRequest(step, [rows], [1.0], "train", 0, loss_of=lambda output: output))
    engine.run(StepRequest(model, [rows], [1.0], "train", 0, loss_of=lambda output: output))


def test_gradients_of_a_shared_weight_add_up_in_the_order_of_their_sources() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    parts = {(0,): 1e8, (1,): 1.0, (2,): -1e8}  # in floating point the order of summation shows
    totals = set()
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        store = GradientStore()
        for source in order:
            store.add(parameter, torch.tensor([parts[(source,)]]), (source,))
        totals.add(store.take()[parameter].item())
    assert len(totals) == 1
    assert store.take() == {}
