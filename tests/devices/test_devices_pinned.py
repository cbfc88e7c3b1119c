"""Page-locked memory: what is locked when, whose buffers are used again, and that everything is put back."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.common.pages import PAGE
from lightning_roundpipe.devices.gpu import pinned
from lightning_roundpipe.devices.gpu.host_buffers import aligned
from lightning_roundpipe.devices.gpu.pinned import PageLockedMemory
from tests.support.page_locks import PageLocks, lock_in_place, travel

MIB = 2**20


def large(dtype: torch.dtype = torch.float32) -> Tensor:
    """2 MiB, or 4 in double precision: twice what is worth a lock, or more."""
    return torch.ones(MIB // 2, dtype=dtype)


def whole_pages(tensor: Tensor) -> int:
    """The bytes of its memory up to its last page, which it may share."""
    return (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE - tensor.data_ptr()


# --- in place ----------------------------------------------------------------------------------------------------


def test_memory_of_others_is_locked_where_it_is_and_once(driver: PageLocks, memory: PageLockedMemory) -> None:
    tensor = large()
    lock_in_place(memory, torch.ones(100), tensor)
    assert driver.locked == {tensor.data_ptr(): whole_pages(tensor)}, "small memory is not worth it"
    lock_in_place(memory, tensor[5:100], tensor)  # a view: the same memory
    assert memory.statistics() == {
        "page_locked_in_place_bytes": float(whole_pages(tensor)),
        "page_locked_own_bytes": 0.0,
        "pageable_bytes": 0.0,
    }
    memory.dispose()
    assert driver.locked == {}
    assert memory.in_place_bytes == 0
    assert torch.equal(tensor, large()), "its values stay"


def test_locked_memory_is_not_freed_before_it_is_unlocked(driver: PageLocks, memory: PageLockedMemory) -> None:
    tensor = large()
    address = tensor.data_ptr()
    lock_in_place(memory, tensor)
    del tensor
    gc.collect()
    assert address in driver.locked
    others = [large() for _ in range(4)]
    assert address not in {other.data_ptr() for other in others}, "the memory was given to another tensor"


def test_memory_that_is_locked_already_is_left_alone(driver: PageLocks, memory: PageLockedMemory) -> None:
    tensor = large()
    driver.page_lock(tensor.data_ptr(), tensor.nbytes)
    lock_in_place(memory, tensor)
    assert memory.in_place_bytes == 0
    memory.dispose()
    assert tensor.data_ptr() in driver.locked, "a lock that is not ours was undone"
    driver.page_unlock(tensor.data_ptr())


def test_a_refusal_is_told_once_with_its_size(driver: PageLocks, memory: PageLockedMemory) -> None:
    weights = large(), large(torch.float64)
    for _ in range(2):
        travel(memory, *weights)
    driver.refuses = 2
    with pytest.warns(
        UserWarning, match=rf"{whole_pages(weights[0])} bytes of weights could not be page-locked \(CUDA error 2\)"
    ):
        travel(memory, *weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        travel(memory, *weights)  # it is not tried again
        buffer, is_locked = memory.buffers.empty_like(torch.empty(3 * MIB))
    assert not is_locked
    assert memory.pageable_bytes == (2 + 4 + 12) * MIB
    buffer.fill_(3.0)
    assert buffer.sum() == 9.0 * MIB
    memory.dispose()
    assert memory.pageable_bytes == 0


def test_many_threads_lock_it_once(driver: PageLocks, memory: PageLockedMemory) -> None:
    tensors = [large() for _ in range(3)]
    pairs = [(torch.empty_like(tensor), tensor) for tensor in tensors]
    for _ in range(2):
        travel(memory, *tensors)
    memory.begin_step()
    reads: list[tuple[Tensor, Tensor]] = []
    threads = [threading.Thread(target=lambda: reads.extend(memory.staged(pairs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(source.nbytes for _, source in reads) == 4 * 3 * 2 * MIB
    assert all(is_locked(driver, source) for _, source in reads)
    assert memory.in_place_bytes == sum(map(whole_pages, tensors))


# --- copies to devices -------------------------------------------------------------------------------------------


def is_at(driver: PageLocks, address: int, num_bytes: int = 1) -> bool:
    return any(start <= address and address + num_bytes <= start + n for start, n in driver.locked.items())


def is_locked(driver: PageLocks, tensor: Tensor) -> bool:
    return is_at(driver, tensor.data_ptr(), tensor.nbytes)


def is_in(part: Tensor, whole: Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes


def test_weights_are_locked_in_place_when_they_travel_in_a_third_step(
    driver: PageLocks, memory: PageLockedMemory
) -> None:
    """Those of the steps in which units are learned, one of training and one of evaluation, may never travel again."""
    weight = large()
    places = []
    for _ in range(5):
        first, again = travel(memory, weight), [source for _, source in memory.staged([(weight.clone(), weight)])]
        assert all(is_locked(driver, read) for read in (*first, *again))
        assert is_in(first[0], weight) == is_in(again[0], weight), "counted within a step"
        places.append(is_in(first[0], weight))
    assert places == [False, False, True, True, True]
    assert memory.in_place_bytes == whole_pages(weight)


def test_weights_that_travel_now_and_then_are_not_locked(driver: PageLocks, memory: PageLockedMemory) -> None:
    rare, others = large(), large()
    for step in range(12):
        travel(memory, others, *([rare] if step % 3 == 0 else []))
    assert not is_at(driver, rare.data_ptr() + PAGE)
    assert is_at(driver, others.data_ptr() + PAGE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(1000),
        lambda: torch.randn(3, 5, dtype=torch.bfloat16).t(),
        lambda: torch.randn(4, 6)[:, ::2],
        lambda: torch.randn(3, 1).expand(3, 4),
        lambda: torch.tensor(2.5),
        lambda: torch.randn(700, 800)[:, ::2],
    ],
    ids=["small", "turned", "spread", "expanded", "scalar", "large and spread"],
)
def test_what_is_not_locked_is_staged_in_one_buffer(
    driver: PageLocks, memory: PageLockedMemory, make: Callable[[], Tensor]
) -> None:
    sources = [make() for _ in range(3)]
    reads = travel(memory, *sources)
    first, size = reads[0].data_ptr(), aligned(sources[0].nbytes)
    assert [read.data_ptr() for read in reads] == [first, first + size, first + 2 * size]
    assert all(is_locked(driver, read) for read in reads)
    for _ in range(3):
        reads = travel(memory, *sources)
    assert all(is_locked(driver, read) for read in reads)


def test_memory_that_cannot_be_locked_is_read_where_it_is(driver: PageLocks, memory: PageLockedMemory) -> None:
    driver.refuses = 2
    weight = large()
    with pytest.warns(UserWarning, match="page-locked"):
        travel(memory, weight)
    for _ in range(4):
        (read,) = travel(memory, weight)
        assert read.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("replace", ["data", "gone"])
def test_memory_that_was_replaced_is_let_go_when_the_next_step_begins(
    driver: PageLocks, memory: PageLockedMemory, replace: str
) -> None:
    weights = [torch.nn.Parameter(large()) for _ in range(2)]
    goes, stays = (weight.data_ptr() + PAGE for weight in weights)  # the first page may be a neighbour's
    freed = weakref.ref(weights[0].untyped_storage())
    for _ in range(3):
        travel(memory, *[weight.detach() for weight in weights])
    assert is_at(driver, goes)
    assert is_at(driver, stays)
    if replace == "data":
        weights[0].data = large()
    else:
        del weights[0]
    memory.begin_step()
    assert not is_at(driver, goes)
    assert is_at(driver, stays)
    assert freed() is None
    assert 2 * MIB - 2 * PAGE <= memory.in_place_bytes <= 2 * MIB


@pytest.mark.parametrize("hold", [lambda w: w[5:7], lambda w: w.untyped_storage(), lambda w: w.numpy()])
def test_memory_that_something_holds_is_not_let_go(
    driver: PageLocks, memory: PageLockedMemory, hold: Callable[[Tensor], Any]
) -> None:
    weight = large()
    address, held = weight.data_ptr(), hold(weight)
    lock_in_place(memory, weight)
    del weight
    memory.begin_step()
    assert address in driver.locked
    assert held is not None
    del held
    travel(memory, torch.ones(MIB))
    memory.begin_step()
    assert address not in driver.locked


# --- pages -------------------------------------------------------------------------------------------------------


class Paged(PageLocks):
    """Locks whole pages, and refuses those that are locked already, as a driver may."""

    def page_lock(self, address: int, num_bytes: int) -> int:
        pages = self.pages(address, num_bytes)
        if any(pages & self.pages(*other) for other in self.locked.items()):
            return 712
        return super().page_lock(address, num_bytes)

    @staticmethod
    def pages(address: int, num_bytes: int) -> set[int]:
        return set(range(address // PAGE, (address + num_bytes - 1) // PAGE + 1))

    def is_page_locked(self, tensor: Tensor) -> bool:
        return any(tensor.data_ptr() // PAGE in self.pages(*locked) for locked in self.locked.items())


def neighbours(num_bytes: int) -> list[Tensor]:
    """Three tensors with storages of their own, one directly behind the other: they share two pages."""
    whole = bytearray(3 * num_bytes)
    return [torch.frombuffer(whole, dtype=torch.uint8, offset=i * num_bytes, count=num_bytes) for i in range(3)]


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)], ids=str)
def test_neighbours_on_one_page_travel_from_locked_memory(order: Sequence[int]) -> None:
    driver = Paged()
    memory = driver.host
    tensors = [tensor.random_(0, 255) for tensor in neighbours(2 * MIB + 1000)]
    for index in order:
        lock_in_place(memory, tensors[index])
    assert memory.pageable_bytes == 0
    assert memory.in_place_bytes >= 6 * MIB - 4 * PAGE
    for tensor in tensors:
        reads = travel(memory, tensor)
        assert all(is_locked(driver, read) for read in reads)
        assert sum(read.nbytes for read in reads if is_in(read, tensor)) >= tensor.nbytes - 2 * PAGE
    memory.dispose()
    assert driver.locked == {}


def test_neighbours_are_unlocked_apart() -> None:
    driver = Paged()
    first, second, _ = neighbours(2 * MIB + 1000)
    lock_in_place(driver.host, first, second)
    assert set(driver.locked) == {first.data_ptr(), second.data_ptr()}
    travel(driver.host, second)
    del second
    driver.host.begin_step()
    assert first.data_ptr() in driver.locked
    assert driver.host.in_place_bytes == whole_pages(first)
    driver.host.dispose()


# --- mapped files ------------------------------------------------------------------------------------------------


def _safetensors(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    files = pytest.importorskip("safetensors.torch")
    files.save_file(weights, path)
    loaded: dict[str, Tensor] = files.load_file(path)
    return loaded


def _opened(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    files = pytest.importorskip("safetensors.torch")
    files.save_file(weights, path)
    with files.safe_open(path, "pt") as file:
        return {"a": file.get_tensor("a"), "b": file.get_slice("b")[: MIB // 4 + 3]}


def _torch(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.save(weights, path)
    loaded: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return loaded


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
@pytest.mark.parametrize(
    ("load", "has_room"), [(_safetensors, True), (_opened, True), (_opened, False), (_torch, True), (_torch, False)]
)
def test_weights_in_a_mapped_file_are_locked_where_they_are_if_the_host_has_room_for_copies(
    driver: PageLocks,
    memory: PageLockedMemory,
    tmp_path: Path,
    load: Callable[..., dict[str, Tensor]],
    has_room: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "total_bytes", lambda: 80 * MIB)
    monkeypatch.setattr(pinned, "available_bytes", lambda: (12 if has_room else 11) * MIB)
    weights = load(tmp_path / "weights", {"a": torch.randn(MIB // 2), "b": torch.randn(MIB // 2)})
    for _ in range(4):
        reads = travel(memory, *weights.values())
        assert all(is_locked(driver, read) for read in reads)
    assert (memory.in_place_bytes > 0) == has_room
    assert memory.pageable_bytes == 0


# --- forks -------------------------------------------------------------------------------------------------------


def status_of_child(work: Callable[[], object]) -> int:
    """Of a fork that does ``work``: 0, or less if a signal has ended it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # it would report what is expected
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_children_of_a_fork_do_not_get_what_is_locked() -> None:
    """Linux would copy it at once. They may free it, though, and get what was shared before."""
    torch.set_num_threads(1)
    driver, shared = PageLocks(), torch.ones(MIB).share_memory_()
    held: dict[str, Any] = {"driver": driver, "weights": torch.ones(MIB)}
    lock_in_place(driver.host, held["weights"], shared)
    assert driver.host.in_place_bytes >= 2 * 4 * MIB - 2 * PAGE
    held["buffer"] = driver.host.buffers.empty_like(shared)[0].fill_(1.0)
    del driver

    def drop() -> None:
        held.clear()
        gc.collect()

    assert status_of_child(drop) == 0
    assert status_of_child(shared.sum) == 0
    for name in ("weights", "buffer"):
        assert status_of_child(held[name].sum) < 0
    held["driver"].host.dispose()
    for name in ("weights", "buffer"):
        assert status_of_child(held[name].sum) == 0
