"""Page-locked host memory: what copies to and from GPUs need in order to run beside everything else.

[Note: page-locked memory]
A copy between a GPU and ordinary host memory goes through a buffer of the driver, at a fraction of the speed, and holds
the host up. So copies read and write page-locked memory alone: ::

    weight that travels again and again   [ page-locked where it is ------------------> ] GPU
    any other weight                      [ ordinary memory ] -> [ buffer of our own -> ] GPU
    activations, gradients                                       [ buffer of our own <- ] GPU

*In place*: no second copy of the weight exists. But to lock memory takes as long as to copy it a few times, and what
travels in the first step of training or evaluation may not travel in the next ones: units are learned there in full
precision, and go on with low-precision copies ([Note: working copies] in :mod:`weights.low_precision`). A step of
training may follow one of evaluation, so memory is locked when it travels in a third step soon after the others. It is
not locked at all if it is small. If it is a mapped file, as what transformers loads, every page becomes a copy of its
own, which stays until the weight goes: so it is locked only while the host has memory to spare. No page is locked
twice: it belongs to the memory that begins in it, and the end of the memory before goes through a buffer. Memory that
nothing else holds any more, because a weight was replaced or is gone, is let go when the next step begins.

*Buffers*: see :mod:`devices.gpu.host_buffers`. Two chunks per device at most are staged in them. The driver takes long
to lock and to unlock memory. It is called with no lock of ours held.

Linux copies page-locked memory into the child of a fork at once, page by page, and every DataLoader worker is such a
child. Therefore the child does not get it: a worker that reads a weight of the model crashes. Memory that was shared
with other processes before stays shared.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...common.pages import PAGE, available_bytes, is_of_file, set_inherited, total_bytes
from ..chunks import Pair
from .cuda import PageLocker
from .host_buffers import HostBuffers, aligned, laid_out_like

# What is smaller is staged about as fast.
_MIN_LOCKED_BYTES = 2**20
# One of training and one of evaluation; see [Note: page-locked memory].
_NUM_LEARNING_STEPS = 2
# Copies of what is in files leave one of so many parts of the host's memory free.
_FREE_PARTS = 8
# Each of the two snapshots of a weight travels in every second step.
_MAX_STEPS_BETWEEN = 2


class _Place:
    """Memory that was allocated elsewhere, and what is page-locked of it.

    Attributes:
        weak: tells whether the memory is still there; its identity is not given to other memory as long as this lives.
        storage: held while we have page-locked it, because it must not be freed meanwhile.
        start, stop: what is page-locked, from one address to another; equal if nothing is.
        refused_bytes: that could not be page-locked.
        num_steps: in which it has travelled, each soon after the one before.
        last_step: of them.
        trying: held while it is tried to page-lock it.
        was_tried: whether that was, or is at the moment.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.storage: torch.UntypedStorage | None = None
        self.start = self.stop = 0
        self.refused_bytes = 0
        self.num_steps = 0
        self.last_step = -1  # the first step is 0
        self.trying = threading.Lock()
        self.was_tried = False

    def is_left(self) -> bool:
        """Whether nothing but this holds the memory."""
        if self.storage is None:
            return bool(self.weak.expired())  # type: ignore[no-untyped-call]
        # Tensors hold the memory itself, Python code the object that stands for it.
        is_only_ours = torch._C._storage_Use_Count(self.storage._cdata) == 1
        return is_only_ours and sys.getrefcount(self.storage) == 2  # one of them is this call's


class PageLockedMemory:
    """Page-locked memory of a process, see [Note: page-locked memory]. May be used from any thread.

    Args:
        locker: does it.

    Attributes:
        buffers: of our own.
    """

    def __init__(self, locker: PageLocker) -> None:
        self._locker = locker
        self.buffers = HostBuffers(functools.partial(self._page_lock, "buffers"), locker.page_unlock)
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}  # by the identity of the storage
        self._num_steps = 0
        self._has_travelled = False  # in this step
        self._has_warned = False

    @property
    def in_place_bytes(self) -> int:
        """Memory of others that is page-locked where it is."""
        with self._lock:
            return sum(place.stop - place.start for place in self._places.values() if place.storage is not None)

    @property
    def pageable_bytes(self) -> int:
        """What could not be page-locked, of others or of buffers: copies are slower there."""
        with self._lock:
            refused = sum(place.refused_bytes for place in self._places.values())
        return refused + self.buffers.pageable_bytes

    def statistics(self) -> dict[str, float]:
        """The bytes that it holds: page-locked in place, of own buffers, and not to be page-locked."""
        return {
            "page_locked_in_place_bytes": float(self.in_place_bytes),
            "page_locked_own_bytes": float(self.buffers.own_bytes),
            "pageable_bytes": float(self.pageable_bytes),
        }

    def begin_step(self) -> None:
        """A step begins, on one device after the other: memory that nothing else holds any more is let go."""
        with self._lock:
            if not self._has_travelled:
                return
            self._has_travelled = False
            self._num_steps += 1
            left = [key for key, place in self._places.items() if place.is_left()]
            places = [self._places.pop(key) for key in left]
        self._let_go(places)

    # --- copies to devices ---------------------------------------------------------------------------------------

    def staged(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The same copies to a device, such that all of them read page-locked memory, as far as there is any.

        The calling thread first copies what is not page-locked into one buffer, which is to be held, too, until the
        device has its copies.
        """
        parts = [part for pair in pairs for part in self._parts(*pair)]
        num_bytes = sum(aligned(source.nbytes) for _, source, is_locked in parts if not is_locked)
        memory, is_usable = self.buffers.memory(num_bytes) if num_bytes else (None, False)
        if memory is None or not is_usable:
            return [(copy, source) for copy, source, _ in parts]
        reads: list[Pair] = []
        offset = 0
        for copy, source, is_locked in parts:
            if not is_locked:
                place, offset = offset, offset + aligned(source.nbytes)
                source = laid_out_like(source, memory, place).copy_(source)
            reads.append((copy, source))
        return reads

    def _parts(self, copy: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """A copy, cut where page-locked memory begins and ends; with whether the source lies in it."""
        if not source.numel():
            return
        start, stop = self._locked_part(source)
        if not (source.is_contiguous() and copy.is_contiguous()):
            # Its elements are somewhere in its storage.
            storage = source.untyped_storage()
            yield copy, source, start <= storage.data_ptr() and storage.data_ptr() + storage.nbytes() <= stop
            return
        first, size, count = source.data_ptr(), source.element_size(), source.numel()
        start, stop = max(-((first - start) // size), 0), min((stop - first) // size, count)
        if (start == 0 and stop == count) or start >= stop:
            yield copy, source, start < stop
            return
        copy, source = copy.view(-1), source.view(-1)
        for i, j, is_locked in ((0, start, False), (start, stop, True), (stop, count, False)):
            if i < j:
                yield copy[i:j], source[i:j], is_locked

    def _locked_part(self, source: Tensor) -> tuple[int, int]:
        """Where the memory of ``source`` is page-locked, from one address to another. Locks it if that is worth it."""
        storage = source.untyped_storage()
        if storage.nbytes() < _MIN_LOCKED_BYTES:
            address = storage.data_ptr()
            return (address, address + storage.nbytes()) if self._locker.is_page_locked(source) else (0, 0)
        with self._lock:
            self._has_travelled = True
            place = self._place_of(storage)
            if (between := self._num_steps - place.last_step) > 0:
                place.last_step = self._num_steps
                place.num_steps = place.num_steps + 1 if between <= _MAX_STEPS_BETWEEN else 1
            is_worth_it = place.num_steps > _NUM_LEARNING_STEPS or place.was_tried
        if is_worth_it or self._locker.is_page_locked(source):
            with place.trying:  # perhaps by another thread
                if not place.was_tried:
                    place.was_tried = True
                    self._lock_in_place(place, source)
        return place.start, place.stop

    # --- memory of others ----------------------------------------------------------------------------------------

    def _place_of(self, storage: torch.UntypedStorage) -> _Place:
        place = self._places.get(storage._cdata)
        if place is None:
            place = self._places[storage._cdata] = _Place(storage)
        return place

    def _lock_in_place(self, place: _Place, tensor: Tensor) -> None:
        """Page-locks the memory of ``tensor``, where that can be."""
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if self._locker.is_page_locked(tensor):
            place.start, place.stop = start, end  # by others: not ours to undo
            return
        stop = end // PAGE * PAGE  # the last page may be the first one of other memory
        if start >= stop or (is_of_file(storage) and not _can_be_spared(stop - start)):
            return
        is_locked = self._page_lock("weights", start, stop - start)
        if is_locked and not storage.is_shared():
            set_inherited(start, stop - start, False)
        with self._lock:
            if is_locked:
                place.storage, place.start, place.stop = storage, start, stop
            else:
                place.refused_bytes = storage.nbytes()

    def _let_go(self, places: Sequence[_Place]) -> None:
        """Unlocks memory in place, which its last holder frees then."""
        for place in places:
            if place.storage is not None:
                self._locker.page_unlock(place.start)
                set_inherited(place.start, place.stop - place.start, True)
                place.storage = None

    def _page_lock(self, what: str, address: int, num_bytes: int) -> bool:
        error = self._locker.page_lock(address, num_bytes)
        if error and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{num_bytes} bytes of {what} could not be page-locked (CUDA error {error}): copies between them and "
                "GPUs are slower. The host may be short of memory, or limit how much may be locked.",
                stacklevel=2,
            )
        return error == 0

    def dispose(self) -> None:
        """Puts everything back: no memory is page-locked by us afterwards. Tensors in buffers keep their values."""
        with self._lock:
            places, self._places = list(self._places.values()), {}
        self._let_go(places)
        self.buffers.dispose()
        self._has_warned = False


def _can_be_spared(num_bytes: int) -> bool:
    """Whether the host has so much memory for a copy of what is in a file, which could also be read from there."""
    left, total = available_bytes(), total_bytes()
    return left is not None and total is not None and left - num_bytes >= total // _FREE_PARTS
