"""The accelerator ``"roundpipe"``: all GPUs if there are any, else virtual CPU devices.

GPUs are those of the accelerator that torch finds, whether CUDA, ROCm, XPU or another one with streams and events."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from typing_extensions import override

from .devices.gpu import driver as gpu_driver
from .devices.gpu.device import GpuDevice
from .devices.pool import DevicePool, num_auto_devices
from .lightning_packages import Accelerator, MisconfigurationException, cpu


class RoundPipeAccelerator(Accelerator):
    """Devices of the pool. On a machine without GPUs ``devices=N`` means N virtual devices on the host's cores.

    The model itself stays on the host; a device holds only what the engine sends there.
    """

    def __init__(self) -> None:
        super().__init__()
        if gpu_driver.gpu_type() is not None:
            # Lightning takes GPUs for unused that none of its own accelerators has.
            warnings.filterwarnings("ignore", "GPU available but not used")

    @override
    def setup_device(self, device: torch.device) -> None:
        """Only other strategies call this: the devices of RoundPipe are set up by its pool.

        Raises:
            MisconfigurationException: always; ``Trainer(accelerator="roundpipe")`` alone would train with DDP.
        """
        raise MisconfigurationException(
            "accelerator='roundpipe' works with strategy='roundpipe' only: set both, or leave the accelerator to 'auto'"
        )

    @override
    def teardown(self) -> None:
        """Nothing to do: the strategy ends the pool."""

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> int | list[int]:
        """The number of virtual devices, or the list of GPU ordinals, one per device of the pool.

        As with Lightning's own accelerators a number is that of the first GPUs, and -1 all of them. A GPU may be
        listed several times, which those refuse: it gets as many places in the pool.

        Raises:
            MisconfigurationException: if the value names no device.
        """
        if gpu_driver.gpu_type() is not None:
            return _ordinals(devices, torch.accelerator.device_count())
        count = int(devices) if isinstance(devices, str) and devices.lstrip("-").isdigit() else devices
        if isinstance(count, list):
            count = len(count)
        if count == -1:
            count = RoundPipeAccelerator.auto_device_count()
        if not isinstance(count, int) or count < 1:
            raise MisconfigurationException(
                f"devices={devices!r}: without a GPU, pass the number of virtual CPU devices, for instance devices=2"
            )
        return count

    @staticmethod
    @override
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        """One torch device per device of the pool."""
        if isinstance(devices, int):
            return [torch.device("cpu")] * devices
        return [torch.device(gpu_driver.gpu_type() or "cuda", ordinal) for ordinal in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """What ``devices="auto"`` means: every GPU, or one virtual device per core (8 at most)."""
        return num_auto_devices()

    @staticmethod
    @override
    def is_available() -> bool:
        """Always: every machine has cores."""
        return True

    @staticmethod
    @override
    def name() -> str:
        """The name under which ``Trainer(accelerator=...)`` knows it."""
        return "roundpipe"

    @override
    def get_device_stats(self, device: str | int | torch.device) -> dict[str, Any]:
        """Memory of ``device`` if it is a GPU. For the host the strategy answers, see ``device_statistics`` there."""
        device = torch.device(device)
        return {} if device.type == "cpu" else dict(torch.get_device_module(device).memory_stats(device))


def _ordinals(devices: int | str | list[int], num_gpus: int) -> list[int]:
    """The GPUs that ``Trainer(devices=...)`` means, of ``num_gpus``.

    Raises:
        MisconfigurationException: if it is no number and no list of numbers, or means a GPU that is not there.
    """
    wanted: Any = devices
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if parts and all(part.removeprefix("-").isdigit() for part in parts):
            wanted = [int(part) for part in parts] if "," in devices else int(parts[0])
    if type(wanted) is int and -1 <= wanted <= num_gpus and wanted:
        return list(range(num_gpus if wanted == -1 else wanted))
    if isinstance(wanted, list) and wanted and all(type(one) is int and 0 <= one < num_gpus for one in wanted):
        return wanted
    raise MisconfigurationException(
        f"devices={devices!r}: this machine has {num_gpus} GPU(s); pass how many of them, -1 for all, or a list of "
        f"numbers from 0 to {num_gpus - 1}"
    )


def host_statistics() -> dict[str, float]:
    """Use of cores and memory of the host in percent; nothing without ``psutil``."""
    try:
        return cpu.get_cpu_stats()  # looked up there, as Lightning's own accelerator does
    except ModuleNotFoundError:
        return {}


def pool_statistics(pool: DevicePool) -> dict[str, float]:
    """Figures of every device of a pool under names such as ``"device0.unit_runs"``: its counters since the pool was
    made, and its limit in bytes if it has one. With GPUs also how much of the host's memory is page-locked."""
    figures: dict[str, float] = {}
    for device in pool.devices:
        own = device.statistics()
        if device.memory.limit is not None:
            own["memory_limit_bytes"] = float(device.memory.limit)
        figures.update({f"device{device.index}.{name}": value for name, value in own.items()})
        if isinstance(device, GpuDevice):  # all GPUs share it
            figures.update({f"host.{name}": value for name, value in device.page_locked.statistics().items()})
    return figures
