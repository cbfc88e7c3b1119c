"""Loose parameters on devices: one upload, one sum of gradients, nothing stale, nothing left on the books."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.device import Device
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.devices.virtual import VirtualDevice
from lightning_roundpipe.usercode import loose_parameters as loose_parameters
from lightning_roundpipe.usercode.lock import UserCodeState
from lightning_roundpipe.usercode.loose_parameters import LooseParameters
from tests.support.engine.lazy_link import LazyLink, LazyTransfer
from tests.support.engine.steps import Steps
from tests.usercode.user_code import UserCode

ROWS, COLUMNS = 4, 3
NUM_BYTES = ROWS * COLUMNS * 4


@pytest.fixture
def make_step() -> Iterator[Callable[..., UserCode]]:
    """Makes user code on lazy devices, which runs until the test ends."""
    with contextlib.ExitStack() as stack:

        def make(num_devices: int = 2, memory_limit: int | None = None) -> UserCode:
            devices = [VirtualDevice(i, link=LazyLink(), memory_limit=memory_limit) for i in range(num_devices)]
            return stack.enter_context(UserCode(*devices).running())

        yield make


@pytest.fixture
def step(make_step: Callable[..., UserCode]) -> UserCode:
    return make_step()


@pytest.fixture(autouse=True)
def sums_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a parameter of a MiB."""
    monkeypatch.setattr(loose_parameters, "LARGE_BYTES", NUM_BYTES)


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, COLUMNS))


def test_uses_on_a_device_share_one_copy(step: UserCode, weight: nn.Parameter) -> None:
    uses = [step.use(weight), step.use(weight), step.use(weight, tracks=False)]
    assert step.uploaded == [NUM_BYTES, 0]
    for used in uses:
        torch.testing.assert_close(used, weight, rtol=0, atol=0)
        assert used.data_ptr() == uses[0].data_ptr()
        assert used.data_ptr() != weight.data_ptr()
    assert [used.requires_grad for used in uses] == [True, True, False]
    step.use(weight, 1)
    assert step.uploaded == [NUM_BYTES, NUM_BYTES]


def test_gradients_add_up_on_the_device_and_go_home_once(step: UserCode, weight: nn.Parameter) -> None:
    factors = [torch.randn(ROWS, COLUMNS) for _ in range(3)]
    for factor in factors:
        step.backward((step.use(weight) * factor).sum() + (step.use(weight) * factor).sum())
        assert weight.grad is None
    step.backward((step.use(weight, 1) * factors[0]).sum())
    assert step.downloaded == [0, 0]
    step.parameters.send_sums()
    assert step.downloaded == [NUM_BYTES, NUM_BYTES]
    for _ in range(2):  # each of several stage runs brings a sum
        step.backward(step.use(weight).sum())
        step.parameters.end_stage_run(step.devices[0])
    assert step.downloaded == [3 * NUM_BYTES, NUM_BYTES]
    gradients = step.gradients.take()
    torch.testing.assert_close(gradients, {weight: 2 * sum(factors) + factors[0] + 2})


def test_the_sum_does_not_change_a_gradient_that_autograd_holds(step: UserCode, weight: nn.Parameter) -> None:
    """Both uses get the same tensor as their gradient."""
    other = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    step.backward((step.use(weight) + step.use(other) + step.use(weight)).sum())
    step.parameters.send_sums()
    gradients = step.gradients.take()
    torch.testing.assert_close(gradients[weight], torch.full((ROWS, COLUMNS), 2.0))
    torch.testing.assert_close(gradients[other], torch.ones(ROWS, COLUMNS))


def test_backward_of_the_user_finds_its_gradient_at_the_master(step: UserCode, weight: nn.Parameter) -> None:
    loss = step.use(weight).square().sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    torch.testing.assert_close(gradient, 2 * weight)
    (second,) = torch.autograd.grad(gradient.sum(), weight)
    torch.testing.assert_close(second, torch.full_like(weight, 2.0))
    step.parameters.send_sums()
    assert step.gradients.take() == {}


def test_a_master_changed_in_place_is_uploaded_anew(step: UserCode, weight: nn.Parameter) -> None:
    before = weight.detach().clone()
    first = step.use(weight)
    step.parameters.before_write([weight])
    with torch.no_grad():
        weight.mul_(2)
    second = step.use(weight)
    torch.testing.assert_close(second, weight, rtol=0, atol=0)
    torch.testing.assert_close(first, before, rtol=0, atol=0)  # a graph leads through it: it stays
    step.parameters.end_stage_run(step.devices[0])
    step.backward((first * second).sum())
    del first, second
    step.parameters.send_sums()
    torch.testing.assert_close(step.gradients.take(), {weight: before + 2 * before})
    assert step.booked == [0, 0]


def test_a_write_waits_for_the_upload_that_reads(step: UserCode, weight: nn.Parameter) -> None:
    """On a GPU the wait for an upload holds back the stream, not the host, so the master may still be read."""
    before = weight.detach().clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyTransfer, "wait", lambda transfer, edge: transfer.tensors)
        used = step.use(weight)
    assert used.isnan().all()
    step.parameters.before_write([weight])
    with torch.no_grad():
        weight.zero_()
    torch.testing.assert_close(used, before, rtol=0, atol=0)


@pytest.mark.usefixtures("without_collector")
def test_copies_are_given_up_when_no_graph_leads_through_them(step: UserCode, weight: nn.Parameter) -> None:
    loss = step.use(weight).square().sum()
    step.parameters.end_stage_run(step.devices[0])
    assert step.booked == [2 * NUM_BYTES, 0]
    step.backward(loss)
    del loss
    step.parameters.end_stage_run(step.devices[1])
    assert step.booked == [2 * NUM_BYTES, 0]
    step.parameters.end_stage_run(step.devices[0])
    step.gradients.take()
    assert step.booked == [0, 0]
    step.use(weight)
    assert step.uploaded == [2 * NUM_BYTES, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_copy_stays_while_there_are_views_of_it(
    step: UserCode, weight: nn.Parameter, mode: Callable[[], Any]
) -> None:
    """As ``position.expand_as(h)`` that an evaluation adds in later stages, too."""
    with mode():
        view = step.use(weight, tracks=False).expand(2, ROWS, COLUMNS)
    step.parameters.end_stage_run(step.devices[0])
    torch.testing.assert_close(view[1], weight.detach(), rtol=0, atol=0)
    assert step.booked == [NUM_BYTES, 0]
    del view
    step.parameters.end_stage_run(step.devices[0])
    assert step.booked == [0, 0]


def test_what_is_given_up_is_poisoned(step: UserCode, weight: nn.Parameter) -> None:
    with torch.no_grad():
        kept = step.use(weight, tracks=False).detach()  # shares the memory, and is no view
    step.parameters.end_stage_run(step.devices[0])
    assert kept.isnan().all()


def test_a_copy_and_the_sum_of_its_gradients_are_on_the_books(
    make_step: Callable[..., UserCode], weight: nn.Parameter
) -> None:
    step = make_step(1, 2 * NUM_BYTES)
    step.use(weight, tracks=False)
    assert step.devices[0].memory.peaks["weights"] == NUM_BYTES
    assert step.devices[0].memory.peaks["gradients"] == 0
    step.use(weight)
    assert step.devices[0].memory.peaks["gradients"] == NUM_BYTES
    other = nn.Parameter(torch.zeros(1))
    with pytest.raises(DeviceOutOfMemoryError, match="weights do not fit"):
        step.use(other)
    step.parameters.drop()
    assert step.booked == [0]
    step.use(other)


@pytest.mark.parametrize("what", ["upload", "gradients"])
def test_a_use_that_fails_leaves_nothing_behind(
    make_step: Callable[..., UserCode], weight: nn.Parameter, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    step = make_step(1, NUM_BYTES)  # no room for the sum
    if what == "upload":
        monkeypatch.setattr(VirtualDevice, "upload", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError if what == "upload" else DeviceOutOfMemoryError):
        step.use(weight)
    step.parameters.drop()
    assert step.booked == [0]


@pytest.mark.parametrize("why", ["no micro-batch", "inside a hook of a unit", "inside a backward"])
def test_a_thread_that_must_not_wait_uses_what_is_there(step: UserCode, weight: nn.Parameter, why: str) -> None:
    device = step.devices[0]

    def use() -> Tensor | None:
        state = None if why == "no micro-batch" else step.state
        step.state.call_unit = None if why == "inside a hook of a unit" else step.state.call_unit
        step.loose.is_walking = why == "inside a backward"
        return step.parameters.use(weight, device, state, step.loose, tracks=True)

    call_unit = step.state.call_unit
    with device.occupied():  # a wait for it would never end
        assert use() is None
    step.state.call_unit, step.loose.is_walking = call_unit, False
    step.use(weight)
    with device.occupied():
        assert use() is not None


def test_other_user_code_may_run_during_the_upload(step: UserCode, weight: nn.Parameter) -> None:
    """Who holds the device may want the user-code lock."""
    other = UserCodeState(1, 0)
    seen = []
    occupied = step.devices[0].occupied

    def watch() -> object:
        step.lock.acquire(other)
        seen.append(True)
        step.lock.release(other)
        return occupied()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step.devices[0], "occupied", watch)
        step.use(weight)
    assert seen == [True]
    step.lock.release(step.state)
    step.lock.acquire(step.state)


@pytest.mark.parametrize("what", ["sparse", "small"])
def test_gradients_that_have_no_sum_go_home_when_the_backward_ends(
    step: UserCode, weight: nn.Parameter, what: str
) -> None:
    if what == "sparse":
        step.backward(nn.functional.embedding(torch.tensor([0, 2, 2]), step.use(weight), sparse=True).sum())
        wanted = torch.tensor([1.0, 0.0, 2.0, 0.0])[:, None].expand(ROWS, COLUMNS)
    else:
        weight = nn.Parameter(torch.randn(ROWS))
        for _ in range(2):
            step.backward((step.use(weight) * step.use(weight)).sum())
        wanted = 4 * weight.detach()
        assert step.devices[0].memory.peaks["gradients"] == 0
    assert weight.grad is None
    gradients = step.gradients.take()
    assert list(gradients) == [weight]
    assert gradients[weight].is_sparse is (what == "sparse")
    torch.testing.assert_close(gradients[weight].to_dense(), wanted)
    step.parameters.send_sums()
    assert step.gradients.take() == {}


def test_gradients_of_a_small_parameter_do_not_depend_on_which_use_was_where(
    make_step: Callable[..., UserCode],
) -> None:
    """Bit for bit: they are added in the order of the uses."""
    weight = nn.Parameter(torch.randn(ROWS))
    factors = [torch.randn(ROWS) * 10.0**i for i in range(5)]
    found = []
    for places in ([0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [1, 0, 0, 1, 0]):
        step = make_step()
        uses = [step.use(weight, place) for place in places]
        step.backward(torch.stack([(use * factor).sum() for use, factor in zip(uses, factors, strict=True)]).sum())
        found.append(step.gradients.take()[weight])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Model(nn.Module):
    """Two units, and a head whose weight is used in user code; tells what is on the device in each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS) for _ in range(2))
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return nn.functional.linear(x, self.head.weight).square().mean()

    def keep_graph(self, x: Tensor) -> Tensor:
        self.kept = self(x)
        return self.kept * 1

    def fail(self, x: Tensor) -> Tensor:
        self(x)
        raise ValueError("after the use")


def steps() -> Steps:
    """Of a model on one device that has copies of its own."""
    return Steps(Model(), copies=True)


def batches(seed: int = 0) -> list[Tensor]:
    return list(torch.randn(6, 2, COLUMNS, generator=torch.Generator().manual_seed(seed)))


def test_a_copy_goes_with_the_stage_run_that_needed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    end_stage_run = LooseParameters.end_stage_run

    def noting(parameters: LooseParameters, device: Device) -> None:
        before = len(parameters._copies)
        end_stage_run(parameters, device)
        left.append(before - len(parameters._copies))

    monkeypatch.setattr(LooseParameters, "end_stage_run", noting)
    run = steps()
    run.train(batches())
    left.clear()
    run.train(batches())
    assert left == [0, 1, 0]  # F, fused, B


@pytest.mark.parametrize("name", ["forward", "keep_graph"])
def test_gradients_of_a_step_are_those_of_a_plain_loop(name: str) -> None:
    """Also if the user keeps the graph that leads through the copy."""
    run = steps()
    parameters = list(run.model.parameters())
    for seed in range(2):
        found = run.train(batches(seed), function=getattr(run.model, name)).gradients
        loss = torch.stack([run.model(batch) for batch in batches(seed)]).mean()
        torch.testing.assert_close(found, dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True)))
        assert run.pool[0].memory.used == 0


def test_a_step_that_fails_leaves_nothing_on_the_books() -> None:
    run = steps()
    run.train(batches())
    with pytest.raises(ValueError, match="after the use"):
        run.train(batches(), function=run.model.fail)
    assert run.pool[0].memory.used == 0
    run.train(batches())
