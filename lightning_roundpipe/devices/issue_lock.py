"""The issue lock: the threads of micro-batches give work to GPUs one after the other.

[Note: issue lock]
To issue a kernel takes the host a few microseconds, in which torch lets go of the interpreter lock. If several threads
issue at the same time, then each of them finds the interpreter lock with another thread after every single kernel, and
sleeps and wakes up, on another core, for longer than it computes. So a unit runs under a lock of its own::

    thread 0   unit: kernel kernel kernel | waits ............. | unit: kernel kernel ...
    thread 1   waits                      | unit: kernel kernel | waits
                                          ^ handed over: one change of threads per unit, not one per kernel

Threads get it in the order in which they have asked for it, so that no GPU waits for another one's next unit.

**It is no mutual exclusion.** A unit that waits has nothing to issue: for a value on the GPU, for user code of another
micro-batch, while it is compiled. If a unit holds the lock for longer than ``patience_s`` while others want it, the
next one goes on beside it. If that happens in ``_NUM_STRIKES`` runs one after the other, it is how the unit is, and it
runs without the lock for its next runs: otherwise all GPUs would wait each time. So no thread waits for ever here, and
the lock has no place in an order of locks.
"""

from __future__ import annotations

import threading
from collections import deque

# Units that wait for less hold each other up; but units that are so short leave GPUs idle most of the time anyway.
_PATIENCE_S = 3e-3
_NUM_STRIKES = 8
_NUM_RUNS_WITHOUT = 200


class Pace:
    """What the issue lock knows about the forwards of a unit, or about its backwards.

    Attributes:
        num_strikes: runs without a break that have held the lock too long.
        num_without: runs to come that do without it.
    """

    __slots__ = ("num_strikes", "num_without")

    def __init__(self) -> None:
        self.num_strikes = self.num_without = 0


class IssueLock:
    """See [Note: issue lock].

    Attributes:
        patience_s: how long the next thread waits for a unit that does not end, in seconds.
    """

    def __init__(self) -> None:
        self.patience_s = _PATIENCE_S
        self._guard = threading.Lock()  # of all below, and of paces; nothing waits while it holds it
        self._holder: _Issuing | None = None
        self._waiting: deque[_Issuing] = deque()

    def issuing(self, pace: Pace) -> _Issuing:
        """Open while a unit runs."""
        return _Issuing(self, pace)

    def take(self, run: _Issuing) -> None:
        """Waits until ``run`` is the next."""
        with self._guard:
            if run.pace.num_without:
                run.pace.num_without -= 1
                return
            holder = self._holder
            if holder is None:
                self._holder = run
                return
            run.is_next.acquire()
            self._waiting.append(run)
        while not run.is_next.acquire(timeout=self.patience_s):
            with self._guard:
                if self._holder is run:
                    return
                if self._holder is holder and self._waiting[0] is run:
                    assert holder is not None
                    self._overtake(holder.pace)
                    return
                holder = self._holder

    def _overtake(self, slow: Pace) -> None:
        """The next run does not wait for the holder, which is ``slow``, any longer; with the guard held."""
        self._holder = self._waiting.popleft()
        slow.num_strikes += 1
        if slow.num_strikes == _NUM_STRIKES:
            slow.num_strikes, slow.num_without = 0, _NUM_RUNS_WITHOUT

    def give(self, run: _Issuing) -> None:
        """Hands the lock on; does nothing if ``run`` was overtaken, or ran without it."""
        with self._guard:
            if self._holder is not run:
                return
            run.pace.num_strikes = 0
            self._holder = self._waiting.popleft() if self._waiting else None
            if self._holder is not None:
                self._holder.is_next.release()


class _Issuing:
    """One run of a unit."""

    __slots__ = ("_lock", "is_next", "pace")

    def __init__(self, lock: IssueLock, pace: Pace) -> None:
        self._lock = lock
        self.pace = pace
        self.is_next = threading.Lock()  # held while it waits

    def __enter__(self) -> None:
        self._lock.take(self)

    def __exit__(self, *exc: object) -> None:
        self._lock.give(self)
