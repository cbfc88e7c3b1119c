"""Gradients of master weights on their way home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..devices.transfer import Edge, Transfer
from .events import tell

# (order of the unit, position of the call), or less where that says enough.
Source = tuple[int, ...]
_LOOSE: Source = ()


@dataclass
class _Queue:
    """Parts of one source that are under way, by ordinal; those below ``next`` have been added.

    Attributes:
        lock: held while a part is waited for, so that a thread with a later part waits as well; other sources go on.
    """

    next: int = 0
    waiting: dict[int, tuple[Sequence[nn.Parameter], Transfer | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class GradientStore:
    """Gradients of master weights that have come home, on the host, in the masters' dtype and shape.

    What is added up in which order does not depend on what comes first, so that sums are the same in every run.

    Args:
        dtypes: gives masters whose gradient has to fit into another dtype: where it does not, it becomes infinite.
    """

    def __init__(self, dtypes: Callable[[], Mapping[nn.Parameter, torch.dtype]] = dict) -> None:
        self._dtypes = dtypes
        self._lock = threading.Lock()
        self._gradients: dict[nn.Parameter, dict[Source, Tensor]] = {}
        self._queues: dict[Source, _Queue] = {}

    def add(self, master: nn.Parameter, gradient: Tensor, source: Source) -> None:
        """Adds ``gradient`` to what is there; takes ownership of it.

        Args:
            source: where it comes from. Parts of a shared weight are added up per source, and the sums in the order
                of the sources.
        """
        self._add(master, gradient, source)

    def add_loose(self, masters: Sequence[nn.Parameter], arriving: Transfer, ordinal: int) -> None:
        """Adds the gradients of loose parameters that micro-batch ``ordinal`` brings, in the order of the
        micro-batches; does not change the tensors given."""
        self.add_later(masters, arriving, _LOOSE, ordinal)

    def add_later(
        self, masters: Sequence[nn.Parameter], arriving: Transfer | None, source: Source, ordinal: int
    ) -> None:
        """Adds what ``arriving`` brings, one gradient per master, when it is there; None brings nothing.

        Args:
            source: see :meth:`add`.
            ordinal: 0, 1, ... of the parts of this source, which are added in this order. As soon as a later part is
                on its way, those before it are waited for, so that the host holds two of a source at most.
        """
        with self._lock:
            queue = self._queues.setdefault(source, _Queue())
        with queue.lock:
            queue.waiting[ordinal] = (masters, arriving)
            while queue.next in queue.waiting and queue.next < max(queue.waiting):
                self._take_in(source, queue.waiting.pop(queue.next))
                queue.next += 1

    def _take_in(self, source: Source, part: tuple[Sequence[nn.Parameter], Transfer | None]) -> None:
        masters, arriving = part
        if arriving is not None:
            for master, gradient in zip(masters, arriving.wait(Edge.GRADIENTS), strict=True):
                self._add(master, gradient, source)
            tell("take", masters, transfer=arriving)

    def _add(self, master: nn.Parameter, gradient: Tensor, source: Source) -> None:
        with self._lock:
            parts = self._gradients.setdefault(master, {})
        if source == _LOOSE and source not in parts:
            gradient = gradient.clone()  # autograd may hold the same tensor elsewhere
        parts[source] = _sum(parts.get(source), gradient)

    def take(self) -> dict[nn.Parameter, Tensor]:
        """All gradients, after a wait for those under way; the store is empty afterwards. No other thread adds any."""
        for source, queue in self._queues.items():
            for ordinal in sorted(queue.waiting):
                self._take_in(source, queue.waiting[ordinal])
        self._queues = {}
        stored, self._gradients = self._gradients, {}
        gradients = {}
        dtypes = self._dtypes()
        for master, parts in stored.items():
            total: Tensor | None = None
            for source in sorted(parts):
                total = _sum(total, parts[source])
            assert total is not None
            dtype = dtypes.get(master)
            is_of_one_unit = len({source[:1] for source in parts}) == 1 and _LOOSE not in parts
            if dtype is not None and is_of_one_unit and _overflows(total, dtype):
                total = total.to(dtype).to(total.dtype)
            gradients[master] = total
        return gradients


def _overflows(gradient: Tensor, dtype: torch.dtype) -> bool:
    if gradient.is_sparse or not gradient.numel():
        return False
    bounds = torch.stack(torch.aminmax(gradient))
    return bool((bounds.isfinite() & bounds.to(dtype).isinf()).any())


def _sum(known: Tensor | None, gradient: Tensor) -> Tensor:
    if known is None:
        return gradient
    if known.is_sparse or gradient.is_sparse:
        return known + gradient
    return known.add_(gradient)
