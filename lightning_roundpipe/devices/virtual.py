"""Workers on the host's own cores, and the links that copies to and from them travel on.

[Note: virtual devices]
On a machine without GPUs a missing wait would nearly always give the right numbers, because everything lives in one
memory. Virtual devices make it show. With a :class:`Link` they have copies of their own: a destination is poisoned
until its copy is made, and memory is poisoned when it is freed. A :class:`LazyLink` makes a copy only when somebody
waits for it, so that a missing wait shows every time. A :class:`TimedLink` makes copies on threads in modelled time,
as GPUs do. Sources are read when the copy is made, not before: a source that is freed or changed too early shows too.
Without a link (the fast mode, for training on the host) device copies alias the masters, and nothing travels.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from .chunks import stored
from .devices import Device
from .memory import DeviceMemory
from .transfer import CHUNK_BYTES, DirectLane, Lane, poison
from .virtual_lanes import Clock, LazyLane, TimedLane, VirtualLane


class Link(ABC):
    """How copies travel between the host and virtual devices: makes their lanes."""

    @abstractmethod
    def lane(self, device_name: str, direction: str) -> Lane:
        """A lane of its own; ``direction`` is "h2d" or "d2h"."""


class TimedLink(Link):
    """Copies take modelled time, and are made by threads that live as long as a step.

    Args:
        bytes_per_ms: bandwidth of each lane; PCIe 4.0 x16 has 25e6.
        latency_ms: added to every piece that moves; PCIe has about 0.01.
        chunk_bytes: bulk is cut into pieces of at most this size.
        prioritised: False lets activations wait for their turn behind bulk, to show what priorities are good for.
        clock: for tests.

    Raises:
        ValueError: if a figure makes no sense.
    """

    def __init__(
        self,
        bytes_per_ms: float = math.inf,
        latency_ms: float = 0.0,
        chunk_bytes: int = CHUNK_BYTES,
        prioritised: bool = True,
        clock: Clock | None = None,
    ) -> None:
        if not bytes_per_ms > 0 or not latency_ms >= 0 or chunk_bytes < 1:
            raise ValueError(
                f"a link needs bytes_per_ms > 0, latency_ms >= 0 and chunk_bytes >= 1, "
                f"not {bytes_per_ms}, {latency_ms} and {chunk_bytes}"
            )
        self.bytes_per_ms = bytes_per_ms
        self.latency_ms = latency_ms
        self.chunk_bytes = chunk_bytes
        self.prioritised = prioritised
        self.clock = clock or Clock()

    def lane(self, device_name: str, direction: str) -> TimedLane:
        return TimedLane(
            device_name,
            direction,
            duration_ms=self.duration_ms,
            chunk_bytes=self.chunk_bytes,
            prioritised=self.prioritised,
            clock=self.clock,
        )

    def duration_ms(self, num_bytes: int) -> float:
        """How long one piece is on its way."""
        return self.latency_ms + num_bytes / self.bytes_per_ms


class LazyLink(Link):
    """A copy is made when somebody waits for it, by whoever does: no threads, no chance."""

    def lane(self, device_name: str, direction: str) -> LazyLane:
        return LazyLane(device_name, direction)


class VirtualDevice(Device):
    """A worker on the host's own cores; see [Note: virtual devices].

    Args:
        index: position in the pool.
        link: how copies travel; None for the fast mode, in which replicas alias the masters.
        memory_limit: bytes that may be on the device at a time; None for no limit.
    """

    def __init__(self, index: int, *, link: Link | None = None, memory_limit: int | None = None) -> None:
        name = f"virtual device {index}"
        host = torch.device("cpu")
        h2d, d2h = (DirectLane(host) if link is None else link.lane(name, lane) for lane in ("h2d", "d2h"))
        super().__init__(index, host, h2d, d2h, DeviceMemory(name, memory_limit))
        self.aliases_host = link is None
        self.is_shared = self.counts_activations = link is not None
        for lane in (h2d, d2h):
            if isinstance(lane, VirtualLane):
                lane.device = self

    def computing(self) -> contextlib.AbstractContextManager[object]:  # type: ignore[override]  # a plain lock is fast
        self.num_unit_runs += 1
        return self._busy

    def occupied(self) -> contextlib.AbstractContextManager[object]:  # type: ignore[override]  # see above
        return self._busy

    def stamp(self) -> float:
        return perf_counter()

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
