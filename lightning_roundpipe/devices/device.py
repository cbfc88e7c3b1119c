"""Devices: the one seam between the engine and the hardware.

                 compute lane: one unit at a time
    host  --h2d lane-->  [ weights | activations | gradients ]  --d2h lane-->  host
                         books: who may put how much here

A :class:`Device` owns two transfer lanes (see [Note: transfers] in :mod:`devices.transfer`), the books on its memory,
the mutual exclusion of its compute lane, a clock and its statistics. The engine asks for nothing else, so that what
runs on virtual devices is what runs on GPUs.

[Note: stamps]
Time on a device is marked by stamps in its stream of work, which are read when the step has ended. On the host a stamp
is the time; on a GPU it is an event, which the host never waits for: what has not been reached yet is read later or not
at all. An event costs the host as much as a small operator, so most steps do without.

[Note: local tensors]
A device that has a GPU of its own knows its tensors by their torch device. Virtual devices all live in the host's
memory, and several devices on one GPU in the memory of that GPU (``is_shared``). There a micro-batch that comes from
another device brings along what it needs through the host, as it would between two GPUs, and what it makes or brings is
local until it goes on.

[Note: lost devices]
A device is lost when its driver says that the hardware, or what the driver has there for this process, does not work
any more. Which error meets it first, where, and what becomes of that error on its way through torch and code of the
user, is not known. So the errors of a step are not searched for it: the device itself is asked (:meth:`Device.check`),
before the results of a step count, and when a step has failed. Of a lost device nothing is waited for, and closing it
raises nothing. It is taken to write nothing any more: memory of the host that its copies were to go to is used again.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .issue_lock import Pace
from .memory import DeviceMemory, Passing
from .transfer import Done, Edge, Lane, Moved, Transfer


class DeviceLostError(RuntimeError):
    """A device does not work any more; the message names it, and says why."""


class Device(ABC):
    """One device of the pool.

    Attributes:
        index: position in the pool, by which users know it.
        lost: why it is lost, in the words of its driver, see [Note: lost devices]; None while it works.
        torch_device: where its tensors live.
        aliases_host: whether device copies of weights share memory with the host's (nothing needs to travel).
        is_shared: whether tensors of other devices, or of the host, live on the same torch device; see
            [Note: local tensors].
        counts_activations: whether the engine books activations; a GPU has an allocator that does.
        draws_as: what decides on the numbers that a seed gives there: equal on devices that draw the same.
        has_own_speed: whether it may compute faster or slower than other devices of the pool.
        times_runs: whether the times of runs are wanted.
        memory: the books.
        h2d, d2h: transfer lanes.
        num_unit_runs: runs of units so far.
    """

    aliases_host: bool = False
    is_shared: bool = False
    counts_activations: bool = False
    has_own_speed: bool = True

    def __init__(self, index: int, torch_device: torch.device, h2d: Lane, d2h: Lane, memory: DeviceMemory) -> None:
        self.index = index
        self.lost: str | None = None
        self.torch_device = torch_device
        self.draws_as: Any = None
        self.h2d = h2d
        self.d2h = d2h
        self.memory = memory
        self._busy = threading.Lock()
        # Only a thread that has the compute lane takes it, so none waits for it. It is the quickest context manager.
        self._issuing: AbstractContextManager[object] = threading.Lock()
        self.times_runs = True
        self.num_unit_runs = 0

    @property
    def name(self) -> str:
        """For messages."""
        return self.memory.name

    def check(self) -> None:  # noqa: B027
        """Notes whether the device is lost, after a wait for the work that it was given; see [Note: lost devices]."""

    @property
    def moved(self) -> list[Moved] | None:
        """Where transfers are noted; None if they are not."""
        return self.h2d.moved

    @moved.setter
    def moved(self, moved: list[Moved] | None) -> None:
        self.h2d.moved = self.d2h.moved = moved

    def computing(self) -> AbstractContextManager[object]:
        """Holds the compute lane: at most one unit runs on a device at any time, also for calls off the plan."""
        self.num_unit_runs += 1
        return self._busy

    def occupied(self) -> AbstractContextManager[object]:
        """Excludes units: for what must not happen while one runs."""
        return self._busy

    def issuing(self, pace: Pace) -> AbstractContextManager[object]:
        """Open while a unit runs, with the compute lane held; see [Note: issue lock] in :mod:`devices.issue_lock`."""
        return self._issuing

    def enter(self) -> None:  # noqa: B027
        """The calling thread works here from now on: a micro-batch comes, from another device or from the host."""

    def throttle(self) -> None:  # noqa: B027
        """A micro-batch begins a stage here: holds its thread back if the host is too far ahead of the device."""

    @abstractmethod
    def stamp(self) -> Any:
        """A mark behind the work that the calling thread has given to the device; see [Note: stamps]."""

    def begin(self) -> Any:
        """A mark in front of a run; None where it costs something, and runs are not timed."""
        return self.stamp()

    def end(self, begun: Any) -> Any:
        """A mark behind the run of a unit that began at the mark ``begun``."""
        return self.stamp()

    @abstractmethod
    def elapsed_ms(self, start: Any, end: Any) -> float | None:
        """Time in ms from one stamp of this device to a later one; None if it has not reached both yet."""

    def upload(
        self,
        tensors: Sequence[Tensor],
        what: str,
        *,
        is_bulk: bool = False,
        after: Transfer | None = None,
        must: bool = False,
    ) -> Transfer:
        """Starts copying ``tensors`` (on the host) to the device; see :meth:`Lane.submit`.

        Args:
            what: they are, for the trace.
            must: whether to make room for them where the allocator has none: see :meth:`make_room`.

        Raises:
            torch.OutOfMemoryError: if the allocator has no room for them.
        """
        try:
            return self.h2d.submit(tensors, is_bulk=is_bulk, after=after, label=what)
        except torch.OutOfMemoryError:
            if not must:
                raise
        self.make_room()
        return self.h2d.submit(tensors, is_bulk=is_bulk, after=after, label=what)

    def download(self, tensors: Sequence[Tensor], what: str, *, is_bulk: bool = False) -> Transfer:
        """Starts copying ``tensors`` to the host, as they are after the work given to the device so far.

        They must not change while that is under way; see :meth:`snapshot`.
        """
        return self.d2h.submit(tensors, is_bulk=is_bulk, label=what)

    def keep(self, tensor: Tensor) -> Transfer:
        """A copy of ``tensor``, which is on the host and no part of a graph, for an upload that comes later."""
        return Done([tensor.clone()])

    def snapshot(self, tensor: Tensor) -> Tensor | None:
        """A copy on the device itself, of what may change before a download has read it and is no part of a graph; None
        if there is no room."""
        try:
            return tensor.clone()
        except torch.OutOfMemoryError:
            return None

    def make_room(self) -> None:
        """The allocator has run out of memory: what is not in use goes, and what is leaving is waited for.

        Called by the thread that holds the compute lane, and no other lock, before it tries once more, or between
        steps. Outside of the handler of the error, whose traceback holds tensors. See [Note: device memory] in
        :mod:`devices.memory`.
        """
        self.memory.make_room()
        self.empty_cache()

    def empty_cache(self) -> None:  # noqa: B027
        """The allocator gives back what it keeps for tensors of the same sizes."""

    def free(self, tensors: Sequence[Tensor], after: Transfer | None = None) -> Passing | None:
        """The memory of ``tensors`` may be used anew: after the work given to the device so far, and after ``after``.

        No views of them may be in use any more. Where ``after`` brings them to the host, no work that uses them may
        have been given to the device since it was submitted: it is all that is waited for.

        Returns:
            What the books have to wait for, see :meth:`DeviceMemory.release`; None if the memory is free now.
        """
        kept = list(tensors)
        if after is None:
            self._reuse(kept)
        else:
            after.when_done(Edge.FREED, lambda: self._reuse(kept))
        return after

    def _reuse(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """Gives memory back."""

    def give_up_spare(self) -> None:
        """Gives up all memory that is kept for what comes, on the device and page-locked on the host; between steps."""
        self.empty_cache()

    def open(self) -> None:
        """A step begins."""
        self.h2d.open()
        self.d2h.open()

    def close(self) -> None:
        """A step has ended, well or not: lanes have no thread and nothing under way afterwards."""
        with contextlib.ExitStack() as stack:  # all of it, even if one raises
            stack.callback(self.memory.end_step)
            stack.callback(self.d2h.close)
            stack.callback(self.h2d.close)

    def dispose(self) -> None:  # noqa: B027
        """The pool is given up: what was changed in the process for it is put back."""

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most bytes of tensors that were on the device at a time, in the life of the process; None if unknown."""
        return None

    def watch_allocator(self) -> Callable[[], int]:
        """Begins to watch; what is returned tells the most bytes that were allocated since, beside those of now. It is
        0 where there is no allocator but the books."""
        return lambda: 0

    def statistics(self) -> dict[str, float]:
        """Counters since the device was made: runs of units, bytes moved up and down, peak bytes by kind."""
        peaks = {} if self.aliases_host else {f"peak_{kind}_bytes": float(n) for kind, n in self.memory.peaks.items()}
        return {
            "unit_runs": self.num_unit_runs,
            "h2d_bytes": self.h2d.num_bytes,
            "d2h_bytes": self.d2h.num_bytes,
            **peaks,
        }


class Run(NamedTuple):
    """What was noted about one run of a unit, or of user code in the backward.

    Attributes:
        device: where it ran.
        kind: "F" or "B".
        name: of the unit; or what kind of user code.
        start, end: stamps of the device.
        stage: the stage it ran in; -1 for none.
        position: the call in the plan; None for calls off the plan and for user code.
        kept: whether the graph is kept between forward and backward; if not, a "B" run holds the forward as well.
        learned: whether the call was the first one of its kind.
        input_bytes, output_bytes: of the call's tensor arguments and results.
        graph_bytes: of the call's graph besides; 0 where it was not looked at.
    """

    device: Device
    kind: str
    name: str
    start: Any
    end: Any
    stage: int
    position: int | None = None
    kept: bool = False
    learned: bool = False
    input_bytes: int = 0
    output_bytes: int = 0
    graph_bytes: int = 0
