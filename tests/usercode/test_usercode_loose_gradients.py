"""Parameters that user code uses between units: their gradients, and that nothing else sees of them during the step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.engine import execution
from tests.support.engine.steps import Steps
from tests.support.identical import assert_identical

WIDTH, ROWS, COUNT = 4, 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    """Two units, and two parameters beside them, of which one is used by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.units[1](self.between(self.units[0](x))).square().mean()


class SeveralUses(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) + self.scale.square().sum()


class Tied(Model):
    """A weight of a unit that is used outside of it as well."""

    def between(self, x: Tensor) -> Tensor:
        return F.linear(x, self.units[1].inner.weight)


class OneGradientForTwo(Model):
    """Autograd gives both parameters the same tensor, which is not even a dense one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.scale + self.unused).sum()


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH))

    def between(self, x: Tensor) -> Tensor:
        return x * F.embedding(torch.tensor([3, 1]), self.table, sparse=True)


class SparseAndDense(Sparse):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.table.sum(0))


class SwitchedOff(Model):
    """A parameter that was trained when it was used, and is not when the backward begins."""

    def forward(self, x: Tensor) -> Tensor:
        self.unused.requires_grad_(True)
        loss = super().forward(x) + self.unused.sum()
        self.unused.requires_grad_(False)
        return loss


class Reaching(Block):
    """A unit that computes with a parameter which is not its own."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.hidden = [lambda: scale]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.hidden[0]()


class HiddenInUnit(Model):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Reaching(self.scale) for _ in range(2))


class AddedByHook(Model):
    def __init__(self) -> None:
        super().__init__()
        self.units[1].inner.register_forward_hook(self.steer)

    def steer(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.scale.square()


class AddedByHookLater(Model):
    """From its second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)

    def begin(self, step: int) -> None:
        if step == 1:
            self.units[1].inner.register_forward_hook(lambda *call: call[-1] * self.unused)


class Checkpointed(Model):
    def between(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y * self.scale) * self.scale, x, use_reentrant=True)  # type: ignore[no-any-return]


class RunsItsOwnBackward(torch.autograd.Function):
    """Computes again and differentiates in its backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x.detach()).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.function(x)
        result.backward(gradients[0])
        return x.grad, None


class NestedInUnit(Block):
    """A unit with weights of its own behind a nested backward."""

    def forward(self, x: Tensor) -> Tensor:
        return RunsItsOwnBackward.apply(x, super().forward)  # type: ignore[no-any-return, no-untyped-call]


class Nested(Model):
    """Where no weight is behind a nested backward, or in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.units[1] = NestedInUnit()

    def between(self, x: Tensor) -> Tensor:
        return RunsItsOwnBackward.apply(x * self.scale, torch.tanh)  # type: ignore[no-any-return, no-untyped-call]


class NestedParameter(Model):
    def between(self, x: Tensor) -> Tensor:
        return RunsItsOwnBackward.apply(x, lambda y: torch.tanh(y * self.scale))  # type: ignore[no-any-return, no-untyped-call]


class NestedUnit(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = RunsItsOwnBackward.apply(self.units[0](x), self.units[1])  # type: ignore[no-untyped-call]
        return y.square().mean()  # type: ignore[no-any-return]


class AsksForParameters(torch.autograd.Function):
    """Computes again and asks for the gradients of its arguments, as the adjoint of an ODE does."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        return function(x.detach()).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.function(x)
        return None, *torch.autograd.grad(result, (x, *parameters), gradients, allow_unused=ctx.function.allow_unused)


class Adjoint(Model):
    """Its function calls no unit, and leaves a parameter out."""

    def between(self, x: Tensor) -> Tensor:
        def function(y: Tensor) -> Tensor:
            return torch.tanh(y * self.scale)

        function.allow_unused = True  # type: ignore[attr-defined]
        return AsksForParameters.apply(function, x, self.scale, self.unused)  # type: ignore[no-any-return, no-untyped-call]


class AdjointOfUnit(Model):
    allow_unused = False

    def forward(self, x: Tensor) -> Tensor:
        unit = self.units[1]
        unit.allow_unused = self.allow_unused
        y = AsksForParameters.apply(unit, self.units[0](x), *unit.parameters())  # type: ignore[no-untyped-call]
        return y.square().mean()  # type: ignore[no-any-return]


class AdjointOfUnitOrNone(AdjointOfUnit):
    allow_unused = True


MODELS: list[type[Model]] = [
    Model, SeveralUses, Tied, OneGradientForTwo, Sparse, SparseAndDense, SwitchedOff, HiddenInUnit, AddedByHook,
    AddedByHookLater, Checkpointed, Nested,
]  # fmt: skip


def batches_of(seed: int) -> list[Tensor]:
    return list(torch.randn(COUNT, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))


class Untouched:
    """Gradients and hooks of parameters, which a step must leave alone."""

    def __init__(self, model: nn.Module) -> None:
        self._gradients = {parameter: torch.full_like(parameter, 7.0) for parameter in model.parameters()}
        self._called: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.grad = self._gradients[parameter]
            parameter.register_hook(lambda gradient, name=name: self._called.append(name))
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: self._called.append(name))

    def check(self) -> None:
        assert self._called == []
        for parameter, gradient in self._gradients.items():
            assert parameter.grad is gradient
            torch.testing.assert_close(gradient, torch.full_like(parameter, 7.0), rtol=0, atol=0)


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_plain_autograd(kind: type[Model], copies: bool) -> None:
    """Parameters without a gradient there have none here; what gradients and hooks they have is left alone."""
    model, plain = kind(), kind()
    plain.load_state_dict(model.state_dict())
    untouched = None if copies else Untouched(model)

    def function(batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        if untouched is not None:
            untouched.check()
        return loss

    steps = Steps(model, num_devices=2, copies=copies)
    for step in range(3):
        for one in (model, plain):
            getattr(one, "begin", lambda step: None)(step)
        gradients = steps.train(batches_of(step), function=function).gradients
        if untouched is not None:
            untouched.check()
        plain.zero_grad()
        for batch in batches_of(step):
            (plain(batch) / COUNT).backward()
        wanted = {name: p.grad.to_dense() for name, p in plain.named_parameters() if p.grad is not None}
        found = {name: gradients[p].to_dense() for name, p in model.named_parameters() if p in gradients}
        assert len(found) == len(gradients)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [SeveralUses, Tied, HiddenInUnit], ids=lambda kind: kind.__name__)
def test_gradients_are_the_same_in_every_run(kind: type[Model]) -> None:
    model = kind()
    first, second = (Steps(model, num_devices=2) for _ in range(2))
    for step in range(2):
        assert_identical(first.gradients(batches_of(step)), second.gradients(batches_of(step)))


def test_a_frozen_unit_that_takes_nothing_from_outside_has_a_graph_while_this_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[str] = []
    enter = execution.enter

    def noted(call: Any, *args: Any) -> None:
        entered.append(call.unit.name)
        enter(call, *args)

    monkeypatch.setattr(execution, "enter", noted)
    model = Model()
    model.units[0].requires_grad_(False)
    steps = Steps(model, num_devices=2, copies=True)
    first = steps.train(batches_of(0))
    assert "units.0" in entered
    entered.clear()
    second = steps.train(batches_of(1))
    assert set(entered) == {"units.1"}
    backwards = {span.label for result in (first, second) for span in result.timeline.spans if span.label[0] == "B"}
    assert "B units.1" in backwards
    assert "B units.0" not in backwards


def test_gradients_of_two_parameters_do_not_share_memory() -> None:
    """Scaling and clipping change them in place."""
    gradients = Steps(model := OneGradientForTwo()).train(batches_of(0)).gradients
    before = gradients[model.scale].clone()
    gradients[model.unused].mul_(7.0)
    torch.testing.assert_close(gradients[model.scale], before, rtol=0, atol=0)


def test_leaves_that_are_no_parameters_have_their_gradient() -> None:
    """One of each micro-batch, as an argument of a unit and beside it, and one that all of them share."""
    model = Model()
    shared = torch.ones(WIDTH, requires_grad=True)
    leaves: dict[int, Tensor] = {}

    def function(batch: Tensor) -> Tensor:
        leaf = leaves[int(batch[0, 0])] = batch.clone().requires_grad_()
        return model(leaf) + (leaf * shared).square().mean()  # type: ignore[no-any-return]

    batches = batches_of(0)
    for index, batch in enumerate(batches):
        batch[0, 0] = index
    Steps(model, num_devices=2).train(batches, function=function)
    found = {index: leaf.grad for index, leaf in leaves.items()} | {COUNT: shared.grad}
    shared.grad = None
    for batch in batches:
        (function(batch) / COUNT).backward()
    torch.testing.assert_close(found, {index: leaf.grad for index, leaf in leaves.items()} | {COUNT: shared.grad})


def test_no_lock_is_held_in_a_backward_between_units() -> None:
    """Two micro-batches are in the middle of one at the same time, between different units."""
    model = Model()
    steps = Steps(model, num_devices=2)
    steps.train(batches_of(0))
    both = threading.Barrier(2, timeout=60)

    def function(batch: Tensor) -> Tensor:
        index = int(batch[0, 0])
        x = model.between(model.units[0](batch))
        if index == 0:
            x.grad_fn.register_prehook(meet)  # of a node: the engine does not see that user code comes
        loss = model.units[1](x).square().mean()
        if index == 1:
            loss.grad_fn.register_prehook(meet)
        return loss  # type: ignore[no-any-return]

    def meet(gradients: tuple[Tensor, ...]) -> None:
        both.wait()

    batches = batches_of(1)
    for index, batch in enumerate(batches):
        batch[0, 0] = index
    steps.train(batches, function=function)
    assert not both.broken


REFUSED: list[type[Model]] = [NestedParameter, NestedUnit, AdjointOfUnit, AdjointOfUnitOrNone]


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_nested_backward_into_weights_is_refused(kind: type[Model], copies: bool) -> None:
    with pytest.raises(RuntimeError, match="name the class of the module around the function"):
        Steps(kind(), copies=copies).train(batches_of(0))


def test_a_nested_backward_may_ask_for_a_parameter_that_is_not_copied() -> None:
    test_gradients_are_those_of_plain_autograd(Adjoint, copies=False)
    with pytest.raises(RuntimeError, match="name the class of the module around the function"):
        Steps(Adjoint(), copies=True).train(batches_of(0))
