"""Nested arguments, results and batches: taken apart, changed, and put together again.

::

    (x, {"mask": m, "k": 3})  --flatten-->  leaves [x, m, 3] and a structure  --unflatten-->  (x', {"mask": m', "k": 3})

- :func:`flatten` and :func:`unflatten` are for the arguments and results of units. They open what
  ``torch.utils._pytree`` knows (tuples, lists, dicts, named tuples, whatever is registered there, such as Hugging
  Face's ``ModelOutput``), classes derived from lists and dicts, dataclasses, namespaces and distributions of torch. Any
  other object is a leaf.
- :func:`children_of` and :func:`rebuild` are for batches and what steps return. They open one container, with the way
  to each entry, and any mapping, list or tuple, also of a class that a unit's argument would be a leaf of.
- :func:`mapped` opens both kinds.
"""

from __future__ import annotations

import copy
import functools
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

_LEAF = None
_POSITIONAL = object()
# Objects of which the attributes are entries.
_WITH_ATTRIBUTES = (torch.distributions.Distribution, SimpleNamespace)
_PLAIN = frozenset({Tensor, torch.nn.Parameter, bool, int, float, str, type(None), torch.Size})


# --- all leaves ------------------------------------------------------------------------------------------------------


class _Node(NamedTuple):
    """How containers of a class are opened: as ``torch.utils._pytree`` says it for those that it knows."""

    flatten_fn: Callable[[Any], tuple[list[Any], Any]]
    unflatten_fn: Callable[[list[Any], Any], Any]


def _flatten_fields(tree: Any) -> tuple[list[Any], Any]:
    names = _fields_of(tree)
    entries = [getattr(tree, name) for name in names]
    shell = _with_fields(tree, names, [None] * len(names))  # the structure must not keep tensors alive
    return entries, (shell, names)


def _unflatten_fields(entries: list[Any], context: tuple[Any, list[str]]) -> Any:
    shell, names = context
    return _with_fields(shell, names, entries)


def _flatten_derived(tree: Any) -> tuple[list[Any], Any]:
    entries = [entry for _, entry in children_of(tree) or ()]
    return entries, rebuild(tree, [None] * len(entries))


def _unflatten_derived(entries: list[Any], shell: Any) -> Any:
    return rebuild(shell, entries)


def _flatten_packed(tree: PackedSequence) -> tuple[list[Any], Tensor]:
    return [tree.data, tree.sorted_indices, tree.unsorted_indices], tree.batch_sizes


def _unflatten_packed(entries: list[Any], batch_sizes: Tensor) -> PackedSequence:
    data, sorted_indices, unsorted_indices = entries
    return PackedSequence(data, batch_sizes, sorted_indices, unsorted_indices)


_FIELDS = _Node(_flatten_fields, _unflatten_fields)
_DERIVED = _Node(_flatten_derived, _unflatten_derived)
# Its batch sizes stay on the host, wherever the rest goes.
_PACKED = _Node(_flatten_packed, _unflatten_packed)


def _node_of(tree: Any) -> Any:
    """The functions that open ``tree`` and make such a container again; None for leaves."""
    kind = type(tree)
    if kind in _PLAIN:
        return None
    if (node := pytree.SUPPORTED_NODES.get(kind)) is not None:
        return node
    if kind is PackedSequence:
        return _PACKED
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return pytree.SUPPORTED_NODES[namedtuple]  # type: ignore[index]
    if _is_instance_of_dataclass(tree) or isinstance(tree, _WITH_ATTRIBUTES):
        return _FIELDS
    return _DERIVED if isinstance(tree, (dict, list, UserDict)) else None


def flatten(tree: Any, leaves: list[Any]) -> Any:
    """Appends the leaves of ``tree`` to ``leaves``; returns the structure for :func:`unflatten`."""
    node = _node_of(tree)
    if node is None:
        leaves.append(tree)
        return _LEAF
    entries, context = node.flatten_fn(tree)
    return node.unflatten_fn, context, [flatten(entry, leaves) for entry in entries]


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """The inverse of :func:`flatten`."""
    if structure is _LEAF:
        return leaves[0]
    return _build(structure, iter(leaves))


def _build(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is _LEAF:
        return next(leaves)
    make, context, parts = structure
    return make([_build(part, leaves) for part in parts], context)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves that :func:`flatten` finds."""
    leaves: list[Any] = []
    flatten(tree, leaves)
    return leaves


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], side: list[Any], leaves: list[Any]) -> Any:
    """:func:`flatten` of the three, quick where there are only positional plain values."""
    if not kwargs and not side and _PLAIN.issuperset(map(type, args)):
        leaves.extend(args)
        return _POSITIONAL
    return flatten((args, kwargs, side), leaves)


def unflatten_call(structure: Any, leaves: list[Any]) -> Any:
    """The inverse of :func:`flatten_call`: ``((args, kwargs), side)``."""
    if structure is _POSITIONAL:
        return (tuple(leaves), {}), []
    args, kwargs, side = unflatten(structure, leaves)
    return (args, kwargs), side


# --- one container ---------------------------------------------------------------------------------------------------


def children_of(value: Any) -> list[tuple[str, Any]] | None:
    """(path suffix, entry) for each entry of a container; ``None`` if the value is not one."""
    if isinstance(value, (Tensor, Enum, torch.Size, PackedSequence)):
        return None
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", entry) for name, entry in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", entry) for index, entry in enumerate(value)]
    if _is_instance_of_dataclass(value):
        return [(f".{name}", getattr(value, name)) for name in _fields_of(value)]
    return None


def rebuild(template: Any, entries: Sequence[Any]) -> Any:
    """A container like ``template`` that holds ``entries``, in the order of :func:`children_of`."""
    if isinstance(template, Mapping):
        return _rebuild_mapping(template, dict(zip(template, entries, strict=True)))
    if type(template) is list:
        return list(entries)
    if isinstance(template, list):
        result = copy.copy(template)
        result[:] = entries
        return result
    if isinstance(template, tuple):
        if hasattr(template, "_make"):
            return template._make(entries)
        return type(template)(entries)
    return _with_fields(template, _fields_of(template), entries)


def _rebuild_mapping(template: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(template) is dict:
        return items
    if isinstance(template, UserDict):
        result: Any = copy.copy(template)
        result.data = items
        return result
    if not isinstance(template, dict):
        try:
            return type(template)(items)  # type: ignore[call-arg]
        except TypeError:
            pass
    # Subclasses of dict keep what else they carry, such as a default factory. Item by item: some forbid update().
    result = copy.copy(template)
    for key, entry in items.items():
        result[key] = entry
    if getattr(template, "__dict__", None) is template:  # its attributes are its items
        result.__dict__ = result
    return result


def _is_instance_of_dataclass(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _fields_of(instance: Any) -> list[str]:
    """The attributes that are entries: of a dataclass its fields, and other tensors and arrays that have been put on
    it, such as masks that ``__post_init__`` makes."""
    if isinstance(instance, _WITH_ATTRIBUTES):
        return list(vars(instance))
    names = [field.name for field in fields(instance) if hasattr(instance, field.name)]
    others = getattr(instance, "__dict__", {}).items()
    return [*names, *(name for name, value in others if name not in names and hasattr(value, "__array__"))]


def _with_fields(template: Any, names: Sequence[str], entries: Sequence[Any]) -> Any:
    result = copy.copy(template)
    for name, entry in zip(names, entries, strict=True):
        object.__setattr__(result, name, entry)  # also for frozen dataclasses and fields with init=False
    return result


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, with the way to it."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for suffix, entry in children_of(value) or ():
        yield from tensors_in(entry, path + suffix)


def are_equal(left: Any, right: Any) -> bool:
    """Whether two values, or what nested containers hold, are equal; tensors may be on different devices."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.shape, left.dtype, left.layout) != (right.shape, right.dtype, right.layout):
            return False
        return left.layout is torch.strided and torch.equal(left, right.to(left.device))
    if type(left) is not type(right) or getattr(left, "shape", None) != getattr(right, "shape", None):
        return False
    entries, others = children_of(left), children_of(right)
    if entries is not None and others is not None:
        is_alike = [name for name, _ in entries] == [name for name, _ in others]
        return is_alike and all(are_equal(x, y) for (_, x), (_, y) in zip(entries, others, strict=True))
    try:
        same = left == right
        return bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # a user class may define == in any way, also so that it fails
        return False


def mapped(
    value: Any,
    change: Callable[[Any], Any] = lambda tensor: tensor,
    *,
    anew: type | tuple[type, ...] = (),
    every: bool = False,
    _above: tuple[Any, ...] = (),
) -> Any:
    """``value`` with every tensor in it changed. A container in which nothing changes is kept as it is.

    Args:
        value: any value; one that holds itself is not entered twice.
        anew: containers of these classes are made anew even so.
        every: whether ``change`` is given everything else as well; a container is opened if it comes back itself.
    """
    if every or isinstance(value, Tensor):
        found = change(value)
        if found is not value or isinstance(value, Tensor):
            return found
    opened = None if any(value is container for container in _above) else _opened(value)
    if opened is None:
        return value
    entries, make = opened
    changed = [mapped(entry, change, anew=anew, every=every, _above=(*_above, value)) for entry in entries]
    is_same = all(new is old for new, old in zip(changed, entries, strict=True))
    return value if is_same and not isinstance(value, anew) else make(changed)


def containers_in(value: Any, _above: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Every container in a value, itself included, in an order that is the same in values of one structure."""
    opened = None if type(value) in _PLAIN or any(value is container for container in _above) else _opened(value)
    if opened is not None:
        yield value
        for entry in opened[0]:
            yield from containers_in(entry, (*_above, value))


def _opened(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The entries of a container, and what makes one like it of others; None for leaves."""
    children = children_of(value)
    if children is not None:
        return [entry for _, entry in children], functools.partial(rebuild, value)
    node = _node_of(value)
    if node is None:
        return None
    entries, context = node.flatten_fn(value)
    return entries, lambda changed: node.unflatten_fn(changed, context)
