"""Plain attributes of units that mean their device: tensors on it, and ``torch.device`` itself.

[Note: kept attributes]
A module may make a tensor once, where its input is, and keep it: a mask, a table of rotations. ::

    if self.mask is None:
        self.mask = torch.ones(n, n, device=x.device).tril()

    step 1    GPU 0   self.mask = ...        host   the master's mask, once the step has ended
    step 2    GPU 1   the replica's mask  <-------  while the replica is active
              GPU 0   the replica's mask  <-------

Torch moves no plain attributes, so those that were made with the module stay on the host. It is noted which ones were
on a device when a step ended, or were set by a hook (to something of ``self.device``, which is the host here and would
be a GPU in plain Lightning): what they hold goes where the unit runs. Notes outlive engines: a module is trained by one
Trainer, and tested by the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..common.fingerprints import version_of
from ..common.trees import mapped
from ..devices.device import Device
from .buffers import brought

# By identity: metrics are modules whose hash depends on their state.
_names: Any = WeakIdKeyDictionary()  # nn.Module -> set of names
# Where modules of Lightning and metrics are, by their own account.
_ALWAYS = ("_device",)


def note_left(module: nn.Module, name: str, value: Any) -> None:
    """A step leaves ``value`` in an attribute. Called while no micro-batch runs."""
    if isinstance(value, torch.device) or any(tensor.device.type != "cpu" for tensor in _tensors_in(value)):
        _names.setdefault(module, set()).add(name)


def note_set(module: nn.Module, name: str, value: Any) -> None:
    """A hook sets an attribute to ``value``, while no micro-batch runs."""
    if isinstance(value, (Tensor, torch.device)):
        _names.setdefault(module, set()).add(name)


class KeptAttributes:
    """Those of a replica; see [Note: kept attributes]. Used by the thread that holds the compute lane of its device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._found: list[tuple[nn.Module, str, Any]] = []
        self._there: list[tuple[Tensor, int]] = []  # what was brought, and its version then

    def look(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Finds those of the copies, in (master, copy), which have the values of the masters."""
        if self._device.torch_device.type != "cpu":
            self._found = [
                (copy, name, copy.__dict__[name])
                for master, copy in pairs
                for name in (*_ALWAYS, *_names.get(master, ()))
                if name in copy.__dict__
            ]

    def bring(self, what: str) -> None:
        """Gives the copies what they keep on the device."""
        if not self._found:
            return
        on_host: dict[int, Tensor] = {}
        for _, _, value in self._found:
            on_host.update((id(t), t) for t in _tensors_in(value) if t.layout is torch.strided)
        uploaded = brought(list(on_host.values()), self._device, what) if on_host else []
        there = dict(zip(on_host, uploaded, strict=True))
        self._there = [(tensor, version_of(tensor)) for tensor in uploaded]
        for copy, name, value in self._found:
            is_device = isinstance(value, torch.device)
            copy.__dict__[name] = (
                self._device.torch_device if is_device else mapped(value, lambda tensor: there.get(id(tensor), tensor))
            )

    def check(self, unit_name: str) -> None:
        """Raises:
        RuntimeError: if the unit has changed one in place, which the next device would not see.
        """
        if any(version_of(tensor) != version for tensor, version in self._there):
            names = ", ".join(repr(name) for _, name, value in self._found if _tensors_in(value))
            raise RuntimeError(
                f"unit {unit_name!r} changes a tensor in place that it keeps in an attribute (one of {names}), which "
                "other devices would not see: assign a new tensor to the attribute, or register it as a buffer"
            )

    def drop(self) -> None:
        """The copies hold the values of the masters again."""
        self._there = []
        for copy, name, value in self._found:
            copy.__dict__[name] = value


def _tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found
