"""Units that run out of the memory of a device are run once more where nothing of the first run is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.devices import Device
from lightning_roundpipe.devices.memory import DeviceMemory
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest
from tests.support.engine.lazy_link import LazyLink, cpu_pool
from tests.support.engine.partitions import two_calls_fused

WIDTH, NUM_UNITS, NUM_MICROBATCHES, NUM_STEPS = 3, 4, 3, 2
# The plan has two stages for each of the first two units, and one for the others, whose graphs it keeps.
RECOMPUTED, KEPT = 0, 3


class Trouble:
    """Raises when it is called for the last time of the given ones; 0 for never."""

    def __init__(self, at: int = 0, num_errors: int = 1) -> None:
        self.errors = range(at, at + num_errors) if at else range(0)
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls in self.errors:
            raise torch.OutOfMemoryError("the device is full")


class Visit(torch.autograd.Function):
    """Calls what it is given on the way forward, or on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> Tensor:
        ctx.backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.backward()
        return gradients[0], None, None


class Unit(nn.Module):
    """Draws random numbers, writes buffers and attributes; may run out of memory before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)
        self.num_runs = 0
        self.visits: dict[str, Callable[[], None]] = {}

    def visit(self, place: str, x: Tensor) -> Tensor:
        nothing = Trouble()
        visited: Tensor = Visit.apply(
            x, self.visits.get(f"forward {place}", nothing), self.visits.get(f"backward {place}", nothing)
        )
        return visited

    def forward(self, x: Tensor) -> Tensor:
        x = self.visit("start", x)
        x = x + torch.tanh(self.first(self.norm(x)))
        self.num_runs = self.num_runs + 1
        x = self.visit("middle", self.dropout(x))
        return self.visit("end", self.second(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(NUM_UNITS))

    def step(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.square().mean()


@pytest.fixture
def made_room(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """The devices that were asked for room."""
    asked: list[Device] = []
    make_room = Device.make_room

    def note(device: Device) -> None:
        assert device._busy.locked(), "replicas of other threads would be touched"
        asked.append(device)
        make_room(device)

    monkeypatch.setattr(Device, "make_room", note)
    return asked


Visits = dict[str, Callable[[], None]]


def results(visits: Visits, unit: int = RECOMPUTED, change: Callable[[Network], None] | None = None) -> dict[str, Any]:
    """What some steps give; the first one is recorded on one device.

    Args:
        visits: what is called, by place, in the unit with this index.
        change: is made to the network before.
    """
    pool = cpu_pool(2, copies=True)
    found = train(pool, visits, unit, change)
    assert [device.memory.used for device in pool.devices] == [0, 0]
    return found


def train(pool: DevicePool, visits: Visits, unit: int, change: Callable[[Network], None] | None) -> dict[str, Any]:
    torch.manual_seed(0)
    network = Network()
    if change is not None:
        change(network)
    batches = list(torch.randn(4 * NUM_MICROBATCHES, WIDTH, dtype=torch.float64).chunk(NUM_MICROBATCHES))
    network.units[unit].visits = visits  # type: ignore[assignment]
    engine = Engine(network, pool, two_calls_fused, num_threads=1)
    names = {parameter: name for name, parameter in network.named_parameters()}
    found: dict[str, Any] = {}
    try:
        for step in range(NUM_STEPS):
            weights = [1 / NUM_MICROBATCHES] * NUM_MICROBATCHES
            result = engine.run(StepRequest(network.step, batches, weights, "train", step, loss_of=lambda loss: loss))
            found |= {f"loss {step} {i}": loss.detach() for i, loss in enumerate(result.outputs)}
            found |= {f"gradient {step} {names[p]}": gradient for p, gradient in result.gradients.items()}
    finally:
        engine.close()
    found |= dict(network.named_buffers())
    return found | {f"runs of {i}": torch.tensor(unit.num_runs) for i, unit in enumerate(network.units)}


def count(place: str, unit: int = RECOMPUTED) -> int:
    """How often a place is visited in all steps."""
    trouble = Trouble()
    results({place: trouble}, unit)
    return trouble.num_calls


@pytest.mark.parametrize("unit", [RECOMPUTED, KEPT])
@pytest.mark.parametrize("place", ["forward start", "forward middle", "forward end"])
def test_a_forward_or_recomputation_is_run_once_more_with_the_same_results(
    place: str, unit: int, made_room: list[Device]
) -> None:
    right = results({})
    num_visits = count(place, unit)
    for at in sorted({1, 2, num_visits // 2, num_visits - 1, num_visits}):
        made_room.clear()
        trouble = Trouble(at)
        torch.testing.assert_close(results({place: trouble}, unit), right, rtol=0, atol=0)
        assert len(made_room) == 1
        assert trouble.num_calls == num_visits + 1


def test_a_backward_that_has_added_nothing_is_run_once_more(made_room: list[Device]) -> None:
    right = results({})
    for at in (1, 2, NUM_STEPS * NUM_MICROBATCHES):
        made_room.clear()
        found = results({"backward end": Trouble(at)})
        torch.testing.assert_close(found, right, rtol=0, atol=0)
        assert len(made_room) == 1


def test_a_backward_that_has_used_up_a_kept_graph_is_not_run_once_more(made_room: list[Device]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        results({"backward end": Trouble(NUM_STEPS * NUM_MICROBATCHES)}, KEPT)
    assert made_room == []


def test_a_backward_that_has_added_to_a_gradient_is_not_run_once_more(made_room: list[Device]) -> None:
    """That of the first micro-batch in a stage run has added to none: what it has made is dropped."""
    last = NUM_STEPS * NUM_MICROBATCHES
    right = results({})
    torch.testing.assert_close(results({"backward middle": Trouble(last - 2)}), right, rtol=0, atol=0)
    assert len(made_room) == 1
    for at in (last - 1, last):
        made_room.clear()
        with pytest.raises(torch.OutOfMemoryError):
            results({"backward middle": Trouble(at)})
        assert made_room == []


@pytest.mark.parametrize("place", ["forward middle", "backward end"])
def test_the_second_error_is_raised(place: str, made_room: list[Device]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        results({place: Trouble(1, num_errors=2)})
    assert len(made_room) == 1


def test_hooks_of_the_user_do_not_run_twice(made_room: list[Device]) -> None:
    shown: list[Tensor] = []

    def hooked(network: Network) -> None:
        network.units[RECOMPUTED].first.register_forward_hook(lambda module, args, output: shown.append(output))

    results({}, change=hooked)
    num_shown = len(shown)
    shown.clear()
    with pytest.raises(torch.OutOfMemoryError):
        results({"forward middle": Trouble(1)}, change=hooked)  # the hook has run before
    assert len(shown) == 1
    assert made_room == []
    shown.clear()
    results({"forward start": Trouble(1)}, change=hooked)
    assert len(shown) == num_shown
    assert len(made_room) == 1


class InPlace(Unit):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return super().forward(x)


def test_an_argument_that_was_changed_in_place_cannot_be_put_back(made_room: list[Device]) -> None:
    def change(network: Network) -> None:
        network.units[1] = InPlace()

    right = results({}, 1, change)
    with pytest.raises(torch.OutOfMemoryError):
        results({"forward start": Trouble(1)}, 1, change)
    assert made_room == []
    # A recomputation has a copy of its own.
    found = results({"forward start": Trouble(count("forward start", 1))}, 1, change)
    torch.testing.assert_close(found, right, rtol=0, atol=0)
    assert len(made_room) == 1


def test_devices_that_share_the_memory_of_the_host_have_no_room_to_make(made_room: list[Device]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(cpu_pool(2), {"forward start": Trouble(5)}, RECOMPUTED, None)
    assert made_room == []


def test_room_is_made_of_what_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights stay from step to step; a unit that has no room gets theirs."""

    def freeze(network: Network) -> None:
        for unit in network.units[1:]:
            unit.requires_grad_(False)

    used: list[tuple[int, int]] = []
    make_room = DeviceMemory.make_room

    def note(memory: DeviceMemory) -> None:
        before = memory.used
        make_room(memory)
        used.append((before, memory.used))

    monkeypatch.setattr(DeviceMemory, "make_room", note)
    pool = DevicePool([torch.device("cpu")], link=LazyLink(), memory_limit=2**20)
    train(pool, {"forward start": Trouble(count("forward start") // 2 + 1)}, RECOMPUTED, freeze)
    ((before, after),) = used
    assert after < before
