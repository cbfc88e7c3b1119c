"""Devices on the host's own cores, and the links that copies to and from them travel on.

[Note: virtual devices]
On a machine without GPUs a missing wait would nearly always give the right numbers, because everything lives in one
memory. Virtual devices with a :class:`TimedLink` make it show. They have copies of their own: a destination is poisoned
until its copy is made, and memory is poisoned when it is freed. Sources are read when the copy is made, not before: a
source that is freed or changed too early shows too.

    submit(x)     x' = NaN -------- the lane's thread: x' = x -------- free(x'): x' = NaN
    reader                  NaN!  |  wait(x') ... reads x'            |  NaN!

The link makes copies on threads in modelled time, as GPUs do. Without a link (the fast mode, for training
on the host) device copies alias the masters, and nothing travels.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from ..common.sizes import num_bytes_of
from .chunks import Pair, copy_all, pairs_of, pieces_of, poison, stored
from .device import Device
from .memory import DeviceMemory
from .transfer import CHUNK_BYTES, DirectLane, Done, Edge, Lane, Moved, Transfer


class TransferGivenUp(RuntimeError):
    """A step ended before this transfer could be made."""


class Clock:
    """The time that links are modelled in, in ms; this one is the host's."""

    def now_ms(self) -> float:
        """The time; it never goes back."""
        return perf_counter() * 1e3

    def wait_until(self, time_ms: float, interrupt: threading.Event) -> None:
        """Returns at ``time_ms`` or later, or when ``interrupt`` is set."""
        while (remaining_ms := time_ms - self.now_ms()) > 0 and not interrupt.wait(remaining_ms / 1e3):
            pass


class TimedLink:
    """How copies travel between the host and virtual devices: makes their lanes.

    Copies take modelled time, and are made by threads that live as long as a step.

    Args:
        bytes_per_ms: bandwidth of each lane; PCIe 4.0 x16 has 25e6.
        latency_ms: added to every piece that moves; PCIe has about 0.01.
        chunk_bytes: bulk is cut into pieces of at most this size.
        clock: what time passes on, also for the devices; None for the host's.
    """

    def __init__(
        self,
        bytes_per_ms: float = math.inf,
        latency_ms: float = 0.0,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self.bytes_per_ms = bytes_per_ms
        self.latency_ms = latency_ms
        self.chunk_bytes = chunk_bytes
        self.clock = clock or Clock()

    def lane(self, device_name: str, direction: str) -> Lane:
        """A lane of its own; ``direction`` is "h2d" or "d2h"."""
        return TimedLane(direction, device_name, self)

    def duration_ms(self, num_bytes: int) -> float:
        """How long one piece is on its way."""
        return self.latency_ms + num_bytes / self.bytes_per_ms


@dataclass(eq=False)
class _Job:
    """A transfer; once it can move: what is left of it, since when, and when it began if that is noted."""

    transfer: Transfer
    is_bulk: bool
    label: str
    pieces: deque[list[Pair]] = field(default_factory=deque)
    ready_ms: float = 0.0
    began_ms: float | None = None


class TimedLane(Lane):
    """Copies on a thread of its own, in the modelled time of a link.

    One piece moves at a time: all tensors of an activation transfer, or one chunk of bulk. It arrives as a whole when
    its time has passed. Before each piece the lane looks for activations first, so an activation waits for the rest of
    one chunk at most, which is within the two that are allowed.

    The lane's time is that of the model: a piece begins when the one before has ended by the model, or when it was
    submitted if that was later. So a thread that wakes up late, or copies slowly, delays what it does now but not what
    comes later, as long as the host keeps up on average.
    """

    def __init__(self, direction: str, device_name: str, link: TimedLink) -> None:
        super().__init__(direction, device_name)
        self._link = link
        self._work = threading.Condition(self._mutex)
        # Guarded by the mutex. Those that have not ended, in order: none of them may outlive the step.
        self._pending: dict[_Job, None] = {}
        self._urgent: deque[_Job] = deque()
        self._bulk: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        # Written by the thread alone.
        self._broken: BaseException | None = None  # an error after which it has ended
        self._free_ms = -math.inf  # when the last piece has ended, by the model
        self._interrupt = threading.Event()

    def open(self) -> None:
        super().open()
        self._interrupt.clear()
        self._broken = None

    def close(self) -> None:
        """Makes at once what is under way and could move, because weights may stay for the next step.

        What waits for another lane is given up: it may never become ready.
        """
        with self._work:
            self._is_open = False
            thread, self._thread = self._thread, None
            self._interrupt.set()
            self._work.notify_all()
        if thread is not None:
            thread.join()
        with self._mutex:
            ready = {*self._urgent, *self._bulk}
            pending, self._pending = self._pending, {}
            self._urgent.clear()
            self._bulk.clear()
        with contextlib.ExitStack() as stack:  # all of them, even if one raises
            for job in reversed(pending):
                if job in ready:
                    stack.callback(job.transfer.make)
                else:
                    error = TransferGivenUp(f"{self.name}: the step ended before {job.label or 'a copy'} was made")
                    stack.callback(job.transfer.end, error)

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        if not sources:
            return Done([])
        pairs = pairs_of(sources)
        transfer = Transfer([copy for copy, _ in pairs], pairs)
        job = _Job(transfer, is_bulk, label)
        with self._mutex:
            self._count(num_bytes_of([stored(copy) for copy in transfer.tensors]), label)
            self._pending[job] = None
        if after is None:
            self._enqueue(job)
        else:
            # A job that cannot move yet is not in a queue: nothing has to wait behind it.
            after.when_done(Edge.OFFLOADED, lambda: self._enqueue_behind(after, job))
        return transfer

    def _enqueue_behind(self, after: Transfer, job: _Job) -> None:
        try:
            if after.is_done():
                after.await_done()  # it may have failed; then its copies are not what was asked for
        except BaseException as error:
            self._end(job, error)
        else:
            self._enqueue(job)

    def _enqueue(self, job: _Job) -> None:
        job.pieces = pieces_of(job.transfer.pairs, self._link.chunk_bytes if job.is_bulk else math.inf)
        with self._work:
            if job not in self._pending or not self._is_open:  # given up
                return
            job.ready_ms = self._link.clock.now_ms()
            (self._bulk if job.is_bulk else self._urgent).append(job)
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                thread.start()
                self._thread = thread
            self._work.notify_all()
        if self._broken is not None:
            self._fail_all(self._broken)

    def _end(self, job: _Job, error: BaseException | None) -> None:
        with self._mutex:
            self._pending.pop(job, None)
        job.transfer.end(error)

    def _serve(self) -> None:
        """The life of the thread."""
        try:
            while self._await_work():
                self._move_piece()
        except BaseException as error:  # of a callback: goes to all who wait now or later in the step
            self._broken = error
            self._fail_all(error)

    def _await_work(self) -> bool:
        """Waits until there is a job; False when the step has ended."""
        with self._work:
            while self._is_open and not self._urgent and not self._bulk:
                self._work.wait()
            return self._is_open

    def _move_piece(self) -> None:
        """Waits as long as the next piece takes, and copies it."""
        queue = self._urgent or self._bulk
        job = queue[0]
        piece, clock, moved = job.pieces[0], self._link.clock, self.moved
        if moved is not None and job.began_ms is None:
            job.began_ms = clock.now_ms()
        num_bytes = num_bytes_of([copy for copy, _ in piece])
        self._free_ms = max(self._free_ms, job.ready_ms) + self._link.duration_ms(num_bytes)
        clock.wait_until(self._free_ms, self._interrupt)
        if self._interrupt.is_set():
            return
        error: BaseException | None = None
        try:
            copy_all(piece)
        except BaseException as raised:  # goes to all who wait
            error = raised
        job.pieces.popleft()
        if job.pieces and error is None:
            return
        queue.popleft()  # only this thread takes from queues, so it is still the first
        if moved is not None and job.began_ms is not None and error is None:
            moved.append(Moved(self.direction, job.began_ms / 1e3, clock.now_ms() / 1e3, job.label))
        self._end(job, error)

    def _fail_all(self, error: BaseException) -> None:
        with self._mutex:
            pending, self._pending = self._pending, {}
        for job in pending:
            job.transfer.end(error)


class VirtualDevice(Device):
    """A device on the host's own cores; see [Note: virtual devices]. Its stamps are of its link's clock.

    Args:
        index: position in the pool.
        link: how copies travel; None for the fast mode, in which replicas alias the masters.
        memory_limit: bytes that may be on the device at a time; None for no limit.
        speed: at most 1; a device of speed 0.5 is busy for twice as long as the host computes. None for devices that
            are all alike.
    """

    def __init__(
        self,
        index: int,
        *,
        link: TimedLink | None = None,
        memory_limit: int | None = None,
        speed: float | None = None,
    ) -> None:
        name = f"virtual device {index}"
        host = torch.device("cpu")
        h2d, d2h = (DirectLane(host) if link is None else link.lane(name, lane) for lane in ("h2d", "d2h"))
        super().__init__(index, host, h2d, d2h, DeviceMemory(name, memory_limit))
        clock = Clock() if link is None else link.clock
        self._seconds = perf_counter if type(clock) is Clock else lambda: clock.now_ms() / 1e3
        self.aliases_host = link is None
        self.is_shared = self.counts_activations = link is not None
        self.has_own_speed = speed is not None
        self._speed = 1.0 if speed is None else speed

    def stamp(self) -> float:
        return self._seconds()

    def end(self, begun: float) -> float:
        if self._speed < 1:
            until = begun + (perf_counter() - begun) / self._speed
            while (left := until - perf_counter()) > 0:
                time.sleep(left)
        return self.stamp()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def _reuse(self, tensors: Sequence[Tensor]) -> None:
        if self.aliases_host:
            return
        with torch.inference_mode():  # the only mode in which tensors made in it may be changed
            for tensor in tensors:
                poison(stored(tensor))

    @property
    def peak_memory_bytes(self) -> int | None:
        return None if self.aliases_host else self.memory.peak
