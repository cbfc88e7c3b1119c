"""Lanes in the host's memory: copies in modelled time, or when somebody waits; see [Note: virtual devices]."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from ..common.sizes import num_bytes_of
from .chunks import Pair, copy_all, pairs_of, pieces_of, stored
from .devices import Device, Moved
from .transfer import Done, Edge, Lane, Transfer


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


class VirtualTransfer(Transfer):
    """Copies in host memory.

    It is over when the copies were made, or it failed, or was given up. Then sources are let go, and what was to be
    called when it is done is called in all three cases, because it frees memory.

    Attributes:
        pairs: what is to be copied; empty when it is over.
    """

    def __init__(self, pairs: list[Pair], label: str) -> None:
        super().__init__([copy for copy, _ in pairs])
        self.pairs = pairs
        self.label = label
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def is_done(self) -> bool:
        return self._is_over.is_set()

    def await_done(self) -> None:
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def _await_by_reader(self) -> None:
        self.await_done()

    def _then(self, then: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self._callbacks.append(then)
                return
        then()

    def make(self) -> None:
        """Makes the copies on this thread; an error is kept for who waits."""
        error: BaseException | None = None
        try:
            copy_all(self.pairs)
        except BaseException as raised:
            error = raised
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """It is over; the first call counts."""
        with self._lock:
            if self._is_over.is_set():
                return
            self._error = error
            self.pairs = []
            callbacks, self._callbacks = self._callbacks, []
            self._is_over.set()
        with contextlib.ExitStack() as stack:  # calls all of them, whatever one of them raises
            for then in reversed(callbacks):
                stack.callback(then)


class VirtualLane(Lane):
    """Copies in one direction between the host and a virtual device.

    Attributes:
        device: whose stamps and whose list are used for the trace; set by the device.
    """

    def __init__(self, device_name: str, direction: str) -> None:
        super().__init__()
        self.name = f"{direction} of {device_name}"
        self.direction = direction
        self.device: Device | None = None
        self._is_open = False
        self._mutex = threading.Lock()
        # What is not over yet, in the order submitted: none of it may outlive the step.
        self._pending: dict[VirtualTransfer, None] = {}

    def open(self) -> None:
        with self._mutex:
            self._is_open = True

    def _end_pending(self, can_move: Callable[[VirtualTransfer], bool]) -> None:
        """Makes at once what is under way and can move, because weights may stay for the next step.

        The rest is given up.
        """
        with self._mutex:
            self._is_open = False
            pending, self._pending = list(self._pending), {}
        with contextlib.ExitStack() as stack:  # all of them, whatever one of them raises
            for transfer in reversed(pending):
                if can_move(transfer):
                    stack.callback(transfer.make)
                else:
                    error = TransferGivenUp(f"{self.name}: the step ended before {transfer.label or 'a copy'} was made")
                    stack.callback(transfer.end, error)

    def _admit(self, transfer: VirtualTransfer) -> None:
        """Enters a new transfer into the books.

        Raises:
            RuntimeError: if no step is open.
        """
        with self._mutex:
            if not self._is_open:
                raise RuntimeError(f"no step is open: {self.name} cannot copy {transfer.label or 'anything'}")
            self.num_bytes += num_bytes_of([stored(copy) for copy in transfer.tensors])
            self._pending[transfer] = None

    def _forget(self, transfer: VirtualTransfer) -> None:
        with self._mutex:
            self._pending.pop(transfer, None)

    def _start_note(self) -> Any:
        device = self.device
        return None if device is None or device.moved is None else device.stamp()

    def _note(self, start: Any, label: str) -> None:
        """Puts a transfer that is made, and began to move at ``start``, into the trace, if somebody wants to know."""
        device = self.device
        if device is not None and start is not None and (moved := device.moved) is not None:
            moved.append(Moved(self.direction, start, device.stamp(), label))


class LazyTransfer(VirtualTransfer):
    """Made by the first thread that waits for it; others that come meanwhile wait for that thread."""

    def __init__(self, lane: LazyLane, pairs: list[Pair], after: Transfer | None, label: str) -> None:
        super().__init__(pairs, label)
        self._making = threading.Lock()
        self._lane = lane
        self._after = after

    def await_done(self) -> None:
        if not self.is_done():
            self.make()
        super().await_done()

    def make(self) -> None:
        with self._making:
            if self.is_done():
                return
            start = self._lane._start_note()
            self._lane._forget(self)
            try:
                if self._after is not None:
                    self._after.wait(Edge.OFFLOADED)
            except BaseException as error:
                self.end(error)
            else:
                # What it calls may wait for other transfers, but not for this one's lock: it is over by then.
                super().make()
                if self._error is None:
                    self._lane._note(start, self.label)
            self._after = None


class LazyLane(VirtualLane):
    """Makes copies when somebody waits for them; what nobody waited for in a step is made at its end."""

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        if not sources:
            return Done([])
        transfer = LazyTransfer(self, pairs_of(sources), after, label)
        self._admit(transfer)
        return transfer

    def close(self) -> None:
        self._end_pending(lambda transfer: True)


class _Job:
    """A transfer on a timed lane.

    Args:
        ready_ms: since when it could move.
    """

    def __init__(self, transfer: VirtualTransfer, pieces: deque[list[Pair]], ready_ms: float) -> None:
        self.transfer = transfer
        self.pieces = pieces
        self.ready_ms = ready_ms
        self.started: Any = None


class TimedLane(VirtualLane):
    """Copies on a thread of its own, in modelled time.

    One piece moves at a time: all tensors of an activation transfer, or one chunk of bulk. It arrives as a whole when
    its time is over. Before each piece the lane looks for activations first, so an activation waits for the rest of one
    chunk at most, which is within the two that are allowed.

    The lane's time is that of the model: a piece begins when the one before has ended by the model, or when it was
    submitted if that was later. So a thread that wakes up late, or copies slowly, delays what it does now but not what
    comes later, as long as the host keeps up on average.

    Args:
        duration_ms: of a piece of so many bytes.
        chunk_bytes: the most bytes of bulk that move as one piece.
        prioritised: whether activations go first.
        clock: what time passes on.
    """

    def __init__(
        self,
        device_name: str,
        direction: str,
        *,
        duration_ms: Callable[[int], float],
        chunk_bytes: int,
        prioritised: bool,
        clock: Clock,
    ) -> None:
        super().__init__(device_name, direction)
        self._duration_ms = duration_ms
        self._chunk_bytes = chunk_bytes
        self._prioritised = prioritised
        self._clock = clock
        self._work = threading.Condition(self._mutex)
        self._urgent: deque[_Job] = deque()
        self._bulk: deque[_Job] = deque()
        self._interrupt = threading.Event()
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._free_ms = -math.inf

    def open(self) -> None:
        super().open()
        self._interrupt.clear()
        self._broken = None

    def close(self) -> None:
        with self._work:
            self._is_open = False
            thread, self._thread = self._thread, None
            self._interrupt.set()
            self._work.notify_all()
        if thread is not None:
            thread.join()
        ready = {job.transfer for job in (*self._urgent, *self._bulk)}
        self._urgent.clear()
        self._bulk.clear()
        # What waits for another lane does not become ready any more: that may take long.
        self._end_pending(ready.__contains__)

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        if not sources:
            return Done([])
        transfer = VirtualTransfer(pairs_of(sources), label)
        self._admit(transfer)
        if after is None:
            self._enqueue(transfer, is_bulk)
        else:
            # A job that cannot move yet is not in a queue: nothing has to wait behind it.
            after.when_done(Edge.OFFLOADED, lambda: self._enqueue_behind(after, transfer, is_bulk))
        return transfer

    def _enqueue_behind(self, after: Transfer, transfer: VirtualTransfer, is_bulk: bool) -> None:
        try:
            if after.is_done():
                after.await_done()  # it may have failed; then its copies are not what was asked for
        except BaseException as error:
            self._forget(transfer)
            transfer.end(error)
        else:
            self._enqueue(transfer, is_bulk)

    def _enqueue(self, transfer: VirtualTransfer, is_bulk: bool) -> None:
        pieces = pieces_of(transfer.pairs, self._chunk_bytes if is_bulk else math.inf)
        with self._work:
            if transfer not in self._pending or not self._is_open:  # given up
                return
            job = _Job(transfer, pieces, self._clock.now_ms())
            is_urgent = self._prioritised and not is_bulk
            (self._urgent if is_urgent else self._bulk).append(job)
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                thread.start()
                self._thread = thread
            self._work.notify_all()
        if self._broken is not None:
            self._fail_all(self._broken)

    def _serve(self) -> None:
        """The life of the thread."""
        try:
            while self._await_work():
                self._move_piece()
        except BaseException as error:  # of a callback: goes to all who wait now or later in the step
            self._broken = error
            self._fail_all(error)

    def _await_work(self) -> bool:
        """Waits until there is a job; False when the step is over."""
        with self._work:
            while self._is_open and not self._urgent and not self._bulk:
                self._work.wait()
            return self._is_open

    def _move_piece(self) -> None:
        """Waits as long as the next piece takes, and copies it."""
        queue = self._urgent or self._bulk
        job = queue[0]
        piece, transfer = job.pieces[0], job.transfer
        if job.started is None:
            job.started = self._start_note()
        num_bytes = num_bytes_of([copy for copy, _ in piece])
        self._free_ms = max(self._free_ms, job.ready_ms) + self._duration_ms(num_bytes)
        self._clock.wait_until(self._free_ms, self._interrupt)
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
        self._forget(transfer)
        if error is None:
            self._note(job.started, transfer.label)
        transfer.end(error)

    def _fail_all(self, error: BaseException) -> None:
        with self._mutex:
            pending, self._pending = list(self._pending), {}
        for transfer in pending:
            transfer.end(error)
