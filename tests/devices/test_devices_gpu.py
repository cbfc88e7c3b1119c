"""CUDA devices on a driver that stands for torch.cuda: what is ordered behind what, and that a step comes out right."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.common.pages import PAGE
from lightning_roundpipe.devices import gpu_lanes
from lightning_roundpipe.devices.gpu import GpuDevice
from lightning_roundpipe.devices.gpu_lanes import GpuTransfer
from lightning_roundpipe.devices.transfer import Edge
from tests.support.engine.gpu_stub import StubDriver, StubStream

MIB = 2**20
JOIN_S = 60.0


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver()


@pytest.fixture
def device(driver: StubDriver) -> Iterator[GpuDevice]:
    made = GpuDevice(0, 0, driver=driver)
    made.open()
    yield made
    made.close()
    made.dispose()
    assert driver.violations == []
    assert driver.locked == {}


SOURCES: dict[str, Callable[[], Tensor]] = {
    "int": lambda: torch.arange(7),
    "bf16": lambda: torch.randn(3, 5, dtype=torch.bfloat16),
    "bool": lambda: torch.tensor([True, False]),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(3, 0),
    "turned": lambda: torch.randn(4, 6).t(),
    "spread": lambda: torch.randn(4, 6)[:, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "complex": lambda: torch.randn(2, 3, dtype=torch.complex64),
    "sparse": lambda: torch.sparse_coo_tensor([[0, 2]], torch.randn(2, 3), (4, 3), check_invariants=True),
}


def stream_of(device: GpuDevice, direction: str, *, is_bulk: bool = False) -> StubStream:
    lane: Any = getattr(device, direction)
    return lane._bulk if is_bulk else lane._activations  # type: ignore[no-any-return]


def is_poison(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all())


# --- what waits for what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_bulk", [False, True])
def test_an_upload_is_there_when_its_reader_has_waited(device: GpuDevice, driver: StubDriver, is_bulk: bool) -> None:
    """The allocator is told about activations. Weights are held by ``Device.free``: the books know when they go."""
    source = torch.randn(3, 4)
    transfer = device.upload([source], "x", is_bulk=is_bulk)
    assert is_bulk or is_poison(transfer.tensors[0])  # the thread of the lane may have waited for bulk
    (copy,) = transfer.wait(Edge.INPUTS)
    assert torch.equal(copy, source)
    told = (copy.data_ptr(), driver.default_stream(device.torch_device))
    assert driver.recorded == ([] if is_bulk else [told])
    assert is_bulk or driver.waits == [], "the host waited, too"
    transfer.await_done()
    assert transfer.is_done()
    transfer.wait(Edge.INPUTS)


@pytest.mark.parametrize("is_bulk", [False, True])
def test_a_download_reads_what_was_computed_before(device: GpuDevice, driver: StubDriver, is_bulk: bool) -> None:
    source = torch.randn(5)
    transfer = device.download([source], "y", is_bulk=is_bulk)
    (copy,) = transfer.wait(Edge.GRADIENTS)
    assert torch.equal(copy, source)
    log = stream_of(device, "d2h", is_bulk=is_bulk).log
    assert log.index("wait compute") < log.index("copy")


def test_an_upload_of_what_comes_down_waits_on_the_gpu(device: GpuDevice, driver: StubDriver) -> None:
    source = torch.randn(4)
    down = device.download([source], "x")
    up = device.upload(down.tensors, "x", after=down)
    assert stream_of(device, "h2d").log[0] == f"wait {stream_of(device, 'd2h').name}"
    assert driver.waits == [], "the host need not wait"
    assert torch.equal(up.wait(Edge.INPUTS)[0], source)


def test_ordinary_memory_is_not_read_before_it_is_written(device: GpuDevice, driver: StubDriver) -> None:
    """The driver reads it when the copy is issued, whatever the stream waits for."""
    driver.refuses = 2
    source = torch.randn(4)
    with pytest.warns(UserWarning, match="page-locked"):
        down = device.download([source], "x")
    device.upload(down.tensors, "x", after=down)
    assert down.is_done()
    assert torch.equal(down.tensors[0], source)


def test_what_comes_after_a_failed_download_fails(device: GpuDevice, driver: StubDriver) -> None:
    down = device.download([torch.randn(4)], "x")
    assert isinstance(down, GpuTransfer)
    down.end(ValueError("broken"))
    for after in (True, False):  # on the GPU and on the host
        down.is_page_locked = after
        with pytest.raises(ValueError, match="broken"):
            device.upload(down.tensors, "x", after=down)


@pytest.mark.parametrize("is_bulk", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", SOURCES)
def test_any_tensor_travels(device: GpuDevice, kind: str, mode: Callable[[], Any], is_bulk: bool) -> None:
    with mode():
        source = SOURCES[kind]()
        for move, edge in ((device.upload, Edge.WEIGHTS), (device.download, Edge.GRADIENTS)):
            (copy,) = move([source], "x", is_bulk=is_bulk).wait(edge)
            assert (copy.dtype, copy.shape, copy.layout) == (source.dtype, source.shape, source.layout)
            assert torch.equal(copy.to_dense(), source.to_dense())
            assert copy.layout is torch.sparse_coo or copy.data_ptr() != source.data_ptr() or not source.numel()
            assert not copy.is_inference()
    assert device.upload([], "nothing").wait(Edge.INPUTS) == []


# --- bulk --------------------------------------------------------------------------------------------------------


class LaneHold:
    """Holds the thread of a lane back before it issues a bulk copy, until the test lets it go on."""

    def __init__(self, driver: StubDriver) -> None:
        self._may_go_on = threading.Semaphore(0)
        self.is_there = threading.Semaphore(0)
        self.is_closed = True
        copy = driver.copy

        def gated(destination: Tensor, source: Tensor) -> None:
            if threading.current_thread() is not threading.main_thread() and self.is_closed:
                self.is_there.release()
                assert self._may_go_on.acquire(timeout=JOIN_S)
            copy(destination, source)

        driver.copy = gated  # type: ignore[method-assign]

    def let_go(self) -> None:
        self.is_closed = False
        self._may_go_on.release()


def test_bulk_goes_in_chunks_two_at_a_time(
    device: GpuDevice, driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lanes, "CHUNK_BYTES", 4 * 100)
    stream = stream_of(device, "h2d", is_bulk=True)
    flights = []
    copy = driver.copy

    def counted(destination: Tensor, source: Tensor) -> None:
        copy(destination, source)
        flights.append(stream.num_given - stream.num_done)
        assert destination.numel() <= 100

    driver.copy = counted  # type: ignore[method-assign]
    source = torch.randn(1000)
    assert torch.equal(device.upload([source], "w", is_bulk=True).wait(Edge.WEIGHTS)[0], source)
    assert len(flights) == 10
    # Copies and the events behind them: this copy, and the one chunk with its event before it.
    assert max(flights) == 3


def test_an_activation_overtakes_bulk(device: GpuDevice, driver: StubDriver) -> None:
    hold = LaneHold(driver)
    bulk = device.upload([torch.randn(1000)], "w", is_bulk=True)
    assert hold.is_there.acquire(timeout=JOIN_S)
    source = torch.randn(3)
    assert torch.equal(device.upload([source], "x").wait(Edge.INPUTS)[0], source)
    assert not bulk.is_done()
    hold.let_go()
    bulk.await_done()


def test_a_bulk_download_reads_what_was_there_at_the_time(device: GpuDevice, driver: StubDriver) -> None:
    """Its stream waits for the event of the submission, although the thread comes to it later."""
    hold = LaneHold(driver)
    first = device.download([torch.randn(10)], "first", is_bulk=True)
    assert hold.is_there.acquire(timeout=JOIN_S)
    place = driver.default_stream(device.torch_device).num_given
    second = device.download([torch.randn(10)], "second", is_bulk=True)
    assert driver.default_stream(device.torch_device).num_given == place + 1, "no event at the submission"
    hold.let_go()
    first.await_done()
    second.await_done()


def test_many_threads_copy_at_once(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lanes, "CHUNK_BYTES", 64)
    wrong: list[Tensor] = []

    def copy(number: int) -> None:
        for i in range(25):
            source = torch.full((40,), float(100 * number + i))
            (there,) = device.upload([source], "x", is_bulk=i % 2 == 0).wait(Edge.WEIGHTS)
            down = device.download([there], "x", is_bulk=i % 3 == 0)
            device.free([there], after=down)
            del there
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


def test_weights_are_page_locked_from_the_third_step_on(device: GpuDevice, driver: StubDriver) -> None:
    weight = torch.randn(MIB)
    for _ in range(3):
        assert weight.data_ptr() not in driver.locked
        for _ in range(2):
            assert torch.equal(device.upload([weight], "w", is_bulk=True).wait(Edge.WEIGHTS)[0], weight)
        device.close()
        device.open()
    assert driver.locked[weight.data_ptr()] == driver.host.in_place_bytes > 4 * MIB - PAGE
    device.upload([torch.randn(MIB)], "x").await_done()
    assert driver.host.in_place_bytes <= 4 * MIB, "activations are not worth it"


def test_weights_are_staged_two_chunks_at_a_time(device: GpuDevice, driver: StubDriver, monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_lanes, "CHUNK_BYTES", MIB)
    weights = [torch.randn(5 * MIB), torch.randn(100)]
    assert all(map(torch.equal, device.upload(weights, "w", is_bulk=True).wait(Edge.WEIGHTS), weights))
    assert driver.host.own_bytes <= 3 * MIB


# --- memory of copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_bulk", [False, True])
def test_sources_are_held_until_they_are_read(device: GpuDevice, driver: StubDriver, is_bulk: bool) -> None:
    source = torch.randn(5)
    values, reference = source.clone(), weakref.ref(source)
    transfer = device.download([source], "y", is_bulk=is_bulk)
    del source
    assert torch.equal(transfer.wait(Edge.GRADIENTS)[0], values)
    assert driver.violations == []
    assert reference() is None, "held longer than needed"


def test_old_transfers_are_forgotten(device: GpuDevice) -> None:
    transfer = device.download([torch.randn(5)], "y")
    assert isinstance(transfer, GpuTransfer)
    stream_of(device, "d2h").run_until(stream_of(device, "d2h").num_given)
    assert transfer.pairs
    device.download([torch.randn(5)], "z")
    assert not transfer.pairs, "the source was held although the copy had been made"


def test_callbacks_are_called_once_even_if_another_one_raises(device: GpuDevice) -> None:
    called: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: called.append(name)

    def broken() -> None:
        raise ZeroDivisionError

    waited = device.download([torch.randn(5)], "y")
    waited.when_done(Edge.FREED, broken)
    waited.when_done(Edge.FREED, note("waited"))
    with pytest.raises(ZeroDivisionError):
        waited.await_done()
    waited.await_done()
    waited.when_done(Edge.FREED, note("late"))
    device.download([torch.randn(5)], "y").when_done(Edge.FREED, note("end"))
    bulk, has_ended = device.download([torch.randn(5)], "y", is_bulk=True), threading.Event()
    bulk.when_done(Edge.FREED, has_ended.set)
    assert has_ended.wait(JOIN_S), "the thread of the lane should have called it"
    device.close()
    assert called == ["waited", "late", "end"]
    device.open()


# --- failures, and the end of a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_bulk", [False, True])
def test_a_failed_copy_is_raised_to_its_readers(device: GpuDevice, driver: StubDriver, is_bulk: bool) -> None:
    copy, is_broken = driver.copy, True

    def fails(destination: Tensor, source: Tensor) -> None:
        if is_broken:
            raise RuntimeError("out of luck")
        copy(destination, source)

    driver.copy = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of luck"):
        device.upload([torch.randn(3)], "w", is_bulk=is_bulk).wait(Edge.WEIGHTS)
    is_broken = False
    source = torch.randn(3)
    assert torch.equal(device.upload([source], "w", is_bulk=is_bulk).wait(Edge.WEIGHTS)[0], source), "the lane is dead"


def test_an_error_of_the_gpu_is_raised_to_who_waits(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = device.download([torch.randn(3)], "y")
    assert isinstance(transfer, GpuTransfer)

    def broken(event: Any) -> bool:
        raise RuntimeError("illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(type(transfer._event), "query", broken)
        patch.setattr(type(transfer._event), "synchronize", broken)
        assert transfer.is_done(), "nothing needs to be waited for any more"
        for _ in range(2):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                transfer.wait(Edge.GRADIENTS)


def test_lanes_need_an_open_step(device: GpuDevice) -> None:
    device.close()
    with pytest.raises(RuntimeError, match="no step is open: h2d of GPU 0 cannot copy weights"):
        device.upload([torch.randn(3)], "weights", is_bulk=True)
    with pytest.raises(RuntimeError, match="no step is open: d2h of GPU 0 cannot copy anything"):
        device.download([torch.randn(3)], "")
    device.open()


def test_what_was_submitted_is_made_at_the_end_of_a_step(device: GpuDevice, driver: StubDriver) -> None:
    """Weights that are prefetched may stay for the next step."""
    hold = LaneHold(driver)
    sources = [torch.randn(100) for _ in range(4)]
    transfers = [device.upload([source], "w", is_bulk=True) for source in sources]
    assert hold.is_there.acquire(timeout=JOIN_S)
    closing = threading.Thread(target=device.close)
    closing.start()
    hold.let_go()
    closing.join(JOIN_S)
    assert all(transfer.is_done() for transfer in transfers)
    for transfer, source in zip(transfers, sources, strict=True):
        assert torch.equal(transfer.wait(Edge.WEIGHTS)[0], source)
    assert not [thread for thread in threading.enumerate() if "GPU 0" in thread.name]
    device.open()
    assert torch.equal(device.upload([sources[0]], "w", is_bulk=True).wait(Edge.WEIGHTS)[0], sources[0])


def test_a_thread_that_cannot_start_is_told_at_once(device: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start"):
            device.upload([torch.randn(3)], "w", is_bulk=True)
    source = torch.randn(3)
    assert torch.equal(device.upload([source], "w", is_bulk=True).wait(Edge.WEIGHTS)[0], source)


# --- the device --------------------------------------------------------------------------------------------------


def test_memory_is_free_when_compute_and_transfer_have_passed(device: GpuDevice) -> None:
    tensor = torch.randn(5)
    reference = weakref.ref(tensor)
    down = device.download([tensor], "g")
    passing = device.free([tensor], after=down)
    device.memory.reserve("gradients", 20)
    device.memory.release("gradients", 20, passing)
    del tensor
    assert not passing.is_done()
    assert device.memory.used == 20
    device.memory.limit = 20
    device.memory.reserve("weights", 20)  # waits
    assert reference() is None, "on the books as free, and still held"
    assert down.is_done()
    assert passing.is_done()
    passing.await_done()


def test_memory_is_held_until_compute_has_passed(device: GpuDevice, driver: StubDriver) -> None:
    compute = driver.default_stream(device.torch_device)
    compute.is_late = True
    done: list[str] = []
    for end in (lambda: compute.run_until(compute.num_given), device.close):
        tensor = torch.randn(5)
        reference = weakref.ref(tensor)
        compute.give("kernel", lambda: done.append("kernel"))
        passing = device.free([tensor])
        del tensor
        assert not passing.is_done()
        assert reference() is not None
        end()
        device.free([])  # collects what has passed
        assert reference() is None
    assert done == ["kernel"] * 2, "the end of a step waits for what is computed"
    compute.is_late = False
    device.open()


def test_freed_memory_is_let_go_although_a_transfer_failed(device: GpuDevice) -> None:
    down = device.download([torch.randn(5)], "g")
    assert isinstance(down, GpuTransfer)
    tensor = torch.randn(5)
    reference = weakref.ref(tensor)
    passing = device.free([tensor], after=down)
    del tensor
    down.end(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        passing.await_done()
    assert reference() is None
    assert passing.is_done()


def test_a_step_ends_although_something_failed(device: GpuDevice, driver: StubDriver) -> None:
    """Nothing is held afterwards, no thread is left, and what failed is raised to those who want it."""
    down = device.download([torch.randn(5)], "g")
    assert isinstance(down, GpuTransfer)
    tensors = [torch.randn(5), torch.randn(5)]
    references = [weakref.ref(tensor) for tensor in tensors]
    for tensor in tensors:
        device.free([tensor], after=down)
    device.upload([torch.randn(5)], "w", is_bulk=True)
    del tensor, tensors
    down.end(ValueError("broken"))
    device.close()
    assert [reference() for reference in references] == [None, None]
    assert not [thread for thread in threading.enumerate() if "GPU 0" in thread.name]
    device.open()

    def broken() -> None:
        raise RuntimeError("illegal memory access")

    down = device.download([torch.randn(5)], "g")
    down.when_done(Edge.FREED, broken)
    device.throttle()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.close()
    assert not device._begun, "it did not go on to the end"
    assert driver.violations == ["source let go before its copy"], "the stub makes the copy all the same"
    driver.violations.clear()
    device.open()


def test_the_host_is_ahead_by_two_micro_batches(device: GpuDevice, driver: StubDriver) -> None:
    compute = driver.default_stream(device.torch_device)
    for begun in range(6):
        place = compute.num_given
        device.throttle()
        assert compute.num_given == place + 1
        assert [event.place for event in driver.waits] == list(range(1, begun))
    device.close()
    driver.waits.clear()
    device.open()
    device.throttle()
    device.throttle()
    assert driver.waits == [], "what the step before has begun is forgotten"


def test_stamps_tell_time_when_they_were_reached(device: GpuDevice, driver: StubDriver) -> None:
    start, end = device.stamp(), device.stamp()
    assert device.elapsed_ms(start, end) == 1.0
    late = driver.record(driver.streams[0], is_timed=True)
    assert device.elapsed_ms(start, late) is None


def test_transfers_are_counted_and_traced_on_request(device: GpuDevice, driver: StubDriver) -> None:
    device.enter(None)
    assert driver.devices_of_threads[threading.get_ident()] == device.torch_device
    device.upload([torch.randn(3)], "untraced").await_done()
    device.moved = moved = []
    device.upload([torch.randn(3)], "inputs a").await_done()
    device.download([torch.randn(5, dtype=torch.float64)], "gradients b", is_bulk=True).await_done()
    device.moved = None
    device.upload([torch.randn(3)], "untraced").await_done()
    assert [(m.lane, m.label) for m in moved] == [("h2d", "inputs a"), ("d2h", "gradients b")]
    for m in moved:
        elapsed = device.elapsed_ms(m.start, m.end)
        assert elapsed is not None
        assert elapsed >= 1
    with device.computing():
        pass
    found = device.statistics()
    assert (found["unit_runs"], found["h2d_bytes"], found["d2h_bytes"]) == (1, 36, 40)
    assert found["peak_memory_bytes"] == 123.0
