"""Which parameters of a unit autocast casts, and nothing else looks at.

[Note: low parameters]
Where autocast casts a weight each time it is used, a device may as well hold the result: half the bytes travel, and the
cast is saved. The values that the unit computes stay the same bit for bit, if no code notices. So a parameter counts as
*low* only if a run of the unit in the dtype of the master has shown that

- every operator that reads it, or a view of it, is autocast's own cast,
- no Python code asks for its dtype, or converts it,
- no autograd function of the user takes it: its backward runs without autocast,
- if it is trained, no element is cast twice: autograd would add up the two gradients in the low dtype.

A parameter that the run does not use stays as it is: nothing is known about it.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common.dispatch import ThreadsDispatchMode
from ..common.sizes import extent_of

_ATEN = torch.ops.aten
# Their backward only moves elements, so that it is exact in any dtype. Not expand: its backward adds up.
_VIEWS = frozenset(
    {
        _ATEN.alias, _ATEN.chunk, _ATEN.detach, _ATEN.flatten, _ATEN.narrow, _ATEN.permute, _ATEN.reshape,
        _ATEN.select, _ATEN.slice, _ATEN.split, _ATEN.split_with_sizes, _ATEN.squeeze, _ATEN.t, _ATEN.transpose,
        _ATEN.unbind, _ATEN.unflatten, _ATEN.unsqueeze, _ATEN.view, _ATEN._unsafe_view,
    }
)  # fmt: skip
_VIEW_AS_DTYPE = _ATEN.view.dtype
# Conversions by the user: their result may be changed in place, and would be the weight itself in the low dtype.
_CONVERSIONS = frozenset(
    {
        Tensor.to, Tensor.type, Tensor.type_as, Tensor.bfloat16, Tensor.half, Tensor.float, Tensor.double,
    }
)  # fmt: skip
_ASKS_NO_DTYPE = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("device", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse",
                         "layout", "ndim", "requires_grad", "shape")
        ),
        Tensor.__hash__, Tensor.__len__, Tensor.dim, Tensor.get_device, Tensor.is_contiguous, Tensor.ndimension,
        Tensor.numel, Tensor.size, Tensor.stride,
    }
)  # fmt: skip


class Use(enum.IntEnum):
    """What a run makes of a parameter. Of several runs the greatest value holds."""

    CAST = 1  # every element is cast once at most
    CAST_AGAIN = 2  # some elements are cast several times
    OTHER = 3  # it is used in another way as well


class CastWatch:
    """While open, notes how the calling thread uses ``parameters``; see [Note: low parameters].

    Args:
        parameters: to be watched, in their masters' dtype.
        dtype: to which autocast casts.
    """

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._uses: dict[int, Use] = {}
        self._cast: dict[int, list[tuple[int, int]]] = {}
        self._by_storage: dict[int, int] = {}
        self._num_seen: dict[int, int] = {}
        self._has_grad_mode = False
        for parameter in parameters:
            storage = _storage_of(parameter)
            if storage is None:
                self._uses[id(parameter)] = Use.OTHER
            elif (other := self._by_storage.setdefault(storage, id(parameter))) != id(parameter):
                self._uses[other] = self._uses[id(parameter)] = Use.OTHER  # they share their memory
        self._modes = contextlib.ExitStack()

    def use_of(self, parameter: Tensor) -> Use | None:
        """What was seen of it; None if it was not used."""
        return self._uses.get(id(parameter))

    def note_results(self, tensors: Iterable[Tensor]) -> None:
        """Notes what the run gave away: the code that gets a parameter may do anything with it."""
        for key, _ in self.watched(tensors):
            self.note(key, Use.OTHER)

    def __enter__(self) -> CastWatch:
        self._has_grad_mode = torch.is_grad_enabled()
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.close()

    def watched(self, values: Iterable[Any]) -> Iterator[tuple[int, Tensor]]:
        """Those of ``values`` that are watched parameters or views of them, with the parameter's key."""
        for value in values:
            if isinstance(value, (list, tuple)):
                yield from self.watched(value)
            elif isinstance(value, Tensor) and (key := self._by_storage.get(_storage_of(value) or 0)) is not None:
                yield key, value

    def note(self, key: int, use: Use) -> None:
        """Notes one use of a parameter."""
        self._uses[key] = max(use, self._uses.get(key, Use.CAST))

    def num_seen(self, key: int) -> int:
        """Operators that have read the parameter so far."""
        return self._num_seen.get(key, 0)

    def note_operator(self, func: Any, key: int, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes an operator that reads ``tensor``, the parameter or a view of it."""
        self._num_seen[key] = self.num_seen(key) + 1
        if func.overloadpacket in _VIEWS and func is not _VIEW_AS_DTYPE:
            return
        if not self._is_cast(func, args, kwargs) or torch.is_grad_enabled() != self._has_grad_mode:
            self.note(key, Use.OTHER)
            return
        start, stop = extent_of(tensor)
        known = self._cast.setdefault(key, [])
        is_again = any(start < other_stop and other_start < stop for other_start, other_stop in known)
        known.append((start, stop))
        self.note(key, Use.CAST_AGAIN if is_again else Use.CAST)

    def _is_cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if func is _ATEN._to_copy.default:
            return kwargs == {"dtype": self._dtype}
        return func is _ATEN.to.dtype and len(args) > 1 and args[1] is self._dtype  # in inference mode


class _Operators(ThreadsDispatchMode):
    """What happens below autocast: casts are visible there."""

    def __init__(self, watch: CastWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for key, tensor in self._watch.watched([*args, *kwargs.values()]):
            self._watch.note_operator(func, key, tensor, args, kwargs)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """What Python code does with a parameter: also what no operator shows, such as a look at its dtype."""

    def __init__(self, watch: CastWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_NO_DTYPE:
            return func(*args, **kwargs)
        watch = self._watch
        before = [(key, watch.num_seen(key)) for key, _ in watch.watched([*args, *kwargs.values()])]
        result = func(*args, **kwargs)
        for key, num_seen in before:
            if func in _CONVERSIONS or watch.num_seen(key) == num_seen:
                watch.note(key, Use.OTHER)
        return result


def in_doubt(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of ``module`` that may be used in another way when they are not watched.

    In evaluation, attention and encoder layers of torch take a fast path, unless a function mode is on.
    """
    for part in module.modules():
        if isinstance(part, (nn.MultiheadAttention, nn.TransformerEncoderLayer)) and not part.training:
            yield from part.parameters()


def _storage_of(tensor: Tensor) -> int | None:
    """Identifies the memory of ``tensor``; None for layouts that have several pieces or none."""
    if tensor.layout is not torch.strided:
        return None
    identity: int = tensor.untyped_storage()._cdata
    return identity
