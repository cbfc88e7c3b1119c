"""Devices that are lost: at a use of theirs that is chosen by its number, as if the driver had said so."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning as L

from lightning_roundpipe.devices.device import Device, DeviceLostError
from lightning_roundpipe.devices.transfer import Lane, Transfer

MESSAGE = "the driver does not find it any more"


class Fault:
    """Counts the uses of a virtual device from now on, and lets it be lost at one of them.

    Used are the compute lane, once per run of a unit, and the lanes for copies. Every use of a device that is lost
    raises an error.

    Args:
        at: number of that use, from 0; None for never.
        kind: count only uses of this name; None for all.
        is_late: whether a copy fails when it is waited for, and not when it is submitted.

    Attributes:
        uses: those that were counted: "run", and the names of lanes, with " bulk" for weights and gradients.
    """

    def __init__(
        self, device: Device, at: int | None = None, *, kind: str | None = None, is_late: bool = False
    ) -> None:
        self.device = device
        self.uses: list[str] = []
        self._at = at
        self._kind = kind
        self._is_late = is_late
        self._lock = threading.Lock()
        changed: Any = device
        changed.computing = functools.partial(self._computing, device.computing)
        for lane in (device.h2d, device.d2h):
            changed = lane
            changed.submit = functools.partial(self._submit, lane, lane.submit)

    def _use(self, what: str) -> bool:
        """Whether it is the one."""
        with self._lock:
            is_counted = self._kind in (None, what)
            if is_counted:
                self.uses.append(what)
            is_the_one = is_counted and self.device.lost is None and len(self.uses) - 1 == self._at
            if is_the_one:
                self.device.lost = MESSAGE
        if self.device.lost is not None and not (is_the_one and self._is_late):
            raise DeviceLostError(MESSAGE)
        return is_the_one

    def _computing(self, computing: Callable[[], AbstractContextManager[object]]) -> AbstractContextManager[object]:
        self._use("run")
        return computing()

    def _submit(self, lane: Lane, submit: Callable[..., Transfer], *args: Any, **options: Any) -> Transfer:
        fails = self._use(lane.direction + " bulk" * bool(options.get("is_bulk")))
        transfer = submit(*args, **options)
        if fails:
            transfer.end(DeviceLostError(MESSAGE))
        return transfer


class Losing(L.Callback):
    """Lets a device of a training be lost.

    Args:
        batch_idx: of the training batch.
        device: its index.
        at: number of its use in that batch.
        is_late: see :class:`Fault`.
    """

    def __init__(self, batch_idx: int, device: int, at: int, *, is_late: bool = False) -> None:
        self.batch_idx, self.device, self.at = batch_idx, device, at
        self.is_late = is_late

    def on_train_batch_start(self, trainer: Any, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            Fault(trainer.strategy.pool[self.device], self.at, is_late=self.is_late)
