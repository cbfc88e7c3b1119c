"""Copies with the host are late under CUDA's conditions, and block otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.accelerator

SIZE = 1000


def test_pinned_memory_is_copied_behind_the_work_before(sim: ModuleType) -> None:
    source, target = torch.ones(SIZE).pin_memory(), torch.zeros(SIZE).pin_memory()
    with sim.held():
        there = torch.empty(SIZE, device="sim:0").copy_(source, non_blocking=True)
        target.copy_(there, non_blocking=True)
        assert target.isnan().all(), "what the host may not read yet is poison"
    sim.synchronize(0)
    assert (target == 1).all()
    assert sim.stats()["blocking_copies"] == 0


def test_pinned_memory_that_is_freed_is_kept_until_its_copy_has_passed(sim: ModuleType) -> None:
    source = torch.ones(SIZE).pin_memory()
    address = source.data_ptr()
    with sim.held():
        there = torch.empty(SIZE, device="sim:0").copy_(source, non_blocking=True)
        del source
        others = [torch.empty(SIZE, pin_memory=True) for _ in range(3)]
        assert address not in [other.data_ptr() for other in others]
    assert (there.cpu() == 1).all()


def test_copy_to_the_host_that_does_not_block_goes_to_pinned_memory(sim: ModuleType) -> None:
    there = torch.ones(SIZE, device="sim:0")
    with sim.held():
        home = there.to("cpu", non_blocking=True)
        assert home.is_pinned()
    sim.synchronize(0)
    assert (home == 1).all()


@pytest.mark.parametrize(
    "copy",
    [
        lambda there, pinned, pageable: there.copy_(pageable, non_blocking=True),
        lambda there, pinned, pageable: there.copy_(pinned),
        lambda there, pinned, pageable: there.cpu(),
        lambda there, pinned, pageable: pageable.to("sim:0"),
        lambda there, pinned, pageable: there.copy_(pinned.double().pin_memory(), non_blocking=True),
        lambda there, pinned, pageable: there.view(2, 5).copy_(pinned.view(5, 2).t(), non_blocking=True),
        lambda there, pinned, pageable: pageable.copy_(there, non_blocking=True),
        lambda there, pinned, pageable: there[torch.tensor([1, 2])],
    ],
    ids=["pageable", "blocking", "cpu", "to", "cast", "strided", "home", "index"],
)
def test_copy_that_cannot_be_late_blocks_and_is_reported_with_its_line(
    copy: Callable[[Tensor, Tensor, Tensor], Tensor], sim: ModuleType
) -> None:
    there, pinned, pageable = torch.ones(10, device="sim:0"), torch.ones(10).pin_memory(), torch.ones(10)
    sim.reset_stats()
    with sim.traced() as reports:
        copy(there, pinned, pageable)
    assert sim.stats()["blocking_copies"] == 1
    ((kind, _, stack),) = reports
    assert kind == "blocking_copies"
    assert __name__.rpartition(".")[2] in stack


def test_value_that_is_read_counts_as_item(sim: ModuleType) -> None:
    assert torch.ones(10, device="sim:0").sum().item() == 10
    counts = sim.stats()
    assert (counts["item_syncs"], counts["blocking_copies"]) == (1, 0)


def test_registered_memory_is_copied_late(sim: ModuleType) -> None:
    memory = torch.zeros(SIZE)
    assert sim.host_register(memory.data_ptr(), memory.nbytes) == 0
    try:
        assert memory.is_pinned()
        assert memory[100:].is_pinned()
        with sim.held():
            memory.copy_(torch.ones(SIZE, device="sim:0"), non_blocking=True)
        sim.synchronize(0)
        assert (memory == 1).all()
        assert sim.stats()["blocking_copies"] == 0
    finally:
        assert sim.host_unregister(memory.data_ptr()) == 0
    assert not memory.is_pinned()


def test_memory_that_is_registered_in_part_blocks(sim: ModuleType) -> None:
    memory, there = torch.zeros(SIZE), torch.ones(SIZE, device="sim:0")
    assert sim.host_register(memory.data_ptr(), memory.nbytes // 2) == 0
    memory[: SIZE // 2].copy_(there[: SIZE // 2], non_blocking=True)
    assert sim.stats()["blocking_copies"] == 0
    memory.copy_(there, non_blocking=True)
    assert sim.stats()["blocking_copies"] == 1
    assert sim.host_unregister(memory.data_ptr()) == 0


def test_registering_returns_the_error_codes_of_cuda(sim: ModuleType) -> None:
    memory, runtime = torch.zeros(SIZE), sim.cudart()
    assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes) == 0
    assert runtime.cudaHostRegister(memory.data_ptr(), 8) == 712
    assert runtime.cudaHostUnregister(memory.data_ptr()) == 0
    assert runtime.cudaHostUnregister(memory.data_ptr()) == 713
    assert runtime.cudaHostRegister(0, 8) == 1
    with sim.options(pin_mb=0):
        assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes) == 2


def test_pinned_bytes_follow_what_is_allocated_and_registered(sim: ModuleType) -> None:
    before, memory = sim.pinned_bytes(), torch.zeros(SIZE)
    pinned = torch.empty(SIZE, pin_memory=True)
    sim.host_register(memory.data_ptr(), memory.nbytes)
    assert sim.pinned_bytes() == before + pinned.nbytes + memory.nbytes
    sim.host_unregister(memory.data_ptr())
    del pinned
    assert sim.pinned_bytes() == before


def test_memory_unregistered_under_a_copy_is_reported(sim: ModuleType) -> None:
    memory = torch.zeros(SIZE)
    sim.host_register(memory.data_ptr(), memory.nbytes)
    with sim.held():
        memory.copy_(torch.ones(SIZE, device="sim:0"), non_blocking=True)
        sim.host_unregister(memory.data_ptr())
        assert sim.stats()["unregistered_in_flight"] == 1
    sim.synchronize(0)  # before the memory goes


def test_copies_of_two_streams_into_one_pinned_buffer_race(sim: ModuleType) -> None:
    side, target, there = sim.Stream("sim:0"), torch.zeros(SIZE).pin_memory(), torch.ones(SIZE, device="sim:0")
    sim.synchronize(0)
    target.copy_(there, non_blocking=True)
    with sim.stream(side):
        target.copy_(there, non_blocking=True)
    assert sim.stats()["races"] == 1


def test_copy_between_devices_orders_both_streams(sim: ModuleType) -> None:
    with sim.held():
        x = torch.ones(SIZE, device="sim:0") * 2
        y = x.to("sim:1") + 1
        x.zero_()
    assert (y.cpu() == 3).all()
    counts = sim.stats()
    assert (counts["races"], counts["blocking_copies"]) == (0, 1), "the one of .cpu()"
