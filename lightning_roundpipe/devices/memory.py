"""The books on a device's memory: who may put how much there, and what has to go first.

[Note: device memory]
Everything that the engine puts on a device is booked in its :class:`DeviceMemory` by kind, before it is allocated.
Where the limit does not allow it, memory comes back in this order: what was freed already and is only read to its end
by a copy or by queued work (that is waited for); then what merely stays in case it is needed again (weights of units
that are not in use). If that is not enough, the step fails with :class:`DeviceOutOfMemoryError`. What is only fetched
ahead of its time does none of this: it stays where it is until there is room. Activations that are booked come ahead
only where there is no limit: they could not be taken back.

    | weights in use | gradients | weights ahead |      headroom      | spare |          the books: up to the limit
    | the same, and what the books do not know: activations, workspaces, the rest | .. | the allocator: more than that

Weights and gradients leave the headroom free, which is for activations: a GPU does not book those. Where nothing can
go any more they take it all the same, because what is known of activations is an upper bound.

The allocator of a GPU may run out of memory where the books have some left, because of what they do not know: user
code that computes a loss over a vocabulary takes gigabytes. What it took in the first micro-batch, which runs alone, is
a part of the headroom where the last forward is (:attr:`Plan.loose_bytes`). If that was not all, everything that is not
in use goes (:meth:`DeviceMemory.make_room`), what has failed (a copy that must be there, or the whole step) is tried
once more, and from then on more is kept free: a little at first, and twice as much each time that it was not enough.
From the third time on, and where nothing that is booked could make way, activations take less as well:
:attr:`DevicePool.is_short`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from ..planning.quantities import format_bytes

Kind = Literal["weights", "gradients", "activations"]
KINDS: tuple[Kind, ...] = ("weights", "gradients", "activations")
# When the allocator runs out of memory for the first time, one of so many parts of the limit is kept free from then on.
_SPARE_PARTS = 20


class DeviceOutOfMemoryError(RuntimeError):
    """What has to be on a device at one time is more than its limit.

    Attributes:
        fits_if_split: whether the weights and gradients alone would fit, so that smaller micro-batches help.
    """

    def __init__(self, message: str, *, fits_if_split: bool = True) -> None:
        super().__init__(message)
        self.fits_if_split = fits_if_split


class Passing(Protocol):
    """Something that memory waits for before it may be used again."""

    def is_done(self) -> bool:
        """Whether it has passed."""

    def await_done(self) -> None:
        """Blocks the calling thread until it has."""


class DeviceMemory:
    """What is on a device, by kind, in bytes; see [Note: device memory]. May be used from any thread.

    Args:
        name: of the device, for messages.
        limit: bytes; None for no limit.

    Attributes:
        headroom: bytes that activations are going to need: weights and gradients leave them free while they can.
        spare: bytes that are kept free beside them, because the allocator has run out of memory.
        peak: the most bytes that were booked at a time.
        evict: asked to give back what is not in use at the moment; whether anything came back.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self.headroom = 0
        self.spare = 0
        self.evict: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._used: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._peaks: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.peak = 0
        self._leaving: deque[tuple[Passing, Kind, int]] = deque()

    @property
    def used(self) -> int:
        """Bytes that are booked now."""
        with self._lock:
            return sum(self._used.values())

    @property
    def peaks(self) -> dict[Kind, int]:
        """The most bytes of each kind that were booked at a time; they need not have been there together."""
        return dict(self._peaks)

    def reserve(self, kind: Kind, num_bytes: int) -> None:
        """Books ``num_bytes``; waits for memory that is on its way back, and evicts, if need be.

        Called by the thread that holds the compute lane, or occupies it.

        Raises:
            DeviceOutOfMemoryError: if the limit does not allow it all the same; the message says what is there.
        """
        leaves_room = kind != "activations"
        while not self.try_reserve(kind, num_bytes, ahead=leaves_room):
            if self._await_leaving() or self.evict():
                continue
            if leaves_room:  # nothing else can go
                leaves_room = False
            elif self.try_reserve(kind, num_bytes):  # came back meanwhile
                return
            else:
                raise self._error(kind, num_bytes)

    def try_reserve(self, kind: Kind, num_bytes: int, *, ahead: bool = False) -> bool:
        """Books ``num_bytes`` if there is room, without waiting; whether it did.

        Args:
            ahead: whether the headroom has to stay free, as for all that comes ahead of its time.
        """
        self._collect()
        with self._lock:
            total = sum(self._used.values()) + num_bytes
            room = max(0, self.headroom - self._used["activations"]) + self.spare if ahead else 0
            if self.limit is not None and num_bytes and total + room > self.limit:
                return False
            self._used[kind] += num_bytes
            self._peaks[kind] = max(self._peaks[kind], self._used[kind])
            self.peak = max(self.peak, total)
            return True

    def evict_all(self) -> None:
        """Evicts all that is not in use, and waits for all that is leaving.

        Called by the thread that holds the compute lane, or while no micro-batch runs.
        """
        while self.evict():
            pass
        self._collect()
        while self._await_leaving():
            self._collect()

    def make_room(self) -> None:
        """The allocator has run out of memory: :meth:`evict_all`, and more is kept free from now on."""
        self.evict_all()
        if self.limit is not None:
            self.spare = min(max(2 * self.spare, self.limit // _SPARE_PARTS), self.limit // 2)

    @property
    def has_room_to_make(self) -> bool:
        """Whether :meth:`make_room` once more would keep more free, and more than what may be left has been booked."""
        return self.limit is not None and self.spare < self.limit // 2 < self.peak

    def release(self, kind: Kind, num_bytes: int, after: Passing | None = None) -> None:
        """Takes ``num_bytes`` off the books: now, or when ``after`` has passed."""
        with self._lock:
            if after is not None and not after.is_done():
                self._leaving.append((after, kind, num_bytes))
            else:
                self._used[kind] -= num_bytes

    def _collect(self) -> None:
        """Takes off the books what has left meanwhile."""
        if not self._leaving:
            return
        with self._lock:
            staying = deque[tuple[Passing, Kind, int]]()
            for passing, kind, num_bytes in self._leaving:
                if passing.is_done():
                    self._used[kind] -= num_bytes
                else:
                    staying.append((passing, kind, num_bytes))
            self._leaving = staying

    def _await_leaving(self) -> bool:
        """Waits for the first of what is on its way back; whether there was any."""
        with self._lock:
            if not self._leaving:
                return False
            passing = self._leaving[0][0]
        passing.await_done()
        return True

    def end_step(self) -> None:
        """A step has ended, well or not: what was on its way back is back, and only weights are still there."""
        with self._lock:
            leaving, self._leaving = self._leaving, deque()
            self.headroom = 0
            for _, kind, num_bytes in leaving:
                self._used[kind] -= num_bytes
            for kind in KINDS:
                if kind != "weights":
                    self._used[kind] = 0

    def _error(self, kind: Kind, num_bytes: int) -> DeviceOutOfMemoryError:
        there = ", ".join(f"{name} {format_bytes(self._used[name])}" for name in KINDS)
        assert self.limit is not None
        states = self._used["weights"] + self._used["gradients"] + (0 if kind == "activations" else num_bytes)
        return DeviceOutOfMemoryError(
            f"{self.name} is out of memory: {format_bytes(num_bytes)} of {kind} do not fit beside what is there "
            f"({there}) within its limit of {format_bytes(self.limit)}.",
            fits_if_split=states <= self.limit,
        )
