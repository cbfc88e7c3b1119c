"""Devices: the one seam between the engine and the hardware.

A :class:`Device` owns two transfer lanes (h2d, d2h; see :mod:`transfer`), the mutual exclusion of its compute lane, a
clock and its statistics. The engine asks for nothing else, so that what runs on virtual devices is what runs on GPUs.

[Note: stamps]
Time on a device is marked by stamps in its stream of work, which are read when the step is over. On the host a stamp is
the time; on a GPU it is an event, which the host never waits for: what has not been reached yet is read later or not at
all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .transfer import Transfer, TransferLane

# The current stage, the next one, activations and logits have to fit together.
_STAGE_SHARE = 4


class Moved(NamedTuple):
    """A transfer that was traced: its lane ("h2d" or "d2h"), stamps at its begin and end, and what moved."""

    lane: str
    start: Any
    end: Any
    label: str


class Device(ABC):
    """One worker of the pool.

    Attributes:
        index: position in the pool.
        torch_device: where its tensors live.
        aliases_host: whether device copies of weights share memory with the host's (nothing needs to travel).
        h2d, d2h: transfer lanes.
        moved: where transfers are noted; None while nobody wants to know.
    """

    aliases_host: bool = False

    def __init__(self, index: int, torch_device: torch.device) -> None:
        self.index = index
        self.torch_device = torch_device
        self.h2d = TransferLane(torch_device)
        self.d2h = TransferLane(torch.device("cpu"))
        self.moved: list[Moved] | None = None
        self._busy = threading.Lock()
        self.num_unit_runs = 0

    @abstractmethod
    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Holds the compute lane: at most one unit runs on a device at any time, also for calls off the plan."""

    @abstractmethod
    def stamp(self) -> Any:
        """A mark behind the work that the calling thread has given to the device; see [Note: stamps]."""

    @abstractmethod
    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        """Time in ms from one stamp of this device to a later one; None if it has not reached both yet."""

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most bytes of tensors that were on the device at a time, in the life of the process; None if unknown."""
        return None

    def upload(self, tensors: Sequence[Tensor], unit: str, what: str, *, keep_graph: bool = False) -> Transfer:
        """Starts copying ``tensors`` to the device.

        Args:
            unit, what: the unit's name and what it is of it, for the trace.
            keep_graph: whether the copies are part of the tensors' autograd graph.
        """
        return self._transfer(self.h2d, "h2d", tensors, unit, what, keep_graph)

    def download(self, tensors: Sequence[Tensor], unit: str, what: str) -> Transfer:
        """Starts copying ``tensors`` to the host; see :meth:`upload`."""
        return self._transfer(self.d2h, "d2h", tensors, unit, what, False)

    def _transfer(
        self, lane: TransferLane, name: str, tensors: Sequence[Tensor], unit: str, what: str, keep_graph: bool
    ) -> Transfer:
        if self.moved is None or not tensors:
            return lane.submit(tensors, keep_graph=keep_graph)
        started = self.stamp()
        transfer = lane.submit(tensors, keep_graph=keep_graph)
        self.moved.append(Moved(name, started, self.stamp(), f"{what} {unit}"))
        return transfer

    def statistics(self) -> dict[str, float]:
        """Counters since the device was made: runs of units, bytes moved up and down."""
        return {
            "unit_runs": self.num_unit_runs,
            "h2d_bytes": self.h2d.num_bytes,
            "d2h_bytes": self.d2h.num_bytes,
        }


class VirtualDevice(Device):
    """A worker on the host's own cores.

    Args:
        index: position in the pool.
        copies: True makes device copies of weights as on a GPU, filled with NaN when they are freed, so that a use
            after the free shows on a machine without GPUs. False (the fast mode) lets replicas alias the masters.
    """

    def __init__(self, index: int, *, copies: bool = False) -> None:
        super().__init__(index, torch.device("cpu"))
        self.aliases_host = not copies

    def computing(self) -> contextlib.AbstractContextManager[object]:
        self.num_unit_runs += 1
        return self._busy

    def stamp(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3


class CudaDevice(Device):
    """A GPU. Copies and compute share the default stream of the device, so they are ordered by it."""

    def __init__(self, index: int, ordinal: int) -> None:
        super().__init__(index, torch.device("cuda", ordinal))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with self._busy, torch.cuda.device(self.torch_device):
            self.num_unit_runs += 1
            yield

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        # To ask is not to wait; elapsed_time of events that were not reached would raise.
        are_reached = start.query() and end.query()  # type: ignore[no-untyped-call]
        return start.elapsed_time(end) if are_reached else None

    @property
    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), "peak_memory_bytes": float(self.peak_memory_bytes)}


class DevicePool:
    """The stateless workers of a run.

    Args:
        torch_devices: one entry per worker; ``cpu`` entries become virtual devices.
        copies: see :class:`VirtualDevice`.

    Raises:
        ValueError: if the list is empty or holds a device type that is neither ``cpu`` nor ``cuda``.
    """

    def __init__(self, torch_devices: Sequence[torch.device], *, copies: bool = False) -> None:
        if not torch_devices:
            raise ValueError("the device pool is empty: pass at least one device, for instance Trainer(devices=2)")
        self.devices = tuple(_make_device(i, d, copies) for i, d in enumerate(torch_devices))

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, index: int) -> Device:
        return self.devices[index]

    @property
    def bytes_moved(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes copied (to each device, from each device) since the pool was made."""
        return tuple(d.h2d.num_bytes for d in self.devices), tuple(d.d2h.num_bytes for d in self.devices)

    @property
    def stage_memory_limit(self) -> int | None:
        """Bytes of weights and gradients that a stage may have: a quarter of the smallest GPU. None on the host."""
        totals = [
            torch.cuda.get_device_properties(d.torch_device).total_memory
            for d in self.devices
            if d.torch_device.type == "cuda"
        ]
        return min(totals) // _STAGE_SHARE if totals else None

    @property
    def is_virtual(self) -> bool:
        """Whether all workers are on the host's cores."""
        return all(isinstance(device, VirtualDevice) for device in self.devices)


def _make_device(index: int, torch_device: torch.device, copies: bool) -> Device:
    if torch_device.type == "cpu":
        return VirtualDevice(index, copies=copies)
    if torch_device.type == "cuda":
        return CudaDevice(index, torch_device.index if torch_device.index is not None else index)
    raise ValueError(f"device {torch_device} cannot be a worker: RoundPipe runs on 'cuda' and 'cpu' devices")
