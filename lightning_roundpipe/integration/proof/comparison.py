"""Whether two values are the same but for rounding: of nested containers, leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.trees import children_of

# What rounding may do to a number, as a part of it. Micro-batches of other sizes may take other kernels.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Smaller numbers may be what is left of larger ones: they are off by as much as this one.
_SMALL = 0.01


@dataclass(frozen=True)
class Difference:
    """Between what rows give as one micro-batch and as two.

    Attributes:
        path: of the leaf, from the value that was compared.
        whole, split: what the leaves are, in words.
        is_of_rows: whether they are tensors that differ in their number of rows alone.
    """

    path: str
    whole: str
    split: str
    is_of_rows: bool = False


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """The relative difference that rounding explains where numbers of these dtypes are computed with."""
    known = [_ROUNDING[dtype] for dtype in dtypes if dtype in _ROUNDING]
    return max(known, default=_ROUNDING[torch.float32])


def differences(whole: Any, split: Any, rounding: float, path: str = "") -> Iterator[Difference]:
    """The leaves of two values that differ. Objects of unknown classes do not count."""
    if whole is split:
        return
    if _is_numeric(whole) and _is_numeric(split):
        one, other = _as_tensor(whole), _as_tensor(split)
        if one.shape != other.shape:
            ours, theirs = (f"of shape {tuple(tensor.shape)}" for tensor in (one, other))
            is_of_rows = min(one.ndim, other.ndim) > 0 and one.shape[1:] == other.shape[1:]
            yield Difference(path, ours, theirs, is_of_rows)
        elif not _are_close(one, other, rounding):
            yield Difference(path, *_shown(one, other))
        return
    entries, others = children_of(whole), children_of(split)
    if entries is not None and others is not None:
        yield from _of_entries(entries, others, rounding, path)
    elif (_is_plain(whole) or _is_plain(split)) and (type(whole) is not type(split) or whole != split):
        yield Difference(path, _brief(whole), _brief(split))


def _of_entries(
    entries: list[tuple[str, Any]], others: list[tuple[str, Any]], rounding: float, path: str
) -> Iterator[Difference]:
    ours, theirs = dict(entries), dict(others)
    if ours.keys() != theirs.keys():
        yield Difference(path, f"with {len(ours)} entries", f"with {len(theirs)} entries")
        return
    for name, value in ours.items():
        yield from differences(value, theirs[name], rounding, path + name)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and not value.is_meta
    kind = getattr(getattr(value, "dtype", None), "kind", "")  # of NumPy
    return type(value) in (int, float, complex) or (kind != "" and kind in "biufc")


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, Tensor)


def _as_tensor(value: Any) -> Tensor:
    return value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(value)


def _are_close(one: Tensor, other: Tensor, rounding: float) -> bool:
    if one.numel() == 0:
        return True
    if not (one.is_floating_point() or one.is_complex()) and one.dtype == other.dtype:
        return torch.equal(one, other)
    kind = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(kind), other.to(kind)
    finite = one.abs()[one.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(other, one, rtol=rounding, atol=rounding * max(largest, _SMALL), equal_nan=True)


def are_close(one: float, other: float, rounding: float, *, beside: Iterable[float] = ()) -> bool:
    """Whether two numbers are equal but for rounding.

    Args:
        beside: numbers that they were made of, which may be larger.
    """
    if math.isnan(one) or math.isnan(other) or math.isinf(one) or math.isinf(other):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= rounding * max(abs(one), _SMALL, *map(abs, beside))


def _shown(one: Tensor, other: Tensor) -> tuple[str, str]:
    """The two as a reader tells them apart: the element where they are furthest from each other."""
    one, other = one.reshape(-1), other.reshape(-1)
    place = 0
    if one.numel() > 1:
        gap = (one.to(torch.float64) - other.to(torch.float64)).abs().nan_to_num(nan=math.inf)
        place = int(gap.argmax())
    where = f" at element {place}" if one.numel() > 1 else ""
    first, second = told_apart(one[place].item(), other[place].item())
    return f"{first}{where}", f"{second}{where}"


def told_apart(one: Any, other: Any) -> tuple[str, str]:
    """Two numbers with as many digits as they need to look different."""
    digits = next((n for n in (4, 6, 9) if f"{one:.{n}g}" != f"{other:.{n}g}"), 17)
    return f"{one:.{digits}g}", f"{other:.{digits}g}"


def _brief(value: Any) -> str:
    text = repr(value) if _is_plain(value) and not isinstance(value, Tensor) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
