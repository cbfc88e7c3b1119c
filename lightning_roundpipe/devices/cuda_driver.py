"""What CUDA devices ask of torch.cuda, in one place, so that tests can put something else there."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pinned import PageLockedMemory

# cudaHostRegisterPortable: page-locked for all GPUs of the process.
_PORTABLE = 1


class MemoryState(NamedTuple):
    """Bytes of a GPU: free for everybody, of the whole GPU, of this process's tensors, and kept by its allocator."""

    free: int
    total: int
    allocated: int
    reserved: int


class CudaDriver:
    """The GPUs of this process.

    Attributes:
        host: its page-locked memory.
    """

    def __init__(self) -> None:
        self.host = PageLockedMemory(self)
        self._lock = threading.Lock()
        self._num_users = 0
        # GPU -> how many devices limit its memory, and the user's fraction (None if torch cannot tell).
        self._limited: dict[int, tuple[int, float | None]] = {}

    # --- streams, events, copies -----------------------------------------------------------------------------------

    def torch_device(self, ordinal: int) -> torch.device:
        """Where the tensors of a GPU live."""
        return torch.device("cuda", ordinal)

    def set_device(self, device: torch.device) -> None:
        """The GPU that the calling thread works on from now on."""
        torch.cuda.set_device(device)

    def default_stream(self, device: torch.device) -> Any:
        """The stream on which threads compute that have chosen no other."""
        return torch.cuda.default_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """A stream that is not ordered with any other."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What the calling thread issues and allocates belongs to ``stream``."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any, *, is_timed: bool = False) -> Any:
        """An event behind what was issued on ``stream`` so far.

        A thread of the host that waits for it sleeps: there are many threads that wait, and few cores.
        """
        event = torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Issues a copy on the stream of the calling thread."""
        destination.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """The memory of ``tensor`` is not used again before ``stream`` has passed what it was given until then."""
        tensor.record_stream(stream)

    # --- memory of a GPU -------------------------------------------------------------------------------------------

    def memory(self, device: torch.device) -> MemoryState:
        """Its state now."""
        free, total = torch.cuda.mem_get_info(device)
        return MemoryState(free, total, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))

    def peak_allocated(self, device: torch.device) -> int:
        """The most bytes of tensors of this process at a time."""
        return torch.cuda.max_memory_allocated(device)

    def fraction(self, device: torch.device) -> float | None:
        """The fraction of the memory that this process may use; None if torch cannot tell."""
        get = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return None if get is None else get(device)

    def set_fraction(self, device: torch.device, fraction: float) -> None:
        """Sets it."""
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    def limit(self, device: torch.device, num_bytes: int) -> None:
        """The allocator gives this process at most ``num_bytes``, or less if the user has said so before.

        Every call needs an :meth:`unlimit`.
        """
        total = self.memory(device).total
        with self._lock:
            key = device.index or 0
            num_limits, users = self._limited.get(key, (0, None))
            if num_limits == 0:
                users = self.fraction(device)
            self._limited[key] = (num_limits + 1, users)
            self.set_fraction(device, min(1.0 if users is None else users, num_bytes / total))

    def unlimit(self, device: torch.device) -> None:
        """With the last of them the user's fraction is put back; all of the GPU if torch could not tell it."""
        with self._lock:
            key = device.index or 0
            num_limits, users = self._limited[key]
            if num_limits > 1:
                self._limited[key] = (num_limits - 1, users)
                return
            del self._limited[key]
            self.set_fraction(device, 1.0 if users is None else users)

    # --- memory of the host ----------------------------------------------------------------------------------------

    def retain(self) -> None:
        """A device needs page-locked memory from now on."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """A device does not need it any more; with the last one all of it is given up."""
        with self._lock:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            self.host.dispose()

    def page_lock(self, address: int, num_bytes: int) -> int:
        """See :class:`pinned.PageLocker`."""
        error = int(self._runtime().cudaHostRegister(address, num_bytes, _PORTABLE))
        if error:
            self._clear_error()
        return error

    def page_unlock(self, address: int) -> None:
        """See :class:`pinned.PageLocker`."""
        if int(self._runtime().cudaHostUnregister(address)):
            self._clear_error()

    def is_page_locked(self, tensor: Tensor) -> bool:
        """See :class:`pinned.PageLocker`."""
        return tensor.is_pinned()

    @staticmethod
    def _runtime() -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    @staticmethod
    def _clear_error() -> None:
        """CUDA reports an error again to the next kernel launch of the thread, and torch raises it there.

        Torch has no call to clear it, so that a launch is made for it.
        """
        with contextlib.suppress(RuntimeError):
            torch.zeros((), device="cuda").add_(1)


DRIVER = CudaDriver()
