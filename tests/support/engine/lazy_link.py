"""A link on which a copy is made when a thread waits for it, by that thread: no threads of lanes, no chance.

So a missing wait shows in every run, whatever the timing: what it should have waited for is still poison.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from lightning_roundpipe.common.sizes import num_bytes_of
from lightning_roundpipe.devices.chunks import pairs_of, stored
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import Done, Edge, Lane, Moved, Transfer
from lightning_roundpipe.devices.virtual import TimedLink, TransferGivenUp, VirtualDevice


class LazyTransfer(Transfer):
    """Made by the first thread that waits for it; others that come meanwhile wait for that thread."""

    def __init__(self, lane: LazyLane, sources: Sequence[Tensor], after: Transfer | None, label: str) -> None:
        pairs = pairs_of(sources)
        super().__init__([copy for copy, _ in pairs], pairs)
        self._making = threading.Lock()
        self._lane = lane
        self._after = after
        self.label = label

    def await_done(self) -> None:
        if not self.is_done():
            self.make()
        super().await_done()

    def make(self) -> None:
        with self._making:
            if self.is_done():
                return
            start = perf_counter()
            self._lane.pending.pop(self, None)
            try:
                if self._after is not None:
                    self._after.wait(Edge.OFFLOADED)
            except BaseException as error:
                self.end(error)
            else:
                # Callbacks may wait for other transfers, but not for this one's lock: it has ended by then.
                super().make()
                if self._error is None and self._lane.moved is not None:
                    self._lane.moved.append(Moved(self._lane.direction, start, perf_counter(), self.label))
            self._after = None


class LazyLane(Lane):
    """Makes copies when a thread waits for them.

    Args:
        is_strict: whether what no thread has waited for is given up at the end of a step, as if the lane were that
            late; otherwise it is made then.
    """

    def __init__(self, direction: str, device_name: str, *, is_strict: bool) -> None:
        super().__init__(direction, device_name)
        self._is_strict = is_strict
        self.pending: dict[LazyTransfer, None] = {}

    def submit(
        self, sources: Sequence[Tensor], *, is_bulk: bool, after: Transfer | None = None, label: str = ""
    ) -> Transfer:
        if not sources:
            return Done([])
        transfer = LazyTransfer(self, sources, after, label)
        with self._mutex:
            self._count(num_bytes_of([stored(copy) for copy in transfer.tensors]), label)
            self.pending[transfer] = None
        return transfer

    def close(self) -> None:
        with self._mutex:
            self._is_open = False
        with contextlib.ExitStack() as stack:
            for transfer in reversed(list(self.pending)):
                if self._is_strict:
                    stack.callback(transfer.end, TransferGivenUp(f"nothing has waited for {transfer.label}"))
                else:
                    stack.callback(transfer.make)
            self.pending.clear()


class LazyLink(TimedLink):
    """See :class:`LazyLane`."""

    def __init__(self, *, is_strict: bool = False) -> None:
        super().__init__()
        self._is_strict = is_strict

    def lane(self, device_name: str, direction: str) -> LazyLane:
        return LazyLane(direction, device_name, is_strict=self._is_strict)


def cpu_pool(num_devices: int, *, copies: bool = False, memory_limit: int | None = None) -> DevicePool:
    """Virtual devices that share the host's memory, or with copies of their own, made when a thread waits for them."""
    link = LazyLink() if copies else None
    return DevicePool([torch.device("cpu")] * num_devices, link=link, memory_limit=memory_limit)


@contextlib.contextmanager
def opened(link: TimedLink, **arguments: int) -> Iterator[VirtualDevice]:
    """A device in a step."""
    device = VirtualDevice(0, link=link, **arguments)
    device.open()
    try:
        yield device
    finally:
        device.close()
