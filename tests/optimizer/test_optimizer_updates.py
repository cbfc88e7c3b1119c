"""Optimizer steps on a thread: the numbers of plain steps, and which optimizers are not taken apart."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

from lightning_roundpipe.optimizer.state import GuardedState
from lightning_roundpipe.optimizer.updates import Updates, why_not_separable
from lightning_roundpipe.weights.futures import is_pending
from tests.optimizer.held_updates import Held, fill_gradients, make_blocker, make_weights
from tests.support.identical import assert_identical


@pytest.fixture
def updates() -> Iterator[Updates]:
    found = Updates(1)
    yield found
    found.wait()


# --- the numbers ---------------------------------------------------------------------------------------------------


class Separable(torch.optim.SGD):
    is_separable = True


Make = Callable[[list[Any]], torch.optim.Optimizer]
o = torch.optim
SEPARABLE: dict[str, Make] = {
    "SGD momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1),
    "SGD nesterov, maximize": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "SGD foreach": lambda p: o.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    # With momentum torch itself cannot take weights with and without a buffer together.
    "SGD fused": lambda p: o.SGD(p, lr=0.1, weight_decay=0.01, fused=True),
    "SGD tensor lr": lambda p: o.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "Adam": lambda p: o.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    "Adam foreach": lambda p: o.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "Adam fused": lambda p: o.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "Adam tensor lr": lambda p: o.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: o.AdamW(p, lr=0.01),
    "AdamW fused, tensor lr": lambda p: o.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "Adagrad": lambda p: o.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "Adagrad fused": lambda p: o.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": lambda p: o.Adadelta(p, lr=0.5, weight_decay=0.1),
    "Adamax": lambda p: o.Adamax(p, lr=0.01, maximize=True),
    "NAdam": lambda p: o.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam foreach": lambda p: o.NAdam(p, lr=0.01, foreach=True),
    "RAdam": lambda p: o.RAdam(p, lr=0.01, weight_decay=0.1),
    "RAdam foreach": lambda p: o.RAdam(p, lr=0.01, foreach=True),
    "RMSprop": lambda p: o.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: o.Rprop(p, lr=0.01),
    "of others, which say that it is": lambda p: Separable(p, lr=0.1, momentum=0.9),
}
if hasattr(o, "Adafactor"):
    SEPARABLE["Adafactor"] = lambda p: o.Adafactor(p, lr=0.01, weight_decay=0.1)
    SEPARABLE["Adafactor foreach"] = lambda p: o.Adafactor(p, lr=0.01, foreach=True)
if hasattr(o, "Muon"):
    SEPARABLE["Muon"] = lambda p: o.Muon([{**g, "params": [x for x in g["params"] if x.dim() == 2]} for g in p], lr=0.1)


def train(make: Make, updates: Updates | None, *, steps: int = 4, sparse: bool = False) -> tuple[list[Tensor], Any]:
    """Several steps with two groups of other options; the weights and the optimizer's state after them."""
    weights = make_weights()
    weights[3].requires_grad_(False)  # without gradient
    groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.05}]
    optimizer = make(groups)
    if isinstance(optimizer.param_groups[0]["lr"], Tensor):
        optimizer.param_groups[1]["lr"] = torch.tensor(0.05)
    assert why_not_separable(optimizer) is None
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        fill_gradients(weights, step, sparse)
        weights[3].grad = None
        weights[step].grad = None  # each step leaves out another one
        if updates is None:
            optimizer.step()
        else:
            with updates.overlapping(optimizer, lambda: [weights[4:], weights[1:3]]):
                optimizer.step()
        for group in optimizer.param_groups:  # at once, while the update may be under way
            lr = group["lr"]
            group["lr"] = lr.mul_(0.9) if isinstance(lr, Tensor) else lr * 0.9
    if updates is not None:
        assert isinstance(optimizer.state, GuardedState)
    return [w.detach().clone() for w in weights], copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("name", SEPARABLE)
def test_bit_identical(updates: Updates, name: str) -> None:
    plain = train(SEPARABLE[name], None)
    assert_identical(train(SEPARABLE[name], updates), plain)
    assert any((a != b).any() for a, b in zip(plain[0], make_weights(), strict=True))


def test_all_optimizers_of_torch_are_tried_or_known_to_be_refused() -> None:
    kinds = {kind for kind in vars(o).values() if isinstance(kind, type) and issubclass(kind, o.Optimizer)}
    tried = {type(make([{"params": make_weights()}])) for make in SEPARABLE.values()}
    assert kinds - tried - {o.Optimizer} == {o.ASGD, o.LBFGS, o.SparseAdam}
    for kind in (o.ASGD, o.LBFGS, o.SparseAdam):
        reason = why_not_separable(kind(make_weights()))
        assert reason is not None
        assert kind.__name__ in reason


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("make", [lambda p: o.SGD(p, lr=0.1, momentum=0.9), lambda p: o.Adagrad(p, lr=0.1)])
def test_sparse_gradients(updates: Updates, make: Make) -> None:
    assert_identical(train(make, updates, sparse=True), train(make, None, sparse=True))


def test_state_is_made_before_the_default_dtype_changes(updates: Updates) -> None:
    """The step after may run with another one, as in double or half precision; and nothing waits without a need."""
    weights = make_weights()
    blocker, gate = make_blocker()
    for make, dtype in ((o.AdamW, torch.float32), (o.SGD, None)):
        optimizer = make(weights, lr=0.1)
        for step in range(2):
            fill_gradients(weights, step)
            if step:
                gate.clear()
                blocker.param_groups[0]["params"][0].grad = torch.ones(1)
                updates.start(blocker, [])
            with updates.overlapping(optimizer, lambda: [weights[::-1]]):
                optimizer.step()
            assert is_pending(weights) == bool(step)
            torch.set_default_dtype(torch.float64)
            gate.set()
            updates.wait()
            torch.set_default_dtype(torch.float32)
        if dtype is not None:
            assert {entry["step"].dtype for entry in optimizer.state.values()} == {dtype}


def test_weights_without_any_gradient_start_nothing(updates: Updates) -> None:
    weights = make_weights()
    optimizer = o.SGD(weights, lr=0.1)
    with updates.overlapping(optimizer, lambda: []):
        optimizer.step()
    assert not is_pending(weights)


def test_the_closure_is_called_with_gradients_and_its_result_returned(updates: Updates) -> None:
    weights = make_weights()
    optimizer = o.SGD(weights, lr=0.1)

    def closure() -> Tensor:
        loss = sum((w**2).sum() for w in weights)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    before = [w.detach().clone() for w in weights]
    with updates.overlapping(optimizer, lambda: []), torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(sum((w**2).sum().item() for w in before))
    for weight, old in zip(weights, before, strict=True):
        assert torch.equal(weight, old - 0.1 * (2 * old))
    assert "step" not in vars(optimizer)


def test_a_loss_scaler_may_change_its_scale_at_once() -> None:
    """A fused optimizer reads the scale itself, and ``scaler.update`` changes that tensor in place."""
    results = []
    for is_held in (False, True):
        weights = make_weights()
        updates = Updates(1)
        blocker, gate = make_blocker()
        optimizer = o.AdamW(weights, lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        for step in range(3):
            scaler.scale(torch.zeros(()))  # makes its tensors
            fill_gradients(weights, step)
            for weight in weights:
                assert weight.grad is not None
                weight.grad.mul_(scaler.get_scale())
            if step == 1:
                assert weights[0].grad is not None
                weights[0].grad.fill_(float("inf"))
            if not is_held:
                scaler.step(optimizer)
                scaler.update()
                continue
            if step:  # the first update ends at once
                gate.clear()
                updates.start(blocker, [])
            with updates.overlapping(optimizer, lambda: []):
                scaler.step(optimizer)
            assert is_pending(weights) == bool(step)
            scaler.update()
            gate.set()
        updates.wait()
        results.append(([w.detach() for w in weights], optimizer.state_dict(), scaler.get_scale()))
    assert_identical(results[1], results[0])


def test_several_optimizers_one_after_the_other(updates: Updates) -> None:
    """The second step is of weights that the first one still updates; and once more."""
    results = []
    for is_plain in (True, False):
        weights = make_weights()
        optimizers = [
            o.Adam(weights[:4], lr=0.01),
            o.SGD(weights[2:], lr=0.1, momentum=0.9),
            o.Adam(weights[:2], lr=0.02),
        ]
        fill_gradients(weights, 0)
        for optimizer in [*optimizers, *optimizers]:
            if is_plain:
                optimizer.step()
            else:
                with updates.overlapping(optimizer, lambda weights=weights: [weights]):
                    optimizer.step()
        results.append(([w.detach().clone() for w in weights], [x.state_dict() for x in optimizers]))
    assert_identical(results[1], results[0])


def test_autograd_notices_an_update_behind_a_saved_weight() -> None:
    held_back = make_weights(shapes=((3, 3),))
    (weight,) = held_back
    x = torch.ones(2, 3, requires_grad=True)
    loss = (x @ weight).sum()  # saves the weight for the gradient of x
    weight.grad = torch.ones(3, 3)
    updates = Updates(1)
    updates.start(o.SGD(held_back, lr=0.1), [])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    updates.wait()


def test_schedulers_do_not_warn(held: Held) -> None:
    weights = make_weights()
    optimizer = o.SGD(weights, lr=0.1)
    scheduler = o.lr_scheduler.StepLR(optimizer, 1)
    wrapped = vars(optimizer)["step"]
    assert why_not_separable(optimizer) is None
    assert why_not_separable(held.optimizer) is None, "its weights are pending"
    fill_gradients(weights, 0)
    optimizer.state = GuardedState(optimizer.state, held.updates.wait)
    optimizer.state.stateless.update(weights)  # as after a first step
    with held.updates.overlapping(optimizer, lambda: []):
        optimizer.step()
    assert vars(optimizer)["step"] is wrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert is_pending(weights)


# --- what is not taken apart ---------------------------------------------------------------------------------------


class Custom(o.SGD):
    pass


class OwnParameter(nn.Parameter):
    pass


def _with_hook(register: str) -> Callable[[], torch.optim.Optimizer]:
    def make() -> torch.optim.Optimizer:
        optimizer = o.SGD(make_weights(), lr=0.1)
        getattr(optimizer, register)(lambda *args: None)
        return optimizer

    return make


def _replaced_step() -> torch.optim.Optimizer:
    import functools

    optimizer = o.SGD(make_weights(), lr=0.1)
    o.lr_scheduler.StepLR(optimizer, 1)
    original = optimizer.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def _replaced_then_scheduled() -> torch.optim.Optimizer:
    import types

    optimizer = o.SGD(make_weights(), lr=0.1)
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    o.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


REFUSED: dict[str, tuple[Callable[[], torch.optim.Optimizer], str]] = {
    "class": (lambda: Custom(make_weights(), lr=0.1), "Custom is not known to update each parameter by itself"),
    "pre hook": (_with_hook("register_step_pre_hook"), "hooks are registered on the step of SGD"),
    "post hook": (_with_hook("register_step_post_hook"), "hooks are registered on the step of SGD"),
    "differentiable": (lambda: o.SGD(make_weights(), lr=0.1, differentiable=True), "SGD is differentiable"),
    "parameter class": (lambda: o.SGD([OwnParameter(torch.ones(1))], lr=0.1), "a parameter of SGD is a OwnParameter"),
    "plain tensor": (lambda: o.SGD([torch.ones(1, requires_grad=True)], lr=0.1), "a parameter of SGD is a Tensor"),
    "step replaced": (_replaced_step, "the step of SGD has been replaced"),
    "step replaced, then a scheduler": (_replaced_then_scheduled, "the step of SGD has been replaced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_apart(name: str) -> None:
    make, reason = REFUSED[name]
    found = why_not_separable(make())
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("register", ["register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"])
def test_hooks_of_all_optimizers_are_respected(register: str) -> None:
    optimizer = o.SGD(make_weights(), lr=0.1)
    handle = getattr(optimizer_module, register)(lambda *args: None)
    try:
        assert why_not_separable(optimizer) == "hooks are registered on the step of SGD"
    finally:
        handle.remove()
    assert why_not_separable(optimizer) is None


def test_an_update_has_its_own_number_of_threads() -> None:
    seen: list[int] = []

    class Asks(torch.optim.SGD):
        is_separable = True

        def step(self, closure: Any = None) -> Any:
            seen.append(torch.get_num_threads())
            return super().step(closure)

    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(3)
    updates.start(Asks(weights, lr=0.1), [[weight] for weight in weights])
    updates.wait()
    assert set(seen) == {3}
    assert torch.get_num_threads() == 1
