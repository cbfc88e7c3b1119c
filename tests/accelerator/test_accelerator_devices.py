"""Devices on simulated GPUs: when memory is free, how a step ends, and what a device, and ``roundpipe doctor``, say
about them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.accelerator import pool_statistics
from lightning_roundpipe.cli.machine_facts import collect, gpus, links, page_locking
from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.devices.gpu.driver import driver_of
from lightning_roundpipe.devices.gpu.lanes import GpuTransfer
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import Edge, Transfer
from tests.support.engine.whole_steps import FEATURES, results, right_results
from tests.support.page_locks import lock_in_place

pytestmark = pytest.mark.accelerator

MIB = 2**20


def there(size: int = 5) -> Tensor:
    return torch.ones(size, device="sim:0")


@pytest.fixture
def in_use(sim: ModuleType) -> Callable[[], int]:
    """Tells the bytes that the test has allocated."""
    gc.collect()
    before = sim.memory_allocated(0)
    return lambda: sim.memory_allocated(0) - before


def failed(device: GpuDevice, sim: ModuleType) -> Transfer:
    transfer = device.download([there()], "g")
    sim.synchronize(0)
    transfer.end(ValueError("broken"))
    return transfer


def broken() -> None:
    raise RuntimeError("illegal memory access")


# --- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_free_when_compute_and_a_transfer_have_passed(
    device: GpuDevice, sim: ModuleType, in_use: Callable[[], int]
) -> None:
    device.memory.reserve("gradients", 20)
    with sim.held():
        tensor = there()
        down = device.download([tensor], "g")
        passing = device.free([tensor], after=down)
        del tensor
        device.memory.release("gradients", 20, passing)
        assert not passing.is_done()
        assert device.memory.used == 20
        assert in_use() > 0
    device.memory.limit = 20
    device.memory.reserve("weights", 20)  # waits
    assert passing.is_done()
    assert down.is_done()
    assert in_use() == 0, "on the books as free, and still held"
    passing.await_done()


def test_memory_that_has_passed_is_given_up_with_the_next_one_or_at_the_end_of_a_step(
    device: GpuDevice, sim: ModuleType, in_use: Callable[[], int]
) -> None:
    with sim.held():
        device.free([there()])
        assert in_use() > 0
    sim.synchronize(0)
    device.free([])
    assert in_use() == 0
    sim._sleep(20_000)
    device.free([there()])
    device.close()
    assert in_use() == 0
    device.open()


def test_freed_memory_is_let_go_although_its_transfer_failed(
    device: GpuDevice, sim: ModuleType, in_use: Callable[[], int]
) -> None:
    down = failed(device, sim)
    with sim.held():
        passing = device.free([there()], after=down)
    with pytest.raises(ValueError, match="broken"):
        passing.await_done()
    assert passing.is_done()
    assert in_use() == 0


# --- steps -------------------------------------------------------------------------------------------------------


def test_a_step_ends_although_something_failed(device: GpuDevice, sim: ModuleType, in_use: Callable[[], int]) -> None:
    """Nothing is held afterwards, and what failed is raised to those who want it."""
    down = failed(device, sim)
    sim._sleep(20_000)
    for _ in range(2):
        device.free([there()], after=down)
    device.close()
    assert in_use() == 0
    device.open()
    device.download([there()], "g").when_done(Edge.FREED, broken)
    device.throttle()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.close()
    assert not device._begun, "it did not go on to the end"
    device.open()


def test_the_host_is_ahead_by_two_micro_batches(device: GpuDevice, sim: ModuleType) -> None:
    behind: list[Any] = []
    for begun in range(6):
        sim._sleep(2000)
        behind.append(driver_of("sim").record(sim.current_stream(0)))
        device.throttle()
        assert all(event.query() for event in behind[: max(begun - 1, 0)])
    device.close()
    device.open()
    with sim.held():  # what the step before has begun is forgotten
        device.throttle()
        device.throttle()


@contextlib.contextmanager
def slow_link(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GpuTransfer]]:
    """Nothing goes down until the host waits for it; gives what it has waited for. It may be ahead by 1 MiB."""
    monkeypatch.setattr(device.memory, "limit", 16 * MIB)
    settle, waited_for = GpuTransfer.settle, []
    with contextlib.ExitStack() as held:
        with torch.sim.stream(device.d2h._activations):
            held.enter_context(torch.sim.held())

        def note(transfer: GpuTransfer) -> None:
            waited_for.append(transfer)
            held.close()
            settle(transfer)

        with monkeypatch.context() as patch:
            patch.setattr(GpuTransfer, "settle", note)
            yield waited_for


@pytest.mark.parametrize(("num", "num_waited_for"), [(1, 0), (2, 1)])
def test_micro_batches_wait_for_a_slow_link_once_much_is_still_to_go_down(
    device: GpuDevice, monkeypatch: pytest.MonkeyPatch, num: int, num_waited_for: int
) -> None:
    """For what was made before the micro-batches that the host may be ahead by. What the step before has sent down does
    not count any more."""
    for _ in range(2):
        with slow_link(device, monkeypatch) as waited_for:
            downloads = [device.download([there(MIB // 4)], f"{number}") for number in range(num)]
            for _ in range(2):
                device.throttle()
                device.download([there(MIB)], "what the host is ahead by")
            device.throttle()
            assert waited_for == downloads[:num_waited_for]
        device.close()
        device.open()


@pytest.fixture
def pools() -> Iterator[Any]:
    """Makes pools of two devices on one GPU."""
    made: list[DevicePool] = []

    def make(limit: int | None = None) -> DevicePool:
        made.append(DevicePool([torch.device("sim", 0)] * 2, memory_limit=limit))
        return made[-1]

    yield make
    for pool in made:
        pool.dispose()


ALIKE = FEATURES - {"dropout"}  # which draws other numbers there


def assert_right(found: dict[str, Any]) -> None:
    torch.testing.assert_close({name: value.cpu() for name, value in found.items()}, right_results(ALIKE))


def test_after_a_failed_step_the_next_one_is_right_and_shows_its_transfers(pools: Any, sim: ModuleType) -> None:
    class Stop(Exception):
        pass

    def stop(x: Tensor) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise Stop

    calls: list[int] = []
    pool = pools()
    with pytest.raises(Stop):
        results(pool, features=ALIKE, watch=stop)
    assert [device.memory.used for device in pool.devices] == [0, 0]
    found = results(pool, features=ALIKE, trace=True)
    assert {"compute", "h2d", "d2h"} <= {span.kind for span in found.pop("spans")}
    assert_right(found)
    assert sim.stats()["races"] == 0


def test_a_step_keeps_to_a_limit(pools: Any) -> None:
    pool = pools()
    results(pool, features=ALIKE)
    peak = max(device.memory.peak for device in pool.devices)
    limited = pools()
    for device in limited.devices:  # of the books: what is allocated has other sizes
        device.memory.limit = peak - 1
    assert_right(results(limited, features=ALIKE))
    assert all(0 < device.memory.peak < peak for device in limited.devices)
    for device in limited.devices:
        device.memory.limit = 8
    with pytest.raises(DeviceOutOfMemoryError, match="device 0 on GPU 0"):
        results(limited, features=ALIKE)


# --- figures -----------------------------------------------------------------------------------------------------


def test_a_pool_that_cannot_be_made_leaves_no_limit(sim: ModuleType) -> None:
    before = sim.get_per_process_memory_fraction(0)
    with pytest.raises(RuntimeError):
        DevicePool([torch.device("sim", 0), torch.device("sim", 99)], memory_limit=2**28)
    assert sim.get_per_process_memory_fraction(0) == before


def test_stamps_tell_time_when_they_were_reached(device: GpuDevice, sim: ModuleType) -> None:
    start = device.stamp()
    with sim.held():
        end = device.stamp()
        assert device.elapsed_ms(start, end) is None
    sim.synchronize(0)
    elapsed = device.elapsed_ms(start, end)
    assert elapsed is not None
    assert elapsed > 0


def test_transfers_are_counted_and_traced_on_request(device: GpuDevice) -> None:
    device.upload([torch.randn(3)], "untraced").await_done()
    device.moved = moved = []
    device.upload([torch.randn(3)], "inputs a").await_done()
    device.download([there(10)], "gradients b", is_bulk=True).await_done()
    device.moved = None
    device.upload([torch.randn(3)], "untraced").await_done()
    assert [(m.lane, m.label) for m in moved] == [("h2d", "inputs a"), ("d2h", "gradients b")]
    for m in moved:
        elapsed = device.elapsed_ms(m.start, m.end)
        assert elapsed is not None
        assert elapsed >= 0
    with device.computing():
        pass
    found = device.statistics()
    assert (found["unit_runs"], found["h2d_bytes"], found["d2h_bytes"]) == (1, 36, 40)


def test_figures_of_a_pool(pools: Any, sim: ModuleType) -> None:
    allocated = sim.memory_allocated(0)
    pool = pools(MIB)
    sim.reset_peak_memory_stats(0)
    peak = sim.memory_allocated(0) + there(1000).untyped_storage().nbytes()
    weight = torch.ones(MIB)
    lock_in_place(pool.devices[0].page_locked, weight)
    found = pool_statistics(pool)
    assert found["device1.memory_limit_bytes"] == (2 * MIB - allocated - MIB // 2) // 2, "less a reserve"
    assert found["device1.peak_memory_bytes"] >= sim.max_memory_allocated(0) >= peak
    assert found["host.page_locked_in_place_bytes"] == pool.devices[1].page_locked.in_place_bytes > 3 * MIB
    assert {name.split(".")[0] for name in found} == {"device0", "device1", "host"}


def test_what_is_allocated_is_watched_without_the_loss_of_earlier_peaks(device: GpuDevice) -> None:
    there(MIB)
    peak = device.peak_memory_bytes
    idle, held = [there(MIB // 2)], there(MIB // 4)
    device.memory.evict = lambda: bool(idle and [device.free([idle.pop()])])
    taken = device.watch_allocator()
    there(MIB // 2)
    assert taken() == 2 * MIB
    assert not idle, "it would go while the allocator is watched"
    del held
    assert device.peak_memory_bytes == peak


def test_probes_of_gpus_know_all_of_them_and_leave_nothing(sim: ModuleType) -> None:
    gc.collect()
    before = sim.memory_allocated(0), sim.pinned_bytes()  # of tests before, which may let it go meanwhile
    facts, unknown = collect([gpus, links, page_locking])
    assert unknown == {}
    assert [gpu["device"] for gpu in facts["gpus"]] == [f"sim:{index}" for index in range(sim.device_count())]
    assert all(gpu["error"] is None for gpu in facts["gpus"])
    assert all(0 < gpu["free_bytes"] <= gpu["memory_bytes"] for gpu in facts["gpus"])
    for way in ("h2d_bytes_per_ms", "d2h_bytes_per_ms"):
        assert len(facts["links"][way]) == sim.device_count()
    assert facts["page_locking"]["tried_bytes"] > 0
    assert facts["page_locking"]["error"] == 0
    gc.collect()
    assert sim.memory_allocated(0) <= before[0]
    assert sim.pinned_bytes() <= before[1]


def test_a_gpu_that_cannot_compute_is_known_by_its_error(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr("torch.ones", fail)
    assert {gpu["error"] for gpu in gpus()} == {"RuntimeError: no kernel image is available"}
