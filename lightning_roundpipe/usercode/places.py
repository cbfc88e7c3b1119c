"""On which device of the pool user code is, for what it does with tensors of several devices.

[Note: where user code is]
In the forward user code is where its micro-batch is. In the backward the micro-batch has gone on, but what autograd
calls has to fit the graph that was made in the forward::

    a hook on a tensor, a function of the user     on the device whose thread of autograd calls it
    what a checkpoint runs again                   where it was, from unit to unit
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..devices.device import Device


class UserCodePlace:
    """Of one micro-batch; see [Note: where user code is].

    Args:
        device: that the micro-batch is on.
        is_engine: tells whether the engine itself walks the graph of the micro-batch at the moment.
        owners: GPU -> the device that has it for itself.

    Attributes:
        device: that the micro-batch is on.
    """

    def __init__(self, device: Device, is_engine: Callable[[], bool], owners: Mapping[torch.device, Device]) -> None:
        self.device = device
        self._is_engine = is_engine
        self._owners = owners
        self._again: Device | None = None  # where a recomputation is

    def now(self) -> Device:
        """Where user code is that the calling thread runs."""
        if self._again is not None:
            return self._again
        kind = self.device.torch_device.type
        if kind == "cpu" or not self._is_engine():
            return self.device
        return self._owners.get(torch.device(kind, torch.get_device_module(kind).current_device()), self.device)

    def recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which user code calls now, for the recomputation: it will be where it is now."""
        begin = self.now()

        @functools.wraps(function)
        def again(*args: Any, **kwargs: Any) -> Any:
            before, self._again = self._again, begin
            try:
                return function(*args, **kwargs)
            finally:
                self._again = before

        return again

    def leave_unit(self, device: Device) -> None:
        """A recomputation has called a unit again, which was on ``device`` in the forward."""
        if self._again is not None:
            self._again = device
