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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...planning.quantities import format_bytes
from ..chunks import plain_mode
from ..device import Device
from ..issue_lock import Pace
from ..memory import DeviceMemory, DeviceOutOfMemoryError, Passing
from ..transfer import Done, Transfer
from .driver import GpuDriver
from .lanes import GpuLane, GpuTransfer
from .pinned import PageLockedMemory

# Of what may be used, beside what the books give out: what the allocator cannot use of its blocks, and the workspaces
# of cuBLAS. Each thread that multiplies has one of its own, of 32 MiB on the newest GPUs, so that they grow with the
# number of micro-batches. Where little may be used, the second figure would be all of it.
_RESERVE_PART, _MAX_RESERVE_PART = 0.05, 0.25
_MIN_RESERVE_BYTES = 512 * 2**20
# The host is ahead of the GPU by at most so many micro-batches in a stage.
_MAX_AHEAD = 2
# Of what those before have made, at most one of so many parts of its memory is still to go down.
_LEAVING_PARTS = 16


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
        if (after is not None and not after.is_done()) or not _has_passed(event):
            return False
        self._let_go()
        return True

    def has_computed(self) -> bool:
        """Whether the compute stream has passed."""
        event = self._event
        return event is None or _has_passed(event)

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


def _has_passed(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # of anything that ran on the GPU before: nothing more comes
        return True


class GpuDevice(Device):
    """A device on a GPU; see [Note: streams] in :mod:`devices.gpu.lanes`.

    Args:
        index: position in the pool.
        ordinal: of the GPU.
        num_sharing: devices on this GPU; see [Note: several devices on one GPU].
        memory_limit: bytes that the allocator of torch may take for the device, until all are given up: nothing of
            this process exceeds it. None for its part of what is free now. The books have less in either case: what is
            allocated already, and a reserve, are taken off.
        driver: of the GPUs of its type.

    Raises:
        DeviceOutOfMemoryError: if nothing is left.
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
        torch_device = torch.device(driver.device_type, ordinal)
        name = f"GPU {ordinal}" if num_sharing == 1 else f"device {index} on GPU {ordinal}"
        limit = _limit(driver, torch_device, num_sharing, memory_limit)
        self._compute = driver.default_stream(torch_device)
        h2d, d2h = (GpuLane(direction, name, torch_device, self._compute, driver) for direction in ("h2d", "d2h"))
        super().__init__(index, torch_device, h2d, d2h, DeviceMemory(name, limit))
        self.d2h: GpuLane = d2h
        self.is_shared = num_sharing > 1
        self.draws_as = driver.model(torch_device)
        self._lock = threading.Lock()
        self._leaving: deque[_Freed | GpuTransfer] = deque()
        # Where micro-batches began a stage: an event, and bytes of activations that were submitted to go down.
        self._begun: deque[tuple[Any, int]] = deque()
        self._is_disposed = False
        if memory_limit is not None:
            driver.limit(torch_device, num_sharing * memory_limit)
        driver.retain()

    def check(self) -> None:
        """Work that has failed is reported where it is waited for; of a lost GPU, in every call from then on."""
        with contextlib.suppress(Exception), self._noting_loss():  # other errors were raised where they belong
            self._await_compute()

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """While open, errors that say that the GPU is lost are noted, and then not raised."""
        try:
            yield
        except Exception as error:
            if self.lost is None and self._driver.is_lost(error):
                # Errors of CUDA go on about other things for many lines.
                self.lost = str(error).strip().partition("\n")[0] or type(error).__name__
            if self.lost is None:
                raise

    def issuing(self, pace: Pace) -> AbstractContextManager[object]:
        return self._driver.issue_lock.issuing(pace)

    def enter(self) -> None:
        self._driver.set_device(self.torch_device)

    def throttle(self) -> None:
        """Memory of work that the GPU has not reached is taken already, and so is that of activations which a slow link
        has not brought down: without bounds it would be all of it."""
        assert self.memory.limit is not None
        with self._lock:
            self._begun.append((self._driver.record(self._compute), self.d2h.activation_bytes))
            oldest = self._begun.popleft() if len(self._begun) > _MAX_AHEAD else None
        if oldest is not None:
            computed, submitted = oldest
            computed.synchronize()
            self.d2h.await_activations(submitted, but=self.memory.limit // _LEAVING_PARTS)
        self._collect()

    def stamp(self) -> Any:
        return self._driver.record(self._compute, is_timed=True)

    def begin(self) -> Any:
        return self.stamp() if self.times_runs else None

    def end(self, begun: Any) -> Any:
        return None if begun is None else self.stamp()

    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        if self.lost is not None or start is None or end is None:
            return None
        # To ask is not to wait; elapsed_time of events that were not reached would raise.
        return float(start.elapsed_time(end)) if start.query() and end.query() else None

    def keep(self, tensor: Tensor) -> Transfer:
        """In page-locked memory."""
        if tensor.layout is not torch.strided:
            return super().keep(tensor)
        with plain_mode():
            copy, is_locked = self._driver.host.buffers.empty_like(tensor)
            return Done([copy.copy_(tensor)], is_page_locked=is_locked)

    def free(self, tensors: Sequence[Tensor], after: Transfer | None = None) -> Passing | None:
        passing: _Freed | GpuTransfer | None = None
        with self._noting_loss():
            if isinstance(after, GpuTransfer) and after.is_download:  # it waits for compute itself, and holds them
                passing = after
            else:
                passing = _Freed(tensors, self._driver.record(self._compute), after)
            with self._lock:
                self._leaving.append(passing)
            self._collect()
        return passing

    def _collect(self) -> None:
        """Lets go of what has passed. The compute stream passes one after the other: behind the first that it has not
        reached nothing is asked for."""
        leaving = list(self._leaving)
        passed = set()
        for passing in leaving:
            if passing.is_done():
                passed.add(id(passing))
            elif isinstance(passing, _Freed) and not passing.has_computed():
                break
        if passed:
            with self._lock:
                self._leaving = deque(passing for passing in self._leaving if id(passing) not in passed)

    def open(self) -> None:
        self.page_locked.begin_step()
        super().open()

    def close(self) -> None:
        """Also waits for what this device computes: nothing of it reaches into the next step."""
        with self._noting_loss(), contextlib.ExitStack() as stack:  # all of it, even if one raises
            stack.callback(self._await_compute)
            super().close()

    def _await_compute(self) -> None:
        with self._lock:
            self._begun.clear()
        try:
            self._driver.record(self._compute).synchronize()
        finally:
            self._await_leaving()

    def _await_leaving(self) -> None:
        with self._lock:
            leaving, self._leaving = self._leaving, deque()
        for passing in leaving:
            with contextlib.suppress(Exception):  # of a transfer: raised to those who ask for its copies
                passing.await_done()

    def empty_cache(self) -> None:
        """Also waits for what is held until streams have passed."""
        self._await_leaving()
        self._driver.empty_cache()

    def give_up_spare(self) -> None:
        super().give_up_spare()
        self.page_locked.buffers.give_up_spare()

    def dispose(self) -> None:
        """With the last device the limit of the allocator is what it was before, and no memory is page-locked."""
        if self._is_disposed:
            return
        self._is_disposed = True
        self._await_leaving()  # the device outlives its use, in the Trainer for example: tensors must not
        self._driver.release()

    @property
    def page_locked(self) -> PageLockedMemory:
        """Of the host; all GPUs share it."""
        return self._driver.host

    @property
    def peak_memory_bytes(self) -> int:
        """Of the GPU, all its devices together."""
        return self._driver.peak_allocated(self.torch_device)

    def watch_allocator(self) -> Callable[[], int]:
        """That of the GPU, all its devices together. What is not in use goes first: it would go while this watches."""
        self.memory.evict_all()
        return self._driver.watch_peak(self.torch_device)

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), "peak_memory_bytes": float(self.peak_memory_bytes)}


def _limit(driver: GpuDriver, device: torch.device, num_sharing: int, memory_limit: int | None) -> int:
    """Bytes that the books of each of the devices on a GPU give out."""
    state = driver.memory(device)
    fraction = driver.fraction(device)
    allowed = state.total if fraction is None else int(fraction * state.total)
    if memory_limit is not None:
        allowed = min(allowed, num_sharing * memory_limit)
    reserve = max(int(_RESERVE_PART * allowed), min(_MIN_RESERVE_BYTES, int(_MAX_RESERVE_PART * allowed)))
    # The context of the GPU and other processes are in neither figure of the allocator, but they are not free either.
    available = min(state.free + state.reserved, allowed) - state.allocated
    limit = (available - reserve) // num_sharing
    if limit <= 0:
        raise DeviceOutOfMemoryError(
            f"{device} has no memory left for a step. Of its {format_bytes(state.total)} this process may use "
            f"{format_bytes(allowed)}. It has {format_bytes(state.allocated)} allocated already, "
            f"{format_bytes(state.free + state.reserved - state.allocated)} are not in use, and "
            f"{format_bytes(reserve)} are kept for workspaces. Free what is there, stop other processes or choose "
            "another GPU, or raise device_memory_limit if one was set.",
            fits_if_split=False,
        )
    return limit
