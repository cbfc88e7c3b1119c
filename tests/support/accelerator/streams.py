"""Streams and events of ``torch.sim``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.accelerator import build

_native = build.load()
_PRIVATEUSE1 = 20  # c10::DeviceType
_HELD_S = 60.0  # at most: no test works so long beside a stream that is held


def index_of(device: Any = None) -> int:
    """The index of what names a device; the current one where nothing does."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Made(type):
    """For what looks like a class and makes objects of torch's class, which cannot be subclassed for all purposes."""

    made: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.made)


class Stream(metaclass=_Made):
    """A stream of the pool of a device."""

    made = torch.Stream

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if "stream_id" in kwargs:
            return torch.Stream(**kwargs)
        return torch.Stream(device=torch.device("sim", index_of(device)), priority=priority)


class Event(metaclass=_Made):
    made = torch.Event

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, device: Any = None
    ) -> Any:
        return torch.Event("sim" if device is None else device, enable_timing=enable_timing, blocking=blocking)


class StreamContext:
    """What the thread issues and allocates belongs to the stream, for a while; its device is the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is None:
            return
        self._device = torch.accelerator.current_device_index()
        self._before = current_stream(self._stream.device_index)
        self._outer = current_stream()
        torch.accelerator.set_stream(self._stream)
        torch.accelerator.set_device_index(self._stream.device_index)

    def __exit__(self, *exc: object) -> None:
        if self._stream is None:
            return
        torch.accelerator.set_stream(self._before)
        torch.accelerator.set_stream(self._outer)
        torch.accelerator.set_device_index(self._device)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=_PRIVATEUSE1)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(index_of(device))


@contextlib.contextmanager
def losing(device: Any, after: int, error: str = "uncorrectable ECC error encountered") -> Iterator[None]:
    """The device is lost after so many more operations, until the context ends: every use and wait raises an error."""
    index = index_of(device)
    _native.lose(index, after, error)
    try:
        yield
    finally:
        _native.lose(index, -1, "")


# Microseconds, not cycles: the current stream does nothing for so long.
_sleep = _native.sleep


@contextlib.contextmanager
def held() -> Iterator[None]:
    """The current stream does nothing until the context ends.

    Raises:
        RuntimeError: if something has waited for it on the host meanwhile: it goes on after a minute then.
    """
    let_go, has_gone_on = _native.hold(), threading.Lock()

    def go_on() -> None:
        if has_gone_on.acquire(blocking=False):
            let_go()

    patience = threading.Timer(_HELD_S, go_on)
    patience.start()
    try:
        yield
    finally:
        is_late = has_gone_on.locked()
        patience.cancel()
        go_on()
        patience.join()
        if is_late:
            raise RuntimeError("the host waited for a stream that was held")
