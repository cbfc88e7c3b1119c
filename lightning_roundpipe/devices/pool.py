"""The devices of a run, which keep nothing of the model from step to step that could not be brought anew."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence

import torch

from .device import Device
from .gpu import driver as gpu_driver
from .gpu.device import GpuDevice
from .virtual import TimedLink, VirtualDevice

_MAX_AUTO_VIRTUAL = 8
# A device that keeps more than one of so many parts of its memory free has run short three times.
_SHORT_PARTS = 8


def num_host_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_auto_devices() -> int:
    """How many devices are used where no number is given: every GPU, or one virtual device per core (8 at most)."""
    if gpu_driver.gpu_type() is not None:
        return torch.accelerator.device_count()
    return min(num_host_cores(), _MAX_AUTO_VIRTUAL)


class DevicePool:
    """The devices, in order.

    The calling thread works on the first one from then on: to page-lock memory, or to wait for a copy, CUDA makes a
    context on the GPU of the thread, which takes memory there and may not be one of the pool.

    Args:
        torch_devices: one entry per device; ``cpu`` entries become virtual devices. A GPU that is listed several times
            has several devices, each with streams and a part of the memory of its own.
        link: over which virtual devices are reached; None if they share the host's memory.
        memory_limit: bytes that each device may use; None for what there is.
        speeds: of virtual devices, one each, above 0 and at most 1; None for devices that are all alike.

    Raises:
        ValueError: if the list is empty, holds devices of different types, or one that is neither ``cpu`` nor a GPU of
            a type that is known.
    """

    def __init__(
        self,
        torch_devices: Sequence[torch.device],
        *,
        link: TimedLink | None = None,
        memory_limit: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        if not torch_devices:
            raise ValueError("the device pool is empty: pass at least one device, for instance Trainer(devices=2)")
        if len({device.type for device in torch_devices}) > 1:
            raise ValueError(f"one pool cannot have devices of different types: {', '.join(map(str, torch_devices))}")
        if speeds is not None and len(speeds) != len(torch_devices):
            raise ValueError(f"speeds={list(speeds)} for {len(torch_devices)} devices: pass one number for each")
        counts = Counter(torch_devices)
        with contextlib.ExitStack() as made:  # if one cannot be made
            devices = []
            for i, d in enumerate(torch_devices):
                speed = None if speeds is None else speeds[i]
                devices.append(_make_device(i, d, counts[d], link, memory_limit, speed))
                made.callback(devices[-1].dispose)
            made.pop_all()
        self.devices: tuple[Device, ...] = tuple(devices)
        self.devices[0].enter()

    def __len__(self) -> int:
        return len(self.devices)

    def __getitem__(self, index: int) -> Device:
        return self.devices[index]

    def open(self) -> None:
        """A step begins."""
        for device in self.devices:
            device.open()

    def close(self) -> None:
        """A step has ended: no thread is alive, nothing is under way."""
        with contextlib.ExitStack() as stack:  # all of them, even if one raises
            for device in reversed(self.devices):
                stack.callback(device.close)

    def dispose(self) -> None:
        """The pool is not used any more."""
        with contextlib.ExitStack() as stack:
            for device in reversed(self.devices):
                stack.callback(device.dispose)

    def find_lost(self) -> list[Device]:
        """The devices that are lost, after a wait for the work of all; see [Note: lost devices] in
        :mod:`devices.device`."""
        for device in self.devices:
            device.check()
        return [device for device in self.devices if device.lost is not None]

    @property
    def owners(self) -> dict[torch.device, Device]:
        """GPU -> its device, where it has only one."""
        return {d.torch_device: d for d in self.devices if not d.is_shared and not d.aliases_host}

    @property
    def gpus(self) -> dict[torch.device, Device]:
        """GPU -> one of its devices."""
        return {d.torch_device: d for d in self.devices if d.torch_device.type != "cpu"}

    @property
    def bytes_moved(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes copied (to each device, from each device) since the pool was made."""
        return tuple(d.h2d.num_bytes for d in self.devices), tuple(d.d2h.num_bytes for d in self.devices)

    @property
    def memory_limit(self) -> int | None:
        """Bytes that every device may use; None if there is no limit."""
        limits = [device.memory.limit for device in self.devices if device.memory.limit is not None]
        return min(limits) if limits else None

    @property
    def is_short(self) -> bool:
        """Whether activations have to take less than in large rounds: allocators have run out of memory three times, or
        what is booked cannot make way; see [Note: device memory] in :mod:`devices.memory`."""
        memories = [device.memory for device in self.devices if device.memory.spare]
        if any(memory.has_room_to_make for memory in memories):
            return any(memory.spare > (memory.limit or 0) // _SHORT_PARTS for memory in memories)
        return bool(memories)

    @property
    def has_own_speeds(self) -> bool:
        """Whether one device may compute faster than another: not if they are all the same cores of the host."""
        return len(self) > 1 and any(device.has_own_speed for device in self.devices)

    @property
    def is_virtual(self) -> bool:
        """Whether all devices are on the host's cores."""
        return all(isinstance(device, VirtualDevice) for device in self.devices)


def _make_device(
    index: int,
    torch_device: torch.device,
    num_sharing: int,
    link: TimedLink | None,
    memory_limit: int | None,
    speed: float | None,
) -> Device:
    if torch_device.type == "cpu":
        return VirtualDevice(index, link=link, memory_limit=memory_limit, speed=speed)
    if speed is not None:
        raise ValueError(f"device {torch_device} has a speed of its own: only virtual devices can be given one")
    if gpu_driver.is_supported(torch_device.type):
        ordinal = torch_device.index if torch_device.index is not None else index
        driver = gpu_driver.driver_of(torch_device.type)
        return GpuDevice(index, ordinal, driver=driver, num_sharing=num_sharing, memory_limit=memory_limit)
    raise ValueError(
        f"device {torch_device} cannot be used: RoundPipe runs on 'cpu', 'cuda', 'xpu', and other accelerators that "
        "torch knows with streams, events and the state of their memory"
    )
