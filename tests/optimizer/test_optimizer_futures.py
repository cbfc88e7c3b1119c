"""Weights whose update is under way: who waits for what, what cannot be noticed, and what happens to errors."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.optimizer.state import plain_state
from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights import futures
from lightning_roundpipe.weights.futures import PendingParameter, unwaited
from tests.common.instructions import call_with
from tests.optimizer.held_updates import (
    TIMEOUT_S,
    Gated,
    Held,
    WaitSpy,
    fill_gradients,
    make_weights,
    outcome_of,
)
from tests.support.identical import assert_identical

o = torch.optim


def test_buckets_are_updated_in_the_order_of_need(make_held: Callable[..., Held]) -> None:
    """Two buckets are through and can be read without a wait, the third is held, and the fourth comes after it."""
    held = make_held(num_free=2)
    with torch.no_grad():
        assert torch.equal(held.weights[0] + 0, held.new[0])
        assert torch.equal(held.weights[1] + 0, held.new[1])
    assert [type(w) is PendingParameter for w in held.weights] == [False, False, True, True]
    thread, found = outcome_of(lambda: held.weights[3].detach().clone())
    assert not found
    held.gate.set()
    thread.join(TIMEOUT_S)
    assert torch.equal(found[0], held.new[3])
    held.updates.wait()
    assert held.optimizer.entered == [w.data_ptr() for w in held.weights]


def test_the_order_may_leave_out_weights_and_name_others() -> None:
    weights = make_weights()
    fill_gradients(weights, 0)
    others = make_weights(1)
    expected = [w.detach() - 0.5 * w.grad for w in weights if w.grad is not None]
    optimizer, updates = Gated(weights), Updates(1)
    order = [[weights[3], others[0]], [], [weights[3], weights[1]], others]
    updates.start(optimizer, order)
    updates.wait()
    rest = [weights[0], weights[2], *weights[4:]]
    assert optimizer.entered == [weights[3].data_ptr(), weights[1].data_ptr(), rest[0].data_ptr()]
    assert_identical([w.detach() for w in weights], expected)


def test_a_signal_handler_may_wait_for_a_weight_in_the_middle_of_a_wait_for_it(held: Held) -> None:
    future = futures._futures[id(held.weights[-1])]
    held.gate.set()
    held.updates.wait()
    num_waits = 0

    def handler() -> None:
        nonlocal num_waits
        future.wait()
        num_waits += 1

    call_with(handler, future.wait)
    assert num_waits > 20


# --- weights -------------------------------------------------------------------------------------------------------


def _assigned(w: nn.Parameter) -> Tensor:
    with torch.no_grad():
        w[0, 0] = w[0, 0] * 1
    return w.detach()


def _foreach(w: nn.Parameter) -> Tensor:
    with torch.no_grad():
        torch._foreach_mul_([w], 1.0)
    return w.detach()


def _saved(w: nn.Parameter) -> Tensor:
    file = io.BytesIO()
    torch.save({"w": w}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


def _gradient_through(w: nn.Parameter) -> Tensor:
    """The gradient of half the square is the weight."""
    (gradient,) = torch.autograd.grad((w**2).sum() / 2, w)
    return gradient


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def _module(w: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.w = w
    return module


# Each gives the values of the weight that it is called with.
READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "arithmetic": lambda w: w + 0,
    "functional": lambda w: nn.functional.linear(torch.eye(3), w).T,
    "out=": lambda w: torch.add(w, 0, out=torch.empty(w.shape)) if not torch.is_grad_enabled() else w + 0,
    "list": lambda w: torch.stack([w])[0],
    "aten operator": lambda w: torch.ops.aten.add.Tensor(w, 0),
    "autograd function": lambda w: _Doubled.apply(w) / 2,
    "gradient": _gradient_through,
    "index": lambda w: torch.stack([w[0], w[1], w[2], w[3]]),
    "item": lambda w: torch.tensor([[w[i, j].item() for j in range(3)] for i in range(4)]),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "repr": lambda w: torch.tensor([float(x) for x in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", repr(w))]).view(4, 3),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "dlpack": lambda w: torch.from_dlpack(w.requires_grad_(False)),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "storage": lambda w: torch.tensor(w.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32).view(4, 3),
    "data.copy_": lambda w: torch.empty(4, 3).copy_(w),
    "copy.copy": lambda w: copy.copy(w),
    "deepcopy": lambda w: copy.deepcopy(w),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": _saved,
    "state_dict": lambda w: _module(w).state_dict()["w"],
    "foreach in place": _foreach,
    "index assignment": _assigned,
    "functional_call": lambda w: torch.func.functional_call(nn.Linear(3, 4, bias=False), {"weight": w}, torch.eye(3)).T,
}


@pytest.mark.parametrize("name", READS)
def test_code_that_reads_a_weight_waits(spy: WaitSpy, held: Held, name: str) -> None:
    weight = held.weights[0]
    thread, found = outcome_of(lambda: READS[name](weight))
    assert spy.waits.wait(TIMEOUT_S)
    assert not found
    with unwaited():
        assert torch.equal(weight.detach(), held.old[0])
    held.gate.set()
    thread.join(TIMEOUT_S)
    result = found[0]
    if isinstance(result, BaseException):
        raise result
    assert type(result) in (Tensor, nn.Parameter)
    torch.testing.assert_close(result.detach(), held.new[0], rtol=0, atol=1e-4 if name == "repr" else 0)
    held.release()
    assert [type(w) for w in held.weights] == [nn.Parameter] * 4


def test_metadata_can_be_looked_at_without_a_wait(spy: WaitSpy, held: Held) -> None:
    w = held.weights[0]
    other = held.weights[1]
    assert w.shape == w.size() == (4, 3)
    assert (w.dtype, w.device, w.layout) == (torch.float32, torch.device("cpu"), torch.strided)
    assert (w.ndim, w.dim(), w.numel(), w.nelement(), w.nbytes, len(w)) == (2, 2, 12, 12, 48, 4)
    assert (w.element_size(), w.itemsize, w.stride(), w.storage_offset()) == (4, 4, (3, 1), 0)
    assert w.is_leaf
    assert w.requires_grad
    assert w.grad_fn is None
    assert not any((w.is_cuda, w.is_sparse, w.is_quantized, w.is_meta))
    assert w.is_contiguous()
    assert w.is_floating_point()
    assert torch.is_floating_point(w)
    assert not any((torch.is_complex(w), w.is_complex(), w.is_inference()))
    assert w._version > 0
    assert isinstance(w, nn.Parameter)
    assert isinstance(w, Tensor)
    assert torch.is_tensor(w)
    assert w is not other
    assert len({w, other, w}) == 2
    assert hash(w) == id(w)
    assert held.optimizer.arrived.wait(TIMEOUT_S)
    assert w.data_ptr() == held.optimizer.entered[0]
    w.requires_grad_(False)
    w.requires_grad = True
    module = _module(w)
    assert dict(module.named_parameters()) == {"w": w}
    assert sum(p.numel() for p in module.parameters()) == 12
    assert spy.count == 0
    assert type(w) is PendingParameter


@pytest.mark.parametrize("access", ["read", "write", "zero_grad", "accumulate"])
def test_gradients_belong_to_the_update(spy: WaitSpy, held: Held, access: str) -> None:
    weight = held.weights[0]

    def use() -> None:
        if access == "read":
            assert weight.grad is not None
            weight.grad.zero_()
        elif access == "write":
            weight.grad = None
        elif access == "zero_grad":
            held.optimizer.zero_grad()
        else:
            (weight * 3).sum().backward()

    thread, found = outcome_of(use)
    assert spy.waits.wait(TIMEOUT_S)
    assert not found
    held.gate.set()
    thread.join(TIMEOUT_S)
    assert found == [None]
    held.release()
    assert torch.equal(weight.detach(), held.new[0])


def test_writes_come_after_the_update(spy: WaitSpy, held: Held) -> None:
    def write() -> None:
        with torch.no_grad():
            held.weights[0].mul_(2)
            held.weights[1].data = held.weights[1].data + 1
            held.weights[2].data.fill_(7)

    thread, _ = outcome_of(write)
    assert spy.waits.wait(TIMEOUT_S)
    held.gate.set()
    thread.join(TIMEOUT_S)
    held.release()
    expected = [held.new[0] * 2, held.new[1] + 1, torch.full((2, 4), 7.0), held.new[3]]
    assert_identical([w.detach() for w in held.weights], expected)


def test_type_of_a_pending_weight_makes_plain_parameters(held: Held) -> None:
    made = type(held.weights[0])(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad
    assert torch.equal(made + 1, torch.full((2,), 2.0))


def test_what_has_been_exchanged_with_a_pending_weight_can_be_used(held: Held) -> None:
    """``swap_tensors`` exchanges the classes as well."""
    other = nn.Parameter(torch.ones(2))
    torch.utils.swap_tensors(held.weights[3], other)
    held.release()
    assert torch.equal(held.weights[3] + 0, torch.ones(2))
    assert torch.equal(other + 0, held.new[3])
    assert type(other) is type(held.weights[3]) is nn.Parameter


# --- the state of the optimizer ------------------------------------------------------------------------------------

STATE_READS: dict[str, Callable[[Held], Any]] = {
    "getitem": lambda h: h.optimizer.state[h.weights[0]]["momentum_buffer"],
    "len": lambda h: len(h.optimizer.state),
    "contains": lambda h: h.weights[0] in h.optimizer.state,
    "keys": lambda h: list(h.optimizer.state.keys()),
    "items": lambda h: dict(h.optimizer.state.items()),
    "dict": lambda h: dict(h.optimizer.state),
    "unpacking": lambda h: dict(**{str(k.data_ptr()): v for k, v in {**h.optimizer.state}.items()}),
    "or from the left": lambda h: {} | h.optimizer.state,
    "method copy": lambda h: h.optimizer.state.copy(),
    "setdefault": lambda h: h.optimizer.state.setdefault(h.weights[0], {})["momentum_buffer"],
    "equality": lambda h: h.optimizer.state == {},
    "state_dict": lambda h: h.optimizer.state_dict()["state"],
    "pickle": lambda h: pickle.loads(pickle.dumps(h.optimizer.state)),
}


@pytest.mark.parametrize("name", STATE_READS)
def test_code_that_looks_at_the_state_waits(spy: WaitSpy, held: Held, name: str) -> None:
    """Before the first update there is no state at all: who did not wait would find nothing."""
    thread, found = outcome_of(lambda: STATE_READS[name](held))
    assert spy.waits.wait(TIMEOUT_S)
    assert not found
    held.gate.set()
    thread.join(TIMEOUT_S)
    result = found[0]
    if isinstance(result, BaseException):
        raise result
    if isinstance(result, Tensor):
        assert result.shape == (4, 3)
    elif name == "equality":
        assert result is False
    elif isinstance(result, int):
        assert result
    else:
        assert len(result) == 4


def test_state_is_an_ordinary_dict_again_and_the_same_object() -> None:
    weights = make_weights()
    optimizer = o.Adam(weights, lr=0.1)
    before = optimizer.state
    updates = Updates(1)
    for step in range(2):
        fill_gradients(weights, step)
        updates.start(optimizer, [])
    copied = copy.deepcopy(optimizer.state)
    pickled = pickle.loads(pickle.dumps(optimizer.state))
    assert type(copied) is type(pickled) is defaultdict
    assert isinstance(optimizer.state, dict)
    assert plain_state(optimizer) is before
    assert type(before) is defaultdict
    assert list(before) == weights
    assert all(entry["step"] == 2 for entry in before.values())


def test_load_state_dict_while_an_update_is_under_way(held: Held) -> None:
    """As if the update were over: its weights count, its state does not."""
    other = o.SGD(make_weights(shapes=((4, 3), (4,), (2, 4), (3, 3))), lr=0.25, momentum=0.5)
    fill_gradients(other.param_groups[0]["params"], 5)
    other.step()
    loaded = copy.deepcopy(other.state_dict())
    held.optimizer.load_state_dict(loaded)
    held.release()
    assert_identical([w.detach() for w in held.weights], held.new)
    assert_identical(held.optimizer.state_dict(), loaded)


def test_the_options_are_those_of_the_call(held: Held) -> None:
    for group in held.optimizer.param_groups:
        group["lr"] = 100.0
    held.release()
    assert_identical([w.detach() for w in held.weights], held.new)
