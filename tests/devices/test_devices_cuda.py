"""CUDA devices on a driver that stands for torch.cuda: what is ordered behind what, and that a step comes out right."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices import cuda_driver, cuda_lanes
from lightning_roundpipe.devices.cuda import CudaDevice, _Freed
from lightning_roundpipe.devices.cuda_driver import CudaDriver, MemoryState
from lightning_roundpipe.devices.cuda_lanes import CudaLane, CudaTransfer
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import Done, Edge
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.planning import CostProfile, Partition
from tests.support.cuda_stub import GIB, StubDriver, StubStream
from tests.support.plain_loop import ROWS, WIDTH, Network, cut_at

MIB = 2**20
JOIN_S = 60.0


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver()


@pytest.fixture
def device(driver: StubDriver) -> Iterator[CudaDevice]:
    made = CudaDevice(0, 0, driver=driver)
    made.open()
    yield made
    made.close()
    made.dispose()
    assert driver.violations == []
    assert driver.locked == {}


def stream_of(device: CudaDevice, direction: str, *, is_bulk: bool = False) -> StubStream:
    lane: Any = getattr(device, direction)
    return lane._bulk if is_bulk else lane._activations  # type: ignore[no-any-return]


def is_poison(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all())


# --- what waits for what -----------------------------------------------------------------------------------------


def test_an_upload_is_there_when_its_reader_has_waited(device: CudaDevice, driver: StubDriver) -> None:
    source = torch.randn(3, 4)
    transfer = device.upload([source], "x")
    assert is_poison(transfer.tensors[0])
    assert not transfer.is_done()
    (copy,) = transfer.wait(Edge.INPUTS)
    assert torch.equal(copy, source)
    assert driver.waits == [], "the host waited, too"
    assert driver.recorded == [(copy.data_ptr(), driver.default_stream(device.torch_device))]
    assert transfer.is_done()
    transfer.wait(Edge.INPUTS)


def test_the_allocator_is_not_told_about_weights(device: CudaDevice, driver: StubDriver) -> None:
    """``Device.free`` holds them: their memory is there again when the books say so, and not later."""
    (copy,) = device.upload([torch.randn(3)], "w", is_bulk=True).wait(Edge.WEIGHTS)
    assert driver.recorded == []
    assert not is_poison(copy)


@pytest.mark.parametrize("is_bulk", [False, True])
def test_a_download_reads_what_was_computed_before(device: CudaDevice, driver: StubDriver, is_bulk: bool) -> None:
    source = torch.randn(5)
    transfer = device.download([source], "y", is_bulk=is_bulk)
    (copy,) = transfer.wait(Edge.GRADIENTS)
    assert torch.equal(copy, source)
    log = stream_of(device, "d2h", is_bulk=is_bulk).log
    assert log.index("wait compute") < log.index("copy")


def test_an_upload_of_what_comes_down_waits_on_the_gpu(device: CudaDevice, driver: StubDriver) -> None:
    source = torch.randn(4)
    down = device.download([source], "x")
    up = device.upload(down.tensors, "x", after=down)
    assert stream_of(device, "h2d").log[0] == f"wait {stream_of(device, 'd2h').name}"
    assert driver.waits == [], "the host need not wait"
    assert torch.equal(up.wait(Edge.INPUTS)[0], source)


def test_ordinary_memory_is_not_read_before_it_is_written(device: CudaDevice, driver: StubDriver) -> None:
    """The driver reads it when the copy is issued, whatever the stream waits for."""
    driver.refuses = 2
    source = torch.randn(4)
    with pytest.warns(UserWarning, match="page-locked"):
        down = device.download([source], "x")
    device.upload(down.tensors, "x", after=down)
    assert down.is_done()
    assert torch.equal(down.tensors[0], source)


def test_copies_of_other_kinds_of_transfers_are_waited_for(device: CudaDevice) -> None:
    source = torch.randn(4)
    up = device.upload([source], "x", after=Done([source]))
    assert torch.equal(up.wait(Edge.INPUTS)[0], source)
    assert device.upload([], "nothing").wait(Edge.INPUTS) == []


def test_what_comes_after_a_failed_download_fails(device: CudaDevice, driver: StubDriver) -> None:
    down = device.download([torch.randn(4)], "x")
    assert isinstance(down, CudaTransfer)
    down.end(ValueError("broken"))
    for after in (True, False):  # on the GPU and on the host
        down.is_page_locked = after
        with pytest.raises(ValueError, match="broken"):
            device.upload(down.tensors, "x", after=down)


@pytest.mark.parametrize("is_bulk", [False, True])
@pytest.mark.parametrize(
    "source",
    [
        torch.arange(7),
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(2.5),
        torch.empty(3, 0),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.randn(2, 3), (4, 3), check_invariants=True),
    ],
    ids=["int", "bf16", "bool", "scalar", "empty", "turned", "spread", "expanded", "complex", "sparse"],
)
def test_any_tensor_travels(device: CudaDevice, source: Tensor, is_bulk: bool) -> None:
    for move, edge in ((device.upload, Edge.WEIGHTS), (device.download, Edge.GRADIENTS)):
        (copy,) = move([source], "x", is_bulk=is_bulk).wait(edge)
        assert (copy.dtype, copy.shape, copy.layout) == (source.dtype, source.shape, source.layout)
        assert torch.equal(copy.to_dense(), source.to_dense())
        assert copy.layout is torch.sparse_coo or copy.data_ptr() != source.data_ptr() or not source.numel()


def test_tensors_of_inference_mode_travel(device: CudaDevice) -> None:
    with torch.inference_mode():
        source = torch.randn(3)
        (copy,) = device.upload([source], "x").wait(Edge.INPUTS)
        (home,) = device.download([copy], "x").wait(Edge.INPUTS)
    assert torch.equal(home, source)
    assert not home.is_inference()


def test_snapshots_do_not_change_with_the_original(device: CudaDevice) -> None:
    source = torch.ones(3)
    down = device.download([device.snapshot(source)], "x")
    source += 1
    assert torch.equal(down.wait(Edge.OFFLOADED)[0], torch.ones(3))


# --- bulk --------------------------------------------------------------------------------------------------------


class Gate:
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
    device: CudaDevice, driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_lanes, "CHUNK_BYTES", 4 * 100)
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


def test_an_activation_overtakes_bulk(device: CudaDevice, driver: StubDriver) -> None:
    gate = Gate(driver)
    bulk = device.upload([torch.randn(1000)], "w", is_bulk=True)
    assert gate.is_there.acquire(timeout=JOIN_S)
    source = torch.randn(3)
    assert torch.equal(device.upload([source], "x").wait(Edge.INPUTS)[0], source)
    assert not bulk.is_done()
    gate.let_go()
    bulk.await_done()


def test_a_bulk_download_reads_what_was_there_at_the_time(device: CudaDevice, driver: StubDriver) -> None:
    """Its stream waits for the event of the submission, although the thread comes to it later."""
    gate = Gate(driver)
    first = device.download([torch.randn(10)], "first", is_bulk=True)
    assert gate.is_there.acquire(timeout=JOIN_S)
    place = driver.default_stream(device.torch_device).num_given
    second = device.download([torch.randn(10)], "second", is_bulk=True)
    assert driver.default_stream(device.torch_device).num_given == place + 1, "no event at the submission"
    gate.let_go()
    first.await_done()
    second.await_done()


def test_many_threads_copy_at_once(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_lanes, "CHUNK_BYTES", 64)
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


def test_weights_are_page_locked_on_their_first_way(device: CudaDevice, driver: StubDriver) -> None:
    weight = torch.randn(MIB)
    for _ in range(2):
        device.upload([weight], "w", is_bulk=True).await_done()
    assert driver.locked == {weight.data_ptr(): 4 * MIB}
    device.upload([torch.randn(MIB)], "x").await_done()
    assert len(driver.locked) == 1, "activations are not worth it"


# --- memory of copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_bulk", [False, True])
def test_sources_are_held_until_they_are_read(device: CudaDevice, driver: StubDriver, is_bulk: bool) -> None:
    source = torch.randn(5)
    values, reference = source.clone(), weakref.ref(source)
    transfer = device.download([source], "y", is_bulk=is_bulk)
    del source
    assert torch.equal(transfer.wait(Edge.GRADIENTS)[0], values)
    assert driver.violations == []
    assert reference() is None, "held longer than needed"


def test_what_nobody_waits_for_is_held_as_well(device: CudaDevice, driver: StubDriver) -> None:
    device.download([torch.randn(5)], "y")
    device.upload([torch.randn(5)], "w", is_bulk=True)
    device.close()
    assert driver.violations == []
    device.open()


def test_old_transfers_are_forgotten(device: CudaDevice) -> None:
    transfer = device.download([torch.randn(5)], "y")
    assert isinstance(transfer, CudaTransfer)
    stream_of(device, "d2h").run_until(stream_of(device, "d2h").num_given)
    assert transfer.pairs
    device.download([torch.randn(5)], "z")
    assert not transfer.pairs, "the source was held although the copy had been made"


def test_callbacks_are_called_once(device: CudaDevice) -> None:
    called: list[str] = []
    waited = device.download([torch.randn(5)], "y")
    waited.when_done(Edge.FREED, lambda: called.append("waited"))
    assert called == []
    waited.await_done()
    waited.await_done()
    waited.when_done(Edge.FREED, lambda: called.append("late"))
    assert called == ["waited", "late"]
    device.download([torch.randn(5)], "y").when_done(Edge.FREED, lambda: called.append("end"))
    bulk = device.download([torch.randn(5)], "y", is_bulk=True)
    over = threading.Event()
    bulk.when_done(Edge.FREED, over.set)
    assert over.wait(JOIN_S), "the thread of the lane should have called it"
    device.close()
    assert called == ["waited", "late", "end"]
    device.open()


def test_all_callbacks_are_called_whatever_one_raises(device: CudaDevice) -> None:
    called: list[int] = []
    transfer = device.download([torch.randn(5)], "y")
    transfer.when_done(Edge.FREED, lambda: called.append(1 // len(called)))
    transfer.when_done(Edge.FREED, lambda: called.append(2))
    with pytest.raises(ZeroDivisionError):
        transfer.await_done()
    assert called == [2]


# --- failures, and the end of a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_bulk", [False, True])
def test_a_failed_copy_is_raised_to_who_wants_it(device: CudaDevice, driver: StubDriver, is_bulk: bool) -> None:
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


def test_an_error_of_the_gpu_is_raised_to_who_waits(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = device.download([torch.randn(3)], "y")
    assert isinstance(transfer, CudaTransfer)

    def broken(event: Any) -> bool:
        raise RuntimeError("illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(type(transfer._event), "query", broken)
        patch.setattr(type(transfer._event), "synchronize", broken)
        assert transfer.is_done(), "nothing needs to be waited for any more"
        for _ in range(2):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                transfer.wait(Edge.GRADIENTS)


def test_lanes_need_an_open_step(device: CudaDevice) -> None:
    device.close()
    with pytest.raises(RuntimeError, match="no step is open: h2d of GPU 0 cannot copy weights"):
        device.upload([torch.randn(3)], "weights", is_bulk=True)
    with pytest.raises(RuntimeError, match="no step is open: d2h of GPU 0 cannot copy anything"):
        device.download([torch.randn(3)], "")
    device.open()


def test_what_was_submitted_is_made_at_the_end_of_a_step(device: CudaDevice, driver: StubDriver) -> None:
    """Weights that are prefetched may stay for the next step."""
    gate = Gate(driver)
    sources = [torch.randn(100) for _ in range(4)]
    transfers = [device.upload([source], "w", is_bulk=True) for source in sources]
    assert gate.is_there.acquire(timeout=JOIN_S)
    closing = threading.Thread(target=device.close)
    closing.start()
    gate.let_go()
    closing.join(JOIN_S)
    assert all(transfer.is_done() for transfer in transfers)
    for transfer, source in zip(transfers, sources, strict=True):
        assert torch.equal(transfer.wait(Edge.WEIGHTS)[0], source)
    assert not [thread for thread in threading.enumerate() if "GPU 0" in thread.name]
    device.open()
    assert torch.equal(device.upload([sources[0]], "w", is_bulk=True).wait(Edge.WEIGHTS)[0], sources[0])


def test_a_thread_that_cannot_start_is_told_at_once(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start"):
            device.upload([torch.randn(3)], "w", is_bulk=True)
    source = torch.randn(3)
    assert torch.equal(device.upload([source], "w", is_bulk=True).wait(Edge.WEIGHTS)[0], source)


# --- the device --------------------------------------------------------------------------------------------------


def test_memory_is_free_when_compute_and_transfer_have_passed(device: CudaDevice) -> None:
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


def test_memory_is_held_until_compute_has_passed(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = stream_of(device, "h2d").driver.default_stream(device.torch_device)
    compute.is_late = True
    tensor = torch.randn(5)
    reference = weakref.ref(tensor)
    passing = device.free([tensor])
    del tensor
    assert not passing.is_done()
    assert reference() is not None
    compute.run_until(compute.num_given)
    device.free([])  # somebody frees something else
    assert reference() is None
    compute.is_late = False


def test_freed_memory_is_let_go_although_a_transfer_failed(device: CudaDevice) -> None:
    down = device.download([torch.randn(5)], "g")
    assert isinstance(down, CudaTransfer)
    tensor = torch.randn(5)
    reference = weakref.ref(tensor)
    passing = device.free([tensor], after=down)
    del tensor
    down.end(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        passing.await_done()
    assert reference() is None
    assert passing.is_done()


def test_the_end_of_a_step_waits_for_what_is_computed(device: CudaDevice, driver: StubDriver) -> None:
    compute = driver.default_stream(device.torch_device)
    compute.is_late = True
    done: list[str] = []
    compute.give("kernel", lambda: done.append("kernel"))
    device.close()
    assert done == ["kernel"]
    compute.is_late = False
    device.open()


def test_a_step_ends_although_something_failed(device: CudaDevice, driver: StubDriver) -> None:
    """Nothing is held afterwards, no thread is left, and what failed is raised to those who want it."""
    down = device.download([torch.randn(5)], "g")
    assert isinstance(down, CudaTransfer)
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


def test_the_host_is_ahead_by_two_micro_batches(device: CudaDevice, driver: StubDriver) -> None:
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


def test_a_thread_works_on_the_gpu_that_it_enters(device: CudaDevice, driver: StubDriver) -> None:
    device.enter(None)
    assert driver.devices_of_threads[threading.get_ident()] == device.torch_device


def test_stamps_tell_time_when_they_were_reached(device: CudaDevice, driver: StubDriver) -> None:
    start, end = device.stamp(), device.stamp()
    assert device.elapsed_ms(start, end) == 1.0
    late = driver.record(driver.streams[0], is_timed=True)
    assert device.elapsed_ms(start, late) is None


def test_transfers_are_traced_on_request(device: CudaDevice) -> None:
    device.upload([torch.randn(3)], "untraced").await_done()
    device.moved = moved = []
    device.upload([torch.randn(3)], "inputs a").await_done()
    device.download([torch.randn(3)], "gradients b", is_bulk=True).await_done()
    device.moved = None
    device.upload([torch.randn(3)], "untraced").await_done()
    assert [(m.lane, m.label) for m in moved] == [("h2d", "inputs a"), ("d2h", "gradients b")]
    for m in moved:
        elapsed = device.elapsed_ms(m.start, m.end)
        assert elapsed is not None
        assert elapsed >= 1


def test_statistics(device: CudaDevice) -> None:
    device.upload([torch.randn(3)], "x").await_done()
    device.download([torch.randn(5, dtype=torch.float64)], "x").await_done()
    with device.computing():
        pass
    found = device.statistics()
    assert (found["unit_runs"], found["h2d_bytes"], found["d2h_bytes"]) == (1, 12, 40)
    assert found["peak_memory_bytes"] == 123.0


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "fraction", "num_workers", "expected"),
    [
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), 1.0, 1, 20 * GIB - int(0.05 * 24 * GIB)),
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), None, 1, 20 * GIB - int(0.05 * 24 * GIB)),
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), 1.0, 2, (20 * GIB - int(0.05 * 24 * GIB)) // 2),
        # The user allows half: what this process has allocated counts.
        (MemoryState(20 * GIB, 24 * GIB, 2 * GIB, 3 * GIB), 0.5, 1, 10 * GIB - int(0.05 * 24 * GIB)),
        # What the allocator keeps for nothing is as good as free.
        (MemoryState(5 * GIB, 24 * GIB, 2 * GIB, 10 * GIB), 1.0, 1, 13 * GIB - int(0.05 * 24 * GIB)),
        (MemoryState(3 * GIB, 4 * GIB, 0, 0), 1.0, 1, 3 * GIB - GIB // 2),
    ],
)
def test_the_default_limit(
    driver: StubDriver, state: MemoryState, fraction: float | None, num_workers: int, expected: int
) -> None:
    driver.state, driver.user_fraction = state, fraction
    devices = [CudaDevice(i, 0, num_workers=num_workers, driver=driver) for i in range(num_workers)]
    assert [device.memory.limit for device in devices] == [expected] * num_workers
    assert driver.user_fraction == fraction, "the user's setting stays"
    for device in devices:
        device.dispose()


def test_a_full_gpu_is_refused(driver: StubDriver) -> None:
    driver.state = MemoryState(GIB, 24 * GIB, 0, 0)
    with pytest.raises(DeviceOutOfMemoryError, match="has 1024 of 24576 MiB to give"):
        CudaDevice(0, 0, driver=driver)


@pytest.mark.parametrize("users", [1.0, 0.9, None])
def test_an_explicit_limit_holds_for_the_allocator_until_the_end(driver: StubDriver, users: float | None) -> None:
    driver.user_fraction = users
    first, second = (CudaDevice(i, 0, num_workers=2, memory_limit=6 * GIB, driver=driver) for i in range(2))
    assert first.memory.limit == second.memory.limit == 6 * GIB
    assert driver.user_fraction == 0.5
    first.dispose()
    first.dispose()
    assert driver.user_fraction == 0.5, "another worker needs it"
    second.dispose()
    assert driver.user_fraction == (1.0 if users is None else users)


def test_the_users_own_limit_is_kept_if_it_is_smaller(driver: StubDriver) -> None:
    driver.user_fraction = 0.25
    device = CudaDevice(0, 0, memory_limit=12 * GIB, driver=driver)
    assert device.memory.limit == 6 * GIB
    assert driver.user_fraction == 0.25
    device.dispose()
    assert driver.user_fraction == 0.25
    driver.limit(torch.device("cpu"), 12 * GIB)
    assert driver.user_fraction == 0.25
    driver.unlimit(torch.device("cpu"))


def test_page_locks_go_with_the_last_worker(driver: StubDriver) -> None:
    devices = [CudaDevice(i, 0, num_workers=2, driver=driver) for i in range(2)]
    weight = torch.randn(MIB)
    driver.host.lock(weight)
    devices[0].dispose()
    assert driver.locked
    devices[1].dispose()
    assert not driver.locked
    assert devices[0].memory.name == "worker 0 on GPU 0"


# --- whole steps -------------------------------------------------------------------------------------------------

NUM_MICROBATCHES, NUM_CALLS = 3, 4
FEATURES = frozenset({"buffers", "dropout", "skip", "tied"})


def pool_on(driver: StubDriver, ordinals: list[int], monkeypatch: pytest.MonkeyPatch, limit: int | None = None) -> Any:
    """A pool of stub GPUs. Each is told that its memory is not its own: it is the host's."""
    monkeypatch.setattr(cuda_driver, "DRIVER", driver)
    pool = DevicePool([torch.device("cuda", ordinal) for ordinal in ordinals], memory_limit=limit)
    assert all(isinstance(device, CudaDevice) for device in pool.devices)
    for device in pool.devices:
        device.is_shared = True
    return pool


def plan(profile: CostProfile, num_microbatches: int, training: bool) -> Partition:
    """Stages that differ forward and backward, two calls of them fused, so that everything has to travel."""
    count = len(profile.calls)
    return cut_at(count, training, range(1, count), range(1, count), count - 2)


def batches() -> list[Any]:
    rows = torch.randn(ROWS * NUM_MICROBATCHES, WIDTH, dtype=torch.float64)
    return [(part, frozenset()) for part in rows.chunk(NUM_MICROBATCHES)]


def results(pool: DevicePool, *, trace: bool = False, visit: Callable[[Tensor], None] | None = None) -> dict[str, Any]:
    """Everything that two steps of training and one of evaluation give, by name."""
    torch.manual_seed(1)
    model = Network(range(NUM_CALLS), FEATURES)
    engine = Engine(model, pool, plan, num_threads=1)
    engine.trace = trace
    found: dict[str, Any] = {}
    for step in range(2):
        if visit is not None:
            model.layers[2].visit = [visit]  # type: ignore[assignment]
        request = StepRequest(
            model.step, batches(), [1 / NUM_MICROBATCHES] * NUM_MICROBATCHES, "train", step, loss_of=lambda loss: loss
        )
        result = engine.run(request)
        found |= {f"loss {i} of step {step}": loss.detach() for i, loss in enumerate(result.outputs)}
        names = {parameter: name for name, parameter in model.named_parameters()}
        found |= {f"gradient of {names[p]} in step {step}": gradient for p, gradient in result.gradients.items()}
        if trace:
            found["spans"] = result.timeline.spans
    model.eval()
    with torch.no_grad():
        outputs = engine.run(StepRequest(model.step, batches(), [1.0] * NUM_MICROBATCHES, "validate", 0)).outputs
    engine.close()
    found |= {f"output {i}": output for i, output in enumerate(outputs)}
    return found | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


@functools.cache
def results_on_the_host() -> dict[str, Tensor]:
    return results(DevicePool([torch.device("cpu")] * 2))


def difference(found: dict[str, Any], wanted: dict[str, Tensor]) -> str | None:
    """The first thing that is not the same, bit for bit; None if there is none."""
    assert found.keys() == wanted.keys()
    return next((name for name in wanted if not torch.equal(found[name], wanted[name])), None)


@pytest.mark.parametrize("ordinals", [[0], [0, 0], [0, 1], [0, 1, 0]], ids=str)
def test_a_step_on_gpus_is_a_step_on_the_host(
    driver: StubDriver, ordinals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_on(driver, ordinals, monkeypatch)
    assert difference(results(pool), results_on_the_host()) is None
    assert driver.violations == []
    assert [device.memory.used for device in pool.devices] == [0] * len(ordinals)
    pool.dispose()
    assert driver.locked == {}


def test_a_traced_step_shows_transfers(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(pool_on(driver, [0, 0], monkeypatch), trace=True)
    lanes = {span.kind for span in found.pop("spans")}
    assert {"compute", "h2d", "d2h"} <= lanes
    assert difference(found, results_on_the_host()) is None


def test_a_step_within_a_limit(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = pool_on(driver, [0, 0], monkeypatch)
    results(unlimited)
    peak = max(device.memory.peak for device in unlimited.devices)
    pool = pool_on(driver, [0, 0], monkeypatch, limit=peak - 1)
    assert difference(results(pool), results_on_the_host()) is None
    assert all(device.memory.peak < peak for device in pool.devices)
    with pytest.raises(DeviceOutOfMemoryError, match="worker 0 on GPU 0"):
        results(pool_on(driver, [0, 0], monkeypatch, limit=8))


def test_a_failed_step_leaves_nothing_behind(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    calls: list[int] = []

    def stop(x: Tensor) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise Stop

    pool = pool_on(driver, [0, 0], monkeypatch)
    with pytest.raises(Stop):
        results(pool, visit=stop)
    assert [device.memory.used for device in pool.devices] == [0, 0]
    assert driver.violations == []
    assert difference(results(pool), results_on_the_host()) is None


def _without_await(lane: CudaLane, transfer: CudaTransfer) -> None:
    """In the place of ``CudaLane.let_reader_wait``: waits until the copies are issued, not until they are made."""
    transfer._is_issued.wait()


def _without_order(lane: CudaLane, job: Any, stream: Any) -> None:
    """In the place of ``CudaLane._await_sources``."""


def _holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    issued, make = CudaTransfer.issued, _Freed.__init__

    def lets_go(transfer: CudaTransfer, event: Any) -> None:
        issued(transfer, event)
        transfer.pairs = []

    monkeypatch.setattr(CudaTransfer, "issued", lets_go)
    monkeypatch.setattr(_Freed, "__init__", lambda freed, tensors, *args: make(freed, [], *args))


@pytest.mark.parametrize(
    "mutate",
    [
        lambda patch: patch.setattr(CudaLane, "let_reader_wait", _without_await),
        lambda patch: patch.setattr(CudaLane, "_await_sources", _without_order),
        _holds_nothing,
    ],
    ids=["readers do not wait", "streams do not wait", "nothing is held"],
)
def test_every_ordering_of_streams_is_needed(
    driver: StubDriver, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Mutation testing: without it, the stub shows poison or a violation, every time."""
    pool = pool_on(driver, [0, 0], monkeypatch)
    with monkeypatch.context() as patch:
        mutate(patch)
        try:
            wrong = difference(results(pool), results_on_the_host())
        except Exception as error:
            wrong = repr(error)
    assert wrong is not None or driver.violations


# --- what it calls of torch --------------------------------------------------------------------------------------


class Recorder:
    """Stands for torch.cuda: notes what is called, and returns what it is told to."""

    def __init__(self, **returns: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._returns = returns

    def __getattr__(self, name: str) -> Any:
        if name not in self._returns:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *kwargs.items()))
            return self._returns[name]

        return call


GPU = torch.device("cuda", 1)


def test_the_driver_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Recorder(record=None)
    fake = Recorder(
        set_device=None, default_stream="default", Stream="new", stream="context", Event=event,
        mem_get_info=(3, 8), memory_allocated=1, memory_reserved=2, max_memory_allocated=7,
        get_per_process_memory_fraction=0.5, set_per_process_memory_fraction=None,
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", fake)
    driver = CudaDriver()
    assert driver.torch_device(1) == GPU
    driver.set_device(GPU)
    assert driver.default_stream(GPU) == "default"
    assert driver.new_stream(GPU) == "new"
    assert driver.on("stream") == "context"
    assert driver.record("stream", is_timed=True) is event
    assert event.calls == [("record", "stream")]
    assert ("Event", ("enable_timing", True), ("blocking", True)) in fake.calls
    assert driver.memory(GPU) == MemoryState(free=3, total=8, allocated=1, reserved=2)
    assert driver.peak_allocated(GPU) == 7
    assert driver.fraction(GPU) == 0.5
    driver.limit(GPU, 2)
    driver.unlimit(GPU)
    assert [call for call in fake.calls if call[0].startswith("set_per")] == [
        ("set_per_process_memory_fraction", 0.25, GPU),
        ("set_per_process_memory_fraction", 0.5, GPU),
    ]


def test_older_versions_of_torch_cannot_tell_the_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", Recorder())
    assert CudaDriver().fraction(GPU) is None


def test_the_driver_copies_and_tells_the_allocator() -> None:
    class Noting(Tensor):
        told: list[Any]

        def record_stream(self, stream: Any) -> None:  # type: ignore[override]
            self.told = [stream]

    tensor = torch.zeros(3).as_subclass(Noting)
    CudaDriver().copy(tensor, torch.ones(3))
    assert tensor.eq(1).all()
    CudaDriver().record_stream(tensor, "stream")
    assert tensor.told == ["stream"]
    assert not CudaDriver().is_page_locked(torch.zeros(3))


def test_a_refused_page_lock_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would report it again to the next launch, which has nothing to do with it."""
    runtime = Recorder(cudaHostRegister=712, cudaHostUnregister=713)
    monkeypatch.setattr(torch, "cuda", Recorder(cudart=runtime))
    launches: list[Any] = []

    def raises(*args: Any, **kwargs: Any) -> Tensor:
        launches.append(kwargs)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch, "zeros", raises)
    driver = CudaDriver()
    assert driver.page_lock(4096, 100) == 712
    driver.page_unlock(4096)
    assert runtime.calls == [("cudaHostRegister", 4096, 100, 1), ("cudaHostUnregister", 4096)]
    assert launches == [{"device": "cuda"}] * 2


def test_a_page_lock_that_works_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", Recorder(cudart=Recorder(cudaHostRegister=0, cudaHostUnregister=0)))
    monkeypatch.setattr(torch, "zeros", None)
    driver = CudaDriver()
    assert driver.page_lock(4096, 100) == 0
    driver.page_unlock(4096)
