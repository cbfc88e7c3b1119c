"""Opens the arguments and results of units: containers, dataclasses and registered pytrees, down to their leaves."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LEAF = None
_POSITIONAL = object()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None), torch.Size})


def flatten(tree: Any, leaves: list[Any]) -> Any:
    """Appends the leaves of ``tree`` to ``leaves``; returns the structure for :func:`unflatten`.

    Tuples, lists, dicts, named tuples, everything registered with ``torch.utils._pytree`` (Hugging Face's
    ``ModelOutput`` registers itself) and dataclasses are opened; any other object is a leaf.
    """
    kind = type(tree)
    if kind in _PLAIN:
        leaves.append(tree)
        return _LEAF
    if kind is tuple or kind is list:
        return (kind, None, [flatten(item, leaves) for item in tree])
    if kind is dict:
        return (dict, list(tree), [flatten(item, leaves) for item in tree.values()])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return ("namedtuple", kind, [flatten(item, leaves) for item in tree])
    node = None if isinstance(tree, torch.Tensor) else pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(tree)
        return ("pytree", (node, context), [flatten(item, leaves) for item in children])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
        parts = [flatten(getattr(tree, name), leaves) for name in names]
        shell = copy.copy(tree)  # the structure must not keep tensors alive
        for name in names:
            object.__setattr__(shell, name, None)
        return ("dataclass", (shell, names), parts)
    leaves.append(tree)
    return _LEAF


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], side: list[Any], leaves: list[Any]) -> Any:
    """:func:`flatten` of ``((args, kwargs), side)``, quick where there are only positional plain values."""
    if not kwargs and not side and all(type(item) in _PLAIN for item in args):
        leaves.extend(args)
        return _POSITIONAL
    return flatten(((args, kwargs), side), leaves)


def unflatten_call(structure: Any, leaves: list[Any]) -> Any:
    """The inverse of :func:`flatten_call`: ``((args, kwargs), side)``."""
    return ((tuple(leaves), {}), []) if structure is _POSITIONAL else unflatten(structure, leaves)


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """The inverse of :func:`flatten`; leaves are consumed from an iterator over ``leaves`` in order."""
    return _build(structure, iter(leaves))


def _build(structure: Any, leaves: Any) -> Any:
    if structure is _LEAF:
        return next(leaves)
    kind, context, parts = structure
    items = [_build(part, leaves) for part in parts]
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    if kind is dict:
        return dict(zip(context, items, strict=True))
    if kind == "namedtuple":
        return context(*items)
    if kind == "pytree":
        node, node_context = context
        return node.unflatten_fn(items, node_context)
    original, names = context
    result = copy.copy(original)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(result, name, item)
    return result
