"""What a strategy knows about the links of its devices, and tells the user."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from timeit import repeat

import torch

from ..common.threads import Worker
from ..devices.links import measured
from ..devices.pool import DevicePool
from ..lightning_packages import rank_zero_info
from ..planning.costs import Machine
from ..planning.quantities import format_bandwidth

# Two of them are added up; the bandwidth of the host's memory shows beyond its caches.
_ADDED_BYTES = 64 * 2**20
_NUM_REPEATS = 3


class Links:
    """The links of the devices of a strategy, measured when it trains for the first time.

    See [Note: measured links] in :mod:`devices.links`. Virtual devices have none, or links that are given. With
    deterministic algorithms nothing is measured, and what was measured is not used: a plan must not depend on it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, ...], Machine] = {}

    def of(self, pool: DevicePool) -> Machine | None:
        """A machine with those of a pool; None if nothing is known, or may be used."""
        return None if torch.are_deterministic_algorithms_enabled() else self._known.get(_key(pool))

    def measure(self, pool: DevicePool, adding_threads: int) -> None:
        """Measures them, unless they are known, and says so in the log.

        Args:
            adding_threads: intra-op threads with which gradients are added up.
        """
        if pool.is_virtual or torch.are_deterministic_algorithms_enabled() or _key(pool) in self._known:
            return
        machine = measured(pool, added_bytes_per_ms(adding_threads))
        self._known[_key(pool)] = machine
        if math.isfinite(machine.h2d_bytes_per_ms):
            rank_zero_info(describe(machine))


def _key(pool: DevicePool) -> tuple[torch.device, ...]:
    return tuple(device.torch_device for device in pool.devices)


def added_bytes_per_ms(num_threads: int | None) -> float:
    """Bytes that the host reads and writes in a ms when it adds up gradients with so many threads."""
    times_s: list[float] = []

    def add() -> None:
        total, more = (torch.ones(_ADDED_BYTES // 4) for _ in range(2))
        times_s.extend(repeat(lambda: total.add_(more), number=1, repeat=_NUM_REPEATS))

    worker = Worker(num_threads)
    try:
        worker.call(add, "measures the host's memory")
    finally:
        worker.close()
    return 3 * _ADDED_BYTES / max(1e3 * min(times_s), 1e-6)


def describe(machine: Machine) -> str:
    """The links of a machine, for the log: one line, and one more if devices share something."""
    kinds: dict[tuple[float, float], list[int]] = defaultdict(list)
    for index in range(machine.num_devices):
        own = machine.traits[index]
        kinds[own.h2d_bytes_per_ms, own.d2h_bytes_per_ms].append(index)
    links = []
    for (up, down), indices in kinds.items():
        named = f"device{'s' if len(indices) > 1 else ''} {_listed(indices)}" if len(kinds) > 1 else "every device"
        links.append(f"{format_bandwidth(up)} to and {format_bandwidth(down)} from {named}")
    text = f"links: {', '.join(links)}; latency {1e3 * machine.transfer_latency_ms:.1f} us, "
    text += f"memory of the host {format_bandwidth(machine.host_bytes_per_ms)}"
    shared = [f"{_listed(link.devices)} ({format_bandwidth(link.bytes_per_ms)})" for link in machine.shared_links]
    return text + ("\ndevices that share a link: " + ", ".join(shared) if shared else "")


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
