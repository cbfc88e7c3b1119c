"""Links of virtual devices that share parts of their ways to the host, in modelled time and without threads.

What was submitted moves when a thread waits for any of it: all of it begins at the same time, and each part of a way is
divided evenly among the copies on it that could use more.

    host ==== memory ====+==== switch 0 ====+==== link of device 0 ==== lane
                         |                  +==== link of device 1
                         +==== ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_roundpipe.common.sizes import num_bytes_of
from lightning_roundpipe.devices.chunks import pairs_of
from lightning_roundpipe.devices.transfer import Lane, Moved, Transfer
from lightning_roundpipe.devices.virtual import Clock, TimedLink


class BusClock(Clock):
    """Moved by the bus alone."""

    ms = 0.0

    def now_ms(self) -> float:
        return self.ms


@dataclass(eq=False)
class _Copy:
    """On its way."""

    lane: BusLane
    transfer: BusTransfer
    num_bytes: int
    left: float


class BusTransfer(Transfer):
    """Made when a thread waits for any."""

    def __init__(self, bus: SharedBus, sources: Sequence[Tensor]) -> None:
        pairs = pairs_of(sources)
        super().__init__([copy for copy, _ in pairs], pairs)
        self._bus = bus

    def await_done(self) -> None:
        self._bus.move()
        super().await_done()


class BusLane(Lane):
    """A lane of one device."""

    def __init__(self, direction: str, device_name: str, bus: SharedBus) -> None:
        super().__init__(direction, device_name)
        self.bus = bus
        self.index = int(device_name.split()[-1])

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        transfer = BusTransfer(self.bus, sources)
        num_bytes = num_bytes_of(transfer.tensors)
        with self._mutex:
            self._count(num_bytes, label)
        self.bus.pending.append(_Copy(self, transfer, num_bytes, num_bytes))
        return transfer

    def close(self) -> None:
        self._is_open = False
        self.bus.move()


class SharedBus(TimedLink):
    """See above.

    Args:
        up, down: bytes per ms of each device's link.
        switches: groups of devices, and what goes through in each direction.
        host_bytes_per_ms: for all lanes together.
    """

    def __init__(
        self,
        up: Sequence[float],
        down: Sequence[float],
        switches: Mapping[tuple[int, ...], float] | None = None,
        host_bytes_per_ms: float = math.inf,
        latency_ms: float = 0.01,
    ) -> None:
        super().__init__()
        self.clock: BusClock = BusClock()
        self.pending: list[_Copy] = []
        self._links = {"h2d": up, "d2h": down}
        self._switches = switches or {}
        self._host = host_bytes_per_ms
        self._latency_ms = latency_ms

    def lane(self, device_name: str, direction: str) -> BusLane:
        return BusLane(direction, device_name, self)

    def move(self) -> None:
        """All that is pending arrives."""
        began_ms, copies, self.pending = self.clock.ms, self.pending, []
        ms, moving = self._latency_ms if copies else 0.0, copies
        while moving:
            rates = self._rates(moving)
            step_ms = min(copy.left / rates[copy] for copy in moving)
            ms += step_ms
            for copy in moving:
                copy.left -= step_ms * rates[copy]
            for copy in [copy for copy in moving if copy.left <= 1e-6 * copy.num_bytes]:
                lane, end_ms = copy.lane, began_ms + ms
                if lane.moved is not None:
                    moved = Moved(lane.direction, began_ms / 1e3, end_ms / 1e3, "")
                    lane.moved.append(moved)
                copy.transfer.make()
            moving = [copy for copy in moving if copy.left > 1e-6 * copy.num_bytes]
        self.clock.ms = began_ms + ms

    def _rates(self, copies: Sequence[_Copy]) -> dict[_Copy, float]:
        """What each copy gets: the narrowest part first divides what it has among those that are on it."""
        parts: list[tuple[float, list[_Copy]]] = [(self._host, list(copies))]
        for copy in copies:
            parts.append((self._links[copy.lane.direction][copy.lane.index], [copy]))
        for group, bandwidth in self._switches.items():
            for direction in ("h2d", "d2h"):
                on = [c for c in copies if c.lane.index in group and c.lane.direction == direction]
                parts.append((bandwidth, on))
        rates: dict[_Copy, float] = {}
        while len(rates) < len(copies):
            shares = []
            for bandwidth, on in parts:
                waiting = [copy for copy in on if copy not in rates]
                if waiting:
                    given = sum(rates[copy] for copy in on if copy in rates)
                    shares.append(((bandwidth - given) / len(waiting), waiting))
            share, waiting = min(shares, key=lambda item: item[0])
            rates |= dict.fromkeys(waiting, share)
        return rates
