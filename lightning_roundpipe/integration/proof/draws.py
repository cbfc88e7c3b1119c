"""Random numbers of the proof: what rows draw as one micro-batch, they draw as two.

[Note: same draws]
Dropout is off, as it changes nothing about how a batch may be split: the functions do nothing. Whatever else draws is
seen by a dispatch mode (:mod:`watching`), in user code and in units, and draws from seeds of its own, part by part::

    as one micro-batch     third draw, (8, 5):   rows 0-3 from seed (2, 0), rows 4-7 from seed (2, 1)
    as two                 third draw, (4, 5):   from seed (2, 0)         |     from seed (2, 1)

A draw that has no rows (a noise level, a layer that is skipped) is the same in all of them. A permutation of all rows
is one of each part. Where a draw cannot be matched, because it has other sizes or comes in another order, that is
noted: what differs then may differ because of it. So are draws from Python's and NumPy's generators, which begin with
the same seed in each micro-batch, but know of no rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd.randomness import takes_generator
from ...common.attributes import attribute_set
from ...common.seeds import derive_seed

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_PLACE_OF_RATE = 4  # of attention's dropout_p


class _Draw(NamedTuple):
    """One draw of the micro-batch of all rows.

    Attributes:
        shape: of what is drawn, or of what it is drawn from.
        is_by_rows: whether each part has drawn its own rows.
    """

    func: Any
    shape: tuple[int, ...]
    is_by_rows: bool


class Draws:
    """The draws of some rows; see [Note: same draws].

    Args:
        sizes: rows of each part.

    Attributes:
        are_lost: whether a draw of a part could not be that of the same rows.
    """

    def __init__(self, seed: int, sizes: Sequence[int]) -> None:
        self.seed = seed
        self._sizes = tuple(sizes)
        self._made: list[_Draw] = []
        self._num_drawn: dict[int | None, int] = {}
        self.are_lost = False

    def begin(self, part: int | None) -> None:
        """The micro-batch of all rows (None) begins, or that of a part, after it; parts may take turns."""
        self._num_drawn[part] = 0
        if part is None:
            self._made.clear()

    def end(self, part: int | None) -> None:
        """The micro-batch has ended."""
        self.are_lost |= self._num_drawn[part] != len(self._made)

    def draw(self, part: int | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a random operator."""
        shape, index = _shape_of(func, args, kwargs), self._num_drawn[part]
        self._num_drawn[part] += 1
        if part is None:
            rows = shape[0] if shape else 0
            draw = _Draw(func, shape, is_by_rows=rows > 0 and rows % sum(self._sizes) == 0)
            self._made.append(draw)
            return self._drawn_whole(draw, index, args, kwargs)
        made = self._made[index] if index < len(self._made) else None
        if made is not None and made.func is func and made.shape[1:] == shape[1:]:
            if shape == made.shape:
                return self._drawn_whole(made, index, args, kwargs)
            if made.is_by_rows and shape[0] * sum(self._sizes) == made.shape[0] * self._sizes[part]:
                return _seeded(func, args, kwargs, derive_seed(self.seed, index, part))
        self.are_lost = True
        return _seeded(func, args, kwargs, derive_seed(self.seed, index, 0))

    def _drawn_whole(self, draw: _Draw, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not draw.is_by_rows:
            return _seeded(draw.func, args, kwargs, derive_seed(self.seed, index, 0))
        lengths = [draw.shape[0] // sum(self._sizes) * size for size in self._sizes]
        results = []
        for part, (start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
            given, named = _narrowed(draw, args, kwargs, start, length)
            result = _seeded(draw.func, given, named, derive_seed(self.seed, index, part))
            results.append(result + start if _is_permutation(draw.func) else result)
        if _writes_first(draw.func):
            return args[0]
        return _joined(results)


def _is_permutation(func: Any) -> bool:
    return bool(func.overloadpacket is torch.ops.aten.randperm)


@functools.cache
def _writes_first(func: Any) -> bool:
    """Whether an operator changes its first argument in place, and returns it."""
    first = func._schema.arguments[0] if func._schema.arguments else None
    return first is not None and first.alias_info is not None and first.alias_info.is_write


@functools.cache
def _place_of_size(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("size") if "size" in names else None


def _shape_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if _is_permutation(func):
        return (int(args[0]),)
    place = _place_of_size(func)
    if place is not None:
        return tuple(args[place] if place < len(args) else kwargs["size"])
    given = (*args, *kwargs.values())
    return next((tuple(x.shape) for x in given if isinstance(x, Tensor) and x.ndim), ())


def _narrowed(
    draw: _Draw, args: tuple[Any, ...], kwargs: dict[str, Any], start: int, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for some rows."""
    rows, place = draw.shape[0], _place_of_size(draw.func)
    if _is_permutation(draw.func):
        return (length, *args[1:]), kwargs

    def narrow(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows
        return value.narrow(0, start, length) if has_rows else value

    given = [narrow(value) for value in args]
    if place is not None and place < len(args):
        given[place] = [length, *args[place][1:]]
    return tuple(given), {name: narrow(value) for name, value in kwargs.items()}


def _joined(results: list[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*results, strict=True))


def _seeded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Any:
    """Calls a random operator, which draws from ``seed``."""
    device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    device = torch.device(kwargs.get("device") or "cpu") if device is None else device
    given = tuple(arg for arg in args if not isinstance(arg, torch.Generator))
    if takes_generator(func) and len(given) == len(args):
        return func(*args, **{**kwargs, "generator": torch.Generator(device).manual_seed(seed)})
    if len(given) < len(args):
        own = torch.Generator(device).manual_seed(seed)
        return func(*(own if isinstance(arg, torch.Generator) else arg for arg in args), **kwargs)
    default = torch.default_generator
    if device.type != "cpu":
        api = torch.get_device_module(device)
        default = api.default_generators[api.current_device() if device.index is None else device.index]
    before = default.get_state()
    default.manual_seed(seed)
    try:
        return func(*args, **kwargs)
    finally:
        default.set_state(before)


# --- dropout ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dropout_off() -> Iterator[None]:
    """While open, modules and functions drop nothing, on any thread."""
    with contextlib.ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(attribute_set(F, name, _doing_nothing(getattr(F, name))))
        stack.enter_context(attribute_set(torch, "dropout", _doing_nothing(torch.dropout)))
        attention = F.scaled_dot_product_attention
        stack.enter_context(attribute_set(F, "scaled_dot_product_attention", _attending_to_all(attention)))
        recurrent: Any = torch._VF
        for name in _RECURRENT:
            stack.enter_context(attribute_set(recurrent, name, _without_rate(getattr(recurrent, name))))
        yield


def _doing_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def dropout(input: Any, *args: Any, **kwargs: Any) -> Any:
        return input

    return dropout


def _attending_to_all(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if len(args) > _PLACE_OF_RATE:
            args = (*args[:_PLACE_OF_RATE], 0.0, *args[_PLACE_OF_RATE + 1 :])
        return function(*args, **({**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs))

    return scaled_dot_product_attention


def _without_rate(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent network; its rate of dropout is its only argument that is a float."""

    @functools.wraps(function)
    def recurrent(*args: Any, **kwargs: Any) -> Any:
        return function(*(0.0 if type(arg) is float else arg for arg in args), **kwargs)

    return recurrent
