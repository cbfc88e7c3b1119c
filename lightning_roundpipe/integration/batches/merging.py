"""Merge what the micro-batches of one step return into what the step on the whole batch would return."""

from __future__ import annotations

import math
import numbers
import sys
from collections import UserList
from collections.abc import Sequence
from dataclasses import is_dataclass
from itertools import chain
from typing import Any

import torch

from ...common.trees import are_equal, children_of, rebuild
from .microbatches import Sizes
from .nodes import is_array, is_column, is_sequence, rows_of


class Part:
    """Stands for a part of a micro-batch in what is merged: see [Note: changes to a batch] in :mod:`changes`.

    Attributes:
        path: the way to it, the same in the batch.
        value: it.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, path: tuple[Any, ...], value: Any) -> None:
        self.path = path
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and other.path == self.path


def merge_outputs(
    outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float], *, given_at_once: bool = False
) -> Any:
    """Merge the step outputs of the micro-batches into the output of one step on the whole batch.

    Containers of one structure are merged leaf by leaf. Tensors, arrays and lists with one row or entry per sample are
    concatenated in order; floating-point scalars are averaged by weight; what is equal everywhere (or the same object)
    is kept; anything else becomes the list of the values.

    Args:
        outputs: what the step returned for each micro-batch; a single one is returned unchanged.
        sizes: rows of each micro-batch, and of other things.
        weights: weight of each micro-batch in averages; a micro-batch of weight 0 does not count, not even with a NaN.
            If all are 0, all count alike.
        given_at_once: the outputs are lists by which another list was extended: as many entries for each sample, in
            order, if the lengths allow it.
    """
    if len(outputs) == 1:
        return outputs[0]
    if given_at_once and _are_of_samples([len(output) for output in outputs], sizes):
        return list(chain.from_iterable(outputs))
    total = math.fsum(weights)
    normalized = tuple(weight / total if total else 1 / len(weights) for weight in weights)
    with torch.no_grad():
        return _merge(list(outputs), sizes, normalized)


def _merge(values: list[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    if all(value is first for value in values):
        return first
    if _have_rows([rows_of(value) for value in values], sizes) and _are_alike(values):
        return _concatenate(values)
    if all(_is_number(value) for value in values) and not all(type(value) is int for value in values):
        return _mean(values, weights)
    if children_of(first) is not None and all(type(value) is type(first) for value in values):
        return _merge_containers(values, sizes, weights)
    if all(is_column(value) for value in values) and _have_rows([*map(len, values)], sizes):
        return _joined(values)
    return first if all(are_equal(first, value) for value in values) else values


def apart_in(outputs: Sequence[Any], sizes: Sequence[int], path: str = "") -> str | None:
    """The way to the first tensors in outputs that :func:`merge_outputs` leaves apart; None if there are none."""
    first = outputs[0]
    if all(is_array(output) for output in outputs):
        is_joined = _have_rows([rows_of(output) for output in outputs], sizes) and _are_alike(list(outputs))
        is_joined |= not any(output.ndim for output in outputs) or all(are_equal(first, output) for output in outputs)
        return None if is_joined else path
    opened = [children_of(output) or [] for output in outputs]
    if len({tuple(name for name, _ in entries) for entries in opened}) > 1:
        return None
    found = (
        apart_in([value for _, value in entries], sizes, path + entries[0][0]) for entries in zip(*opened, strict=True)
    )
    return next((way for way in found if way is not None), None)


def _have_rows(found: Sequence[int | None], sizes: Sequence[int]) -> bool:
    """Whether these are the rows of the micro-batches, or the numbers of something else that they have."""
    return any(tuple(found) == tuple(own) for own in (sizes, *(sizes.counts if isinstance(sizes, Sizes) else ())))


def _joined(columns: list[Any]) -> Any:
    """Sequences one after the other: in their own type if it can be joined."""
    first, pandas = columns[0], sys.modules.get("pandas")
    if pandas is not None and isinstance(first, (pandas.Series, pandas.DataFrame)):
        are_counted = all(isinstance(column.index, pandas.RangeIndex) and column.index.start == 0 for column in columns)
        return pandas.concat(columns, ignore_index=are_counted)
    if pandas is not None and isinstance(first, pandas.Index):
        return first.append(columns[1:])
    entries = [*chain.from_iterable(columns)]
    return type(first)(entries) if isinstance(first, UserList) else entries


def _merge_containers(values: list[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
    first = values[0]
    if is_sequence(first) and _are_per_sample(values, sizes):
        return rebuild(first, list(chain.from_iterable(values)))
    children = [children_of(value) or [] for value in values]
    names = [{name for name, _ in entries} for entries in children]
    common = min(names, key=len)
    # Beside its fields a dataclass may have what was computed in some micro-batches only.
    if not all(common <= other if is_dataclass(first) else common == other for other in names):
        return values
    template = names.index(common)
    by_name = [dict(entries) for entries in children]  # the keys may come in another order
    merged = [_merge([entries[name] for entries in by_name], sizes, weights) for name, _ in children[template]]
    return rebuild(values[template], merged)


def _are_of_samples(lengths: Sequence[int], sizes: Sequence[int]) -> bool:
    """Tell whether lists have as many entries for each row, or lengths that depend on the data."""
    per_row = lengths[0] // max(sizes[0], 1)
    return len(set(lengths)) > 1 or all(n == per_row * size for n, size in zip(lengths, sizes, strict=True))


def _are_per_sample(values: list[Any], sizes: Sequence[int]) -> bool:
    if any(len(v) != size for v, size in zip(values, sizes, strict=True)):
        return False
    if isinstance(values[0], tuple):  # columns, but for the names that a DataLoader collates
        return all(type(entry) is str for value in values for entry in value)
    if len(set(sizes)) > 1:
        return True  # as containers they would have the same length in every micro-batch
    columns = zip(*values, strict=True)  # one of which may hold as many things as there are rows by chance in some
    return not any(all(map(_holds_rows, column, sizes)) for column in columns)


def _holds_rows(value: Any, size: int) -> bool:
    """Tell whether any array in the value has the leading size ``size``."""
    if isinstance(value, Part):
        value = value.value
    if is_array(value):
        return rows_of(value) == size
    return any(_holds_rows(entry, size) for _, entry in children_of(value) or ())


def _are_alike(arrays: list[Any]) -> bool:
    """Tell whether arrays can be joined: all tensors or all numpy arrays, of equal shape but for dimension 0."""
    first = arrays[0]
    same = all(isinstance(array, torch.Tensor) == isinstance(first, torch.Tensor) for array in arrays)
    return same and all(tuple(array.shape[1:]) == tuple(first.shape[1:]) for array in arrays)


def _concatenate(arrays: list[Any]) -> Any:
    if isinstance(arrays[0], torch.Tensor):
        return torch.cat([array.to(arrays[0].device) for array in arrays])
    return sys.modules["numpy"].concatenate(arrays)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and (value.is_floating_point() or value.is_complex())
    # Floating-point numbers of numpy are real ones, too; truth values and its integers are integral.
    return type(value) is int or (isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral))


def _mean(values: list[Any], weights: Sequence[float]) -> Any:
    """Return the weighted mean: a tensor of the first tensor's dtype and device, or a float if there is no tensor."""
    weighted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    template = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if template is None:
        # Equal values stay as they are: weights like 1/3 would move the last digit.
        if all(value == values[0] for value in values):
            return float(values[0])
        return math.fsum(float(value) * weight for value, weight in weighted)
    # Half precision would lose digits with every term.
    dtype = torch.float32 if template.dtype.itemsize < 4 else template.dtype
    terms = [torch.as_tensor(value).to(template.device, dtype) * weight for value, weight in weighted]
    return torch.stack(terms).sum().to(template.dtype)
