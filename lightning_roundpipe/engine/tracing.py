"""What a step did, as a timeline.

[Note: tracing]
Runs of units are always noted, because costs are measured from them. Waits and transfers are noted on request: then the
gate and the user-code lock of the step are of classes that note them, and the devices have a list to note transfers in.
Without, nothing of it exists.

Waits are timed by the host, everything else by the stamps of its device. A :class:`Clock` brings both to one origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

from ..devices.device import Device, Run
from ..devices.pool import DevicePool
from ..planning.schedule import Action, Schedule
from ..planning.spans import Span
from ..usercode.lock import UserCodeLock, current
from .gate import Gate

# An interrupted thread goes on some milliseconds later; a stamp takes some microseconds.
_AT_ONCE_S = 1e-4
_NUM_TRIES = 5


class Clock:
    """Times in ms since it was made, from stamps of devices and from :func:`time.perf_counter`."""

    def __init__(self, pool: DevicePool) -> None:
        self._started = perf_counter()
        self._origins = {device: self._origin_of(device) for device in pool.devices}

    def _origin_of(self, device: Device) -> tuple[float, Any]:
        """A time and the stamp for it: a device is idle between steps, so that its first stamp is reached when it is
        made. Both are taken again if the thread was interrupted in between."""
        for _ in range(_NUM_TRIES):
            before = perf_counter()
            stamp = device.stamp()
            if perf_counter() - before < _AT_ONCE_S:
                break
        return (before - self._started) * 1e3, stamp

    def host_ms(self, time_s: float) -> float:
        """``time_s`` is of :func:`time.perf_counter`."""
        return (time_s - self._started) * 1e3

    def between(self, device: Device, start: Any, end: Any) -> tuple[float, float] | None:
        """Both stamps in ms; None if the device has not reached them."""
        offset_ms, origin = self._origins[device]
        start_ms, end_ms = device.elapsed_ms(origin, start), device.elapsed_ms(origin, end)
        return None if start_ms is None or end_ms is None else (offset_ms + start_ms, offset_ms + end_ms)

    def spans_of(self, runs: Iterable[Run], microbatch: int) -> list[Span]:
        """What a micro-batch computed, as far as the devices have got."""
        spans = []
        for device, kind, name, start, end, stage, *_ in runs:
            if (times := self.between(device, start, end)) is not None:
                spans.append(Span(device.index, "compute", *times, stage, microbatch, f"{kind} {name}"))
        return spans


class Trace:
    """The waits and transfers of one step."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._waits: list[tuple[int, float, float, int, int, str]] = []
        self._indices = range(0)
        self._where: dict[int, tuple[int, int]] = {}

    def begin(self, schedule: Schedule, indices: range) -> None:
        """A run over a schedule begins: of these micro-batches, in the order of their indices in it. What was noted
        before is lost."""
        self._indices = indices
        self._where = {
            index: (schedule.device_of(Action(0, schedule_index)), 0) for schedule_index, index in enumerate(indices)
        }
        self._waits.clear()
        for device in self._pool.devices:
            device.moved = []

    def move(self, action: Action, device: int) -> None:
        """A micro-batch is on its way to a stage: what it waits for from now on, it waits for there."""
        self._where[self.index_of(action.microbatch_index)] = (device, action.stage_index)

    def index_of(self, schedule_index: int) -> int:
        """Index of the micro-batch with this index in the schedule."""
        return self._indices[schedule_index]

    def waited(self, index: int, started: float, what: str) -> None:
        """A micro-batch has waited until now."""
        device, stage = self._where[index]
        self._waits.append((device, started, perf_counter(), stage, index, what))

    def spans(self, clock: Clock) -> Iterator[Span]:
        """Everything noted since :meth:`begin`."""
        for device_index, started, ended, stage, microbatch, label in self._waits:
            yield Span(device_index, "wait", clock.host_ms(started), clock.host_ms(ended), stage, microbatch, label)
        for device in self._pool.devices:
            for moved in device.moved or ():
                if (times := clock.between(device, moved.start, moved.end)) is not None:
                    yield Span(device.index, moved.lane, *times, label=moved.label)

    def close(self) -> None:
        """Transfers are not noted any more."""
        for device in self._pool.devices:
            device.moved = None


class TracedGate(Gate):
    """Notes who waited for a turn, or for another micro-batch's buffers."""

    def __init__(self, trace: Trace, schedule: Schedule, end_stage: Callable[[int], None]) -> None:
        super().__init__(schedule, end_stage)
        self._trace = trace

    def approach(self, action: Action) -> bool:
        return self._noted(super().approach, action)

    def enter(self, action: Action) -> bool:
        return self._noted(super().enter, action)

    def _noted(self, wait: Callable[[Action], bool], action: Action) -> bool:
        self._trace.move(action, self.device_of(action))
        started = perf_counter()
        has_waited = wait(action)
        if has_waited:
            self._trace.waited(self._trace.index_of(action.microbatch_index), started, "its turn on the device")
        return has_waited

    def await_position(self, microbatch_index: int, other: int, position: int) -> bool:
        started = perf_counter()
        has_waited = super().await_position(microbatch_index, other, position)
        if has_waited:
            index, awaited = self._trace.index_of(microbatch_index), self._trace.index_of(other)
            self._trace.waited(index, started, f"the buffers of micro-batch {awaited}")
        return has_waited


class TracedUserCodeLock(UserCodeLock):
    """Notes who waited for the user-code lock."""

    def __init__(self, trace: Trace, *args: Any) -> None:
        super().__init__(*args)
        self._trace = trace

    def _wait(self) -> None:
        started = perf_counter()
        super()._wait()
        state = current()
        if state is not None:
            self._trace.waited(state.index, started, "the user-code lock")
