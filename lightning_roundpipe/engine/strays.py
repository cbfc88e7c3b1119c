"""Makes a pool of GPUs look like one device to glue.

[Note: stray operands]
User code creates tensors on ``self.device`` (the host), uses raw parameters (the host's masters), labels of the batch
(host) and outputs of units (the GPU of their stage). A function mode on the micro-batch's thread brings the operands
of a call that live on different devices to one: for in-place functions the target's, otherwise the current stage's.
The move is part of the graph, so gradients find their way back, also to masters on the host. Inside units everything
is on one device already, and the mode does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .glue import current

# Functions that take operands on several devices by design.
_MOVES = frozenset({"to", "copy_", "cpu", "cuda", "type_as", "set_", "data", "__set__", "__get__", "backward"})

_TARGETED = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__getitem__"})


class StrayOperands(TorchFunctionMode):
    """Moves operands of glue to one device; see [Note: stray operands].

    Args:
        where: gives the device of the current stage.
    """

    def __init__(self, where: Callable[[], torch.device]) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        state = current()
        if name in _MOVES or (state is not None and state.unit_writes is not None):
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0}
        if len(devices) < 2:
            return func(*args, **kwargs)
        target = self._where()
        if args and isinstance(args[0], Tensor) and _keeps_target(name):
            target = args[0].device
        moved = [
            leaf.to(target) if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.device != target else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(moved, structure)
        return func(*args, **kwargs)


def _keeps_target(name: str) -> bool:
    """In-place functions by torch's naming, and indexing, whose index follows the indexed tensor."""
    return (name.endswith("_") and not name.endswith("__")) or name in _TARGETED
