"""Operands on several devices, with ``meta`` as the device of the current stage: the logic needs two devices, not a
GPU.

Values are checked on virtual devices that have copies of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.common.attributes import UnitWrites
from lightning_roundpipe.devices.device import Device
from lightning_roundpipe.devices.memory import DeviceMemory
from lightning_roundpipe.devices.transfer import DirectLane, Done
from lightning_roundpipe.devices.virtual import VirtualDevice
from lightning_roundpipe.usercode import loose_parameters as loose_parameters
from lightning_roundpipe.usercode.implicit_transfers import put_on_mode, take_off_mode
from lightning_roundpipe.usercode.lock import entered
from tests.support.engine.lazy_link import LazyLink
from tests.usercode.user_code import UserCode

STAGE = torch.device("meta")
HOST = torch.device("cpu")


class Down(DirectLane):
    """What comes from the stand-in has no values: it gets some."""

    def submit(self, sources: Sequence[Tensor], **options: Any) -> Done:
        return Done([torch.full(source.shape, 2.0) for source in sources])


class Gpu(Device):
    """Looks like one, and computes nothing."""

    def __init__(self) -> None:
        super().__init__(0, STAGE, DirectLane(STAGE), Down(HOST), DeviceMemory("a GPU"))

    def stamp(self) -> float:
        return 0.0

    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        return end - start


def run(user_code: UserCode) -> Iterator[UserCode]:
    with user_code.running(), entered(user_code.state), user_code.mode:
        yield user_code


@pytest.fixture
def user_code() -> Iterator[UserCode]:
    """User code on something like a GPU; the mode is on."""
    yield from run(UserCode(Gpu()))


@pytest.fixture
def on_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[UserCode]:
    """User code on a virtual device, where one can see what is computed with; the mode is on."""
    monkeypatch.setattr(loose_parameters, "LARGE_BYTES", 0)
    yield from run(UserCode(VirtualDevice(0, link=LazyLink())))


@pytest.fixture
def on_host() -> Tensor:
    return torch.ones(3, 4)


@pytest.fixture
def on_stage() -> Tensor:
    return torch.ones(3, 4, device=STAGE)


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 4))


PLACES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.device]] = {
    "loss": (F.mse_loss, STAGE),
    "joined": (lambda host, stage: torch.cat([host, stage]), STAGE),
    "on the host": (lambda host, stage: host + host, HOST),
    "moved by the user": (lambda host, stage: host.to(STAGE), STAGE),
    "index": (lambda host, stage: stage[torch.tensor([0, 2])], STAGE),
    "scalar": (lambda host, stage: stage * torch.tensor(2.0), STAGE),
    "scalar of the stage": (lambda host, stage: host * stage.sum(), STAGE),  # torch knows scalars of the host only
    "stacked scalars": (lambda host, stage: torch.stack([torch.tensor(2.0), stage.sum()]), STAGE),
    "lengths stay": (lambda host, stage: pack_padded_sequence(stage[None], torch.tensor([3]), True).batch_sizes, HOST),
    "made there": (lambda host, stage: torch.tensor([1.0], device=stage.device), STAGE),
    "brought home": (lambda host, stage: stage.cpu(), HOST),
    "like another": (lambda host, stage: host.type_as(stage), STAGE),
    "written by name": (lambda host, stage: nn.init.kaiming_uniform_(host), HOST),  # torch says `tensor=` again
    "stacked on the host": (lambda host, stage: torch.stack([torch.tensor(2.0), host.sum()]), HOST),
}


@pytest.mark.usefixtures("user_code")
@pytest.mark.parametrize(("function", "device"), PLACES.values(), ids=PLACES)
def test_a_result_is_where_its_operands_meet(
    function: Callable[[Tensor, Tensor], Tensor], device: torch.device, on_host: Tensor, on_stage: Tensor
) -> None:
    assert function(on_host, on_stage).device == device


@pytest.mark.usefixtures("user_code")
def test_an_in_place_function_keeps_its_target_where_it_is(on_host: Tensor, on_stage: Tensor) -> None:
    target = torch.zeros(3, 4, device=STAGE)
    assert target.add_(on_host).device == STAGE
    target[0] = torch.ones(4)
    target += on_host
    assert target.device == STAGE
    on_host.add_(on_stage)
    on_host[0] = on_stage[0]
    torch.add(on_host, on_stage, out=on_host)
    assert on_host.tolist() == [[4.0] * 4, [5.0] * 4, [5.0] * 4]


def test_what_user_code_moves_goes_through_the_lanes(user_code: UserCode, on_host: Tensor) -> None:
    """An operand once, for all functions; what is asked for by name each time, because it may be changed."""
    stage = torch.ones(3, 4, device=STAGE)
    for _ in range(2):
        F.mse_loss(on_host, stage)
    assert user_code.uploaded == [on_host.nbytes]
    first, second = on_host.to(stage), on_host.to(STAGE, torch.float64)
    assert user_code.uploaded == [3 * on_host.nbytes]
    assert first.dtype == torch.float32
    assert second.dtype == torch.float64
    assert stage.sum().item() == 2.0  # what the lane of the stand-in brings


@pytest.mark.usefixtures("user_code")
def test_the_move_is_part_of_the_graph(on_stage: Tensor) -> None:
    assert (on_stage * torch.ones(4, requires_grad=True)).requires_grad
    assert (on_stage * nn.Parameter(torch.ones(4))).requires_grad


def test_inside_a_unit_nothing_is_moved(user_code: UserCode, on_host: Tensor, on_stage: Tensor) -> None:
    user_code.state.unit_writes = UnitWrites()
    with pytest.raises(RuntimeError, match="device"):
        F.mse_loss(on_host, on_stage)
    user_code.state.unit_writes = None


def test_inside_the_engine_nothing_is_moved(user_code: UserCode, on_host: Tensor, on_stage: Tensor) -> None:
    with user_code.lock.released(user_code.state), pytest.raises(RuntimeError, match="device"):
        F.mse_loss(on_host, on_stage)


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_in_a_unit_the_mode_is_on_for_hooks_alone(
    user_code: UserCode, on_host: Tensor, on_stage: Tensor, is_exclusive: bool
) -> None:
    lock, state = user_code.lock, user_code.state
    state.unit_writes = UnitWrites()
    with lock.released(state), lock.exclusive() if is_exclusive else contextlib.nullcontext():
        take_off_mode(state)
        assert state.mode is user_code.mode
        with lock.in_user_code(state):
            assert F.mse_loss(on_host, on_stage).device == STAGE
        assert torch._C._len_torch_function_stack() == 0
        put_on_mode(state)
    state.unit_writes = None
    assert F.mse_loss(on_host, on_stage).device == STAGE


def test_the_mode_stays_under_modes_of_the_user(user_code: UserCode) -> None:
    class OfTheUser(TorchFunctionMode):
        pass

    state = user_code.state
    with OfTheUser():
        take_off_mode(state)
        assert state.mode is None
    take_off_mode(state)
    assert state.mode is user_code.mode
    put_on_mode(state)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w,
    "transposed": lambda w: w.t().t(),
    "unsqueezed": lambda w: w.unsqueeze(0)[0],
    "most of it": lambda w: w[:4].expand(2, 4, 4)[0],
    "expanded": lambda w: w[0].expand(5, 4),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_parameter_travels_once(user_code: UserCode, weight: nn.Parameter, view: Callable[[Tensor], Tensor]) -> None:
    for _ in range(3):
        shown = view(weight)
        assert torch.mul(shown, torch.ones(shown.shape, device=STAGE)).device == STAGE
    assert user_code.uploaded == [5 * 4 * 4]


def test_a_small_part_of_a_parameter_travels_by_itself(user_code: UserCode, weight: nn.Parameter) -> None:
    assert (weight[0] * torch.ones(4, device=STAGE)).device == STAGE
    assert user_code.uploaded == [4 * 4]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_views_of_a_parameter_have_its_values_and_give_it_their_gradients(
    on_copies: UserCode, view: Callable[[Tensor], Tensor], order: str
) -> None:
    values = torch.randn(5, 4) if order == "contiguous" else torch.randn(4, 5).t()
    weight, other = nn.Parameter(values.clone()), values.clone().requires_grad_()
    factor = torch.randn(view(other).shape)
    expected = (view(other) * factor).square().sum()
    expected.backward()
    loss = (view(weight) * factor).square().sum()
    assert on_copies.uploaded == [5 * 4 * 4]
    torch.testing.assert_close(loss, expected)
    on_copies.backward(loss)
    on_copies.parameters.send_sums()
    torch.testing.assert_close(on_copies.gradients.take(), {weight: other.grad})


def test_without_a_graph_views_of_a_parameter_use_one_copy(on_copies: UserCode, weight: nn.Parameter) -> None:
    with torch.no_grad():
        out = weight[:4] * torch.ones(4, 4) + weight.t()[:, :4].t() * torch.ones(4, 4)
    assert not out.requires_grad
    torch.testing.assert_close(out, 2 * weight.detach()[:4])
    assert on_copies.uploaded == [5 * 4 * 4]


def test_a_hook_on_a_view_of_a_parameter_runs_once(on_copies: UserCode, weight: nn.Parameter) -> None:
    seen: list[Tensor] = []
    view = weight.t()
    view.register_hook(seen.append)
    (view * torch.ones(4, 5)).sum().backward()
    assert len(seen) == 1


def test_what_only_concerns_parameters_stays_on_the_host(on_copies: UserCode, weight: nn.Parameter) -> None:
    penalty = weight.square().sum() + torch.ones(4).sum()
    assert on_copies.uploaded == [0]
    penalty.backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())


def test_changes_in_place_hit_the_master(on_copies: UserCode, weight: nn.Parameter) -> None:
    values = weight.detach().clone()
    ones = torch.ones(5, 4)
    torch.testing.assert_close(weight * ones, values)
    with torch.no_grad():
        weight.clamp_(max=0.1)
        weight.mul_(ones * 2)
        weight[0] = torch.ones(4)
        weight -= ones
        torch.add(weight, ones, out=weight)
        torch._foreach_add_([weight], [ones])
        weight[1].zero_()
    expected = values.clamp(max=0.1) * 2 + 1
    expected[0], expected[1] = 2.0, 0.0
    torch.testing.assert_close(weight.detach().clone(), expected)
    torch.testing.assert_close(weight * ones, expected)


WRITES: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "in place": lambda w, x: w.mul_(x),
    "operator": lambda w, x: w.__iadd__(x),
    "item": lambda w, x: w.__setitem__(0, x[0]),
    "out": lambda w, x: torch.add(x, x, out=w),
    "copy": lambda w, x: w.copy_(x),
    "list": lambda w, x: torch._foreach_mul_([w], 2.0),
    "view": lambda w, x: w[0].zero_(),
    "data": lambda w, x: w.data.zero_(),
    "data of a view": lambda w, x: w[0].data.zero_(),
    "other memory": lambda w, x: setattr(w, "data", x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_uploads_are_over_before_a_write(
    on_copies: UserCode, weight: nn.Parameter, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    told: list[nn.Parameter] = []
    on_copies.weights.append(weight)
    monkeypatch.setattr(on_copies.parameters, "before_write", told.extend)
    with torch.no_grad():
        weight + 1
        assert not told
        version = weight._version
        write(weight, torch.ones(5, 4))
    assert told
    assert all(parameter is weight for parameter in told)
    assert weight._version > version


def test_what_a_function_writes_comes_back(on_copies: UserCode, weight: nn.Parameter) -> None:
    with torch.no_grad():
        F.embedding(torch.tensor([0, 1]), weight, max_norm=0.1)
    assert weight.detach()[:2].norm(dim=1).max().item() <= 0.1 + 1e-6
    assert weight.detach()[2:].norm(dim=1).min().item() > 0.1


def test_running_statistics_come_back() -> None:
    """Batch norm writes them without raising their version."""
    mean, variance = torch.zeros(4), torch.ones(4)
    written: list[Tensor] = []
    for _ in run(UserCode(Gpu())):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "copy_", lambda tensor, other: written.append(tensor) or tensor)
            F.batch_norm(torch.ones(3, 4, device=STAGE), mean, variance, training=True)
    assert {id(tensor) for tensor in written} >= {id(mean), id(variance)}
