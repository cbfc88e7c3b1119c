"""What a batch consists of, before it is decided what its parts hold: a tree of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...common.trees import children_of
from .containers import common_kind, is_array, is_sequence, rows_of, why_not_split


@dataclass(slots=True)
class Node:
    """One value of a batch.

    Attributes:
        path: the way to it, such as ``batch['labels'][0]``.
        rows: leading size of an array, None for everything else.
        kind: what the entries of a sequence have in common, as :func:`common_kind` gives it; None if they differ.
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
    children = children_of(value)
    if children is None:
        return Node(path, value, rows=rows_of(value), problem=why_not_split(value))
    kind = common_kind(value) if is_sequence(value) else None
    if is_sequence(value) and all(type(entry) in (str, int, float) for entry in value):
        children = []  # long lists of labels and texts need no node for each entry
    return Node(path, value, children=tuple(node_of(entry, path + suffix) for suffix, entry in children), kind=kind)


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
    if is_array(node.value) and not getattr(node.value, "is_nested", False):
        return f"{node.path} of shape {tuple(node.value.shape)}"
    if is_sequence(node.value):
        return f"{node.path}, a {type(node.value).__name__} of {len(node.value)} entries"
    return f"{node.path} of type {type(node.value).__name__}"
