"""Page-locked memory: what is locked when, whose buffers are used again, and that everything is put back."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_roundpipe.devices import pinned
from lightning_roundpipe.devices.pinned import PageLockedMemory, _bucket
from tests.support.engine.gpu_stub import StubDriver

MIB = 2**20


@pytest.fixture
def driver() -> Iterator[StubDriver]:
    made = StubDriver()
    yield made
    made.host.dispose()
    assert made.locked == {}, "memory was left page-locked"


@pytest.fixture
def memory(driver: StubDriver) -> PageLockedMemory:
    return driver.host


def large(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(2 * MIB, dtype=dtype)


# --- in place ----------------------------------------------------------------------------------------------------


def test_memory_of_others_is_locked_where_it_is_and_once(driver: StubDriver, memory: PageLockedMemory) -> None:
    tensor = large()
    assert not memory.lock(torch.ones(100)), "small memory is not worth it"
    assert memory.lock(tensor)
    assert driver.locked == {tensor.data_ptr(): 8 * MIB}
    assert memory.lock(tensor[5:100]), "a view: the same memory"
    assert memory.lock(tensor)
    assert memory.statistics() == {
        "page_locked_in_place_bytes": 8.0 * MIB,
        "page_locked_own_bytes": 0.0,
        "pageable_bytes": 0.0,
    }
    memory.dispose()
    assert driver.locked == {}
    assert memory.in_place_bytes == 0
    assert torch.equal(tensor, large()), "its values stay"


def test_locked_memory_is_not_freed_before_it_is_unlocked(driver: StubDriver, memory: PageLockedMemory) -> None:
    tensor = large()
    address = tensor.data_ptr()
    memory.lock(tensor)
    del tensor
    gc.collect()
    assert address in driver.locked
    others = [large() for _ in range(4)]
    assert address not in {other.data_ptr() for other in others}, "the memory was given to another tensor"


def test_memory_that_is_locked_already_is_left_alone(driver: StubDriver, memory: PageLockedMemory) -> None:
    tensor = large()
    driver.page_lock(tensor.data_ptr(), 8 * MIB)
    assert memory.lock(tensor)
    assert memory.in_place_bytes == 0
    memory.dispose()
    assert tensor.data_ptr() in driver.locked, "a lock that is not ours was undone"
    driver.page_unlock(tensor.data_ptr())


def test_a_refusal_is_told_once_with_its_size(driver: StubDriver, memory: PageLockedMemory) -> None:
    driver.refuses = 2
    first, second = large(), large(torch.float64)
    with pytest.warns(UserWarning, match=rf"{8 * MIB} bytes of weights could not be page-locked \(CUDA error 2\)"):
        assert not memory.lock(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not memory.lock(second)
        assert not memory.lock(first), "it is not tried again"
        buffer, is_locked = memory.empty_like(first)
    assert not is_locked
    assert memory.pageable_bytes == (8 + 16 + 8) * MIB
    buffer.fill_(3.0)
    assert buffer.sum() == 3.0 * first.numel()
    memory.dispose()
    assert memory.pageable_bytes == 0


def test_many_threads_lock_it_once(driver: StubDriver, memory: PageLockedMemory) -> None:
    tensors = [large() for _ in range(3)]
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.extend(map(memory.lock, tensors))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 12
    assert len(driver.locked) == 3


# --- own buffers -------------------------------------------------------------------------------------------------


def sources() -> list[Tensor]:
    made = [torch.rand(shape) * 9 for shape in ((), (1,), (7, 5), (3, 0, 2), (700, 900))]
    return [*made, made[2].t(), torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last), made[4][:, ::2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_buffers_hold_any_type_and_shape(driver: StubDriver, memory: PageLockedMemory, dtype: torch.dtype) -> None:
    """In the order of the source in memory, without its gaps; and longer than the memory is page-locked."""
    made: list[tuple[Tensor, Tensor]] = []
    for numbers in sources():
        source = numbers.to(dtype)
        buffer, is_locked = memory.empty_like(source)
        assert is_locked
        assert (buffer.shape, buffer.dtype, buffer.stride()) == (source.shape, dtype, torch.empty_like(source).stride())
        made.append((buffer.copy_(source), source))
    memory.dispose()
    assert driver.locked == {}
    assert all(torch.equal(buffer, source) for buffer, source in made)
    buffer, _ = memory.empty_like(large())
    assert driver.locked == {buffer.data_ptr(): 8 * MIB}


def test_a_buffer_is_used_again_when_all_its_views_are_gone(memory: PageLockedMemory) -> None:
    tensor, _ = memory.empty_like(large())
    address, total = tensor.data_ptr(), memory.own_bytes
    view = tensor.view(2, -1)[1].expand(3, -1)
    del tensor
    assert memory.empty_like(large())[0].data_ptr() != address, "a view still has the memory"
    del view
    again, _ = memory.empty_like(large())
    more, _ = memory.empty_like(large())
    assert address in {again.data_ptr(), more.data_ptr()}
    assert memory.own_bytes == 2 * total, "both were there"


def test_a_buffer_that_a_graph_has_saved_is_not_used_again(memory: PageLockedMemory) -> None:
    tensor, _ = memory.empty_like(large())
    address = tensor.fill_(2.0).data_ptr()
    weight = torch.ones(2 * MIB, requires_grad=True)
    loss = (tensor * weight).sum()
    del tensor
    other, _ = memory.empty_like(large())
    assert other.data_ptr() != address
    other.fill_(-1.0)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))
    del loss, other
    memory.empty_like(large())
    assert memory.own_bytes == 16 * MIB


def test_small_buffers_share_page_locks(driver: StubDriver, memory: PageLockedMemory) -> None:
    tensors = [memory.empty_like(torch.ones(1000))[0] for _ in range(100)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(float(i))
    assert [float(tensor.sum()) for tensor in tensors] == [1000.0 * i for i in range(100)], "buffers overlap"
    assert len(driver.locked) == 1


@settings(derandomize=True)
@given(st.integers(1, 2**40))
def test_buffers_are_at_most_an_eighth_too_large(num_bytes: int) -> None:
    size = _bucket(num_bytes)
    assert num_bytes <= size <= max(512, num_bytes + num_bytes // 8 + 64)
    assert size % 64 == 0
    assert _bucket(size) == size


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.lists(st.integers(MIB // 4, 4 * MIB), min_size=1, max_size=30))
def test_free_buffers_of_other_sizes_are_given_up(sizes: list[int]) -> None:
    driver = StubDriver()
    most = 0
    for size in sizes:  # one after the other: at most one in use
        tensor, _ = driver.host.empty_like(torch.empty(size, dtype=torch.uint8, device="meta"))
        most = max(most, size)
        assert driver.host.own_bytes <= 1.25 * 1.125 * most + MIB
        assert sum(driver.locked.values()) == driver.host.own_bytes
        tensor.fill_(1)
        del tensor
    driver.host.dispose()
    assert driver.locked == {}


def test_buffers_die_in_any_thread(memory: PageLockedMemory) -> None:
    """Also in one that is inside the memory's own lock: nothing waits for it there."""
    tensors = [memory.empty_like(torch.ones(MIB))[0] for _ in range(4)]

    def drop() -> None:
        tensors.clear()

    with memory._lock:
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join(timeout=30)
        assert not thread.is_alive()
    total = memory.own_bytes
    kept = [memory.empty_like(torch.ones(MIB))[0] for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in kept}) == 4
    assert memory.own_bytes == total


_FORK = """
import importlib.util, os, torch

spec = importlib.util.spec_from_file_location("pinned", {path!r})  # without the package: it takes long to import
pinned = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pinned)

class Driver:
    def page_lock(self, address, num_bytes):
        return 0

    def page_unlock(self, address):
        pass

    def is_page_locked(self, tensor):
        return False

memory = pinned.PageLockedMemory(Driver())
weights, shared = torch.ones(2**20), torch.ones(2**20).share_memory_()
assert memory.lock(weights) and memory.lock(shared)
buffer, _ = memory.empty_like(weights)
buffer.fill_(1.0)

def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]

def drop():
    global weights, buffer, memory
    del weights, buffer, memory

def touch(tensor):
    return lambda: tensor[:].sum().item()

torch.set_num_threads(1)
print(in_child(lambda: None), in_child(touch(shared)), in_child(drop))
print(in_child(touch(weights)), in_child(touch(buffer)))
memory.dispose()
print(in_child(touch(weights)), in_child(touch(buffer)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")
def test_children_of_a_fork_do_not_get_what_is_locked() -> None:
    """Linux would copy it at once. They may free it, though, and get what was shared before."""
    program = _FORK.format(path=pinned.__file__)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    fine, crashed, after = done.stdout.splitlines()
    assert fine == "0 0 0"
    assert all(status != "0" for status in crashed.split()), crashed
    assert after == "0 0"
