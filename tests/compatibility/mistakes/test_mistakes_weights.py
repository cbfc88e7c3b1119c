"""Mistakes with weights, gradients and devices: an error before anything is trained, or the right result anyhow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import GradientCutError, UnitEscapeError
from tests.compatibility.mistakes.refusals import Step, assert_refused, with_step
from tests.support.parity import compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import WIDTH, Small


@pytest.fixture(params=[False, True], ids=["aliases", "copies"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Units compute with the masters, or with copies of them."""
    return {"virtual_copies": request.param}


# --- weights and gradients -------------------------------------------------------------------------------------------


def _in_place(self: Any, batch: Any, batch_idx: int) -> Any:
    with torch.no_grad():
        self.head.weight.mul_(0.9)
    return self.loss(batch)


def _through_data(self: Any, batch: Any, batch_idx: int) -> Any:
    self.body[1][0].bias.data.add_(0.1)
    return self.loss(batch)


def _after_its_use(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    return loss + 0 * self.body[1][0].bias.data.add_(0.1).sum()


def _through_numpy(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    values = self.body[1][0].bias.detach().numpy()
    values += 0.1
    return loss


def _replaced_data(self: Any, batch: Any, batch_idx: int) -> Any:
    self.head.weight.data = self.head.weight.data * 0.9
    return self.loss(batch)


class Teacher(Small):
    """A moving average that ``training_step`` updates, as many recipes do."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step > 0:
            self.slow.weight.lerp_(self.head.weight.detach(), 0.1)
        x, y = batch
        return F.cross_entropy(self(x), y) + F.mse_loss(self(x), self.slow(self.body(x)))


@compat(
    "Misuse",
    "a weight changed in place in `training_step`",
    status="refused",
    note="Change it in `on_train_batch_start` or `on_train_batch_end`.",
)
@pytest.mark.parametrize(
    "step", [_in_place, _through_data, _after_its_use, _replaced_data], ids=lambda step: step.__name__[1:]
)
def test_weights_changed_in_a_step(step: Step) -> None:
    message = assert_refused(with_step(step), r"training_step, or code that it calls, changes the weight")
    assert "'head.weight'" in message or "'body.1.0.bias'" in message
    assert "3 times per batch" in message
    assert "on_train_batch_start" in message


def test_weights_changed_in_a_later_step() -> None:
    assert_refused(Teacher(), r"weight 'slow.weight' in place", after=1)

    def later(self: Any, batch: Any, batch_idx: int) -> Any:
        return _in_place(self, batch, batch_idx) if batch_idx == 2 else self.loss(batch)

    assert_refused(with_step(later), r"weight 'head.weight' in place", after=2)

    def noticed(self: Any, batch: Any, batch_idx: int) -> Any:
        later(self, batch, batch_idx)
        if batch_idx == 2:  # by autograd, in the graph of another micro-batch
            raise RuntimeError("a variable has been modified by an inplace operation")
        return self.loss(batch)

    assert_refused(with_step(noticed), r"weight 'head.weight' in place", after=2)


def test_weights_changed_in_validation() -> None:
    module = Small()
    module.validation_step = lambda batch, batch_idx: _in_place(module, batch, batch_idx)
    with pytest.raises(MisconfigurationException, match=r"validation_step, or code that it calls, changes the weight"):
        make_trainer().validate(module, make_loader(), verbose=False)


class SwapsInAnAverage(Small):
    """Validation computes with an average of the weights, which is equal to them until something is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [weight.detach().clone() for weight in self.parameters()]

    def put(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.parameters(), values, strict=True):
            weight.data.copy_(value)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        trained = [weight.detach().clone() for weight in self.parameters()]
        self.put(self.average)
        self.loss(batch)
        self.put(trained)


def test_weights_swapped_in_validation_after_a_sanity_check() -> None:
    trainer = make_trainer(num_sanity_val_steps=2)
    with pytest.raises(MisconfigurationException, match=r"validation_step.*on_validation_batch"):
        trainer.fit(SwapsInAnAverage(), make_loader(rows=32), make_loader(rows=32))
    assert trainer.global_step == 4


@compat("Misuse", "a weight changed in place in `training_step`, with `num_microbatches=1`")
def test_weights_changed_with_one_microbatch(options: dict[str, Any]) -> None:
    compare(lambda: with_step(_in_place), ours={"num_microbatches": 1, "options": options})
    compare(lambda: with_step(_through_data), ours={"num_microbatches": 1, "options": options})
    if options["virtual_copies"]:
        assert_refused(
            with_step(_after_its_use), "have changed between", RuntimeError, num_microbatches=1, options=options
        )
        assert_refused(with_step(_through_numpy), "such as through numpy", num_microbatches=1, options=options)


class Shrinks(nn.Linear):
    through_data = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            (self.weight.data if self.through_data else self.weight).mul_(0.9)
        return super().forward(x)


@compat(
    "Misuse",
    "a unit that changes its own weights in its forward",
    status="refused",
    note="Change the weights in a hook.",
)
def test_weights_changed_by_a_unit(options: dict[str, Any]) -> None:
    module = Small()
    module.head = Shrinks(WIDTH, 3)
    match = r"forward of unit 'head' \(Shrinks\) changes its weight 'head.weight'"
    assert_refused(module, match, options=options)
    if not options["virtual_copies"]:
        module.head.through_data = True
        for num_microbatches in (1, 3):
            assert_refused(module, match, num_microbatches=num_microbatches)


class Looks(Small):
    """With a table whose rows are scaled in place when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.table = nn.Embedding(10, WIDTH, max_norm=0.5)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x + self.table((x.abs() * 3).long().sum(1) % 10), y))


@compat("Misuse", "`max_norm` of embeddings on devices without memory of their own")
@compat(
    "Misuse",
    "`max_norm` of embeddings on devices with memory of their own",
    status="refused",
    note="Scale the rows in a hook, with `torch.embedding_renorm_`.",
)
def test_max_norm() -> None:
    compare(Looks)
    assert_refused(Looks(), r"unit 'table' \(Embedding\) changes its weight", options={"virtual_copies": True})


def _writes_gradient(self: Any, batch: Any, batch_idx: int) -> Any:
    self.head.weight.grad = torch.ones_like(self.head.weight)
    return self.loss(batch)


def _own_penalty(self: Any, batch: Any, batch_idx: int) -> Any:
    self.head.weight.square().sum().backward()
    return self.loss(batch)


@compat(
    "Misuse",
    "`.grad` written in `training_step`",
    status="refused",
    note="Write it in `on_after_backward` or `on_before_optimizer_step`.",
)
@pytest.mark.parametrize("step", [_writes_gradient, _own_penalty], ids=lambda step: step.__name__[1:])
def test_gradients_written_in_a_step(step: Step) -> None:
    assert_refused(with_step(step), r"writes the gradient \(.grad\) of 'head.weight'.*on_after_backward")


def _own_backward(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    loss.backward()
    return loss


def _input_gradient(self: Any, batch: Any, batch_idx: int) -> Any:
    x = batch[0].requires_grad_()
    (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
    return self.loss(batch) + gradient.square().sum()


@compat(
    "Misuse",
    "`torch.autograd.grad` or `backward` through a unit in `training_step`",
    status="refused",
    note="Use `torch.func.grad`, or take it inside a unit, whose class `units` names, or in a hook.",
)
@pytest.mark.parametrize("step", [_own_backward, _input_gradient], ids=lambda step: step.__name__[1:])
def test_gradients_through_a_unit(step: Step) -> None:
    assert_refused(with_step(step), r"went through unit 'head'.*units=\[", GradientCutError)


class Leaks(Small):
    """Hands a tensor with a graph to the loss through a global object."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1].register_module("2", _Leak())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + _Leak.seen[-1].square().mean()


class _Leak(nn.Linear):
    seen: list[Tensor] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        _Leak.seen.append(super().forward(x))
        return x


class Hides(Small):
    """Hands what a unit was given to the loss, in an object of its own: no weight of the unit is behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1].register_module("2", _Hiding())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.body[1][2].seen.x.square().mean()


class _Seen:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Hiding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = _Seen(x)
        return super().forward(x)


@pytest.mark.parametrize("module", [Leaks, Hides])
@compat(
    "Misuse",
    "a tensor that leaves a unit by a side channel",
    status="refused",
    note="Return it, assign it to an attribute, or choose coarser or finer units.",
)
def test_side_channel(module: type[Small]) -> None:
    try:
        assert_refused(module(), r"a tensor leaves unit 'body.1.2'.*Return it", UnitEscapeError)
    finally:
        _Leak.seen.clear()


def _manual(edit: str) -> Any:
    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for place in ("before", "between"):
                if edit == place:
                    self.head.weight.data.mul_(0.9)
                self.manual_backward(self.loss(batch))
                optimizer.step()
                optimizer.zero_grad()
            if edit == "after":
                self.head.bias.data.add_(1)

    return Manual()


@pytest.mark.parametrize("edit", ["before", "between", "after"])
def test_weights_changed_beside_optimizers(edit: str) -> None:
    """Optimizers that are stepped by hand change weights in the middle of a step; nothing else may."""
    after = {"before": 0, "between": 1, "after": 2}[edit]
    assert_refused(_manual(edit), r"changes the weight 'head\.\w+' in place", after=after)


# --- places ----------------------------------------------------------------------------------------------------------


@compat(
    "Misuse",
    "modules moved to a device by hand",
    status="refused",
    note="Weights stay on the host. What `__init__` and `setup` move to a GPU comes back without an error.",
)
@pytest.mark.parametrize("place", ["__init__", "setup", "on_train_start", "on_train_batch_start", "training_step"])
def test_moved_by_hand(place: str) -> None:
    """``meta`` stands in for a GPU: there is no other device here. It has no data, which is noticed first."""
    module = Small()

    def move(*arguments: Any, stage: str = "") -> Any:
        module.head.to("meta")
        return module.loss(arguments[0]) if place == "training_step" else None

    if place == "__init__":
        move()
    else:
        setattr(module, place, move)
    match = r"'head.weight' was moved to the device 'meta' by hand"
    if place in ("__init__", "setup"):
        match = r"'head.weight' has no data"
    assert_refused(module, match)


def test_moves_to_where_it_is() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.to(self.device)
        return self.loss([entry.to(self.device) for entry in batch])

    class Moves(Small):
        training_step = step

    compare(Moves)
