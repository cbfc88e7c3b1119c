"""Attributes of modules and objects, read and written past ``__setattr__``.

Other places count as attributes, so that micro-batches have their own values there as well: whether a parameter
requires a gradient, the variable of a closure (a *cell*), and all attributes of an object that is no module at once::

    found = []                                                                        cell, "cell_contents"
    layer.register_forward_hook(lambda module, args, output: found.append(output))
    layer.register_forward_hook(recorder.keep)                                        recorder, "__dict__"
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

MISSING: Any = object()  # value of an attribute or entry that is not there
_FLAG: Any = torch._C.TensorBase.requires_grad
_CONTAINERS = (list, dict, defaultdict, OrderedDict)
# Packages whose objects have a life of their own: the Trainer, loggers, optimizers, loaders; threads, files, locks.
LIGHTNING = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
_FOREIGN = (sys.stdlib_module_names | LIGHTNING | {"lightning_roundpipe", "torch"}) - {
    *("abc", "builtins", "collections", "dataclasses", "types", "typing"),
}
CELL, ALL = "cell_contents", "__dict__"

# (id of a module or another place, name of the attribute) -> (the module or place, a value)
Attributes = dict[tuple[int, str], tuple[nn.Module, Any]]


def assign(module: Any, name: str, value: Any) -> None:
    """Sets or (``MISSING``) removes an attribute or a buffer, unnoticed."""
    if isinstance(module, Tensor):
        _FLAG.__set__(module, value)
        return
    if name in (CELL, ALL):
        object.__setattr__(module, name, value)
        return
    state = module.__dict__
    if name in state.get("_buffers", ()):
        state = state["_buffers"]
    if value is MISSING:
        state.pop(name, None)
    else:
        state[name] = value


def read(module: Any, name: str) -> Any:
    """A plain attribute or buffer, ``MISSING`` if there is none; what is in one of the other places."""
    if isinstance(module, Tensor):
        return _FLAG.__get__(module)
    if name in (CELL, ALL):
        return getattr(module, name)
    state = module.__dict__
    buffers = state.get("_buffers", ())
    return buffers[name] if name in buffers else state.get(name, MISSING)


def is_registered(module: nn.Module, name: str) -> bool:
    """Parameters and submodules are shared by all micro-batches; attributes and assigned buffers are isolated."""
    state = module.__dict__
    return any(name in state.get(kind, ()) for kind in ("_parameters", "_modules"))


def is_container(value: Any) -> bool:
    """Whether it is a list or dict, of which runs of units and micro-batches are given copies. Other classes may keep
    more than their entries."""
    return type(value) in _CONTAINERS


def is_of_users(value: Any) -> bool:
    """Whether it is an object of a class that is the user's, as far as can be told, with attributes."""
    if type(getattr(value, "__dict__", None)) is not dict:
        return False
    return not any(base.__module__.partition(".")[0] in _FOREIGN for base in type(value).__mro__ if base is not object)


class UnitWrites:
    """Attributes that a unit writes while it runs, with their values before.

    Attributes:
        registered: buffers that it has registered, of which there was none before, and whether they are persistent.
    """

    def __init__(self) -> None:
        self.before: Attributes = {}
        self.registered: dict[tuple[int, str], bool] = {}

    def note(self, module: nn.Module, name: str) -> None:
        """Called before the attribute changes."""
        if (id(module), name) not in self.before:
            self.before[id(module), name] = (module, read(module, name))

    def note_registered(self, module: nn.Module, name: str, *, is_persistent: bool) -> None:
        """Called before a buffer is registered."""
        self.note(module, name)
        if self.before[id(module), name][1] is MISSING:
            self.registered[id(module), name] = is_persistent

    def take_back(self) -> list[tuple[nn.Module, str, Any]]:
        """Restores the values from before; what was written: (module, name, value), registered names left out. A buffer
        that was None, or none at all, has no value that others know of: it is written like a plain attribute."""
        written = []
        noted, self.before = self.before, {}
        for (_, name), (module, before) in noted.items():
            is_buffer = name in module.__dict__.get("_buffers", ()) and before is not None and before is not MISSING
            if is_registered(module, name) or is_buffer:
                continue
            written.append((module, name, read(module, name)))
            assign(module, name, before)
        return written


@contextlib.contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a class, or of an object or module itself and not of its class, for a while."""
    before = vars(owner).get(name, MISSING)
    _store(owner, name, value)
    try:
        yield
    finally:
        _store(owner, name, before)


def _store(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, type):
        if value is MISSING:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = value
    elif value is not MISSING:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)
