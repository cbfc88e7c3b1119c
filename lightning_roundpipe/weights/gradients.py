"""Gradients of master weights on their way home.

[Note: accumulation]
A gradient that comes from a device has to be waited for, and then to be read and added: work for the host's memory, and
none for a thread that feeds devices. So a thread of its own does it, source by source; *busy* is a source that it, or
who else adds, is at: ::

    micro-batch threads   add_later(part 2)     add_later(part 3) ........ waits until part 2 is in the sum
    accumulation thread     waits for part 2's download | sum += part 2 | waits for part 3's download | sum += part 3

The parts of a source are added in their order, whichever comes first, and so are the sources of a weight at the end:
sums are the same in every run. The host holds as many parts of a source as there are devices, which may end stage runs
of one stage at the same time, and one more, beside the sum: the thread that brings another one waits. What need not be
waited for is added at once, by the thread that brings it, unless another one is at its source. Nothing is waited for
with the lock held.

Who needs sums while parts still come ([Note: reduction] in :mod:`ranks.reduction`) is told what is *foreseen*: of which
weights how many parts come from which sources. The sum of those of a weight may be taken when all have come.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..common.threads import Worker
from ..devices.transfer import Done, Edge, Transfer
from .events import tell

# (order of the unit, position of the call), or less where that says enough.
Source = tuple[int, ...]
LOOSE: Source = ()  # uses of parameters in user code, by micro-batch
_UNFORESEEN: Source = (0, 0)
# Weight -> how many parts of it are going to come from which sources.
Foreseen = Mapping[nn.Parameter, Mapping[Source, int]]
# The masters, and what brings their gradients; None for none.
_Part = tuple[Sequence[nn.Parameter], Transfer | None]
# Elements per thread that are added at a time where dtypes differ: what torch makes of them lies in the cache.
_BLOCK = 2**18


@dataclass
class _Queue:
    """Parts of one source that are under way, by ordinal.

    Attributes:
        next: the first that is not in the sum.
        is_busy: whether a thread adds those that can be added, also what comes meanwhile.
    """

    next: int = 0
    waiting: dict[int, _Part] = field(default_factory=dict)
    is_busy: bool = False


class GradientStore:
    """Gradients of master weights that have come home, on the host, in the masters' dtype and shape.

    See [Note: accumulation]. May be used from any thread.

    Args:
        dtypes: gives masters whose gradient has to fit into another dtype: where it does not, it becomes infinite.
        adder: the accumulation thread, which was started; None lets those wait and add that bring gradients.
        num_devices: that bring gradients.
    """

    def __init__(
        self,
        dtypes: Callable[[], Mapping[nn.Parameter, torch.dtype]] = dict,
        adder: Worker | None = None,
        num_devices: int = 1,
    ) -> None:
        self._dtypes = dtypes
        self._adder = adder
        self._num_devices = num_devices
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._gradients: dict[nn.Parameter, dict[Source, Tensor]] = {}
        self._queues: dict[Source, _Queue] = {}
        self._error: BaseException | None = None
        self._foreseen: Foreseen = {}
        self._planned_dtypes: Mapping[nn.Parameter, torch.dtype] = {}
        self._is_settled = False

    @classmethod
    def of(cls, gradients: Mapping[nn.Parameter, Tensor]) -> GradientStore:
        """A store of gradients that have come already, of which none was foreseen."""
        store = cls()
        store.add(list(gradients), Done(list(gradients.values())), _UNFORESEEN)
        return store

    def add(self, masters: Sequence[nn.Parameter], arriving: Transfer, source: Source) -> None:
        """Waits for what ``arriving`` brings, one gradient per master, and adds it to what is there; takes ownership.

        Args:
            source: where it comes from. Parts of a shared weight are added up per source, and the sums in the order
                of the sources.
        """
        gradients = arriving.wait(Edge.GRADIENTS)
        with self._lock:
            rows = [self._gradients.setdefault(master, {}) for master in masters]
        for master, parts, gradient in zip(masters, rows, gradients, strict=True):
            known = parts.get(source)
            if known is None and source == LOOSE:
                gradient = gradient.clone()  # autograd may hold the same tensor elsewhere
            parts[source] = sum_up(known, gradient, master.dtype)
        tell("take", masters, transfer=arriving)

    def add_later(
        self, masters: Sequence[nn.Parameter], arriving: Transfer | None, source: Source, ordinal: int
    ) -> None:
        """Adds what ``arriving`` brings, one gradient per master, when it is there; None brings nothing.

        Args:
            source: see :meth:`add`.
            ordinal: 0, 1, ... of the parts of this source, which are added in this order. Where more parts wait than
                there are devices, this waits until those before it are in the sum, as far as they have come.
        """
        with self._lock:
            queue = self._queues.setdefault(source, _Queue())
            queue.waiting[ordinal] = (masters, arriving)
            part = None if queue.is_busy else queue.waiting.get(queue.next)
            queue.is_busy = queue.is_busy or part is not None
        self._add_up(source, queue, part, may_wait=self._adder is None)
        if queue.is_busy and queue.next < ordinal and len(queue.waiting) > self._num_devices:
            with self._changed:
                self._changed.wait_for(
                    lambda: not queue.is_busy or queue.next >= ordinal or len(queue.waiting) <= self._num_devices
                )

    def _add_up(self, source: Source, queue: _Queue, part: _Part | None, *, may_wait: bool) -> None:
        """Adds ``part``, whose turn it is, and those that follow.

        Args:
            may_wait: False leaves the first one that has to be waited for, and those behind it, to the accumulation
                thread.
        """
        while part is not None:
            if not (may_wait or isinstance(part[1], Done | None)):
                assert self._adder is not None
                self._adder.begin(
                    functools.partial(self._add_up, source, queue, part, may_wait=True), "roundpipe-accumulation"
                )
                return
            try:
                if self._error is None and part[1] is not None:
                    self.add(part[0], part[1], source)
            except BaseException as error:  # must reach the thread that runs the step
                self._error = error
            with self._lock:
                queue.waiting.pop(queue.next, None)
                queue.next += 1
                part = queue.waiting.get(queue.next)
                queue.is_busy = part is not None
                self._changed.notify_all()

    def close(self) -> None:
        """The step has ended, well or not, and so have its transfers: what is not in a sum is lost.

        Blocks until no thread adds anything.
        """
        with self._changed:
            for queue in self._queues.values():
                queue.waiting.clear()
            self._await_quiet()
            self._queues = {}
            self._be_settled()

    def _await_quiet(self) -> None:
        self._changed.wait_for(lambda: not any(queue.is_busy for queue in self._queues.values()))

    def _be_settled(self) -> None:
        self._is_settled = True
        self._changed.notify_all()

    def settle(self) -> None:
        """Blocks until all that is under way has come. No other thread adds any.

        Raises:
            BaseException: what went wrong in a transfer, or while its gradients were added.
        """
        with self._changed:
            self._await_quiet()
        for source, queue in self._queues.items():
            for _, (masters, arriving) in sorted(queue.waiting.items()) if self._error is None else ():
                if arriving is not None:
                    self.add(masters, arriving, source)
        with self._changed:
            self._queues = {}
            self._be_settled()
        error, self._error = self._error, None
        if error is not None:
            self._gradients = {}
            raise error

    def take(self) -> dict[nn.Parameter, Tensor]:
        """All gradients, after :meth:`settle`; the store is empty afterwards."""
        self.settle()
        self._is_settled, self._foreseen = False, {}
        stored, self._gradients = self._gradients, {}
        dtypes = self._dtypes()
        return {master: _total(master, parts, dtypes.get(master)) for master, parts in stored.items() if parts}

    # --- before all have come ------------------------------------------------------------------------------------

    def foresee(self, foreseen: Foreseen) -> None:
        """What is going to come; what has come until now, without a plan, was foreseen as well."""
        self._foreseen, self._planned_dtypes = foreseen, self._dtypes()

    def await_planned(self, masters: Iterable[nn.Parameter]) -> None:
        """Blocks until all that is foreseen for ``masters`` is in the sums, or nothing comes any more."""
        missing = {source: n for master in masters for source, n in self._foreseen.get(master, {}).items()}

        def has_come(source: Source) -> bool:
            queue = self._queues.get(source)
            return queue is not None and queue.next >= missing[source]

        def have_come() -> bool:
            while missing and has_come(source := next(iter(missing))):
                del missing[source]
            return self._is_settled or not missing

        with self._changed:
            self._changed.wait_for(have_come)

    def take_planned(self, master: nn.Parameter) -> Tensor | None:
        """The sum of what was foreseen and has come, None for nothing; it is not in the store any more."""
        with self._lock:
            stored = self._gradients.get(master, {})
            parts = {source: stored.pop(source) for source in list(stored) if self._is_planned(master, source)}
        return _total(master, parts, self._planned_dtypes.get(master)) if parts else None

    def unplanned(self) -> set[nn.Parameter]:
        """Weights that something has come for which was not foreseen; after :meth:`settle`."""
        return {
            master
            for master, parts in self._gradients.items()
            if any(not self._is_planned(master, source) for source in parts)
        }

    def _is_planned(self, master: nn.Parameter, source: Source) -> bool:
        return len(source) == 1 or source in self._foreseen.get(master, ())


def _total(master: nn.Parameter, parts: Mapping[Source, Tensor], dtype: torch.dtype | None) -> Tensor:
    """The sum of ``parts``, in the order of their sources; infinite where it does not fit into ``dtype``."""
    total: Tensor | None = None
    for source in sorted(parts):
        total = sum_up(total, parts[source], master.dtype)
    assert total is not None
    if dtype is not None:
        is_of_one_unit = len({source[:1] for source in parts}) == 1 and LOOSE not in parts
        if is_of_one_unit and _overflows(total, dtype):
            total = total.to(dtype).to(total.dtype)
    return total


def _overflows(gradient: Tensor, dtype: torch.dtype) -> bool:
    if gradient.is_sparse or not gradient.numel():
        return False
    bounds = torch.stack(torch.aminmax(gradient))
    return bool((bounds.isfinite() & bounds.to(dtype).isinf()).any())


def added(known: Tensor, part: Tensor) -> Tensor:
    """The sum of two gradients, in a new tensor. Torch adds a sparse one to a dense one, and not the other way."""
    return part + known if known.is_sparse else known + part


def sum_up(known: Tensor | None, part: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of both in ``dtype``, which ``known`` has, in its memory; ``part`` alone if there is no other.

    Reads and writes the memory of each once. Torch would make a copy of all of ``part`` in the other dtype first, on
    the host.
    """
    if known is None:
        return part if part.dtype == dtype else part.to(dtype)
    if known.is_sparse or part.is_sparse:
        return added(known, part)
    if known.dtype == part.dtype or known.device.type != "cpu":
        return known.add_(part)
    if known.is_contiguous() and part.is_contiguous():
        known_rows, rows = known.view(-1), part.view(-1)
    else:
        known_rows, rows = known, part
    size = max(1, _BLOCK * torch.get_num_threads() * len(rows) // max(rows.numel(), 1))
    for total, block in zip(torch.split(known_rows, size), torch.split(rows, size), strict=True):
        total.add_(block)
    return known
