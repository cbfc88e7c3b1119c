"""What a batch consists of, before it is decided what its parts hold: a tree of nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ...common.trees import children_of
from .graphs import num_graphs_of

# Sequences that are one thing.
_NO_COLUMNS = (str, bytes, bytearray, memoryview, list, tuple, Mapping, torch.Tensor, PackedSequence)
# Entries of a column that are looked at.
_MOST_LOOKED_AT = 1024
_REPLICATED = (
    *(type(None), bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.Generator, torch.Size, torch.layout, torch.memory_format),
)


def is_array(value: Any) -> bool:
    """Tell whether the value is a tensor or a numpy array."""
    # numpy is optional for torch: there are arrays only if it has been imported.
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def is_replicated(value: Any) -> bool:
    """Tell whether the value is a scalar or constant that every micro-batch may share."""
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, _REPLICATED) or (numpy is not None and isinstance(value, numpy.generic))


def is_sequence(value: Any) -> bool:
    """Tell lists and tuples, whose length may be the batch size, from records such as namedtuples."""
    if not isinstance(value, (list, tuple)):
        return False
    return not (hasattr(value, "_fields") or hasattr(value, "n_fields"))  # namedtuple, torch.return_types


def is_column(value: Any) -> bool:
    """Tell sequences that are neither lists nor tuples: arrays of texts and objects, ranges, columns of tables."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, (*_NO_COLUMNS, type)):
        return False
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return value.ndim > 0 and value.dtype.kind in "USO"
    is_array_like = all(hasattr(type(value), name) for name in ("__len__", "__getitem__", "__array__"))
    return isinstance(value, Sequence) or is_array_like


def rows_of(value: Any) -> int | None:
    """Return the leading size of a tensor or array, ``None`` if it has none by which it can be cut and joined."""
    if not is_array(value) or why_not_split(value):
        return None
    return int(value.shape[0]) if value.ndim else None


def why_not_split(value: Any) -> str:
    """Return why a leaf can be neither cut nor shared, an empty string if it can be."""
    if isinstance(value, PackedSequence):
        return "the rows of a PackedSequence are interleaved by time step"
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested tensors are not split"
        if value.layout not in (torch.strided, torch.sparse_coo):
            return f"tensors of layout {value.layout} are not split"
        return ""
    return "" if is_array(value) or is_replicated(value) else "its rows are unknown"


def _kind(value: Any) -> tuple[Any, ...]:
    """Classify an entry of a sequence: the entries of a per-sample sequence are of one kind.

    Arrays are of one kind if they have the same number of dimensions, dtype and layout, containers if they have the
    same type.
    """
    if is_array(value):
        return ("array", type(value), value.ndim, value.dtype, getattr(value, "layout", None))
    if isinstance(value, (str, bytes)):
        return ("text",)
    if is_replicated(value):
        return ("scalar",)
    if children_of(value) is None:
        return ("object",)
    return ("container", "mapping" if isinstance(value, Mapping) else type(value))


@dataclass(slots=True)
class Node:
    """One value of a batch.

    Attributes:
        path: the way to it, such as ``batch['labels'][0]``.
        rows: leading size of an array, None for everything else.
        kind: "array", "text", "scalar", "object" or "container" if all entries of a sequence but None are of one kind.
            A table has objects. The entries of a column are no children.
        problem: why the value can be neither cut nor shared.
    """

    path: str
    value: Any
    rows: int | None = None
    children: tuple[Node, ...] = ()
    kind: str | None = None
    problem: str = ""


def node_of(value: Any, path: str = "batch") -> Node:
    """The tree of nodes for a batch, or for a part of it."""
    if (num_graphs := num_graphs_of(value)) is not None:
        return Node(path, value, rows=num_graphs)
    if is_column(value):
        return Node(path, value, kind=_kind_of_column(value))
    children = children_of(value)
    if children is None:
        return Node(path, value, rows=rows_of(value), problem=why_not_split(value))
    entries = value if is_sequence(value) else ()
    kinds = {_kind(entry) for entry in entries if entry is not None}
    if is_sequence(value) and all(type(entry) in (str, int, float) for entry in value):
        children = []  # long lists of labels and texts need no node for each entry
    nodes = tuple(node_of(entry, path + suffix) for suffix, entry in children)
    return Node(path, value, children=nodes, kind=next(iter(kinds))[0] if len(kinds) == 1 else None)


def _kind_of_column(value: Any) -> str | None:
    if hasattr(value, "iloc"):
        return "object"
    kinds = {_kind(value[index])[0] for index in range(min(len(value), _MOST_LOOKED_AT)) if value[index] is not None}
    return kinds.pop() if len(kinds) == 1 else "object" if kinds else None


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    yield node
    for child in node.children:
        yield from walk(child)


def rows_seen(root: Node) -> set[int]:
    """The leading sizes of all arrays."""
    return {node.rows for node in walk(root) if node.rows is not None}


def are_alike(node: Node) -> bool:
    """Whether the entries of a sequence look like samples of one data set."""
    return len({_signature(child) for child in node.children if child.value is not None}) <= 1


def _signature(node: Node) -> Any:
    value = node.value
    if is_array(value):
        return ("array", str(value.dtype), value.ndim)
    if is_sequence(value):
        return (type(value), frozenset(_signature(child) for child in node.children))
    return (type(value), tuple(_signature(child) for child in node.children))


def is_floating(array: Any) -> bool:
    """Whether a tensor or numpy array has a floating-point or complex dtype."""
    return "float" in str(array.dtype) or "complex" in str(array.dtype)


def describe(node: Node) -> str:
    """How messages name a node."""
    if is_column(node.value):
        return f"{node.path} of type {type(node.value).__name__} with {len(node.value)} entries"
    if num_graphs_of(node.value) is not None:
        return f"{node.path}, a {type(node.value).__name__} of {node.rows} graphs"
    if is_array(node.value) and not getattr(node.value, "is_nested", False):
        return f"{node.path} of shape {tuple(node.value.shape)}"
    if is_sequence(node.value):
        return f"{node.path}, a {type(node.value).__name__} of {len(node.value)} entries"
    return f"{node.path} of type {type(node.value).__name__}"
