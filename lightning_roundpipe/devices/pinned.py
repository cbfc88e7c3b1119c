"""Page-locked host memory: what copies to and from GPUs need in order to run beside everything else.

[Note: page-locked memory]
A copy between a GPU and ordinary host memory goes through a buffer of the driver, at a fraction of the speed, and holds
the host up. So weights are page-locked where they are, when they travel for the first time: no second copy of them
exists. What comes down (activations, gradients) gets buffers of our own, which are used again as soon as no
tensor lies in them any more. They have nearly the size that was asked for: torch's allocator of page-locked memory
rounds up to a power of two, up to twice as much.

Linux copies page-locked memory into the child of a fork at once, page by page, and every DataLoader worker is such a
child. Therefore the child does not get it: a worker that reads a weight of the model crashes. Memory that was shared
with other processes before stays shared.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# What is smaller is copied by the driver about as fast either way.
_MIN_LOCKED_BYTES = 2**20
# Smaller buffers are cut out of pieces of this size: each page-lock costs a call to the driver.
_SLAB_BYTES = 2**20
_MIN_BUFFER_BYTES = 512
# Own memory beside what was in use at its peak: the sizes of a step need not be those of the step before.
_MAX_SPARE = 0.25

_MADVISE: Callable[..., int] | None
try:
    _MADVISE = ctypes.CDLL(None, use_errno=True).madvise
except (OSError, AttributeError, TypeError):  # no such call here
    _MADVISE = None
_DONTFORK = getattr(mmap, "MADV_DONTFORK", None)
_DOFORK = getattr(mmap, "MADV_DOFORK", None)
_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class PageLocker(Protocol):
    """The part of the driver that page-locks."""

    def page_lock(self, address: int, num_bytes: int) -> int:
        """Page-locks memory; 0, or the driver's error code."""

    def page_unlock(self, address: int) -> None:
        """Undoes :meth:`page_lock`."""

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor on the host is page-locked, by this process or others."""


class _Locked(NamedTuple):
    """Memory that was allocated elsewhere; held, because it must not be freed while it is page-locked."""

    storage: torch.UntypedStorage
    is_ours: bool
    is_locked: bool


class _Slab:
    """Own memory, cut into buffers of one size."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
        self.num_bytes = num_bytes
        self.num_used = 0
        self.is_locked = False

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class _Buffer(NamedTuple):
    """A part of a slab."""

    slab: _Slab
    offset: int
    num_bytes: int


class PageLockedMemory:
    """Page-locked memory of a process, see [Note: page-locked memory]. May be used from any thread.

    Args:
        driver: does it.

    Attributes:
        in_place_bytes: of others, page-locked where it is.
        own_bytes: of buffers, in use or not.
        pageable_bytes: that could not be page-locked, of others or of buffers: copies are slower there.
    """

    def __init__(self, driver: PageLocker) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._known: dict[int, _Locked] = {}
        self._slabs: set[_Slab] = set()
        self._free: dict[int, list[_Buffer]] = defaultdict(list)
        # A tensor may die anywhere, also in a thread that holds the lock: what it leaves is picked up later.
        self._returned: deque[_Buffer] = deque()
        self._used_bytes = 0
        self._peak_used_bytes = 0
        self._has_warned = False
        self.in_place_bytes = 0
        self.own_bytes = 0
        self.pageable_bytes = 0

    def statistics(self) -> dict[str, float]:
        """The bytes that it holds: page-locked in place, of own buffers, and not to be page-locked."""
        return {
            "page_locked_in_place_bytes": float(self.in_place_bytes),
            "page_locked_own_bytes": float(self.own_bytes),
            "pageable_bytes": float(self.pageable_bytes),
        }

    # --- memory of others ----------------------------------------------------------------------------------------

    def lock(self, tensor: Tensor) -> bool:
        """Page-locks the memory of ``tensor`` where it is, if it is large enough to be worth it, until :meth:`dispose`.

        Returns:
            Whether it is page-locked now. If it cannot be, a warning says so once.
        """
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes < _MIN_LOCKED_BYTES:
            return False
        with self._lock:
            known = self._known.get(address)
            if known is None:
                known = self._known[address] = self._lock_storage(tensor, storage)
            return known.is_locked

    def _lock_storage(self, tensor: Tensor, storage: torch.UntypedStorage) -> _Locked:
        if self._driver.is_page_locked(tensor):
            return _Locked(storage, is_ours=False, is_locked=True)
        is_locked = self._page_lock(storage.data_ptr(), storage.nbytes(), "weights")
        if is_locked:
            self.in_place_bytes += storage.nbytes()
            if not storage.is_shared():
                _set_inherited(storage.data_ptr(), storage.nbytes(), False)
        return _Locked(storage, is_ours=is_locked, is_locked=is_locked)

    def _page_lock(self, address: int, num_bytes: int, what: str) -> bool:
        error = self._driver.page_lock(address, num_bytes)
        if error == 0:
            return True
        self.pageable_bytes += num_bytes
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{num_bytes} bytes of {what} could not be page-locked (CUDA error {error}): copies between them and "
                "GPUs are slower. The host may be short of memory, or limit how much may be locked.",
                stacklevel=2,
            )
        return False

    # --- own buffers ---------------------------------------------------------------------------------------------

    def empty_like(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """A host tensor of the shape and type of ``tensor``, with memory in a page-locked buffer of its own.

        The buffer is used again when the tensor and all its views are gone.

        Returns:
            The tensor, and whether it is page-locked indeed.
        """
        layout = torch.empty_like(tensor, device="meta")
        num_bytes = layout.numel() * layout.element_size()
        if num_bytes == 0:
            return torch.empty_like(tensor, device="cpu"), True
        with self._lock:
            buffer = self._take(_bucket(num_bytes))
        # The storage owns the lease, and every view owns the storage: when the lease dies, the memory is not used any
        # more.
        lease = (ctypes.c_ubyte * buffer.num_bytes).from_buffer(buffer.slab.memory, buffer.offset)
        weakref.finalize(lease, self._returned.append, buffer).atexit = False
        storage = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, layout.shape, layout.stride())
        return made, buffer.slab.is_locked

    def _take(self, num_bytes: int) -> _Buffer:
        self._pick_up()
        if not self._free[num_bytes]:
            self._trim(num_bytes)
            self._grow(num_bytes)
        buffer = self._free[num_bytes].pop()
        buffer.slab.num_used += 1
        self._used_bytes += num_bytes
        self._peak_used_bytes = max(self._peak_used_bytes, self._used_bytes)
        return buffer

    def _pick_up(self) -> None:
        """Buffers whose tensors have died are free."""
        while self._returned:
            buffer = self._returned.popleft()
            if buffer.slab in self._slabs:  # else given up meanwhile
                buffer.slab.num_used -= 1
                self._used_bytes -= buffer.num_bytes
                self._free[buffer.num_bytes].append(buffer)

    def _grow(self, num_bytes: int) -> None:
        """Makes buffers of a size, at least one."""
        slab = _Slab(max(1, _SLAB_BYTES // num_bytes) * num_bytes)
        _set_inherited(slab.address, slab.num_bytes, False)
        slab.is_locked = self._page_lock(slab.address, slab.num_bytes, "buffers")
        self._slabs.add(slab)
        self.own_bytes += slab.num_bytes
        self._free[num_bytes] += [_Buffer(slab, offset, num_bytes) for offset in range(0, slab.num_bytes, num_bytes)]

    def _trim(self, num_bytes: int) -> None:
        """Gives up free buffers, the largest first, if there would be too many of them with ``num_bytes`` more."""
        allowed = (1 + _MAX_SPARE) * max(self._peak_used_bytes, self._used_bytes + num_bytes)
        for slab in sorted((s for s in self._slabs if not s.num_used), key=lambda s: s.num_bytes, reverse=True):
            if self.own_bytes + num_bytes <= allowed:
                return
            self._give_up(slab)

    def _give_up(self, slab: _Slab) -> None:
        self._unlock(slab)
        self._slabs.remove(slab)
        self.own_bytes -= slab.num_bytes
        for size in list(self._free):
            self._free[size] = [buffer for buffer in self._free[size] if buffer.slab is not slab]

    def _unlock(self, slab: _Slab) -> None:
        if slab.is_locked:
            self._driver.page_unlock(slab.address)
            slab.is_locked = False
        else:
            self.pageable_bytes -= slab.num_bytes

    def dispose(self) -> None:
        """Puts everything back: no memory is page-locked by us afterwards. Tensors in buffers keep their values."""
        with self._lock:
            for known in self._known.values():
                if known.is_ours:
                    self._driver.page_unlock(known.storage.data_ptr())
                    _set_inherited(known.storage.data_ptr(), known.storage.nbytes(), True)
            self._known.clear()
            for slab in self._slabs:
                self._unlock(slab)
                _set_inherited(slab.address, slab.num_bytes, True)
            self._slabs.clear()
            self._free.clear()
            self._returned.clear()
            self._used_bytes = self._peak_used_bytes = 0
            self.in_place_bytes = self.own_bytes = self.pageable_bytes = 0
            self._has_warned = False


def _bucket(num_bytes: int) -> int:
    """The size of the buffer for ``num_bytes``: at most an eighth more, so that similar sizes share buffers."""
    if num_bytes <= _MIN_BUFFER_BYTES:
        return _MIN_BUFFER_BYTES
    step = 1 << max(num_bytes.bit_length() - 4, 6)  # 64 bytes at least: buffers stay aligned
    return -(-num_bytes // step) * step


def _set_inherited(address: int, num_bytes: int, is_inherited: bool) -> None:
    """Whether children of a fork get the pages that lie in this memory as a whole.

    Those at the ends may hold other things, such as the allocator's notes on this memory.
    """
    advice = _DOFORK if is_inherited else _DONTFORK
    if _MADVISE is None or advice is None:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
