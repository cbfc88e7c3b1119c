"""Devices: the one seam between the engine and the hardware.

A :class:`Device` owns two transfer lanes (h2d, d2h; see :mod:`transfer`), the mutual exclusion of its compute lane, and
its statistics. The engine asks for nothing else, so that what runs on virtual devices is what runs on GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from .transfer import TransferLane

# The current stage, the next one, activations and logits have to fit together.
_STAGE_SHARE = 4


class Device(ABC):
    """One worker of the pool.

    Attributes:
        index: position in the pool.
        torch_device: where its tensors live.
        aliases_host: whether device copies of weights share memory with the host's (nothing needs to travel).
        h2d, d2h: transfer lanes.
    """

    aliases_host: bool = False

    def __init__(self, index: int, torch_device: torch.device) -> None:
        self.index = index
        self.torch_device = torch_device
        self.h2d = TransferLane(torch_device)
        self.d2h = TransferLane(torch.device("cpu"))
        self._busy = threading.Lock()
        self.num_unit_runs = 0

    @abstractmethod
    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Holds the compute lane: at most one unit runs on a device at any time, also for calls off the plan."""

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


class CudaDevice(Device):
    """A GPU. Copies and compute share the default stream of the device, so they are ordered by it."""

    def __init__(self, index: int, ordinal: int) -> None:
        super().__init__(index, torch.device("cuda", ordinal))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with self._busy, torch.cuda.device(self.torch_device):
            self.num_unit_runs += 1
            yield

    def statistics(self) -> dict[str, float]:
        peak = float(torch.cuda.max_memory_allocated(self.torch_device))
        return {**super().statistics(), "peak_memory_bytes": peak}


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
