"""A driver in the place of torch.cuda, on the host.

Its copy streams are as late as they may be: what is given to one happens only when the host or another stream waits for
it. What a copy will write to is poison until then, and a copy whose source or destination was let go meanwhile is noted
as a violation. The stream that computes is the host itself, and never late.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_roundpipe.devices.chunks import poison
from lightning_roundpipe.devices.gpu_driver import GpuDriver, MemoryState

GIB = 2**30


class StubEvent:
    """A place in a stream."""

    def __init__(self, stream: StubStream, is_timed: bool) -> None:
        self.stream = stream
        self.place = stream.num_given
        self.is_timed = is_timed
        self.reached_at: int | None = None

    def query(self) -> bool:
        with self.stream.driver.lock:
            return self.stream.num_done >= self.place

    def synchronize(self) -> None:
        self.stream.driver.waits.append(self)
        self.stream.run_until(self.place)

    def elapsed_time(self, end: StubEvent) -> float:
        assert self.is_timed
        assert end.is_timed
        assert self.reached_at is not None
        assert end.reached_at is not None
        return float(end.reached_at - self.reached_at)


class StubStream:
    """Work in order.

    Attributes:
        log: what was given to it: "wait X", "copy", "record".
    """

    def __init__(self, driver: StubDriver, name: str, *, is_late: bool) -> None:
        self.driver = driver
        self.name = name
        self.is_late = is_late
        self.log: list[str] = []
        self.num_given = 0
        self.num_done = 0
        self._work: list[Callable[[], None]] = []

    def give(self, what: str, work: Callable[[], None]) -> None:
        with self.driver.lock:
            self.log.append(what)
            self._work.append(work)
            self.num_given += 1
            if not self.is_late:
                self.run_until(self.num_given)

    def wait_event(self, event: StubEvent) -> None:
        self.give(f"wait {event.stream.name}", lambda: event.stream.run_until(event.place))

    def run_until(self, place: int) -> None:
        with self.driver.lock:
            while self.num_done < place:
                work = self._work.pop(0)
                work()
                self.num_done += 1


class StubDriver(GpuDriver):
    """GPUs whose memory is the host's.

    Attributes:
        violations: copies that came too late for their memory.
        recorded: (address of the memory, stream) that the allocator was told.
        locked: page-locked memory: address -> bytes.
        refuses: error code of the next page-locks; 0 for none.
        waits: events that the host has waited for.
        state, user_fraction: of the memory of every GPU.
        num_cache_flushes: how often the allocator was asked to give back what it keeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.violations: list[str] = []
        self.recorded: list[tuple[int, StubStream]] = []
        self.locked: dict[int, int] = {}
        self.refuses = 0
        self.waits: list[StubEvent] = []
        self.state = MemoryState(free=20 * GIB, total=24 * GIB, allocated=0, reserved=0)
        self.user_fraction: float | None = 1.0
        self.num_cache_flushes = 0
        self.streams: list[StubStream] = []
        self.devices_of_threads: dict[int, torch.device] = {}
        self._compute = StubStream(self, "compute", is_late=False)
        self._local = threading.local()
        self._time = itertools.count()
        self.events: list[StubEvent] = []

    # --- streams -------------------------------------------------------------------------------------------------

    def torch_device(self, ordinal: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        self.devices_of_threads[threading.get_ident()] = device

    def default_stream(self, device: torch.device) -> StubStream:
        return self._compute

    def new_stream(self, device: torch.device) -> StubStream:
        self.streams.append(StubStream(self, f"copies {len(self.streams)}", is_late=True))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: StubStream) -> Iterator[None]:
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, stream: StubStream, *, is_timed: bool = False) -> StubEvent:
        with self.lock:
            event = StubEvent(stream, is_timed)
            event.place += 1

            def reach() -> None:
                event.reached_at = next(self._time)

            stream.give("record", reach)
            return event

    def copy(self, destination: Tensor, source: Tensor) -> None:
        stream = self._local.stream
        assert stream is not None, "a copy on the compute stream"
        with self.lock:
            there, here = _Weak(destination), _Weak(source)
            poison(destination)

            def work() -> None:
                with torch.inference_mode(False), torch.no_grad():
                    to, of = there.tensor(), here.tensor()
                    if to is not None and of is not None:
                        to.copy_(of)
                    else:
                        self.violations.append(f"{'destination' if to is None else 'source'} let go before its copy")

            stream.give("copy", work)

    def record_stream(self, tensor: Tensor, stream: StubStream) -> None:
        self.recorded.append((tensor.data_ptr(), stream))

    # --- memory --------------------------------------------------------------------------------------------------

    def memory(self, device: torch.device) -> MemoryState:
        return self.state

    def peak_allocated(self, device: torch.device) -> int:
        return 123

    def empty_cache(self) -> None:
        self.num_cache_flushes += 1

    def fraction(self, device: torch.device) -> float | None:
        return self.user_fraction

    def set_fraction(self, device: torch.device, fraction: float) -> None:
        self.user_fraction = fraction

    def page_lock(self, address: int, num_bytes: int) -> int:
        if self.refuses:
            return self.refuses
        assert not any(address < other + size and other < address + num_bytes for other, size in self.locked.items()), (
            "page-locked twice"
        )
        self.locked[address] = num_bytes
        return 0

    def page_unlock(self, address: int) -> None:
        del self.locked[address]

    def is_page_locked(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(address <= at < address + size for address, size in self.locked.items())


class _Weak:
    """A tensor whose memory is not held."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._meta = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        dtype, *layout = self._meta
        return torch.empty(0, dtype=dtype).set_(storage, *layout)
