"""What the simulated accelerator saw, and how it behaves: counts, reports, options."""

from __future__ import annotations

import atexit
import contextlib
import traceback
from collections.abc import Callable, Iterator

import torch

from tests.support.accelerator import build

_native = build.load()
_ALWAYS_COUNTED = (
    "blocking_copies",
    "item_syncs",
    "races",
    "ooms",
    "synchronous_operators",
    "cache_flushes",
    "unregistered_in_flight",
)

Report = tuple[str, str, str]  # kind, text, Python stack
reset_stats = _native.reset_counts


def stats() -> dict[str, int]:
    """Counts since the start or :func:`reset_stats`."""
    return {**dict.fromkeys(_ALWAYS_COUNTED, 0), **_native.counts()}


def on_report(callback: Callable[[str, str], None] | None) -> None:
    """``callback(kind, text)`` runs in the thread that did it: races, blocking copies, items, out of memory."""
    _native.set_callback(callback)


@contextlib.contextmanager
def traced() -> Iterator[list[Report]]:
    """A list that is filled for a while."""
    reports: list[Report] = []
    on_report(lambda kind, text: reports.append((kind, text, "".join(traceback.format_stack()[:-1]))))
    try:
        yield reports
    finally:
        on_report(None)


def set_delay(microseconds: int) -> None:
    """Every operator and copy is so late from now on."""
    _native.set_option("delay_us", int(microseconds))


@contextlib.contextmanager
def options(**values: int) -> Iterator[None]:
    """Other options for a while: delay_us, jitter, eager_free, pin_mb."""
    before = _native.options()
    try:
        for name, value in values.items():
            _native.set_option(name, int(value))
        yield
    finally:
        for name, value in before.items():
            _native.set_option(name, value)


@atexit.register
def _leave() -> None:
    """Nothing may ask for the interpreter after its end."""
    if _native.is_forked():
        return
    on_report(None)
    for index in range(_native.device_count()):
        with contextlib.suppress(RuntimeError):
            torch.accelerator.synchronize(index)
