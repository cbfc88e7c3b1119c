"""What ``torch.sim`` is: the Python side of the device type."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.support.accelerator import build

_C = build.load()

# --- devices ---------------------------------------------------------------------------------------------------------


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return torch.accelerator.current_device_index()
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def device_count() -> int:
    return _C.device_count()


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _C.is_forked()


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(contextlib.ContextDecorator):
    """The current device of the thread, for a while."""

    def __init__(self, device: Any) -> None:
        self.idx = None if device is None else _index(device)
        self.before: list[int] = []

    def __enter__(self) -> None:
        self.before.append(current_device())
        if self.idx is not None and self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        set_device(self.before.pop())


class _DeviceGuard(device):
    pass


def device_of(obj: torch.Tensor) -> device:
    return device(obj.get_device() if obj.device.type == "sim" else None)


def get_device_name(device: Any = None) -> str:
    return "simulated accelerator"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (8, 0)


class _Properties:
    name, major, minor, multi_processor_count = "simulated accelerator", 8, 0, 1

    def __init__(self, index: int) -> None:
        self.total_memory = _C.memory(index)["total"]


def get_device_properties(device: Any = None) -> _Properties:
    return _Properties(_index(device))


# --- streams and events ----------------------------------------------------------------------------------------------


class _Made(type):
    """For what looks like a class, and makes objects of torch's class (which cannot be subclassed for all purposes)."""

    def __instancecheck__(cls, obj: object) -> bool:
        return isinstance(obj, cls.made)  # type: ignore[attr-defined]


class Stream(metaclass=_Made):
    """A stream of the pool of a device (like CUDA's: 32 of them, then they are given out again)."""

    made = torch.Stream

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if "stream_id" in kwargs:
            return torch.Stream(**kwargs)
        return torch.Stream(device=torch.device("sim", _index(device)), priority=priority)


class Event(metaclass=_Made):
    made = torch.Event

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, device: Any = None
    ) -> Any:
        return torch.Event("sim" if device is None else device, enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """What the thread issues and allocates belongs to the stream, for a while; also its device is the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self.device = current_device()
        self.before = current_stream(self.stream.device_index)
        self.outer = current_stream()
        set_stream(self.stream)
        set_device(self.stream.device_index)

    def __exit__(self, *exc: object) -> None:
        if self.stream is None:
            return
        torch.accelerator.set_stream(self.before)
        torch.accelerator.set_stream(self.outer)
        set_device(self.device)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def _sleep(microseconds: int) -> None:
    """The current stream does nothing for so long (microseconds, not cycles)."""
    _C.sleep(int(microseconds))


# --- memory ----------------------------------------------------------------------------------------------------------


def memory_allocated(device: Any = None) -> int:
    return _C.memory(_index(device))["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    return _C.memory(_index(device))["peak"]


def memory_reserved(device: Any = None) -> int:
    return _C.memory(_index(device))["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    return _C.memory(_index(device))["peak_reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _C.reset_peak(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    state = _C.memory(_index(device))
    return state["total"] - state["reserved"], state["total"]


def memory_stats(device: Any = None) -> dict[str, int]:
    state = _C.memory(_index(device))
    return {
        "allocated_bytes.all.current": state["allocated"],
        "allocated_bytes.all.peak": state["peak"],
        "reserved_bytes.all.current": state["reserved"],
        "reserved_bytes.all.peak": state["peak_reserved"],
        "active_bytes.all.current": state["allocated"] + state["pending"],
    }


def empty_cache() -> None:
    for index in range(device_count()):
        _C.empty_cache(index)


def set_memory_limit(num_bytes: int, device: Any = None) -> None:
    _C.set_limit(_index(device), int(num_bytes))


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    _C.set_limit(_index(device), int(fraction * _C.memory(_index(device))["total"]))


def get_per_process_memory_fraction(device: Any = None) -> float:
    return _C.get_limit(_index(device)) / _C.memory(_index(device))["total"]


OutOfMemoryError = torch.OutOfMemoryError


class _Runtime:
    """What engines use of ``torch.cuda.cudart()``; returns CUDA's error codes."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int = 0) -> int:
        return _C.host_register(address, num_bytes)

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return _C.host_unregister(address)


def cudart() -> _Runtime:
    return _Runtime()


host_register, host_unregister = _C.host_register, _C.host_unregister
pinned_bytes = _C.pinned_bytes

# --- random numbers --------------------------------------------------------------------------------------------------

default_generators = tuple(_C.default_generator(index) for index in range(device_count()))


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    default_generators[_index(device)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states):
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


# --- what the simulation saw -----------------------------------------------------------------------------------------

reports: list[tuple[str, str, str]] = []  # kind, text, Python stack; filled while traced() or with SIM_TRACE=1


def stats() -> dict[str, int]:
    """Counts since the start or :func:`reset_stats`; "races" and "blocking_copies" among them."""
    counts = dict.fromkeys(
        (
            "blocking_copies",
            "item_syncs",
            "races",
            "ooms",
            "synchronous_operators",
            "cache_flushes",
            "unregistered_in_flight",
        ),
        0,
    )
    return {**counts, **_C.stats()}


reset_stats = _C.reset_stats
set_delay = _C.set_delay


def on_report(callback: Callable[[str, str], None] | None) -> None:
    """``callback(kind, text)`` is called in the thread that did it, for each race, blocking copy, item, out of memory."""
    _C.set_callback(callback)


def _note(kind: str, text: str) -> None:
    reports.append((kind, text, "".join(traceback.format_stack()[:-1])))


@contextlib.contextmanager
def traced() -> Any:
    """Fills :data:`reports` with Python stacks; yields it."""
    reports.clear()
    on_report(_note)
    try:
        yield reports
    finally:
        on_report(None)


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", sys.modules[__name__])
with contextlib.suppress(RuntimeError):
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
if os.environ.get("SIM_TRACE", "0") not in ("", "0"):
    on_report(_note)


@atexit.register
def _leave() -> None:
    if _is_in_bad_fork():
        return
    if os.environ.get("SIM_REPORT"):
        pathlib.Path(os.environ["SIM_REPORT"]).write_text(json.dumps({"stats": stats(), "reports": reports}, indent=1))
    on_report(None)
    for index in range(device_count()):
        with contextlib.suppress(RuntimeError):
            synchronize(index)
