"""Devices on GPUs.

[Note: several devices on one GPU]
``devices=[0, 0]`` makes two devices of GPU 0, so that everything that happens between devices can happen where there is
one GPU. Each has lanes, copy streams, books and a part of the memory of its own. They compute on one stream, in
whatever order they come: user code outside the units may use any tensor on the GPU at any time, and only one stream
orders all of that.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .chunks import plain_mode
from .devices import Device
from .gpu_driver import GpuDriver
from .gpu_lanes import GpuLane
from .memory import DeviceMemory, DeviceOutOfMemoryError, Passing
from .pinned import PageLockedMemory
from .transfer import Done, Transfer

# Beside the tensors: what the allocator cannot use of its blocks, and the workspaces of cuBLAS. Each thread that
# multiplies has one of its own, of 32 MiB on the newest GPUs, so that they grow with the number of micro-batches.
_RESERVE_PART = 0.05
_MIN_RESERVE_BYTES = 512 * 2**20
# The host is ahead of the GPU by at most so many micro-batches in a stage.
_MAX_AHEAD = 2

_MIB = 2**20


class _Freed:
    """Tensors that are held until the compute stream, and a transfer, have passed."""

    def __init__(self, tensors: Sequence[Tensor], event: Any, after: Transfer | None) -> None:
        self._tensors = list(tensors)
        self._event = event
        self._after = after

    def is_done(self) -> bool:
        """Whether they have passed. The tensors are gone then, so that the allocator has their memory."""
        event, after = self._event, self._after  # another thread may let go meanwhile
        if event is None:
            return True
        if (after is not None and not after.is_done()) or not event.query():
            return False
        self._let_go()
        return True

    def await_done(self) -> None:
        """Waits until they have."""
        event, after = self._event, self._after
        if event is None:
            return
        try:
            if after is not None:
                after.await_done()
            event.synchronize()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._after = self._event = None
        self._tensors = []


class GpuDevice(Device):
    """A device on a GPU; see [Note: streams] in :mod:`devices.gpu_lanes`.

    Args:
        index: position in the pool.
        ordinal: of the GPU.
        num_sharing: devices on this GPU; see [Note: several devices on one GPU].
        memory_limit: bytes that the device may use. It holds for the allocator of torch as well, so that nothing of
            this process exceeds it, until :meth:`dispose`. None for its part of what is free now, less a reserve.
        driver: of the GPUs of its type.

    Raises:
        DeviceOutOfMemoryError: if less than the reserve is free.
    """

    def __init__(
        self,
        index: int,
        ordinal: int,
        *,
        driver: GpuDriver,
        num_sharing: int = 1,
        memory_limit: int | None = None,
    ) -> None:
        self._driver = driver
        torch_device = driver.torch_device(ordinal)
        name = f"GPU {ordinal}" if num_sharing == 1 else f"device {index} on GPU {ordinal}"
        limit = _limit(driver, torch_device, num_sharing, memory_limit)
        self._compute = driver.default_stream(torch_device)
        h2d, d2h = (GpuLane(direction, name, torch_device, self._compute, driver) for direction in ("h2d", "d2h"))
        super().__init__(index, torch_device, h2d, d2h, DeviceMemory(name, limit))
        self.is_shared = num_sharing > 1
        self._lock = threading.Lock()
        self._leaving: deque[_Freed] = deque()
        self._begun: deque[Any] = deque()  # events where micro-batches began a stage
        self._is_limited = memory_limit is not None
        self._is_disposed = False
        if self._is_limited:
            driver.limit(torch_device, num_sharing * limit)
        driver.retain()

    def enter(self, before: Device | None) -> None:
        self._driver.set_device(self.torch_device)

    def throttle(self) -> None:
        """Memory of work that the GPU has not reached is taken already: without a bound it would be all of it."""
        with self._lock:
            self._begun.append(self._driver.record(self._compute))
            oldest = self._begun.popleft() if len(self._begun) > _MAX_AHEAD else None
        if oldest is not None:
            oldest.synchronize()
        self._collect()

    def stamp(self) -> Any:
        return self._driver.record(self._compute, is_timed=True)

    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        # To ask is not to wait; elapsed_time of events that were not reached would raise.
        return float(start.elapsed_time(end)) if start.query() and end.query() else None

    def keep(self, tensor: Tensor) -> Transfer:
        """In page-locked memory."""
        if tensor.layout is not torch.strided:
            return super().keep(tensor)
        with plain_mode():
            copy, is_locked = self._driver.host.empty_like(tensor)
            return Done([copy.copy_(tensor)], is_page_locked=is_locked)

    def free(self, tensors: Sequence[Tensor], after: Transfer | None = None) -> Passing:
        freed = _Freed(tensors, self._driver.record(self._compute), after)
        with self._lock:
            self._leaving.append(freed)
        self._collect()
        return freed

    def _collect(self) -> None:
        """Lets go of what has passed."""
        with self._lock:
            leaving = list(self._leaving)
        passed = {id(freed) for freed in leaving if freed.is_done()}
        if passed:
            with self._lock:
                self._leaving = deque(freed for freed in self._leaving if id(freed) not in passed)

    def close(self) -> None:
        """Also waits for what this device computes: nothing of it reaches into the next step."""
        with contextlib.ExitStack() as stack:  # all of it, even if one raises
            stack.callback(self._await_compute)
            super().close()

    def _await_compute(self) -> None:
        with self._lock:
            self._begun.clear()
            leaving, self._leaving = self._leaving, deque()
        self._driver.record(self._compute).synchronize()
        for freed in leaving:
            with contextlib.suppress(Exception):  # of a transfer: raised to those who ask for its copies
                freed.await_done()

    def dispose(self) -> None:
        """The limit of the allocator is what it was before, and with the last device no memory is page-locked."""
        if self._is_disposed:
            return
        self._is_disposed = True
        if self._is_limited:
            self._driver.unlimit(self.torch_device)
        self._driver.release()

    @property
    def page_locked(self) -> PageLockedMemory:
        """Of the host; all GPUs share it."""
        return self._driver.host

    @property
    def peak_memory_bytes(self) -> int:
        """Of the GPU, all its devices together."""
        return self._driver.peak_allocated(self.torch_device)

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), "peak_memory_bytes": float(self.peak_memory_bytes)}


def _limit(driver: GpuDriver, device: torch.device, num_sharing: int, memory_limit: int | None) -> int:
    """Bytes that each of the devices on a GPU may use."""
    state = driver.memory(device)
    fraction = driver.fraction(device)
    allowed = state.total if fraction is None else int(fraction * state.total)
    if memory_limit is not None:
        return min(memory_limit, allowed // num_sharing)
    available = min(state.free + state.reserved, allowed) - state.allocated
    limit = (available - max(int(_RESERVE_PART * state.total), _MIN_RESERVE_BYTES)) // num_sharing
    if limit <= 0:
        raise DeviceOutOfMemoryError(
            f"{device} has {available / _MIB:.0f} of {state.total / _MIB:.0f} MiB to give: another process, or another "
            "part of this one, uses the rest. Free it, choose another GPU, or set a memory limit yourself."
        )
    return limit
