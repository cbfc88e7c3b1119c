"""A clock for links of virtual devices on which time flies."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from lightning_roundpipe.devices.virtual import Clock

JOIN_S = 60.0


class FlyingClock(Clock):
    """Time that passes only while a lane waits, and then at once; it stands still until :meth:`start`.

    Args:
        late_ms: how late each wait returns.
    """

    def __init__(self, late_ms: float = 0.0) -> None:
        self.ms = 0.0
        self._late_ms = late_ms
        self._is_going = threading.Event()
        self._mutex = threading.RLock()
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def start(self) -> None:
        """From now on lanes move."""
        self._is_going.set()

    def at(self, ms: float, do: Callable[[], object]) -> None:
        """Call ``do`` at that time, on the lane's thread: before what the lane itself does then."""
        heapq.heappush(self._events, (ms, next(self._numbers), do))

    def now_ms(self) -> float:
        return self.ms

    def wait_until(self, time_ms: float, interrupt: threading.Event) -> None:
        assert self._is_going.wait(JOIN_S)
        with self._mutex:
            until = max(time_ms, self.ms) + self._late_ms
            while self._events and self._events[0][0] <= until:
                ms, _, do = heapq.heappop(self._events)
                self.ms = max(self.ms, ms)
                do()
            self.ms = until
