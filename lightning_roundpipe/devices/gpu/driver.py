"""What devices on GPUs ask of torch, in one place: the module that torch has for a type of accelerator.

``torch.cuda`` (CUDA and ROCm), ``torch.xpu`` and modules of the same form for other accelerators: they need streams,
events and an allocator that tells what it holds. What is CUDA's alone is in :mod:`devices.gpu.cuda`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..issue_lock import IssueLock
from . import cuda
from .pinned import PageLockedMemory

# Level Zero and SYCL, below torch.xpu, call the error ZE_RESULT_ERROR_DEVICE_LOST and UR_RESULT_ERROR_DEVICE_LOST.
_DEVICE_LOST = "ERROR_DEVICE_LOST"
# What the module of an accelerator must have.
_NEEDED = ("Stream", "Event", "stream", "current_stream", "mem_get_info", "memory_allocated", "memory_reserved")


class MemoryState(NamedTuple):
    """Bytes of a GPU: free for all, of the whole GPU, of this process's tensors, and kept by its allocator."""

    free: int
    total: int
    allocated: int
    reserved: int


class GpuDriver:
    """The GPUs of this process that have one device type.

    Attributes:
        device_type: as in ``torch.device``.
        host: page-locked memory of this process.
        issue_lock: of all its threads that run units.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self.device_type = device_type
        self._api: Any = torch.get_device_module(device_type)
        self.host = PageLockedMemory(cuda.PageLocker(device_type))
        self.issue_lock = IssueLock()
        self._lock = threading.Lock()
        self._num_users = 0
        self._peaks: dict[torch.device, int] = defaultdict(int)  # of allocated bytes, until torch's began anew
        self._users_fractions: dict[torch.device, float] = {}  # of GPUs that are limited

    # --- streams, events, copies -----------------------------------------------------------------------------------

    def set_device(self, device: torch.device) -> None:
        """The GPU that the calling thread works on from now on."""
        self._api.set_device(device)

    def default_stream(self, device: torch.device) -> Any:
        """The stream on which threads compute that have chosen no other."""
        # Without that function it is the current stream of a thread that has chosen none.
        return (getattr(self._api, "default_stream", None) or self._api.current_stream)(device)

    def new_stream(self, device: torch.device) -> Any:
        """A stream that is not ordered with any other."""
        return self._api.Stream(device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What the calling thread issues and allocates belongs to ``stream``."""
        opened: contextlib.AbstractContextManager[Any] = self._api.stream(stream)
        return opened

    def record(self, stream: Any, *, is_timed: bool = False) -> Any:
        """An event behind what was issued on ``stream`` so far."""
        event = self._api.Event(enable_timing=is_timed, **self._blocking)
        event.record(stream)
        return event

    @functools.cached_property
    def _blocking(self) -> dict[str, bool]:
        """Lets a thread of the host that waits for an event sleep, where torch can: many threads wait on few cores."""
        try:
            takes_it = "blocking" in inspect.signature(self._api.Event).parameters
        except ValueError:  # of a class in C
            takes_it = False
        return {"blocking": True} if takes_it else {}

    def model(self, device: torch.device) -> tuple[Any, ...]:
        """What it is. On GPUs of other models operators draw in other orders: by how many threads run at a time."""
        properties = getattr(self._api, "get_device_properties", lambda device: None)(device)
        return tuple([getattr(properties, name, None) for name in ("name", "multi_processor_count")])

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Issues a copy on the stream of the calling thread."""
        destination.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """The memory of ``tensor`` is not used again before ``stream`` has passed what it was given until then."""
        tensor.record_stream(stream)

    def is_lost(self, error: BaseException) -> bool:
        """Whether ``error`` says that the GPU which it comes from does not work any more; not if it may be a mistake
        of the program."""
        return cuda.is_lost(error) or (isinstance(error, RuntimeError) and _DEVICE_LOST in str(error))

    # --- memory of a GPU -------------------------------------------------------------------------------------------

    def memory(self, device: torch.device) -> MemoryState:
        """Its state now."""
        free, total = self._api.mem_get_info(device)
        return MemoryState(free, total, self._api.memory_allocated(device), self._api.memory_reserved(device))

    def peak_allocated(self, device: torch.device) -> int:
        """The most bytes of tensors of this process at a time."""
        return max(self._peaks[device], int(self._api.max_memory_allocated(device)))

    def watch_peak(self, device: torch.device) -> Callable[[], int]:
        """Begins to watch; what is returned tells the most bytes of tensors since, beside those of now. That of torch,
        which begins anew, is kept for :meth:`peak_allocated`. Where torch cannot do that it is 0."""
        if not hasattr(self._api, "reset_peak_memory_stats"):
            return lambda: 0
        self._peaks[device] = self.peak_allocated(device)
        self._api.reset_peak_memory_stats(device)
        there = int(self._api.memory_allocated(device))
        return lambda: int(self._api.max_memory_allocated(device)) - there

    def empty_cache(self) -> None:
        """The allocators of all GPUs give back what they keep; as far as one that is lost lets them."""
        if hasattr(self._api, "empty_cache"):
            with self._loss_ignored():
                self._api.empty_cache()

    @contextlib.contextmanager
    def _loss_ignored(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not self.is_lost(error):
                raise

    def fraction(self, device: torch.device) -> float | None:
        """The fraction of the memory that this process may use; None if torch cannot tell."""
        get = getattr(self._api, "get_per_process_memory_fraction", None)
        return None if get is None else get(device)

    def set_fraction(self, device: torch.device, fraction: float) -> None:
        """Sets it, where torch can: elsewhere only the books keep to a limit."""
        if hasattr(self._api, "set_per_process_memory_fraction"):
            self._api.set_per_process_memory_fraction(fraction, device)

    def limit(self, device: torch.device, num_bytes: int) -> None:
        """The allocator gives this process at most ``num_bytes``, or less if the user has said so before, as long as
        there are devices."""
        total, fraction = self.memory(device).total, self.fraction(device)
        with self._lock:
            users = self._users_fractions.setdefault(device, 1.0 if fraction is None else fraction)
            self.set_fraction(device, min(users, num_bytes / total))

    # --- what devices share ----------------------------------------------------------------------------------------

    def retain(self) -> None:
        """There is one more device."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """A device is given up; with the last one go all limits and all page-locked memory."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            fractions, self._users_fractions = self._users_fractions, {}
        try:
            self.host.dispose()
        finally:
            for device, fraction in fractions.items():
                with self._loss_ignored():
                    self.set_fraction(device, fraction)


@functools.cache
def driver_of(device_type: str) -> GpuDriver:
    """The driver of all GPUs of this type in the process."""
    return GpuDriver(device_type)


def gpu_type() -> str | None:
    """The type of this machine's accelerator; None if it has none that devices can be on."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and is_supported(found.type) else None


def is_supported(device_type: str) -> bool:
    """Whether accelerators of this type have all that devices need."""
    try:
        api = torch.get_device_module(device_type)
    except RuntimeError:
        return False
    return device_type != "cpu" and all(hasattr(api, name) for name in _NEEDED)
