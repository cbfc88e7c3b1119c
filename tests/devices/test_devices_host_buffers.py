"""Buffers of page-locked memory: whose are used again, how large they are, and what they lie in."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_roundpipe.common.pages import HUGE_PAGE
from lightning_roundpipe.devices.gpu.host_buffers import _bucket
from lightning_roundpipe.devices.gpu.pinned import PageLockedMemory
from tests.support.page_locks import PageLocks, travel

MIB = 2**20


def large() -> Tensor:
    return torch.ones(2 * MIB)


def sources() -> list[Tensor]:
    made = [torch.rand(shape) * 9 for shape in ((), (1,), (7, 5), (3, 0, 2), (700, 900))]
    return [*made, made[2].t(), torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), made[4][:, ::2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_buffers_hold_any_type_and_shape(driver: PageLocks, memory: PageLockedMemory, dtype: torch.dtype) -> None:
    """In the order of the source in memory, without its gaps; and longer than the memory is page-locked."""
    made: list[tuple[Tensor, Tensor]] = []
    for numbers in sources():
        source = numbers.to(dtype)
        buffer, is_locked = memory.buffers.empty_like(source)
        assert is_locked
        assert (buffer.shape, buffer.dtype, buffer.stride()) == (source.shape, dtype, torch.empty_like(source).stride())
        made.append((buffer.copy_(source), source))
    memory.dispose()
    assert driver.locked == {}
    assert all(torch.equal(buffer, source) for buffer, source in made)
    buffer, _ = memory.buffers.empty_like(large())
    assert driver.locked == {buffer.data_ptr(): 8 * MIB}


def test_a_buffer_is_used_again_when_all_its_views_are_gone(memory: PageLockedMemory) -> None:
    tensor, _ = memory.buffers.empty_like(large())
    address, total = tensor.data_ptr(), memory.buffers.own_bytes
    view = tensor.view(2, -1)[1].expand(3, -1)
    del tensor
    assert memory.buffers.empty_like(large())[0].data_ptr() != address, "a view still has the memory"
    del view
    again, _ = memory.buffers.empty_like(large())
    more, _ = memory.buffers.empty_like(large())
    assert address in {again.data_ptr(), more.data_ptr()}
    assert memory.buffers.own_bytes == 2 * total, "both were there"


def test_a_buffer_that_a_graph_has_saved_is_not_used_again(memory: PageLockedMemory) -> None:
    tensor, _ = memory.buffers.empty_like(large())
    address = tensor.fill_(2.0).data_ptr()
    weight = torch.ones(2 * MIB, requires_grad=True)
    loss = (tensor * weight).sum()
    del tensor
    other, _ = memory.buffers.empty_like(large())
    assert other.data_ptr() != address
    other.fill_(-1.0)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
    del loss, other
    memory.buffers.empty_like(large())
    assert memory.buffers.own_bytes == 16 * MIB


def test_small_buffers_share_page_locks(driver: PageLocks, memory: PageLockedMemory) -> None:
    tensors = [memory.buffers.empty_like(torch.ones(1000))[0] for _ in range(100)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(float(i))
    assert [float(tensor.sum()) for tensor in tensors] == [1000.0 * i for i in range(100)], "buffers overlap"
    assert len(driver.locked) == 1


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 2**40))
def test_buffers_are_at_most_an_eighth_too_large(num_bytes: int) -> None:
    size = _bucket(num_bytes)
    assert num_bytes <= size <= max(512, num_bytes + num_bytes // 8 + 64)
    assert size % 64 == 0
    assert _bucket(size) == size


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.lists(st.integers(MIB // 4, 4 * MIB), min_size=1, max_size=30))
def test_free_buffers_of_other_sizes_are_given_up(sizes: list[int]) -> None:
    driver = PageLocks()
    most = 0
    for size in sizes:  # one after the other: at most one in use
        tensor, _ = driver.host.buffers.empty_like(torch.empty(size, dtype=torch.uint8, device="meta"))
        most = max(most, size)
        assert driver.host.buffers.own_bytes <= 1.25 * 1.125 * most + MIB
        assert sum(driver.locked.values()) == driver.host.buffers.own_bytes
        tensor[[0, -1]] = 1
        del tensor
    driver.host.dispose()
    assert driver.locked == {}


def test_buffers_die_in_any_thread(memory: PageLockedMemory) -> None:
    """Also in one that is inside the memory's own lock: nothing waits for it there."""
    tensors = [memory.buffers.empty_like(torch.ones(MIB))[0] for _ in range(4)]

    def drop() -> None:
        tensors.clear()

    with memory.buffers._lock:
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join(timeout=120)
        assert not thread.is_alive()
    total = memory.buffers.own_bytes
    kept = [memory.buffers.empty_like(torch.ones(MIB))[0] for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in kept}) == 4
    assert memory.buffers.own_bytes == total


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the kernel has no transparent huge pages"
)
@pytest.mark.parametrize(("num_bytes", "is_huge"), [(MIB, False), (2 * MIB, True), (5 * MIB + 77, True)])
def test_large_buffers_are_in_huge_pages_before_they_are_locked(num_bytes: int, is_huge: bool) -> None:
    advised: list[bool] = []

    class Looks(PageLocks):
        def page_lock(self, address: int, num_bytes: int) -> int:
            advised.append("hg" in flags_of(address))
            return super().page_lock(address, num_bytes)

    driver = Looks()
    tensor, _ = driver.host.buffers.empty_like(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
    assert advised == [is_huge]
    assert tensor.data_ptr() % HUGE_PAGE == 0 or not is_huge
    tensor.fill_(1)
    assert int(tensor.sum()) == num_bytes
    driver.host.dispose()


def flags_of(address: int) -> list[str]:
    """What the kernel notes about the mapping that ``address`` is in."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first:
            start, stop = (int(number, 16) for number in first.split("-"))
            is_there = start <= address < stop
        elif is_there and first == "VmFlags:":
            return line.split()[1:]
    return []


def test_a_buffer_does_not_wait_until_others_are_locked(driver: PageLocks) -> None:
    """Neither until weights are, nor until buffers of another size are."""
    begun, may_go_on = threading.Event(), threading.Event()
    known = driver.host.buffers.empty_like(torch.ones(100))  # others of its size are there
    page_lock = driver.page_lock

    def held(address: int, num_bytes: int) -> int:
        begun.set()
        assert may_go_on.wait(30)
        return page_lock(address, num_bytes)

    weight, made = torch.ones(MIB), []
    for _ in range(2):
        travel(driver.host, weight)
    driver.host.buffers.give_up_spare()
    driver.page_lock = held  # type: ignore[method-assign]
    for work in (
        lambda: travel(driver.host, weight),  # for the third time
        lambda: made.append(driver.host.buffers.empty_like(torch.ones(3 * MIB))[0]),
    ):
        begun.clear()
        may_go_on.clear()
        locking = threading.Thread(target=work)
        locking.start()
        assert begun.wait(30)
        downloading = threading.Thread(target=driver.host.buffers.empty_like, args=(torch.ones(100),))
        downloading.start()
        downloading.join(30)
        waited = downloading.is_alive()
        may_go_on.set()
        locking.join(30)
        downloading.join(30)
        assert not waited
    assert {known[0].data_ptr(), weight.data_ptr(), made[0].data_ptr()} <= set(driver.locked)
