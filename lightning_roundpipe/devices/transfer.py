"""Tensors on their way between the host and a device.

[Note: transfers]
Each device has two lanes, to it (h2d) and from it (d2h), and two kinds of traffic share a lane. *Activations*
(inputs of units, gradients of their outputs) are what the next unit waits for. *Bulk* (weights of a stage, its
gradients) is much more, and has a whole stage to travel. A long copy in front of an activation would stall the
pipeline, so activations go first, and bulk is cut into chunks of which at most two are under way at a time: an
activation never waits for more than those. (Paper, section on the transfer engine, with another remedy.)

[Note: edges]
Who reads a copy must wait for it, who frees memory must wait for its last reader. Each such ordering is an
:class:`Edge`. On virtual devices a destination is poisoned until its copy is made, and memory is poisoned again when
it is freed, so that a missing edge gives NaN in place of numbers that are nearly always right.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..common.sizes import num_bytes_of

# An activation waits for two of these at most: 2.5 ms at 25 GB/s.
CHUNK_BYTES = 32 * 2**20


class Edge(enum.Enum):
    """What waits for a transfer; the value says for what, in traces. See [Note: edges]."""

    WEIGHTS = "weights"  # a unit runs after the upload of its weights
    BUFFERS = "buffers"  # ... of its buffers; and the host reads them after their download
    INPUTS = "inputs"  # a unit runs forward after the upload of its arguments
    RELOADED = "saved inputs"  # a unit is run again after the upload of the arguments that were saved
    OUTPUT_GRADIENTS = "output gradients"  # a unit's backward runs after the upload of its outputs' gradients
    OFFLOADED = "the copy on the host"  # an upload reads on the host what a download has brought there
    GRADIENTS = "gradients"  # the host adds gradients after their download
    FREED = "the copy that reads it"  # memory is freed after the download that reads it


class Transfer(ABC):
    """Copies under way.

    Attributes:
        tensors: the copies, in the order submitted; not to be read before :meth:`wait`.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    @abstractmethod
    def is_done(self) -> bool:
        """Whether all copies have been made; does not wait."""

    @abstractmethod
    def await_done(self) -> None:
        """Blocks the calling thread until all copies have been made.

        Raises:
            BaseException: what went wrong in the lane.
        """

    @abstractmethod
    def _await_by_reader(self) -> None:
        """Makes whoever reads the copies wait: the compute lane after an upload, the host after a download."""

    def wait(self, edge: Edge) -> list[Tensor]:
        """The copies, after a wait for them by their reader: the compute lane of the device after an upload, the
        calling thread after a download.

        Args:
            edge: which wait this is.
        """
        self._await_by_reader()
        return self.tensors

    def when_done(self, edge: Edge, then: Callable[[], None]) -> None:
        """Calls ``then`` once, when all copies have been made: on this thread if they have, else on that of the lane.

        Args:
            edge: which wait this is.
        """
        self._then(then)

    @abstractmethod
    def _then(self, then: Callable[[], None]) -> None:
        """See :meth:`when_done`."""


class Done(Transfer):
    """Copies that were made at once."""

    def is_done(self) -> bool:
        return True

    def await_done(self) -> None:
        pass

    def _await_by_reader(self) -> None:
        pass

    def _then(self, then: Callable[[], None]) -> None:
        then()


class Lane(ABC):
    """Copies in one direction between the host and one device; see [Note: transfers].

    Attributes:
        num_bytes: submitted so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

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

    def open(self) -> None:  # noqa: B027
        """A step begins."""

    def close(self) -> None:  # noqa: B027
        """A step has ended: what is under way is finished or given up, threads are joined."""


class DirectLane(Lane):
    """Copies inside :meth:`submit`, by the caller: for devices that share the host's memory."""

    def __init__(self, destination: torch.device) -> None:
        super().__init__()
        self._destination = destination

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        if after is not None:
            after.wait(Edge.OFFLOADED)
        self.num_bytes += num_bytes_of(sources)
        return Done([t.detach().to(self._destination, copy=True) for t in sources])


def poison(tensor: Tensor) -> None:
    """Fills memory that must not be read with NaN, or the lowest value of an integer type."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
