"""Lanes between the host and a simulated GPU: what overtakes what, who waits for what, and what fails.

A stream is held while a test submits: nothing is copied, or computed, until the test lets it go on. What waits there
on the host fails.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices.gpu import lanes
from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.devices.gpu.driver import driver_of
from lightning_roundpipe.devices.gpu.lanes import GpuTransfer
from lightning_roundpipe.devices.transfer import Edge

pytestmark = pytest.mark.accelerator

MIB = 2**20
JOIN_S = 60.0
SOURCES: dict[str, Callable[[], Tensor]] = {
    "int": lambda: torch.arange(7),
    "bf16": lambda: torch.randn(3, 5, dtype=torch.bfloat16),
    "bool": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(3, 0),
    "turned": lambda: torch.randn(4, 6).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "spread": lambda: torch.randn(4, 6)[:, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "complex": lambda: torch.randn(2, 3, dtype=torch.complex64),
    "sparse": lambda: torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 3), (4, 3), check_invariants=True),
}


def stream_of(device: GpuDevice, direction: str, *, is_bulk: bool = False) -> Any:
    lane: Any = getattr(device, direction)
    return lane._bulk if is_bulk else lane._activations


@contextlib.contextmanager
def held(stream: Any) -> Iterator[None]:
    """``stream`` does nothing until the context ends."""
    with contextlib.ExitStack() as stack:
        with torch.sim.stream(stream):
            stack.enter_context(torch.sim.held())
        yield


def there(value: float, size: int = 5) -> Tensor:
    """Computed on the device."""
    return torch.full((size,), value, device="sim:0")


# --- what waits for what -----------------------------------------------------------------------------------------


def test_streams_wait_for_each_other_and_the_host_for_none(device: GpuDevice, sim: ModuleType) -> None:
    with sim.held():
        down = device.download([there(3)], "x")
        (copy,) = device.upload(down.tensors, "x", after=down).wait(Edge.INPUTS)
        result = copy + 1
        assert not down.is_done()
    assert result.cpu().eq(4).all()


def test_what_is_staged_is_read_when_it_is_there(device: GpuDevice, sim: ModuleType) -> None:
    """Copies that are not known to be page-locked: the host puts them into a buffer."""
    sim._sleep(20_000)
    down = device.download([there(3)], "x")
    down.is_page_locked = False
    (copy,) = device.upload(down.tensors, "x", after=down).wait(Edge.INPUTS)
    assert down.is_done()
    assert copy.cpu().eq(3).all()


def test_what_comes_after_a_failed_download_fails(device: GpuDevice, sim: ModuleType) -> None:
    down = device.download([there(3)], "x")
    sim.synchronize(0)
    down.end(ValueError("broken"))
    for is_on_the_gpu in (True, False):  # or on the host
        down.is_page_locked = is_on_the_gpu
        with pytest.raises(ValueError, match="broken"):
            device.upload(down.tensors, "x", after=down)


@pytest.mark.parametrize("kind", SOURCES)
def test_any_tensor_travels(device: GpuDevice, kind: str) -> None:
    for mode, is_bulk in itertools.product((torch.enable_grad, torch.inference_mode), (False, True)):
        with mode():
            source = SOURCES[kind]()
            (up,) = device.upload([source], "x", is_bulk=is_bulk).wait(Edge.WEIGHTS)
            (down,) = device.download([up], "x", is_bulk=is_bulk).wait(Edge.GRADIENTS)
            for copy in (up, down):
                assert (copy.dtype, copy.shape, copy.layout) == (source.dtype, source.shape, source.layout)
                assert not copy.is_inference()
            assert torch.equal(down.to_dense(), source.to_dense())
    assert device.upload([], "nothing").wait(Edge.INPUTS) == []


@pytest.mark.parametrize("view", [Tensor.conj, lambda t: t.conj().imag], ids=["conjugated", "negated"])
def test_lazy_views_are_left_to_nothing_that_does_not_wait(
    device: GpuDevice, monkeypatch: pytest.MonkeyPatch, view: Callable[[Tensor], Tensor]
) -> None:
    """CUDA's copies of what is conjugated or negated lazily change the copy on the host before it has arrived."""
    driver = driver_of("sim")
    copy, marks = driver.copy, list[bool]()

    def noted(to: Tensor, source: Tensor) -> None:
        marks.append((to.is_conj(), to.is_neg()) == (source.is_conj(), source.is_neg()))
        copy(to, source)

    source = torch.randn(3, 4, dtype=torch.complex64)
    on_gpu = view(source.to("sim:0"))
    monkeypatch.setattr(driver, "copy", noted)
    for is_bulk in (False, True):
        (down,) = device.download([on_gpu], "x", is_bulk=is_bulk).wait(Edge.GRADIENTS)
        assert torch.equal(down, view(source))
        (up,) = device.upload([down], "x", is_bulk=is_bulk).wait(Edge.WEIGHTS)
        assert torch.equal(up.cpu(), view(source))
    assert marks[::2] == [True, True]  # of downloads


def test_activations_go_through_page_locked_buffers(
    device: GpuDevice, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they lay in may change at once; what lies in a buffer already is not copied again, in any order of memory.
    So the host never waits."""
    read: list[int] = []
    driver = driver_of("sim")
    copy = driver.copy
    monkeypatch.setattr(driver, "copy", lambda to, source: read.append(source.data_ptr()) or copy(to, source))
    source = SOURCES["channels last"]()
    values = source.clone()
    with held(stream_of(device, "h2d")):
        upload = device.upload([source], "x")
        source.zero_()
        kept = device.keep(values)
        device.upload(kept.tensors, "x", after=kept)
    (up,) = upload.wait(Edge.INPUTS)
    assert device.download([up], "y").wait(Edge.OFFLOADED)[0].equal(values)
    assert read[1] == kept.tensors[0].data_ptr()
    assert sim.stats()["blocking_copies"] == 0


# --- bulk --------------------------------------------------------------------------------------------------------


def test_bulk_goes_in_chunks_two_at_a_time(device: GpuDevice, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CHUNK_BYTES", 4 * 100)
    driver, behind, in_flight = driver_of("sim"), [], []
    copy = driver.copy

    def counted(destination: Tensor, source: Tensor) -> None:
        assert destination.numel() <= 100
        in_flight.append(sum(not event.query() for event in behind))
        sim._sleep(1000)
        copy(destination, source)
        behind.append(driver.record(stream_of(device, "h2d", is_bulk=True)))

    monkeypatch.setattr(driver, "copy", counted)
    source = torch.randn(1000)
    assert device.upload([source], "w", is_bulk=True).wait(Edge.WEIGHTS)[0].cpu().equal(source)
    assert len(in_flight) == 10
    assert max(in_flight) <= 1


def test_an_activation_overtakes_bulk(device: GpuDevice) -> None:
    source = torch.randn(3)
    with held(stream_of(device, "h2d", is_bulk=True)):
        bulk = device.upload([torch.randn(1000)], "w", is_bulk=True)
        assert device.upload([source], "x").wait(Edge.INPUTS)[0].cpu().equal(source)
        assert not bulk.is_done()
    bulk.await_done()


def test_a_bulk_download_does_not_wait_for_what_is_computed_after_its_submission(
    device: GpuDevice, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the thread of the lane comes to it later."""
    monkeypatch.setattr(lanes, "CHUNK_BYTES", 4 * 100)
    with contextlib.ExitStack() as later:
        with held(stream_of(device, "d2h", is_bulk=True)):
            downloads = [device.download([there(2, size)], "g", is_bulk=True) for size in (1000, 10)]
            later.enter_context(sim.held())
        for download in downloads:
            download.await_done()
            assert download.tensors[0].eq(2).all()


def test_many_threads_copy_at_once(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CHUNK_BYTES", 64)
    wrong: list[Tensor] = []

    def copy(number: int) -> None:
        device.enter()
        for i in range(25):
            source = torch.full((40,), float(100 * number + i))
            (up,) = device.upload([source], "x", is_bulk=i % 2 == 0).wait(Edge.WEIGHTS)
            down = device.download([up], "x", is_bulk=i % 3 == 0)
            device.free([up], after=down)
            del up
            (back,) = down.wait(Edge.GRADIENTS)
            if not torch.equal(back, source):
                wrong.append(back)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "lanes wait for each other"
    assert wrong == []


def test_weights_are_staged_two_chunks_at_a_time(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CHUNK_BYTES", MIB)
    weights = [torch.randn(5 * MIB), torch.randn(100)]
    copies = device.upload(weights, "w", is_bulk=True).wait(Edge.WEIGHTS)
    assert all(copy.cpu().equal(weight) for copy, weight in zip(copies, weights, strict=True))
    assert 0 < device.page_locked.buffers.own_bytes <= 3 * MIB


# --- the end of a transfer ---------------------------------------------------------------------------------------


def test_sources_are_let_go_when_they_have_been_copied(device: GpuDevice, sim: ModuleType) -> None:
    waited, other = (device.download([there(1)], "y") for _ in range(2))
    waited.wait(Edge.GRADIENTS)
    assert not waited.pairs
    sim.synchronize(0)
    assert other.pairs
    device.download([there(1)], "z")
    assert not other.pairs, "the source was held although the copy had been made"


def test_callbacks_are_called_once_by_the_thread_that_ends_a_transfer(device: GpuDevice) -> None:
    called: list[str] = []
    waited = device.download([there(1)], "y")
    waited.when_done(Edge.FREED, functools.partial(called.append, "by the one who waits"))
    waited.await_done()
    waited.await_done()
    bulk, has_ended = device.download([there(1)], "y", is_bulk=True), threading.Event()
    bulk.when_done(Edge.FREED, has_ended.set)
    assert has_ended.wait(JOIN_S), "the thread of the lane should have called it"
    device.download([there(1)], "y").when_done(Edge.FREED, functools.partial(called.append, "at the end of the step"))
    device.close()
    device.open()
    assert called == ["by the one who waits", "at the end of the step"]


@pytest.mark.parametrize("is_bulk", [False, True])
def test_a_failed_copy_is_raised_to_its_readers(
    device: GpuDevice, is_bulk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(destination: Tensor, source: Tensor) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(driver_of("sim"), "copy", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            device.upload([torch.randn(3)], "w", is_bulk=is_bulk).wait(Edge.WEIGHTS)
    source = torch.randn(3)
    again = device.upload([source], "w", is_bulk=is_bulk).wait(Edge.WEIGHTS)
    assert again[0].cpu().equal(source), "the lane is dead"


def test_an_error_of_the_gpu_is_raised_to_who_waits(device: GpuDevice) -> None:
    def broken() -> bool:
        raise RuntimeError("illegal memory access")

    source = there(1)
    transfer = device.download([source], "y")
    assert isinstance(transfer, GpuTransfer)
    transfer.issued(SimpleNamespace(query=broken, synchronize=broken))
    assert transfer.is_done(), "nothing needs to be waited for any more"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            transfer.wait(Edge.GRADIENTS)


def test_a_thread_that_cannot_start_is_told_at_once(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start"):
            device.upload([torch.randn(3)], "w", is_bulk=True)
    source = torch.randn(3)
    assert device.upload([source], "w", is_bulk=True).wait(Edge.WEIGHTS)[0].cpu().equal(source)


def test_what_was_submitted_is_made_at_the_end_of_a_step(device: GpuDevice, sim: ModuleType) -> None:
    """Weights that are prefetched may stay for the next step."""
    with sim.stream(stream_of(device, "h2d", is_bulk=True)):
        sim._sleep(20_000)
    sources = [torch.randn(100) for _ in range(4)]
    transfers = [device.upload([source], "w", is_bulk=True) for source in sources]
    device.close()
    assert all(transfer.is_done() for transfer in transfers)
    assert not [thread for thread in threading.enumerate() if "GPU 0" in thread.name]
    device.open()
    transfers.append(device.upload([sources[0]], "w", is_bulk=True))
    for transfer, source in zip(transfers, [*sources, sources[0]], strict=True):
        assert transfer.wait(Edge.WEIGHTS)[0].cpu().equal(source)
