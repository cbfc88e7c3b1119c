"""Buffers that units write on devices with memory of their own, until they are home.

[Note: buffers come home]
Running statistics are written by one micro-batch after the other. The host needs them when the step has ended, so
nobody waits for them before: what a forward has written begins to travel home, and the next micro-batch takes it from
where it is newest::

    device 0   unit, micro-batch 0 -> value -> copy -> unit, micro-batch 1 -> value
                                        | d2h                                   | d2h
    host                             (not the newest any more)           on its way ---> the master, at the end
                                                                             | h2d
    device 1                                                              unit, micro-batch 2

The order is that of the micro-batches, in which the engine lets them call such a unit. The copy on the same device is
made because the lane may still be reading the value.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from ..devices.devices import Device
from ..devices.transfer import Edge, Transfer


class _Newest(NamedTuple):
    """What a master buffer is going to be: on a device, and on its way home."""

    home: Tensor
    device: Device
    value: Tensor
    transfer: Transfer


class ComingBuffers:
    """See [Note: buffers come home]. May be used from any thread; for one buffer in the order of the micro-batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[int, _Newest] = {}

    def send(self, home: Tensor, value: Tensor, device: Device, what: str) -> None:
        """``value`` on ``device`` is what the buffer ``home`` is going to be; it does not change any more."""
        newest = _Newest(home, device, value, device.download([value], what))
        with self._lock:
            self._newest[id(home)] = newest

    def copy(self, home: Tensor, device: Device, what: str) -> Tensor | None:
        """The newest value of a buffer, for a unit that is going to run on ``device``; None if that is ``home``."""
        newest = self._newest.get(id(home))
        if newest is None:
            return None
        if newest.device is device:
            return device.snapshot(newest.value)
        upload = device.upload(newest.transfer.tensors, what, after=newest.transfer)
        return upload.wait(Edge.BUFFERS)[0]

    def arrive(self) -> None:
        """No unit runs: what is under way is waited for, and written."""
        newest, self._newest = self._newest, {}
        with torch.no_grad():
            for home, _, _, transfer in newest.values():
                home.copy_(transfer.wait(Edge.BUFFERS)[0])

    def drop(self) -> None:
        """The step has failed: masters stay as they are."""
        self._newest.clear()
