"""Memory of devices, and page-locked memory of the host, as ``torch.sim`` shows them."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.accelerator import build
from tests.support.accelerator.streams import index_of

_native = build.load()

OutOfMemoryError = torch.OutOfMemoryError
host_register, host_unregister = _native.host_register, _native.host_unregister
pinned_bytes = _native.pinned_bytes


def _counts(device: Any) -> dict[str, int]:
    return dict(_native.memory(index_of(device)))


def memory_allocated(device: Any = None) -> int:
    return _counts(device)["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    return _counts(device)["peak"]


def memory_reserved(device: Any = None) -> int:
    return _counts(device)["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    return _counts(device)["peak_reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _native.reset_peaks(index_of(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and all."""
    counts = _counts(device)
    return counts["total"] - counts["reserved"], counts["total"]


def memory_stats(device: Any = None) -> dict[str, int]:
    counts = _counts(device)
    return {
        "allocated_bytes.all.current": counts["allocated"],
        "allocated_bytes.all.peak": counts["peak"],
        "reserved_bytes.all.current": counts["reserved"],
        "reserved_bytes.all.peak": counts["peak_reserved"],
        "active_bytes.all.current": counts["allocated"] + counts["pending"],
    }


def empty_cache() -> None:
    for index in range(_native.device_count()):
        _native.empty_cache(index)


def set_memory_limit(num_bytes: int, device: Any = None) -> None:
    _native.set_memory_limit(index_of(device), int(num_bytes))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    set_memory_limit(int(fraction * _counts(device)["total"]), device)


def get_per_process_memory_fraction(device: Any = None) -> float:
    counts = _counts(device)
    return counts["limit"] / counts["total"]


class _Runtime:
    """What engines use of ``torch.cuda.cudart()``; returns CUDA's error codes."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int = 0) -> int:
        return int(host_register(address, num_bytes))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return int(host_unregister(address))


def cudart() -> type[_Runtime]:
    return _Runtime
