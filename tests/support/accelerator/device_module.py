"""What ``torch.sim`` is: what engines use of ``torch.cuda``, and what only a simulation can tell.

torch.sim  =  this module: devices and random numbers
                + streams.py   + memory.py   + reports.py
                          |          |            |
                          +---- native.so: source/*.cpp, built by build.py
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from tests.support.accelerator import build
from tests.support.accelerator.memory import (
    OutOfMemoryError,
    cudart,
    empty_cache,
    get_per_process_memory_fraction,
    host_register,
    host_unregister,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    pinned_bytes,
    reset_peak_memory_stats,
    set_memory_limit,
    set_per_process_memory_fraction,
)
from tests.support.accelerator.reports import (
    on_report,
    options,
    reset_stats,
    set_delay,
    stats,
    traced,
)
from tests.support.accelerator.streams import (
    Event,
    Stream,
    StreamContext,
    _sleep,
    current_stream,
    default_stream,
    held,
    index_of,
    losing,
    set_stream,
    stream,
    synchronize,
)

__all__ = [
    "Event",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "_sleep",
    "cudart",
    "current_stream",
    "default_stream",
    "empty_cache",
    "get_per_process_memory_fraction",
    "held",
    "host_register",
    "host_unregister",
    "losing",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "on_report",
    "options",
    "pinned_bytes",
    "reset_peak_memory_stats",
    "reset_stats",
    "set_delay",
    "set_memory_limit",
    "set_per_process_memory_fraction",
    "set_stream",
    "stats",
    "stream",
    "synchronize",
    "traced",
]

_native = build.load()
_NAME = "simulated accelerator"


def register() -> None:
    """Makes torch know the name ``sim`` and this module; once per process."""
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


# --- devices ---------------------------------------------------------------------------------------------------------

device_count = _native.device_count
_is_in_bad_fork = _native.is_forked


def is_available() -> bool:
    return bool(device_count() > 0)


_initialized = True  # checkpoints ask for it before they keep the state of generators


def is_initialized() -> bool:
    return _initialized


def init() -> None:
    """Nothing is left to do."""


_lazy_init = init


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(index_of(device))


class device(contextlib.ContextDecorator):
    """The current device of the thread, for a while."""

    def __init__(self, device: Any) -> None:
        self.idx = None if device is None else index_of(device)
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(current_device())
        if self.idx is not None and self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        set_device(self._before.pop())


_DeviceGuard = device


def device_of(obj: torch.Tensor) -> device:
    return device(obj.get_device() if obj.device.type == "sim" else None)


def get_device_name(device: Any = None) -> str:
    return _NAME


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (8, 0)


class _Properties:
    name, major, minor, multi_processor_count = _NAME, 8, 0, 1

    def __init__(self, index: int) -> None:
        self.total_memory = _native.memory(index)["total"]


def get_device_properties(device: Any = None) -> _Properties:
    return _Properties(index_of(device))


# --- random numbers --------------------------------------------------------------------------------------------------

default_generators = tuple(_native.default_generator(index) for index in range(device_count()))


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return default_generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    default_generators[index_of(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> int:
    return default_generators[current_device()].seed()


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()
