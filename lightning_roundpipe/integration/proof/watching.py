"""What the proof sees of a step's operators: random ones, and those that write what was there before."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...autograd.randomness import drops_nothing, is_random
from ...common.dispatch import ThreadsDispatchMode
from .draws import Draws

# Scales rows of an embedding to a norm: twice is the same as once.
_HARMLESS = (torch.ops.aten.embedding_renorm_,)
# Not torch's to classify: the loss of a classification, whose first argument has the shape [samples, classes].
_CLASSIFICATION = torch.ops.aten.nll_loss_forward


class Originals:
    """Tensors as they were, each copied when something is about to write its memory; ``.data`` shares it."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._named: dict[int, list[tuple[str, Tensor, Tensor]]] = {}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._written: dict[str, None] = {}
        for name, tensor in named:
            address = _address_of(tensor)
            if address:
                self._named.setdefault(address, []).append((name, tensor, tensor.detach()))

    @property
    def written(self) -> list[str]:
        """Names of those that were written, or have other memory now."""
        moved = (
            name
            for address, found in self._named.items()
            for name, tensor, _ in found
            if _address_of(tensor) != address
        )
        return list(dict.fromkeys((*self._written, *moved)))

    def about_to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""
        for tensor in _written_by(func, args, kwargs):
            address = _address_of(tensor)
            if address not in self._named:
                continue
            if address not in self._copies:
                storage = tensor.untyped_storage()
                self._copies[address] = storage, storage.clone()  # type: ignore[no-untyped-call]
            if func.overloadpacket not in _HARMLESS:
                self._written.update((name, None) for name, _, _ in self._named[address])

    def put_back(self) -> None:
        """All tensors hold again what they held; those that were written have a new version, so that others see it."""
        for address, found in self._named.items():
            for _, tensor, before in found:
                if _address_of(tensor) != address:
                    tensor.data = before
        for address, (storage, copy) in self._copies.items():
            storage.copy_(copy)
            for _, tensor, _ in self._named[address]:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        self._copies.clear()
        self._written.clear()


def _address_of(tensor: Tensor) -> int:
    """Of a tensor's memory; 0 for one that has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse ones, wrappers around other tensors
        return 0


@functools.cache
def _writing_places(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if not isinstance(func, torch._ops.OpOverload):
        return []
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writing_places(func)]
    flat = [x for value in given for x in (value if isinstance(value, (list, tuple)) else [value])]
    return [x for x in flat if isinstance(x, Tensor)]


class ProofMode(ThreadsDispatchMode):
    """On the thread of a micro-batch, around the user's step.

    Args:
        draws: None leaves random numbers alone.
        part: that the micro-batch is of them, see :meth:`draws.Draws.begin`.

    Attributes:
        square: rows of a classification with as many classes as rows; 0 if there was none.
    """

    def __init__(self, draws: Draws | None, originals: Originals, part: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._part = part
        self._originals = originals
        self.square = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._originals.about_to(func, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if func.overloadpacket is _CLASSIFICATION and args[0].ndim == 2 and args[0].shape[0] == args[0].shape[1]:
            self.square = int(args[0].shape[0])
        if self._draws is not None and is_random(func) and not drops_nothing(func, args, kwargs):
            return self._draws.draw(self._part, func, args, kwargs)
        return func(*args, **kwargs)
