"""Optimizer steps on a thread: the numbers of plain steps, who waits for what, and what happens to errors."""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_module

from lightning_roundpipe.optimizer import buckets
from lightning_roundpipe.optimizer.state import GuardedState, unguard
from lightning_roundpipe.optimizer.updates import Updates, why_not_separable
from lightning_roundpipe.weights.futures import PendingParameter, is_pending, unwaited
from tests.support.identical import assert_identical

_TIMEOUT_S = 30.0  # nothing here takes so long: what hangs fails
_SHAPES = ((5, 3), (5,), (4, 5), (4,), (3, 4), (2,), ())


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group of the order is a share of its own."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    torch.set_num_threads(1)


@pytest.fixture
def updates() -> Iterator[Updates]:
    found = Updates(1)
    yield found
    found.wait()


def make_weights(seed: int = 0, shapes: tuple[tuple[int, ...], ...] = _SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def fill_gradients(weights: list[nn.Parameter], seed: int, sparse: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for weight in weights:
        gradient = torch.randn(weight.shape, generator=generator)
        if sparse and weight.dim() == 2:
            rows = torch.tensor([0, 2, 0])  # a row twice
            values = torch.randn(3, weight.shape[1], generator=generator)
            gradient = torch.sparse_coo_tensor(rows[None], values, weight.shape, check_invariants=True)
        weight.grad = gradient


# --- the numbers ---------------------------------------------------------------------------------------------------

Make = Callable[[list[Any]], torch.optim.Optimizer]
o = torch.optim
SEPARABLE: dict[str, Make] = {
    "SGD": lambda p: o.SGD(p, lr=0.1),
    "SGD momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1),
    "SGD nesterov, maximize": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "SGD foreach": lambda p: o.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    # With momentum torch itself cannot take weights with and without a buffer together.
    "SGD fused": lambda p: o.SGD(p, lr=0.1, weight_decay=0.01, fused=True),
    "SGD tensor lr": lambda p: o.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "Adam": lambda p: o.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam amsgrad, maximize": lambda p: o.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "Adam foreach": lambda p: o.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "Adam fused": lambda p: o.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "Adam tensor lr": lambda p: o.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: o.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: o.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: o.AdamW(p, lr=0.01, fused=True),
    "AdamW fused, tensor lr": lambda p: o.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "Adagrad": lambda p: o.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "Adagrad foreach": lambda p: o.Adagrad(p, lr=0.1, foreach=True),
    "Adagrad fused": lambda p: o.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": lambda p: o.Adadelta(p, lr=0.5, weight_decay=0.1),
    "Adadelta foreach": lambda p: o.Adadelta(p, lr=0.5, foreach=True),
    "Adamax": lambda p: o.Adamax(p, lr=0.01, maximize=True),
    "Adamax foreach": lambda p: o.Adamax(p, lr=0.01, foreach=True),
    "NAdam": lambda p: o.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam foreach": lambda p: o.NAdam(p, lr=0.01, foreach=True),
    "RAdam": lambda p: o.RAdam(p, lr=0.01, weight_decay=0.1),
    "RAdam foreach": lambda p: o.RAdam(p, lr=0.01, foreach=True),
    "RMSprop": lambda p: o.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "RMSprop foreach": lambda p: o.RMSprop(p, lr=0.01, foreach=True),
    "Rprop": lambda p: o.Rprop(p, lr=0.01),
    "Rprop foreach": lambda p: o.Rprop(p, lr=0.01, foreach=True),
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
@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad"])
def test_sparse_gradients(updates: Updates, name: str) -> None:
    make: Make = {
        "SGD momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9),
        "Adagrad": lambda p: o.Adagrad(p, lr=0.1),
    }[name]
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
            if step:  # the first update is over at once
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


# --- an update that is held back ------------------------------------------------------------------------------------


class Gated(o.SGD):
    """Each share waits for the gate that its first weight has in ``gates``, if any."""

    is_separable = True

    def __init__(self, weights: list[nn.Parameter], **options: Any) -> None:
        super().__init__(weights, lr=0.5, momentum=0.9, **options)
        self.gates: dict[int, threading.Event] = {}
        self.entered: list[int] = []
        self.arrived = threading.Event()

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0].data_ptr()
        self.entered.append(first)
        self.arrived.set()
        if first in self.gates:
            assert self.gates[first].wait(_TIMEOUT_S)
        return super().step(closure)


def make_blocker() -> tuple[Gated, threading.Event]:
    """An optimizer of one weight, whose update holds up all that come after it, and the gate that lets it go."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    blocker = Gated([weight])
    gate = blocker.gates[weight.data_ptr()] = threading.Event()
    return blocker, gate


class Held:
    """Four weights in four shares, whose update has begun and waits for :meth:`release`."""

    def __init__(self, num_free: int = 0) -> None:
        self.weights = make_weights(shapes=((4, 3), (4,), (2, 4), (3, 3)))
        fill_gradients(self.weights, 0)
        self.old = [w.detach().clone() for w in self.weights]
        self.new = [w.detach() - 0.5 * w.grad for w in self.weights if w.grad is not None]
        self.optimizer = Gated(self.weights)
        self.gate = threading.Event()
        self.optimizer.gates[self.weights[num_free].data_ptr()] = self.gate
        self.updates = Updates(1)
        self.order = [[w] for w in self.weights]
        self.updates.start(self.optimizer, self.order)

    def release(self) -> None:
        self.gate.set()
        self.updates.wait()


@pytest.fixture
def make_held() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(num_free: int = 0) -> Held:
        made.append(Held(num_free))
        return made[-1]

    yield make
    for held in made:
        held.release()


@pytest.fixture
def held(make_held: Callable[..., Held]) -> Held:
    return make_held()


def outcome_of(access: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs ``access`` on another thread; what it gave, or the error, once the thread has ended."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(access())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


class WaitSpy:
    """Tells when somebody begins to wait for a share, or for all of an optimizer's updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lightning_roundpipe.weights.futures import ParameterFuture

        self.waits = threading.Event()
        self.count = 0

        def watched(original: Any) -> Any:
            def wait(this: Any) -> None:
                self.count += 1
                self.waits.set()
                original(this)

            return wait

        monkeypatch.setattr(ParameterFuture, "wait", watched(ParameterFuture.wait))
        monkeypatch.setattr(Updates, "join", watched(Updates.join))


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> WaitSpy:
    return WaitSpy(monkeypatch)


def test_shares_are_updated_in_the_order_of_need(make_held: Callable[..., Held]) -> None:
    """Two shares are through and can be read without a wait, the third is held, and the fourth comes after it."""
    held = make_held(num_free=2)
    with torch.no_grad():
        assert torch.equal(held.weights[0] + 0, held.new[0])
        assert torch.equal(held.weights[1] + 0, held.new[1])
    assert [type(w) is PendingParameter for w in held.weights] == [False, False, True, True]
    thread, found = outcome_of(lambda: held.weights[3].detach().clone())
    assert not found
    held.gate.set()
    thread.join(_TIMEOUT_S)
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


def _cat_in_place(w: nn.Parameter) -> Tensor:
    return torch.cat([torch.zeros_like(w), w])[len(w) :]


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
    "operator from the left": lambda w: 1.0 * w,
    "functional": lambda w: nn.functional.linear(torch.eye(3), w).T,
    "other operand": lambda w: torch.zeros_like(w).add(w),
    "out=": lambda w: torch.add(w, 0, out=torch.empty(w.shape)) if not torch.is_grad_enabled() else w + 0,
    "list": lambda w: torch.stack([w])[0],
    "list in place": _cat_in_place,
    "einsum": lambda w: torch.einsum("ij->ij", w),
    "aten operator": lambda w: torch.ops.aten.add.Tensor(w, 0),
    "aten packet": lambda w: torch.ops.aten.mul(w, 1),
    "autograd function": lambda w: _Doubled.apply(w) / 2,
    "gradient": _gradient_through,
    "index": lambda w: torch.stack([w[0], w[1], w[2], w[3]]),
    "iteration": lambda w: torch.stack(list(w)),
    "item": lambda w: torch.tensor([[w[i, j].item() for j in range(3)] for i in range(4)]),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "repr": lambda w: torch.tensor([float(x) for x in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", repr(w))]).view(4, 3),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "array": lambda w: torch.tensor(__import__("numpy").asarray(w.requires_grad_(False))),
    "dlpack": lambda w: torch.from_dlpack(w.requires_grad_(False)),
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "view": lambda w: w.view(-1).view(4, 3),
    "T": lambda w: w.T.T,
    "storage": lambda w: torch.tensor(w.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32).view(4, 3),
    "data.copy_": lambda w: torch.empty(4, 3).copy_(w),
    "clone": lambda w: w.clone(),
    "to": lambda w: w.to(torch.float64).to(torch.float32),
    "cpu": lambda w: w.cpu(),
    "copy.copy": lambda w: copy.copy(w),
    "deepcopy": lambda w: copy.deepcopy(w),
    "deepcopy of a module": lambda w: copy.deepcopy(_module(w)).w,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": _saved,
    "state_dict": lambda w: _module(w).state_dict()["w"],
    "state_dict keep_vars": lambda w: _module(w).state_dict(keep_vars=True)["w"] + 0,
    "module.to": lambda w: _module(w).to(torch.float64).w.float(),
    "parameters_to_vector": lambda w: nn.utils.parameters_to_vector([w]).view(4, 3),
    "foreach": lambda w: torch._foreach_add([w], 0.0)[0],
    "foreach in place": _foreach,
    "index assignment": _assigned,
    "comparison": lambda w: torch.where(w == w, w, torch.zeros(())),
    "functional_call": lambda w: torch.func.functional_call(nn.Linear(3, 4, bias=False), {"weight": w}, torch.eye(3)).T,
}


@pytest.mark.parametrize("name", READS)
def test_whoever_reads_a_weight_waits(spy: WaitSpy, held: Held, name: str) -> None:
    weight = held.weights[0]
    thread, found = outcome_of(lambda: READS[name](weight))
    assert spy.waits.wait(_TIMEOUT_S)
    assert not found
    with unwaited():
        assert torch.equal(weight.detach(), held.old[0])
    held.gate.set()
    thread.join(_TIMEOUT_S)
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
    assert held.optimizer.arrived.wait(_TIMEOUT_S)
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
    assert spy.waits.wait(_TIMEOUT_S)
    assert not found
    held.gate.set()
    thread.join(_TIMEOUT_S)
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
    assert spy.waits.wait(_TIMEOUT_S)
    held.gate.set()
    thread.join(_TIMEOUT_S)
    held.release()
    expected = [held.new[0] * 2, held.new[1] + 1, torch.full((2, 4), 7.0), held.new[3]]
    assert_identical([w.detach() for w in held.weights], expected)


def test_several_threads_wait(held: Held) -> None:
    threads = [outcome_of(lambda w=w: w.detach().clone()) for w in held.weights for _ in range(3)]
    held.gate.set()
    for index, (thread, found) in enumerate(threads):
        thread.join(_TIMEOUT_S)
        assert torch.equal(found[0], held.new[index // 3])


def test_a_pending_weight_may_go_to_the_next_update(held: Held) -> None:
    assert why_not_separable(held.optimizer) is None


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


# --- the state of the optimizer ------------------------------------------------------------------------------------

STATE_READS: dict[str, Callable[[Held], Any]] = {
    "getitem": lambda h: h.optimizer.state[h.weights[0]]["momentum_buffer"],
    "get": lambda h: h.optimizer.state.get(h.weights[0], {})["momentum_buffer"],
    "len": lambda h: len(h.optimizer.state),
    "contains": lambda h: h.weights[0] in h.optimizer.state,
    "keys": lambda h: list(h.optimizer.state.keys()),
    "iter": lambda h: list(h.optimizer.state),
    "values": lambda h: list(h.optimizer.state.values()),
    "items": lambda h: dict(h.optimizer.state.items()),
    "dict": lambda h: dict(h.optimizer.state),
    "unpacking": lambda h: dict(**{str(k.data_ptr()): v for k, v in {**h.optimizer.state}.items()}),
    "or": lambda h: h.optimizer.state | {},
    "or from the left": lambda h: {} | h.optimizer.state,
    "copy": lambda h: copy.copy(h.optimizer.state),
    "method copy": lambda h: h.optimizer.state.copy(),
    "bool": lambda h: bool(h.optimizer.state),
    "setdefault": lambda h: h.optimizer.state.setdefault(h.weights[0], {})["momentum_buffer"],
    "equality": lambda h: h.optimizer.state == {},
    "state_dict": lambda h: h.optimizer.state_dict()["state"],
    "deepcopy of the optimizer": lambda h: copy.deepcopy(h.optimizer.state),
    "pickle": lambda h: pickle.loads(pickle.dumps(h.optimizer.state)),
}


@pytest.mark.parametrize("name", STATE_READS)
def test_whoever_looks_at_the_state_waits(spy: WaitSpy, held: Held, name: str) -> None:
    """Before the first update there is no state at all: who did not wait would find nothing."""
    thread, found = outcome_of(lambda: STATE_READS[name](held))
    assert spy.waits.wait(_TIMEOUT_S)
    assert not found
    held.gate.set()
    thread.join(_TIMEOUT_S)
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
    unguard(optimizer)
    assert optimizer.state is before
    assert type(before) is defaultdict
    assert list(before) == weights
    assert all(entry["step"] == 2 for entry in before.values())
    unguard(optimizer)  # nothing to do


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


def test_schedulers_do_not_warn(held: Held) -> None:
    weights = make_weights()
    optimizer = o.SGD(weights, lr=0.1)
    scheduler = o.lr_scheduler.StepLR(optimizer, 1)
    wrapped = vars(optimizer)["step"]
    assert why_not_separable(optimizer) is None
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


# --- errors --------------------------------------------------------------------------------------------------------


class Broken(Gated):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if len(self.entered) == 2:
            self.fail_here()

    def fail_here(self) -> None:
        raise ZeroDivisionError("in the second share")


def break_update(weights: list[nn.Parameter]) -> tuple[Broken, Updates]:
    fill_gradients(weights, 0)
    optimizer, updates = Broken(weights), Updates(1)
    optimizer.gates[weights[0].data_ptr()] = threading.Event()
    updates.start(optimizer, [[w] for w in weights])
    return optimizer, updates


def test_an_error_reaches_everybody_until_training_knows(spy: WaitSpy) -> None:
    weights = make_weights()
    old = [w.detach().clone() for w in weights]
    optimizer, updates = break_update(weights)
    threads = [outcome_of(lambda w=w: w.detach().clone()) for w in weights[1:]]
    optimizer.gates[weights[0].data_ptr()].set()
    for thread, _ in threads:
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive()
    updates.join()
    # Also who comes later, to a weight whose own update was made.
    threads.append(outcome_of(lambda: weights[0].detach().clone()))
    threads[-1][0].join(_TIMEOUT_S)
    errors = [found[0] for _, found in threads]
    with pytest.raises(ZeroDivisionError, match="in the second share") as caught:
        weights[0].detach()
    assert all(error is caught.value for error in errors)
    assert "fail_here" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    # The thread that trains knows: what it does about the error may look at the weights.
    assert [type(w) for w in weights] == [nn.Parameter] * len(weights)
    assert torch.equal(weights[2].detach(), old[2])  # what comes later is not updated
    assert not torch.equal(weights[0].detach(), old[0])
    for goes_on in (updates.wait, updates.check, lambda: updates.start(o.SGD(weights, lr=0.1), [])):
        with pytest.raises(ZeroDivisionError, match="in the second share"):
            goes_on()
    assert torch.equal(weights[2].detach(), old[2])


def test_the_tear_down_after_an_error_does_not_raise_it_again() -> None:
    weights = make_weights()
    optimizer, updates = break_update(weights)
    optimizer.gates[weights[0].data_ptr()].set()
    updates.join()

    def fail_otherwise() -> None:
        try:
            weights[0].detach()
        except ZeroDivisionError as error:
            updates.wait()
            raise ValueError("another") from error

    with pytest.raises(ValueError, match="another") as caught:
        fail_otherwise()
    try:
        raise caught.value
    except ValueError:
        updates.wait()  # what is handled comes of it

    def handle_something_else() -> None:
        try:
            raise ValueError("that has nothing to do with it")
        except ValueError:
            updates.wait()

    with pytest.raises(ZeroDivisionError):
        handle_something_else()


@pytest.mark.parametrize("asks", ["wait", "start", "state", "weight"])
def test_an_error_is_raised_by_whoever_asks_first(asks: str) -> None:
    weights = make_weights()
    optimizer, updates = break_update(weights)

    def ask() -> None:
        optimizer.gates[weights[0].data_ptr()].set()
        if asks == "wait":
            updates.wait()
        elif asks == "state":
            len(optimizer.state)
        elif asks == "weight":
            for weight in weights:
                weight.detach()
        else:
            updates.start(optimizer, [])

    with pytest.raises(ZeroDivisionError, match="in the second share"):
        ask()
    updates.join()
    assert not is_pending(weights)
    len(optimizer.state)


def test_a_step_behind_a_failed_one_does_not_happen() -> None:
    weights, others = make_weights(), make_weights(1)
    optimizer, updates = break_update(weights)
    fill_gradients(others, 0)
    old = [w.detach().clone() for w in others]
    updates.start(o.SGD(others, lr=0.1), [])
    optimizer.gates[weights[0].data_ptr()].set()
    with pytest.raises(ZeroDivisionError):
        updates.wait()
    assert_identical([w.detach() for w in others], old)
    assert not is_pending([*weights, *others])


def test_without_a_thread_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            updates.start(o.SGD(weights, lr=0.1), [])
    assert not is_pending(weights)
    assert_identical([w.detach() for w in weights], [w.detach() for w in make_weights()])
    updates.wait()
    updates.start(o.SGD(weights, lr=0.1), [])
    updates.wait()
    assert not torch.equal(weights[0].detach(), make_weights()[0].detach())


def test_ctrl_c_while_the_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has the shares already: the update happens, and is waited for."""
    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)
    original = threading.Event.wait
    main = threading.current_thread()

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        found = original(self, timeout)
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            updates.start(o.SGD(weights, lr=0.1), [])
    updates.wait()
    assert not is_pending(weights)
    # Either nothing happened or everything.
    changed = [not torch.equal(w, old) for w, old in zip(weights, make_weights(), strict=True)]
    assert len(set(changed)) == 1


def test_who_waits_does_not_forget_an_update_that_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another thread waits while the Trainer's takes the next step."""
    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)
    blocker, gate = make_blocker()
    original, begun = threading.Thread.join, []

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        original(self, timeout)
        if not begun:
            begun.append(True)
            updates.start(blocker, [])

    updates.start(o.SGD(weights, lr=0.1), [])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", join)
        updates.wait()
    thread, found = outcome_of(lambda: len(blocker.state))
    assert not found
    gate.set()
    thread.join(_TIMEOUT_S)
    assert found == [1]


def test_an_update_that_waits_for_itself_is_an_error() -> None:
    class Coupled(o.SGD):
        is_separable = True  # which is not true

        def __init__(self, weights: list[nn.Parameter]) -> None:
            super().__init__(weights, lr=0.1)
            self.all = weights

        def step(self, closure: Any = None) -> Any:
            self.norm = sum(w.norm() for w in self.all)
            return super().step(closure)

    weights = make_weights()
    fill_gradients(weights, 0)
    updates = Updates(1)
    updates.start(Coupled(weights), [])
    with pytest.raises(RuntimeError, match="in another way than through its param_groups"):
        updates.wait()
    assert not is_pending(weights)


# --- what is not taken apart ---------------------------------------------------------------------------------------


class Custom(o.SGD):
    pass


class Separable(o.SGD):
    is_separable = True


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


def test_optimizers_of_others_can_say_that_they_are_separable(updates: Updates) -> None:
    def make(groups: list[Any]) -> torch.optim.Optimizer:
        return Separable(groups, lr=0.1, momentum=0.9)

    assert_identical(train(make, updates), train(make, None))


@pytest.mark.parametrize("register", ["register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"])
def test_hooks_of_all_optimizers_are_respected(register: str) -> None:
    optimizer = o.SGD(make_weights(), lr=0.1)
    handle = getattr(optimizer_module, register)(lambda *args: None)
    try:
        assert why_not_separable(optimizer) == "hooks are registered on the step of SGD"
    finally:
        handle.remove()
    assert why_not_separable(optimizer) is None
