"""Buffers of page-locked host memory, which are used again as soon as no tensor lies in them any more.

::

    slabs     [ buffer | buffer | buffer ]   [ buffer ------------------- ]     each page-locked as a whole
    tensors     ^ own the lease of their buffer: the last one to die gives it back

They have nearly the size that was asked for: torch's allocator of page-locked memory rounds up to a power of two, up to
twice as much. Large ones lie in huge pages, where the kernel has some. Locks are held for the books alone, and not
while the driver locks memory, which takes long.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.pages import OwnPages, set_inherited

# Smaller buffers are cut out of pieces of this size: each page-lock costs a call to the driver.
_SLAB_BYTES = 2**20
_MIN_BUFFER_BYTES = 512
# Of a buffer, for as long as anything lies there.
Memory = ctypes.Array[ctypes.c_ubyte]
# Own memory beside what was in use at its peak: the sizes of a step need not be those of the step before.
_MAX_SPARE = 0.25


class _Buffer(NamedTuple):
    """A part of a slab: of own memory that is cut into buffers of one size."""

    slab: OwnPages
    offset: int
    num_bytes: int


class HostBuffers:
    """Gives buffers. May be used from any thread.

    Args:
        page_lock: page-locks memory (address, bytes); whether it could.
        page_unlock: undoes that (address).
    """

    def __init__(self, page_lock: Callable[[int, int], bool], page_unlock: Callable[[int], None]) -> None:
        self._page_lock = page_lock
        self._page_unlock = page_unlock
        self._lock = threading.Lock()
        self._slabs: set[OwnPages] = set()
        self._free: dict[int, list[_Buffer]] = defaultdict(list)
        self._leases: dict[int, tuple[weakref.ref[Memory], _Buffer]] = {}
        # A tensor may die anywhere, also in a thread that holds the lock: what it leaves is picked up later.
        self._returned: deque[weakref.ref[Memory]] = deque()
        self._used_bytes = 0
        self._peak_used_bytes = 0

    @property
    def own_bytes(self) -> int:
        """Of buffers, in use or not."""
        with self._lock:
            return sum(slab.num_bytes for slab in self._slabs)

    @property
    def pageable_bytes(self) -> int:
        """Of them, that could not be page-locked."""
        with self._lock:
            return sum(slab.num_bytes for slab in self._slabs if not slab.is_locked)

    def empty_like(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """A host tensor of the shape and type of ``tensor``, with memory in a page-locked buffer of its own.

        The buffer is used again when the tensor and all its views are gone.

        Returns:
            The tensor, and whether it is page-locked indeed.
        """
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu"), True
        memory, is_locked = self.memory(tensor.nbytes)
        return laid_out_like(tensor, memory, 0), is_locked

    def memory(self, num_bytes: int) -> tuple[Memory, bool]:
        """At least so many bytes for :func:`laid_out_like`, on the same terms."""
        buffer = self._take(_bucket(num_bytes))
        slab = buffer.slab
        # Each tensor that lies there owns the lease, and so do its views: when it dies, the memory is free.
        lease = (ctypes.c_ubyte * buffer.num_bytes).from_buffer(slab.memory, slab.offset + buffer.offset)
        end = weakref.ref(lease, self._returned.append)
        self._leases[id(end)] = end, buffer
        return lease, slab.is_locked

    def _take(self, num_bytes: int) -> _Buffer:
        with self._lock:
            self._pick_up()
            if self._free[num_bytes]:
                return self._used(self._free[num_bytes].pop())
            allowed = (1 + _MAX_SPARE) * max(self._peak_used_bytes, self._used_bytes + num_bytes)
            spare = self._trim(allowed - num_bytes)
        for slab in spare:
            self._unlock(slab)
        slab = OwnPages(max(1, _SLAB_BYTES // num_bytes) * num_bytes)
        set_inherited(slab.address, slab.num_bytes, False)
        slab.is_locked = self._page_lock(slab.address, slab.num_bytes)
        first, *others = (_Buffer(slab, offset, num_bytes) for offset in range(0, slab.num_bytes, num_bytes))
        with self._lock:
            self._slabs.add(slab)
            self._free[num_bytes] += others
            return self._used(first)

    def _used(self, buffer: _Buffer) -> _Buffer:
        buffer.slab.num_used += 1
        self._used_bytes += buffer.num_bytes
        self._peak_used_bytes = max(self._peak_used_bytes, self._used_bytes)
        return buffer

    def _pick_up(self) -> None:
        """Buffers whose tensors have died are free."""
        while self._returned:
            end = self._returned.popleft()
            _, buffer = self._leases.pop(id(end), (end, None))
            if buffer is not None and buffer.slab in self._slabs:  # else given up meanwhile
                buffer.slab.num_used -= 1
                self._used_bytes -= buffer.num_bytes
                self._free[buffer.num_bytes].append(buffer)

    def give_up_spare(self) -> None:
        """Gives up what is not in use, as if no more had ever been."""
        with self._lock:
            self._pick_up()
            self._peak_used_bytes = self._used_bytes
            spare = self._trim(0)
        for slab in spare:
            self._unlock(slab)

    def _trim(self, allowed_bytes: float) -> list[OwnPages]:
        """Free buffers that are given up, the largest first, while there are more own bytes than are allowed."""
        spare: list[OwnPages] = []
        own_bytes = sum(slab.num_bytes for slab in self._slabs)
        for slab in sorted((s for s in self._slabs if not s.num_used), key=lambda s: s.num_bytes, reverse=True):
            if own_bytes <= allowed_bytes:
                break
            spare.append(slab)
            self._slabs.remove(slab)
            own_bytes -= slab.num_bytes
        for size in list(self._free) if spare else ():
            self._free[size] = [buffer for buffer in self._free[size] if buffer.slab in self._slabs]
        return spare

    def _unlock(self, slab: OwnPages) -> None:
        if slab.is_locked:
            self._page_unlock(slab.address)
            slab.is_locked = False

    def dispose(self) -> None:
        """Gives up all of them; tensors keep their values."""
        with self._lock:
            slabs, self._slabs = self._slabs, set()
            self._free.clear()
            self._leases.clear()
            self._returned.clear()
            self._used_bytes = self._peak_used_bytes = 0
        for slab in slabs:
            self._unlock(slab)
            set_inherited(slab.address, slab.num_bytes, True)


def _bucket(num_bytes: int) -> int:
    """The size of the buffer for ``num_bytes``: at most an eighth more, so that similar sizes share buffers."""
    if num_bytes <= _MIN_BUFFER_BYTES:
        return _MIN_BUFFER_BYTES
    step = 1 << max(num_bytes.bit_length() - 4, 6)  # 64 bytes at least: buffers stay aligned
    return -(-num_bytes // step) * step


def aligned(num_bytes: int) -> int:
    """As many bytes, or a few more, such that any tensor may begin behind them."""
    return -(-num_bytes // 64) * 64


def laid_out_like(tensor: Tensor, memory: Memory, offset: int) -> Tensor:
    """A tensor of the shape and type of ``tensor`` at this byte of ``memory``, in its order, without its gaps."""
    row = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    if tensor.is_contiguous():
        return row.view(tensor.shape)
    return row.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
