"""Units that run out of the memory of a device are run once more where nothing of the first run is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices.device import Device
from lightning_roundpipe.devices.memory import DeviceMemory
from lightning_roundpipe.devices.pool import DevicePool
from tests.support.engine.lazy_link import LazyLink, cpu_pool
from tests.support.engine.visited_units import (
    KEPT,
    NUM_MICROBATCHES,
    NUM_STEPS,
    RECOMPUTED,
    Network,
    Unit,
    Visits,
    train,
)


class Trouble:
    """Raises at a visit, and perhaps at those that follow; 0 for never."""

    def __init__(self, at: int = 0, num_errors: int = 1) -> None:
        self.errors = range(at, at + num_errors) if at else range(0)
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls in self.errors:
            raise torch.OutOfMemoryError("the device is full")


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


def results(visits: Visits, unit: int = RECOMPUTED, change: Callable[[Network], None] | None = None) -> dict[str, Any]:
    """What some steps give on two devices with copies; see :func:`train`."""
    pool = cpu_pool(2, copies=True)
    found = train(pool, visits, unit, change)
    assert [device.memory.used for device in pool.devices] == [0, 0]
    return found


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
    for at in sorted({1, num_visits // 2, num_visits}):
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
