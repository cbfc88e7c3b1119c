"""Attributes of objects, and what lists, dicts and the like hold, at one moment; put back in place.

What is looked at begins with the modules of a project and goes as deep as their attributes lead: lists, dicts, sets,
queues, objects of classes of the user's own, generators of random numbers. Not into what belongs to Lightning and
torch, nor into long containers, which hold data: only what is in them counts there. Tensors keep their values elsewhere
(:class:`watching.Originals`); here they are named.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ...common.attributes import is_of_users

# Entries of a container that is looked into.
_MOST_ENTRIES = 64
# Objects that are looked at.
_MOST_OBJECTS = 1_000_000
_MOST_ARRAY_BYTES = 2**20
_CONTAINERS: tuple[Any, ...] = (list, OrderedDict, dict, set, deque, bytearray)
_NO_STATE = (str, bytes, int, float, complex, bool, type(None), type, FunctionType, BuiltinFunctionType, ModuleType)


class Snapshot:
    """What can be reached from ``roots`` now.

    Attributes:
        named: the tensors in it, with the way there from a root.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._put_back: list[Callable[[], None]] = []
        self._attributes: dict[int, dict[str, Any]] = {}
        self._contents: dict[int, Any] = {}
        self._kept: list[Any] = []  # ids stay theirs
        self.named: list[tuple[str, Tensor]] = []
        todo = list(roots)
        seen: set[int] = set()
        while todo and len(seen) < _MOST_OBJECTS:
            path, value = todo.pop()
            if id(value) not in seen:
                seen.add(id(value))
                todo.extend(self._note(path, value))

    def _note(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Notes one object; gives those in it."""
        if isinstance(value, Tensor):
            self.named.append((path, value))
        elif isinstance(value, (*_NO_STATE, Metric)):
            return
        elif isinstance(value, MethodType):
            yield path, value.__self__
        elif isinstance(value, _CONTAINERS):
            yield from self._note_container(path, value)
        elif (put_back := _generator_state(value)) is not None:
            self._put_back.append(put_back)
        elif hasattr(value, "__array__"):
            self._note_array(value)
        elif isinstance(value, tuple):
            yield from ((f"{path}[{i}]", entry) for i, entry in enumerate(value[:_MOST_ENTRIES]))
        elif isinstance(value, nn.Module) or is_of_users(value):
            attributes = self._attributes[id(value)] = dict(vars(value))
            self._kept.append(value)
            self._put_back.append(lambda: _put_back_attributes(vars(value), attributes))
            prefix = f"{path}." if path else ""
            yield from ((prefix + name, entry) for name, entry in attributes.items())

    def _note_container(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        content = self._contents[id(value)] = _content(value)
        self._kept.append(value)
        self._put_back.append(lambda: _put_back_content(value, content))
        if len(value) > _MOST_ENTRIES or isinstance(value, bytearray):
            return
        if isinstance(value, dict):
            is_kind = path.rpartition(".")[2] in ("_parameters", "_buffers", "_modules")
            above = path.rpartition(".")[0]
            for key, entry in value.items():
                yield (f"{above}.{key}".lstrip(".") if is_kind else f"{path}[{key!r}]"), entry
        else:
            yield from ((f"{path}[{i}]", entry) for i, entry in enumerate(value))

    def _note_array(self, value: Any) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes <= _MOST_ARRAY_BYTES:
            values = value.copy()
            self._put_back.append(lambda: value.__setitem__(..., values) if value.flags.writeable else None)

    def attributes_of(self, module: nn.Module) -> dict[str, Any]:
        """Those that a module had."""
        return self._attributes.get(id(module), {})

    def content_of(self, container: Any) -> Any:
        """What a container held; None if it was not there."""
        return self._contents.get(id(container))

    def put_back(self) -> None:
        """Everything is again as it was."""
        for put_back in self._put_back:
            put_back()


def _put_back_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    if len(now) != len(before) or any(now.get(name, now) is not value for name, value in before.items()):
        now.clear()
        now.update(before)


def _base_of(container: Any) -> Any:
    """The class of Python's own that a container is of."""
    return next(base for base in _CONTAINERS if isinstance(container, base))


def _content(container: Any) -> Any:
    """What a container holds, as a list or dict, whatever methods a class of the user's has."""
    base = _base_of(container)
    return dict(base.items(container)) if isinstance(container, dict) else list(base.__iter__(container))


def _put_back_content(container: Any, before: Any) -> None:
    """Lets a container hold again what it held, if it does not."""
    now, base = _content(container), _base_of(container)
    keys = before if isinstance(before, dict) else range(len(before))
    is_alike = len(now) == len(before) and (isinstance(before, list) or now.keys() == before.keys())
    if is_alike and all(now[key] is before[key] for key in keys):
        return
    base.clear(container)
    (base.update if isinstance(container, (dict, set)) else base.extend)(container, before)


def _call(function: Callable[[Any], Any], argument: Any) -> None:
    function(argument)


def _generator_state(value: Any) -> Callable[[], None] | None:
    """What puts the state of a generator of random numbers back; None for anything else."""
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if isinstance(value, torch.Generator):
        position = value.get_state()
        return functools.partial(_call, value.set_state, position)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = copy.deepcopy(value.bit_generator.state)
        return lambda: setattr(value.bit_generator, "state", bits)
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        old = value.get_state()
        return lambda: value.set_state(old)
    return None
