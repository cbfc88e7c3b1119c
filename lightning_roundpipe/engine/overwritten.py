"""What an update overwrites, so that it can be taken back; see [Note: early updates] in :mod:`early`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .optimizer_state import GuardedState
from .transfer import num_bytes_of

# Types of entries of an optimizer's state that can be put back.
_RESTORABLE = (Tensor, bool, int, float, str, type(None))


class Buffers:
    """Memory for copies of tensors, used again for others of the same layout: the first use of memory is slow."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.num_bytes = 0
        self._free: dict[Any, list[Tensor]] = {}

    def lend(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """A buffer for each of ``tensors``; None if there is no memory left for all of them."""
        found = [free.pop() if (free := self._free.get(_layout(tensor))) else None for tensor in tensors]
        missing = num_bytes_of([tensor for tensor, buffer in zip(tensors, found, strict=True) if buffer is None])
        if self.num_bytes + missing > self.limit_bytes:
            self.take_back([buffer for buffer in found if buffer is not None])
            return None
        self.num_bytes += missing
        return [torch.empty_like(t) if buffer is None else buffer for t, buffer in zip(tensors, found, strict=True)]

    def take_back(self, buffers: Sequence[Tensor]) -> None:
        """They are not needed any more."""
        for buffer in buffers:
            self._free.setdefault(_layout(buffer), []).append(buffer)


class Overwritten:
    """What an early update overwrites of one weight.

    Args:
        buffers: memory for it, see :func:`changed_by_update`.
    """

    def __init__(self, parameter: nn.Parameter, home: GuardedState, buffers: Sequence[Tensor]) -> None:
        self._parameter = parameter
        self._home = home
        self._state = home.lend(parameter)
        self._entries = dict(self._state or {})
        self.buffers = buffers
        self._copies = list(zip(changed_by_update(parameter, self._state), buffers, strict=True))

    def save(self) -> None:
        """Copies it."""
        for tensor, buffer in self._copies:
            buffer.copy_(tensor)

    def restore(self) -> None:
        """Writes it back."""
        for tensor, buffer in self._copies:
            tensor.copy_(buffer)
        if self._state is not None:
            self._state.clear()
            self._state.update(self._entries)
        self._home.take_back(self._parameter, self._state)


def can_be_restored(state: Mapping[str, Any] | None) -> bool:
    """Whether all entries of the state of a weight can be put back."""
    return all(type(value) in _RESTORABLE for value in (state or {}).values())


def changed_by_update(parameter: nn.Parameter, state: Mapping[str, Any] | None) -> list[Tensor]:
    """The tensors that an update of ``parameter`` may write."""
    return [parameter.data, *(value for value in (state or {}).values() if isinstance(value, Tensor))]


def _layout(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype
