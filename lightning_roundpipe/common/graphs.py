"""Autograd graphs: their nodes, and the bytes that they keep for the backward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

_PYTHON_NODE = torch.autograd.function.BackwardCFunction
_autograd: Any = torch._C._autograd


class EngineFunction(torch.autograd.Function):
    """A function of ours. Where no function transform of torch is active, its ``apply`` leaves out what they need."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


def direct_apply(function: type[EngineFunction]) -> Callable[..., Any]:
    """Its ``apply``, for where no function transform of torch can be active."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


class _Depth(threading.local):
    """Of the hooks of a thread, in versions of torch that cannot tell whether there are any."""

    value = 0

    def counts(self, function: Callable[..., None], change: int) -> Callable[..., None]:
        @functools.wraps(function)
        def counted(*args: Any) -> None:
            function(*args)
            self.value += change

        return counted


_depth = None
if not hasattr(_autograd, "_top_saved_tensors_default_hooks"):
    _depth = _Depth()
    for _name, _change in (("_push_saved_tensors_default_hooks", 1), ("_pop_saved_tensors_default_hooks", -1)):
        setattr(_autograd, _name, _depth.counts(getattr(_autograd, _name), _change))


def has_saved_tensor_hooks() -> bool:
    """Whether the calling thread is inside of hooks on what autograd saves."""
    return _depth.value > 0 if _depth is not None else _autograd._top_saved_tensors_default_hooks(False) is not None


class _OwningEdge(GradientEdge):
    """An edge that may hold more than it compares."""

    owner: Any


def _owning_edge(tensor: Tensor) -> GradientEdge:
    """In torch 2.6 an edge to a function in Python does not keep it alive; a node of torch that leads to it does."""
    edge = _OwningEdge(*get_gradient_edge(tensor))
    if isinstance(edge.node, _PYTHON_NODE):
        with torch.enable_grad():
            edge.owner = tensor.view_as(tensor).grad_fn
    return edge


edge_of: Callable[[Tensor], GradientEdge] = (
    get_gradient_edge if "ownership_token" in GradientEdge._fields else _owning_edge
)
"""Where a gradient of a tensor goes; keeps the graph behind it."""


def is_of_user(node: Any) -> bool:
    """Whether the node is of a function in Python that is not ours."""
    return isinstance(node, _PYTHON_NODE) and not issubclass(cast(Any, node)._forward_cls, EngineFunction)


def walk_graph(roots: Iterable[Any]) -> Iterator[Any]:
    """The autograd nodes ``roots`` (None among them is left out) and all behind them."""
    todo = list(dict.fromkeys(node for node in roots if node is not None))
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def graph_bytes(outputs: Iterable[Tensor], besides: Iterable[Any]) -> int:
    """Bytes of memory that the graph behind ``outputs`` has saved for its backward.

    Memory that a tensor among ``besides`` uses does not count, nor what functions keep outside ``save_for_backward``.
    """
    counted = {memory[0] for x in besides if isinstance(x, Tensor) and (memory := _memory_of(x)) is not None}
    total = 0
    for node in walk_graph([output.grad_fn for output in outputs]):
        for tensor in _saved_by(node):
            memory = _memory_of(tensor)
            if memory is not None and memory[0] not in counted:
                counted.add(memory[0])
                total += memory[1]
    return total


def _memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """(address, bytes) of the tensor's storage; None for layouts that have several."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return None


def _saved_by(node: Any) -> Iterator[Tensor]:
    kind: Any = type(node)
    for name in _saved_names(kind):
        try:
            value = getattr(node, name)
        except RuntimeError:  # changed in place since, or freed
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor):
                yield item


@functools.cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    """Attributes that show what a node has saved: one each in torch's own nodes, one for all in those of users."""
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")
