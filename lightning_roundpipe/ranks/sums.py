"""Sums over ranks, on memory of the host or *staged*: by way of a device.

::

    on the host    gradients <------------------------- gloo -------------------------> other ranks
    staged         gradients --copy--> device <--- NCCL, or what it has ---> other ranks
                             <--copy--

Where the devices of different ranks reach each other faster than their hosts do, the way by a device is worth two
copies of each bucket. It needs memory for four buckets there. One device per rank takes part, and gradients alone go
that way: two libraries of collectives at work on one device at a time may wait for each other for ever.

A wait for a collective on a device is a look at an event, again and again: NCCL's own wait gives its connections up
when it has a time limit, and cannot be interrupted when it has none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Between looks at a collective on a device: at first, and at most.
_FIRST_LOOK_S, _LAST_LOOK_S = 5e-5, 2e-3
# Of NCCL: at a failure its own thread would end the process. Here ranks tell each other (:mod:`failures`).
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# Lets a collective begin, and waits for its end.
Wait = Callable[[Callable[[], Any]], None]


class Sums:
    """Adds tensors up over ranks; one thread at a time.

    Args:
        timeout: of the group.
        backend: of ``torch.distributed``.
        device: by way of which sums are made; None for the host.
    """

    def __init__(self, timeout: timedelta, backend: str = "gloo", device: torch.device | None = None) -> None:
        if device is not None:
            os.environ.setdefault(_ASYNC_ERRORS, "0")
        self._group: Any = dist.new_group(backend=backend, timeout=timeout)
        self._device = device
        self._stream = None if device is None else torch.get_device_module(device).Stream(device)
        self._size = dist.get_world_size()
        self._rank = dist.get_rank()

    def add_up(self, tensor: Tensor, wire: torch.dtype | None, wait: Wait) -> None:
        """See :meth:`RankGroup.add_up`."""
        with self._at_device():
            there = tensor if self._device is None else tensor.to(self._device)
            if wire is None:
                self._wait(wait, lambda: dist.all_reduce(there, group=self._group, async_op=True))
            else:
                self._add_up_low(there, wire, wait)
            if there is not tensor:
                tensor.copy_(there)

    def _add_up_low(self, tensor: Tensor, wire: torch.dtype, wait: Wait) -> None:
        """Each rank adds up one piece, of equal size, which all send to it, and sends the sum to all."""
        size = -(-len(tensor) // self._size)
        whole = torch.zeros(self._size * size, dtype=wire, device=tensor.device)
        whole[: len(tensor)] = tensor
        parts = torch.empty_like(whole)
        self._wait(wait, lambda: dist.all_to_all_single(parts, whole, group=self._group, async_op=True))
        mine = _sum_of(parts, self._size, torch.float32).to(wire)
        self._wait(wait, lambda: dist.all_gather_into_tensor(whole, mine, group=self._group, async_op=True))
        tensor.copy_(whole[: len(tensor)])

    def add_up_parts(self, tensor: Tensor, sizes: Sequence[int], wire: torch.dtype | None, wait: Wait) -> Tensor:
        """See :meth:`RankGroup.add_up_parts`."""
        with self._at_device():
            sent = tensor.to(device=self._device, dtype=wire)
            size = sizes[self._rank]
            parts = sent.new_empty(self._size * size)
            sizes_here = [size] * self._size
            self._wait(
                wait,
                lambda: dist.all_to_all_single(parts, sent, sizes_here, list(sizes), group=self._group, async_op=True),
            )
            return _sum_of(parts, self._size, tensor.dtype if wire is None else torch.float32).cpu()

    def _wait(self, wait: Wait, begin: Callable[[], Any]) -> None:
        wait(begin if self._device is None else lambda: _Polled(begin()))

    def _at_device(self) -> contextlib.AbstractContextManager[Any]:
        """Around what works there: on a stream of its own, beside that of the backward."""
        if self._stream is None:
            return contextlib.nullcontext()
        at_device: contextlib.AbstractContextManager[Any] = torch.get_device_module(self._device).stream(self._stream)
        return at_device

    def close(self, *, is_failed: bool) -> None:
        """Ends the group; after a failure without a word to ranks that may not answer."""
        if is_failed and self._device is not None and hasattr(self._group, "abort"):
            self._group.abort()
        dist.destroy_process_group(self._group)
        self._group = None  # connections close with the last reference


class _Polled:
    """A collective on a device, which is waited for like one of gloo."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta = timedelta.max) -> None:
        """Returns when it has ended well.

        Raises:
            RuntimeError: if it has ended otherwise, or not in time.
        """
        start, pause_s = time.monotonic(), _FIRST_LOOK_S
        while not self._work.is_completed():
            if time.monotonic() - start > timeout.total_seconds():
                raise RuntimeError("timed out")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        self._work.wait()  # what has gone wrong; and the stream of this thread comes after it


def _sum_of(parts: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    """Of so many parts of equal size, in their order."""
    first, *others = torch.split(parts, len(parts) // number) if len(parts) else (parts,)
    total: Tensor = first.to(dtype, copy=True)
    for other in others:
        total += other
    return total
