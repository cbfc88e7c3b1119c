"""Ranks without processes: threads that meet as ranks do, and a rank whose others do what it does.

A :class:`ThreadRank` knows the ranks beside it by a hub. Tests can hold a message back (:attr:`Hub.before`), and see in
which order messages went (:attr:`ThreadRank.sent`). An :class:`EchoRank` believes that all others have the same batch:
a whole Trainer runs with it, on one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_roundpipe.ranks.failures import RankError
from lightning_roundpipe.ranks.group import RankGroup

T = TypeVar("T")
TIMEOUT_S = 120.0


class Hub:
    """Where threads meet.

    Attributes:
        before: called by each rank before a message: (rank, what it is for).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.before: Callable[[int, str], None] = lambda rank, what: None
        self._slots: dict[str, list[Any]] = {}
        self._barriers = {name: threading.Barrier(size) for name in ("control", "gradients", "updates")}

    def meet(self, name: str, rank: int, what: str, value: Any) -> list[Any]:
        """What all ranks have brought, by rank."""
        self.before(rank, what)
        barrier = self._barriers[name]
        self._slots.setdefault(name, [None] * self.size)[rank] = what, value
        try:
            barrier.wait(TIMEOUT_S)
            found = list(self._slots[name])
            barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise RankError(f"a rank has failed, or has not come for {what}") from error
        if len({what for what, _ in found}) > 1:
            raise RankError(f"ranks have gone different ways: {[what for what, _ in found]}")
        return [value for _, value in found]

    def abort(self) -> None:
        """A rank has failed."""
        for barrier in self._barriers.values():
            barrier.abort()


class ThreadRank(RankGroup):
    """A rank that is a thread.

    Attributes:
        sent: (what for, number of elements, name of the thread) of all that was added up.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self.rank, self.size = rank, hub.size
        self.sent: list[tuple[str, int, str]] = []

    @override
    def exchange(self, values: Sequence[float], what: str) -> list[list[float]]:
        return self._hub.meet("control", self.rank, what, list(values))

    @override
    def gather(self, value: Any, what: str) -> list[Any]:
        return self._hub.meet("control", self.rank, what, value)

    @override
    def add_up(self, tensor: Tensor, what: str, wire: torch.dtype | None = None) -> None:
        assert tensor.is_contiguous()
        self.sent.append((what, tensor.numel(), threading.current_thread().name))
        first, *others = self._hub.meet("gradients", self.rank, what, tensor.clone())
        tensor.copy_(first)
        for other in others:
            assert other.shape == tensor.shape
            assert other.dtype == tensor.dtype
            tensor.add_(other)

    @override
    def add_up_parts(self, tensor: Tensor, sizes: Sequence[int], what: str, wire: torch.dtype | None = None) -> Tensor:
        total = tensor.clone()
        self.add_up(total, what, wire)
        return torch.split(total, list(sizes))[self.rank].clone()

    @override
    def share(self, mine: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        assert mine.dim() == 1
        given = self._hub.meet("updates", self.rank, what, (list(sizes), mine.clone()))
        assert all(told == list(sizes) for told, _ in given)
        assert [len(values) for _, values in given] == list(sizes)
        return [values for _, values in given]

    @override
    def copy_from(self, tensors: Iterable[Tensor], what: str, source: int = 0) -> None:
        for tensor in tensors:
            tensor.copy_(self._hub.meet("control", self.rank, what, tensor.clone())[source])


def run_ranks(size: int, work: Callable[[ThreadRank], T], hub: Hub | None = None) -> list[T]:
    """What ``work`` gives on each rank; the first error that is no consequence of another one is raised."""
    hub = hub or Hub(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(hub, rank))
        except BaseException as error:  # must reach the test
            errors.append(error)
            hub.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise next((error for error in errors if "a rank has failed" not in str(error)), errors[0])
    return results


class EchoRank(RankGroup):
    """Rank 0 of several that have the same batch, and so the same gradients.

    Attributes:
        sent: see :class:`ThreadRank`.
    """

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.sent: list[tuple[str, int, str]] = []

    @override
    def exchange(self, values: Sequence[float], what: str) -> list[list[float]]:
        return [list(map(float, values)) for _ in range(self.size)]

    @override
    def gather(self, value: Any, what: str) -> list[Any]:
        return [value] * self.size

    @override
    def add_up(self, tensor: Tensor, what: str, wire: torch.dtype | None = None) -> None:
        self.sent.append((what, tensor.numel(), threading.current_thread().name))
        tensor.mul_(self.size)
