"""``torch.func.functional_call`` in user code: weights that one module makes and another one uses.

[Note: functional calls]
``functional_call(module, {"weight": made}, x)`` puts ``made`` in the place of a parameter of the module, for the time
of one call. The module belongs to all micro-batches, and while it is a unit, or calls one, another micro-batch runs. It
would find ``made`` there, with a graph that is not its own, and the engine would take it for a weight of the unit.

So the parameter stays where it is, and ``made`` becomes an attribute of the same name in front of it, as if user code
had set one. Then it is what such attributes are anyhow (see [Note: attribute writes] in :mod:`usercode.lock`): the
micro-batch has it for itself, and for a unit it is an input that gets a gradient::

    module._parameters   weight: the master             all micro-batches
    module.__dict__      weight: made                   this one, until the call ends
    replica.__dict__     weight: made, on its device    in the unit, and again when it is recomputed
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import _named_member_accessor

from ..common.attributes import MISSING, attribute_set
from .lock import current


@contextlib.contextmanager
def functional_calls_apart() -> Iterator[None]:
    """While open, what functional calls of micro-batches put into modules is their own."""
    original: Any = _named_member_accessor.swap_tensor

    def swap_tensor(module: nn.Module, name: str, tensor: Any, allow_missing: bool = False) -> Any:
        state = current()
        if state is None or state.lock is None or state.unit_writes is not None:
            return original(module, name, tensor, allow_missing)
        registered = getattr(module, "_parameters", {}).get(name)
        if registered is None:
            if name in getattr(module, "_buffers", {}):
                state.lock.note(state, module, name)
            return original(module, name, tensor, allow_missing)
        before = vars(module).get(name, registered)
        state.lock.write(state, module, name, MISSING if tensor is registered else tensor)
        return before

    with attribute_set(_named_member_accessor, "swap_tensor", swap_tensor):
        yield
