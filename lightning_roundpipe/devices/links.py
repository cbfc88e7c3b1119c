"""How fast copies travel between the host and the devices: measured once.

[Note: measured links]
Copies go through the lanes of the devices, from page-locked memory where there is any, as those of a step do. ::

    small copies            h2d 0 |.   d2h 0 |.   h2d 1 |. ...           latency
    one lane at a time      h2d 0 |==| d2h 0 |==| h2d 1 |==| ...         each link by itself
    all lanes at a time     h2d 0 |====| d2h 0 |====| h2d 1 |====| ...   what the memory of the host gives
    two at a time           h2d 0 |===|  h2d 1 |===|                     two devices behind one switch take longer
    a whole group           h2d 0 |=====| h2d 1 |=====| h2d 2 |=====|    what the switch gives

The lanes note when a copy has begun and ended by the clock of the device: what the threads of the host do before and
after is not in it. The best of several counts, because noise only makes slower. A copy takes a few milliseconds, so
that neither the latency nor the begin of the next lane's counts much, and no more time is taken than there is: what was
not measured in it stays as it was, the groups first, the links last.

Two GPUs in equal slots never give equal figures, and a planner that believed the last digit would treat them as devices
that differ, which costs it more and gives nothing. So speeds of one direction that are nearly the same become the same
(:func:`settled`).

The memory of the host serves the lanes and the additions of gradients. It has the larger of the bandwidths that both
reach. A switch that is wide enough for two of its devices, and not for all, does not show in pairs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter

import torch

from ..planning.costs import DeviceTraits, Machine, SharedLink
from .device import Device
from .pool import DevicePool
from .transfer import Moved, Transfer

# For all measurements together.
_BUDGET_MS = 1500.0
_COPY_MS = 4.0
_MOST_BYTES = 64 * 2**20
# Page-locked, of all devices together: to lock memory takes a while.
_MOST_LOCKED_BYTES = 512 * 2**20
_LEAST_BYTES = 2**20
_SMALL_BYTES = 64
# Of the memory of a device that is not in use; two copies are on it at a time.
_MEMORY_PARTS = 8
_NUM_REPEATS = 3
# Speeds that differ by less are the same.
_ALIKE = 0.1
# Lanes that reach less of their speeds together share a part of the way.
_UNDISTURBED = 0.85

_LANES = ("h2d", "d2h")
# A lane: its device and direction.
Way = tuple[int, str]


def _now_ms() -> float:
    return perf_counter() * 1e3


# --- measuring ---------------------------------------------------------------------------------------------------


def measured(pool: DevicePool, added_bytes_per_ms: float | None = None) -> Machine:
    """The links of a pool, their latency and the host's memory, see [Note: measured links]; nothing else is in it.

    For devices with a memory of their own, between two steps, on the thread that runs them. No thread, no memory stays.

    Args:
        added_bytes_per_ms: bandwidth of the host's memory that additions of gradients reach; None if not known.
    """
    if any(device.aliases_host for device in pool.devices):
        return Machine(len(pool))
    bench = _Bench(pool)
    bench.host_bytes_per_ms = added_bytes_per_ms
    with contextlib.ExitStack() as stack:
        stack.callback(bench.close)
        stack.callback(pool.close)
        pool.open()
        # Where the allocator of a GPU has no room for buffers, what is known by then is enough.
        with contextlib.suppress(torch.OutOfMemoryError):
            bench.measure()
    shared = [SharedLink(group, bandwidth) for group, bandwidth in bench.shared.items()]
    return machine_with(len(pool), bench.speeds, bench.latency_ms, bench.host_bytes_per_ms, shared)


class _Traffic:
    """What travels between the host and one device: buffers at both ends."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.num_bytes = num_bytes
        (self._host,) = device.keep(torch.empty(num_bytes, dtype=torch.uint8)).tensors
        upload = device.upload([self._host], "a buffer", is_bulk=True)
        upload.await_done()
        (self._there,) = upload.tensors

    def begin(self, lane: str, num_bytes: int) -> Transfer:
        if lane == "h2d":
            return self._device.upload([self._host[:num_bytes]], "a measured copy", is_bulk=True)
        return self._device.download([self._there[:num_bytes]], "a measured copy", is_bulk=True)


class _Bench:
    """Measures the devices of a pool; the attributes hold what is known so far.

    Attributes:
        speeds: of the lanes, alone, in bytes per ms.
        latency_ms, host_bytes_per_ms: None if not known.
        shared: what groups of devices reach together.
    """

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._deadline_ms = _now_ms() + _BUDGET_MS
        self._origins: dict[int, tuple[float, object]] = {}  # a time of the host, and a stamp from then
        self._traffic: list[_Traffic | None] = [None] * len(pool)
        self.speeds: dict[Way, float] = {}
        self.latency_ms: float | None = None
        self.host_bytes_per_ms: float | None = None
        self.shared: dict[tuple[int, ...], float] = {}

    def close(self) -> None:
        """Nothing is held any more."""
        self._traffic.clear()
        for device in self._pool.devices:
            device.moved = None
            device.give_up_spare()

    @property
    def _has_time(self) -> bool:
        return _now_ms() < self._deadline_ms

    def measure(self) -> None:
        """Everything, the most important figures first, as long as there is time."""
        latencies = []
        for device in self._pool.devices:
            if self._has_time:
                latencies += self._measure_links(device)
                self.latency_ms = statistics.median(latencies) if latencies else None
        self._measure_host(self.speeds)
        slowed = []
        for pair in self._pairs():
            ways = [(index, "h2d") for index in pair]
            if self._has_time and all(way in self.speeds for way in ways):
                limit = min(sum(self.speeds[way] for way in ways), self.host_bytes_per_ms or math.inf)
                if self._together(ways) < _UNDISTURBED * limit:
                    slowed.append(pair)
        for group in groups_of(slowed):
            if self._has_time:
                reached = [self._together([(index, lane) for index in group]) for lane in _LANES]
                self.shared[group] = min(reached)
        if self.shared:  # now that it is known who takes longer beside the others
            self._measure_host(shared_speeds(self.speeds, self.shared))

    def _measure_host(self, speeds: Mapping[Way, float]) -> None:
        """All lanes at a time, of which each is expected to reach this speed."""
        if self._has_time and speeds:
            self.host_bytes_per_ms = max(self.host_bytes_per_ms or 0.0, self._together(list(speeds), speeds))

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Those that may share a link. Two devices do not need to know, unless they are on one GPU."""
        devices = self._pool.devices
        for a, b in itertools.combinations(devices, 2):
            if len(devices) > 2 or a.torch_device == b.torch_device:
                yield a.index, b.index

    def _measure_links(self, device: Device) -> list[float]:
        """Both directions of a device: the speeds, and the latencies that are returned."""
        limit, index = device.memory.limit, device.index
        room = _MOST_BYTES if limit is None else (limit - device.memory.used) // _MEMORY_PARTS
        most = min(room, _MOST_BYTES, _MOST_LOCKED_BYTES // (2 * len(self._pool)))
        if most < _LEAST_BYTES:
            return []
        self._traffic[index] = traffic = _Traffic(device, _LEAST_BYTES)
        traffic.begin("d2h", 1).await_done()  # a download waits for what the device computes: it is idle now
        self._origins[index] = _now_ms(), device.stamp()
        traffic.begin("d2h", 1).await_done()  # and has reached the stamp
        latencies = {lane: self._best_ms([(index, lane)], [_SMALL_BYTES]) for lane in _LANES}
        first = max(_LEAST_BYTES / self._best_ms([(index, lane)], [_LEAST_BYTES]) for lane in _LANES)
        num_bytes = min(max(int(first * _COPY_MS), _LEAST_BYTES), most)
        self._traffic[index] = None  # its memory may be needed for the next ones
        del traffic
        self._traffic[index] = _Traffic(device, num_bytes)
        for lane in _LANES:
            ms = self._best_ms([(index, lane)], [num_bytes])
            self.speeds[index, lane] = num_bytes / _without(ms, latencies[lane])
        return list(latencies.values())

    def _together(self, ways: Sequence[Way], speeds: Mapping[Way, float] | None = None) -> float:
        """Bytes per ms that lanes reach at the same time. Each copies what takes it equally long at these speeds, which
        are those alone."""
        speeds = speeds or self.speeds
        traffics = [self._traffic[index] for index, _ in ways]
        ms = min(t.num_bytes / speeds[way] for t, way in zip(traffics, ways, strict=True) if t is not None)
        sizes = [max(1, int(ms * speeds[way])) for way in ways]
        return sum(sizes) / _without(self._best_ms(ways, sizes), self.latency_ms or 0.0)

    def _best_ms(self, ways: Sequence[Way], sizes: Sequence[int]) -> float:
        """From the begin of the first copy to the end of the last."""
        return min(self._copy_ms(ways, sizes) for _ in range(_NUM_REPEATS))

    def _copy_ms(self, ways: Sequence[Way], sizes: Sequence[int]) -> float:
        notes: dict[int, list[Moved]] = {index: [] for index, _ in ways}
        for index, noted in notes.items():
            self._pool[index].moved = noted
        transfers = []
        for (index, lane), num_bytes in zip(ways, sizes, strict=True):
            traffic = self._traffic[index]
            assert traffic is not None
            transfers.append(traffic.begin(lane, num_bytes))
        for transfer in transfers:
            transfer.await_done()
        stamps = [
            self._at_ms(index, stamp) for index, noted in notes.items() for m in noted for stamp in (m.start, m.end)
        ]
        return max(stamps) - min(stamps)

    def _at_ms(self, index: int, stamp: object) -> float:
        """A stamp on the clock of the host."""
        offset_ms, origin = self._origins[index]
        since_ms = self._pool[index].elapsed_ms(origin, stamp)
        assert since_ms is not None, "a copy that was waited for has ended"
        return offset_ms + since_ms


def _without(ms: float, latency_ms: float) -> float:
    """What the bytes took of a copy; of one that took hardly longer than a small one, all."""
    return ms - latency_ms if ms > 2 * latency_ms else max(ms, 1e-6)


# --- figures -----------------------------------------------------------------------------------------------------


def settled(speeds: Mapping[Way, float]) -> dict[Way, float]:
    """Speeds of each direction, where those within 10 % of their median are the same: the median.

    So are those of the others that are left, within 10 % of theirs, and so on: two kinds of slots give two speeds. The
    median of an even number is the lower one of the two in the middle.
    """
    same: dict[Way, float] = {}
    for lane in _LANES:
        left = {way: speed for way, speed in speeds.items() if way[1] == lane}
        while left:
            middle = statistics.median_low(left.values())
            alike = [way for way, speed in left.items() if abs(speed - middle) <= _ALIKE * middle]
            for way in alike:
                same[way] = middle
                del left[way]
    return same


def groups_of(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The groups that pairs make up: two devices are in one group if a chain of pairs leads from one to the other."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(group for group in groups if not group.isdisjoint(pair)))
        groups = [group for group in groups if group.isdisjoint(pair)] + [joined]
    return sorted(tuple(sorted(group)) for group in groups)


def shared_speeds(speeds: Mapping[Way, float], shared: Mapping[tuple[int, ...], float]) -> dict[Way, float]:
    """Speeds of lanes while all are busy, as far as groups share what they reach."""
    found = dict(speeds)
    for group, bandwidth in shared.items():
        for lane in _LANES:
            ways = [(index, lane) for index in group if (index, lane) in speeds]
            part = min(1.0, bandwidth / sum(speeds[way] for way in ways))
            found |= {way: part * speeds[way] for way in ways}
    return found


def machine_with(
    num_devices: int,
    speeds: Mapping[Way, float],
    latency_ms: float | None,
    host_bytes_per_ms: float | None,
    shared_links: Sequence[SharedLink],
) -> Machine:
    """A machine with these figures, made the same where they nearly are; what is not known has no limit.

    The machine gets the speed that is the median of each direction, its devices what differs from that.
    """
    if not speeds:
        return Machine(num_devices)
    same = settled(speeds)
    up, down = (
        statistics.median_low([speed for (_, other), speed in same.items() if other == lane] or [math.inf])
        for lane in _LANES
    )
    devices = tuple(
        DeviceTraits(h2d_bytes_per_ms=same.get((index, "h2d"), up), d2h_bytes_per_ms=same.get((index, "d2h"), down))
        for index in range(num_devices)
    )
    return Machine(
        num_devices,
        h2d_bytes_per_ms=up,
        d2h_bytes_per_ms=down,
        transfer_latency_ms=latency_ms or 0.0,
        host_bytes_per_ms=host_bytes_per_ms or math.inf,
        devices=devices if len(set(devices)) > 1 else (),
        shared_links=tuple(shared_links),
    )
