"""Buffers that units write on devices with memory of their own, until they are home.

[Note: buffers come home]
Running statistics are written by one micro-batch after the other. The host needs them when the step has ended, so
nothing waits for them before: what a forward has written begins to travel home, and the next micro-batch takes it from
where it is newest::

    device 0   unit, micro-batch 0 -> value -> copy -> unit, micro-batch 1 -> value
                                        | d2h                                   | d2h
    host                             (not the newest any more)           on its way ---> the master, at the end
                                                                             | h2d
    device 1                                                              unit, micro-batch 2

The order is that of the micro-batches, in which the engine lets them call such a unit. The copy on the same device is
made because the lane may still be reading the value.

On a device that has the host's memory units write the masters themselves. Batch norm does so without raising the
version, by which others tell what has changed; that is made up for when the step has ended, and no graph needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..devices.device import Device
from ..devices.transfer import Edge, Transfer


def brought(tensors: Sequence[Tensor], device: Device, what: str) -> list[Tensor]:
    """``tensors`` of the host on ``device``, for a unit that runs there next."""
    return device.upload(tensors, what, must=True).wait(Edge.BUFFERS)


class _Newest(NamedTuple):
    """What the buffer ``home`` of a master is going to be: on a device, and on its way there."""

    home: Tensor
    master: nn.Module
    name: str
    device: Device
    value: Tensor
    transfer: Transfer


class ComingBuffers:
    """See [Note: buffers come home]. May be used from any thread; for one buffer in the order of the micro-batches."""

    def __init__(self) -> None:
        self._newest: dict[int, _Newest] = {}  # by the id of the home
        self._written: dict[int, Tensor] = {}  # masters that units have written themselves

    def send(self, master: nn.Module, name: str, value: Tensor, device: Device, what: str) -> None:
        """``value`` on ``device`` is what a buffer of ``master`` is going to be; it does not change any more."""
        home, transfer = master._buffers[name], device.download([value], what)
        assert home is not None
        self._newest[id(home)] = _Newest(home, master, name, device, value, transfer)

    def note_written(self, home: Tensor) -> None:
        """A unit has written a buffer of a master itself."""
        self._written[id(home)] = home

    def load(
        self, buffers: Iterable[tuple[nn.Module, nn.Module, str]], device: Device, what: str, *, is_loaded: bool
    ) -> None:
        """Gives the copy of each master, in (master, copy, name), the newest value, for a unit that runs on ``device``.

        Args:
            is_loaded: whether the copies have what the masters have, or the newest value from before.
        """
        missing: list[tuple[nn.Module, str, Tensor]] = []
        for master, copy, name in buffers:
            home = master._buffers[name]
            newest = None if home is None else self._newest.get(id(home))
            if newest is not None:
                copy._buffers[name] = self._copy(newest, device, what)
            elif home is not None and not (is_loaded and copy._buffers.get(name) is not None):
                missing.append((copy, name, home))
        if missing:
            uploaded = brought([home for _, _, home in missing], device, what)
            for (copy, name, _), tensor in zip(missing, uploaded, strict=True):
                copy._buffers[name] = tensor

    @staticmethod
    def _copy(newest: _Newest, device: Device, what: str) -> Tensor:
        if newest.device is device and (copy := device.snapshot(newest.value)) is not None:
            return copy
        upload = device.upload(newest.transfer.tensors, what, after=newest.transfer, must=True)
        return upload.wait(Edge.BUFFERS)[0]

    def arrive(self) -> None:
        """No unit runs: what is under way is waited for, and written."""
        newest, self._newest = self._newest, {}
        for home, master, name, _, _, transfer in newest.values():
            (value,) = transfer.wait(Edge.BUFFERS)
            if home.shape == value.shape and home.dtype == value.dtype:
                with torch.no_grad():
                    home.copy_(value)
            else:
                master._buffers[name] = value.clone()  # memory of its own, that stays

    def end_step(self) -> None:
        """What has not arrived, as the step has failed, is dropped. What units have written themselves shows now."""
        self._newest.clear()
        torch.autograd.graph.increment_version(list(self._written.values()))
        self._written.clear()
