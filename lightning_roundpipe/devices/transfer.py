"""Tensors on their way between the host and a device.

[Note: transfers]
Each device has two lanes, one per direction, and two kinds of traffic share a lane. *Activations* (inputs of units,
gradients of their outputs) are what the next unit waits for. *Bulk* (weights of a stage, its gradients) is much more,
and has a whole stage to travel. A long copy in front of an activation would stall the pipeline. So activations go
first, and bulk is cut into chunks of which at most two are under way at a time:

    submitted:   W (bulk, 5 chunks)      x (activation)
    h2d lane:    | W1 | W2 | x | W3 | W4 | W5 |          x waits for two chunks at most
    compute:     ... wait(W) for the stage after this one, wait(x) for the next unit

(Paper, section on the transfer engine, with another remedy.)

[Note: edges]
A reader of a copy must wait for it; memory may be freed only after its last reader. Each such ordering is an
:class:`Edge`. On virtual devices a destination is poisoned until its copy is made, and memory is poisoned again when
it is freed, so that a missing edge gives NaN in place of numbers that are nearly always right.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.sizes import num_bytes_of
from .chunks import Pair, copy_all

# An activation waits for two of these at most: 2.5 ms at 25 GB/s.
CHUNK_BYTES = 32 * 2**20


class Edge(enum.Enum):
    """The orderings between transfers and their readers; see [Note: edges]."""

    WEIGHTS = "weights"  # a unit runs after the upload of its weights
    BUFFERS = "buffers"  # ... of its buffers; and the host reads them after their download
    INPUTS = "inputs"  # a unit runs forward after the upload of its arguments
    RELOADED = "saved inputs"  # a unit is run again after the upload of the arguments that were saved
    OUTPUT_GRADIENTS = "output gradients"  # a unit's backward runs after the upload of its outputs' gradients
    OFFLOADED = "the copy on the host"  # an upload reads on the host what a download has brought there
    GRADIENTS = "gradients"  # the host adds gradients after their download
    FREED = "the copy that reads it"  # memory is freed after the download that reads it


class Moved(NamedTuple):
    """A transfer that was noted: its lane ("h2d" or "d2h"), stamps at its begin and end, and what moved."""

    lane: str
    start: Any
    end: Any
    label: str


class Transfer:
    """Copies under way, until :meth:`end`: the copies were made then, or it has failed. May be used from any thread.

    Attributes:
        tensors: the copies, in the order submitted; not to be read before :meth:`wait`.
        pairs: destinations and sources, held until the end.
        is_page_locked: whether the copies lie in page-locked memory of the host.
    """

    is_page_locked = False

    def __init__(self, tensors: list[Tensor], pairs: Sequence[Pair] = ()) -> None:
        self.tensors = tensors
        self.pairs = pairs
        self._lock = threading.Lock()
        self._may_go_on = False  # whether threads that wait may do so, at the end at the latest
        self._waiting: threading.Event | None = None  # made by the first of them: most transfers need none
        self._has_ended = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def is_done(self) -> bool:
        """Whether it has ended; does not wait."""
        return self._has_ended

    def await_done(self) -> None:
        """Blocks the calling thread until the end.

        Raises:
            BaseException: what went wrong in the lane.
        """
        self._await_go_on()
        self._raise()

    def _await_go_on(self) -> None:
        if self._may_go_on:
            return
        with self._lock:
            if self._may_go_on:
                return
            if self._waiting is None:
                self._waiting = threading.Event()
            waiting = self._waiting
        waiting.wait()

    def _let_go_on(self) -> None:
        """``_lock`` is held."""
        self._may_go_on = True
        if self._waiting is not None:
            self._waiting.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _await_by_reader(self) -> None:
        """Makes the reader of the copies wait: the compute lane after an upload, the host after a download."""
        self.await_done()

    def wait(self, edge: Edge) -> list[Tensor]:
        """The copies, after a wait for them by their reader: the compute lane of the device after an upload, the
        calling thread after a download.

        Args:
            edge: which wait this is.
        """
        self._await_by_reader()
        return self.tensors

    def when_done(self, edge: Edge, then: Callable[[], None]) -> None:
        """Calls ``then`` once, at the end, however it ends: on this thread if it has ended, else on the one that ends
        it.

        Args:
            edge: which wait this is.
        """
        with self._lock:
            if not self._has_ended:
                self._callbacks.append(then)
                return
        then()

    def end(self, error: BaseException | None = None) -> None:
        """Ends it; only the first call has an effect. Sources are let go, and all callbacks are called, also with an
        ``error``, because they free memory."""
        with self._lock:
            if self._has_ended:
                return
            self._error = error
            self._has_ended = True
            self.pairs = ()
            callbacks, self._callbacks = self._callbacks, []
            self._let_go_on()
        if not callbacks:
            return
        with contextlib.ExitStack() as stack:  # calls all of them, even if one raises
            for then in reversed(callbacks):
                stack.callback(then)

    def make(self) -> None:
        """Makes the copies on this thread, and ends."""
        try:
            copy_all(self.pairs)
        except BaseException as error:  # raised to those who wait
            self.end(error)
        else:
            self.end()


class Done(Transfer):
    """Copies that were made at once."""

    def __init__(self, tensors: list[Tensor], *, is_page_locked: bool = False) -> None:
        self.tensors = tensors
        self.pairs = ()
        self.is_page_locked = is_page_locked
        self._has_ended = True

    def await_done(self) -> None:
        pass

    def when_done(self, edge: Edge, then: Callable[[], None]) -> None:
        then()


class Joined(Transfer):
    """Copies of several transfers as one, which ends with the last of them."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        super().__init__([tensor for part in parts for tensor in part.tensors])
        self._parts = parts

    def is_done(self) -> bool:
        return all([part.is_done() for part in self._parts])

    def await_done(self) -> None:
        for part in self._parts:
            part.await_done()

    def when_done(self, edge: Edge, then: Callable[[], None]) -> None:
        following = then
        for part in self._parts:  # each when it is done, the next one after it
            following = functools.partial(part.when_done, edge, following)
        following()

    def wait(self, edge: Edge) -> list[Tensor]:
        return self.arrived(edge)

    def arrived(self, edge: Edge) -> list[Tensor]:
        """The copies, after a wait for each of the transfers."""
        for part in self._parts:
            part.wait(edge)
        return self.tensors


class Lane(ABC):
    """Copies in one direction between the host and one device; see [Note: transfers].

    Args:
        direction: "h2d" or "d2h".
        device_name: for messages and threads.

    Attributes:
        num_bytes: submitted so far.
        moved: where transfers are noted; None if they are not.
    """

    def __init__(self, direction: str, device_name: str) -> None:
        self.direction = direction
        self.name = f"{direction} of {device_name}"
        self.num_bytes = 0
        self.moved: list[Moved] | None = None
        self._mutex = threading.Lock()
        self._is_open = False

    @abstractmethod
    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        """Starts to copy ``sources``; always makes copies (detached), never aliases.

        The sources are kept alive, and must not change, until the copies have been made.

        Args:
            is_bulk: whether it may wait for activations, and goes in chunks.
            after: the sources are the copies of this transfer: they are read when it is done (``Edge.OFFLOADED``).
            label: for the trace.
        """

    def _count(self, num_bytes: int, label: str) -> None:
        """Enters a transfer that is submitted; ``_mutex`` is held.

        Raises:
            RuntimeError: if no step is open.
        """
        if not self._is_open:
            raise RuntimeError(f"no step is open: {self.name} cannot copy {label or 'anything'}")
        self.num_bytes += num_bytes

    def open(self) -> None:
        """A step begins."""
        with self._mutex:
            self._is_open = True

    @abstractmethod
    def close(self) -> None:
        """A step has ended: what is under way is finished or given up, threads are joined."""


class DirectLane(Lane):
    """Copies inside :meth:`submit`, by the caller: for devices that share the host's memory."""

    def __init__(self, destination: torch.device) -> None:
        super().__init__("copies", str(destination))
        self._destination = destination

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        if after is not None:
            after.wait(Edge.OFFLOADED)
        self.num_bytes += num_bytes_of(sources)
        return Done([t.detach().to(self._destination, copy=True) for t in sources])

    def close(self) -> None:
        pass
