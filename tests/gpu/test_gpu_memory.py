"""Memory of a GPU: limits that hold, nothing reused too early, nothing left behind."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.common.pages import PAGE
from lightning_roundpipe.devices.gpu.cuda import PageLocker
from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.devices.gpu.driver import driver_of
from lightning_roundpipe.devices.transfer import CHUNK_BYTES, Edge
from tests.gpu.training import assert_alike, mlp, train, vectors

pytestmark = pytest.mark.gpu

MIB = 2**20
GPU = torch.device("cuda", 0)
# About 30 ms on any GPU: work that copies would overtake if nothing held them back.
LATE_CYCLES = 50_000_000
WAIT_S = 60.0


@pytest.fixture
def device() -> Iterator[GpuDevice]:
    made = GpuDevice(0, 0, driver=driver_of("cuda"))
    made.open()
    made.enter()
    yield made
    made.close()
    made.dispose()


def test_a_model_that_does_not_fit(memory_in_use: Callable[[], int], tmp_path: Path) -> None:
    """1.5 GiB of weights, and as much of gradients, on a GPU of which 1.25 GiB may be used beside what others have.

    A quarter of that is kept for workspaces: there is room for seven layers of 64 MiB, with or without gradients.
    """
    network, batches = functools.partial(mlp, width=4096, depth=24), vectors((4, 4), width=4096)
    warm_up(tmp_path)
    memory_in_use()
    limit = torch.cuda.memory_reserved(GPU) + 1280 * MIB
    torch.cuda.reset_peak_memory_stats(GPU)
    options = {"num_microbatches": 2, "device_memory_limit": limit}
    found = train(network, batches, tmp_path, devices=[0], options=options, epochs=1)
    assert torch.cuda.max_memory_reserved(GPU) <= limit
    assert_alike(found, train(network, batches, tmp_path, epochs=1))


def test_nothing_is_left_behind(memory_in_use: Callable[[], int], tmp_path: Path) -> None:
    warm_up(tmp_path)
    before, fraction = memory_in_use(), driver_of("cuda").fraction(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    network = functools.partial(mlp, width=1024, depth=4)
    # For each of two devices, and each may take a reserve off.
    options = {"num_microbatches": 2, "device_memory_limit": torch.cuda.memory_reserved(GPU) + 1024 * MIB}
    found = train(network, vectors(width=1024), tmp_path, devices=[0, 0], options=options, epochs=1)
    assert torch.cuda.max_memory_allocated(GPU) >= before + 4 * MIB, "the GPU was not used"
    assert memory_in_use() <= before, "weights or activations were left on the GPU"
    assert not any(parameter.is_pinned() for parameter in found.module.parameters())
    # Torch keeps it in bytes.
    assert driver_of("cuda").fraction(GPU) == (None if fraction is None else pytest.approx(fraction, rel=1e-9))


def warm_up(folder: Path) -> None:
    """What a process takes once and keeps, whatever trains, is there afterwards."""
    train(mlp, vectors(), folder, devices=[0, 0], options={"num_microbatches": 2}, epochs=1)


def test_the_limit_holds_for_everything_of_the_process(memory_in_use: Callable[[], int]) -> None:
    memory_in_use()  # blocks that the allocator keeps would not be asked of the GPU again
    # With room for the reserve that a device may ask for.
    made = GpuDevice(0, 0, driver=driver_of("cuda"), memory_limit=torch.cuda.memory_reserved(GPU) + 1024 * MIB)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1280 * MIB, dtype=torch.uint8, device=GPU)
        torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
    finally:
        made.dispose()
    memory_in_use()
    torch.empty(1280 * MIB, dtype=torch.uint8, device=GPU)


@pytest.mark.parametrize("size", [3, MIB, 3 * CHUNK_BYTES // 4 + 5])
@pytest.mark.parametrize("is_bulk", [False, True])
def test_copies_there_and_back(device: GpuDevice, size: int, is_bulk: bool) -> None:
    source = torch.randn(size)
    (there,) = device.upload([source], "x", is_bulk=is_bulk).wait(Edge.INPUTS)
    (back,) = device.download([there + 1], "x", is_bulk=is_bulk).wait(Edge.GRADIENTS)
    assert torch.equal(back, source + 1)
    assert back.is_pinned()


@pytest.mark.parametrize("is_bulk", [False, True])
def test_a_download_waits_for_what_is_computed(device: GpuDevice, is_bulk: bool) -> None:
    for i in range(20):
        torch.cuda._sleep(LATE_CYCLES)
        made = torch.full((MIB,), float(i), device=GPU)
        transfer = device.download([made], "x", is_bulk=is_bulk)
        del made
        assert torch.equal(transfer.wait(Edge.GRADIENTS)[0], torch.full((MIB,), float(i)))


@pytest.mark.parametrize("is_bulk", [False, True])
def test_uploads_do_not_overwrite_what_is_still_read(device: GpuDevice, is_bulk: bool) -> None:
    """Each copy is read late, and let go at once: the next one must not get its memory before that."""
    sums = []
    for i in range(50):
        (copy,) = device.upload([torch.full((MIB,), float(i))], "x", is_bulk=is_bulk).wait(Edge.WEIGHTS)
        torch.cuda._sleep(LATE_CYCLES)
        sums.append(copy.mean())
        if is_bulk:
            device.free([copy])
        del copy
    assert [float(s) for s in sums] == [float(i) for i in range(50)]


def test_what_comes_down_goes_up_again(device: GpuDevice) -> None:
    """Between two devices the second copy waits for the first on the GPU."""
    other = GpuDevice(1, 0, driver=driver_of("cuda"))
    other.open()
    try:
        for i in range(20):
            torch.cuda._sleep(LATE_CYCLES)
            down = device.download([torch.full((MIB,), float(i), device=GPU)], "x")
            up = other.upload(down.tensors, "x", after=down)
            assert float(up.wait(Edge.INPUTS)[0].mean()) == float(i)
    finally:
        other.close()
        other.dispose()


def test_an_activation_does_not_wait_for_a_stage(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives while the thread of the lane is held back in the middle of the bulk."""
    bulk, activation = torch.randn(8 * CHUNK_BYTES // 4), torch.randn(1000)
    may_go_on, is_there, copy = threading.Event(), threading.Event(), driver_of("cuda").copy
    chunks: list[int] = []

    def held(destination: Tensor, source: Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            chunks.append(destination.numel())
            if len(chunks) == 4:
                is_there.set()
                assert may_go_on.wait(WAIT_S)
        copy(destination, source)

    monkeypatch.setattr(driver_of("cuda"), "copy", held)
    whole = device.upload([bulk], "bulk", is_bulk=True)
    assert is_there.wait(WAIT_S)
    arriving = device.upload([activation], "activation")
    arriving.await_done()
    assert torch.equal(arriving.tensors[0].cpu(), activation)
    assert not whole.is_done()
    may_go_on.set()
    whole.await_done()
    assert torch.equal(whole.tensors[0].cpu(), bulk)


def test_page_locks_in_place(device: GpuDevice) -> None:
    weight = torch.randn(4 * MIB)
    for _ in range(3):  # from the third step on
        device.upload([weight], "w", is_bulk=True).await_done()
        device.close()
        device.open()
    assert weight.is_pinned()
    assert 16 * MIB - PAGE < device.page_locked.in_place_bytes <= 16 * MIB
    # A second lock is refused, and the refusal must not reach the next launch.
    assert PageLocker("cuda").page_lock(weight.data_ptr(), 16 * MIB) != 0
    torch.ones(3, device=GPU).add_(1)
    torch.cuda.current_stream().synchronize()


def test_the_host_does_not_run_far_ahead(device: GpuDevice) -> None:
    events = []
    for _ in range(8):
        device.throttle()
        torch.cuda._sleep(LATE_CYCLES)
        events.append(torch.cuda.Event())
        events[-1].record()
        assert sum(not event.query() for event in events) <= 3


def test_peak_memory_is_reported(device: GpuDevice) -> None:
    before = device.peak_memory_bytes
    made: list[Any] = [torch.empty(before + 32 * MIB, dtype=torch.uint8, device=GPU)]
    assert device.peak_memory_bytes >= before + 32 * MIB
    made.clear()
