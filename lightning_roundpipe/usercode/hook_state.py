"""What forward hooks fill besides attributes of modules.

[Note: state of hooks]
A hook may keep what it sees in a list of its closure, or in the object whose method it is; the step reads it there::

    found = []                                                             self.keeper = Keeper()
    layer.register_forward_hook(lambda m, args, out: found.append(out))    layer.register_forward_hook(self.keeper.keep)

Both are places like attributes of modules (:mod:`common.attributes`): micro-batches have values of their own there,
which are swapped with the user-code lock, and merged when the step ends ([Note: collected lists] in
:mod:`usercode.collected_lists`). What a unit does there by itself, without a hook, it does to whatever is there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ..common.attributes import ALL, CELL, is_container


def held_by_hooks(modules: Iterable[nn.Module], called: Iterable[nn.Module]) -> list[tuple[Any, str, Any]]:
    """Lists and dicts in closures of hooks, and the attributes of objects whose methods hooks are: the place, the name
    of what is there, the value; each once.

    Args:
        modules: whose hooks are looked at. A hook that runs before a forward inside a unit is a part of the unit.
        called: the modules that user code calls: of these, hooks that run before the forward count as well.
    """
    found: dict[int, tuple[Any, str, Any]] = {}
    hooked = [*(m._forward_hooks for m in modules), *(m._forward_pre_hooks for m in called)]
    for hook in itertools.chain.from_iterable([hooks.values() for hooks in hooked if hooks]):
        for function in _functions_in(hook):
            owner = getattr(function, "__self__", function)
            if _is_plain_object(owner):
                found[id(owner)] = owner, ALL, owner.__dict__
            for cell in getattr(function, "__closure__", None) or ():
                with contextlib.suppress(ValueError):  # a variable without a value
                    if is_container(cell.cell_contents):
                        found[id(cell)] = cell, CELL, cell.cell_contents
    return list(found.values())


def _functions_in(hook: Any) -> Iterator[Any]:
    """A hook, and what it wraps as a ``partial`` or as what a decorator has made."""
    while hook is not None:
        inner = hook.func if isinstance(hook, functools.partial) else getattr(hook, "__wrapped__", None)
        if inner is None or isinstance(hook, (FunctionType, MethodType)):
            yield hook
        hook = inner


def _is_plain_object(owner: Any) -> bool:
    """Whether another dict may be put in the place of its attributes: it is no module, function or class."""
    if isinstance(owner, nn.Module) or type(getattr(owner, "__dict__", None)) is not dict:
        return False
    return not isinstance(owner, (FunctionType, ModuleType))
