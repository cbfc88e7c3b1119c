"""Split a batch into micro-batches.

Which parts of a batch are cut, and where, is decided in :mod:`reading`; here they are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ...common.trees import mapped, rebuild, tensors_in
from .nodes import Node
from .reading import UNKNOWN, BatchSource, BatchSplitError, Reading, Role, read_batch

# Entries of a tensor that are counted.
_MOST_COUNTED = 2**20
_IGNORED = -100


class MicrobatchSplit(NamedTuple):
    """A batch cut into micro-batches.

    Attributes:
        sizes: rows of each micro-batch; 1 where the rows are unknown.
        batch_size: rows of the batch; ``None`` when they are unknown.
    """

    microbatches: tuple[Any, ...]
    sizes: tuple[int, ...]
    batch_size: int | None


def split_batch(
    batch: Any,
    num_microbatches: int,
    *,
    min_rows: int = 1,
    source: BatchSource = UNKNOWN,
    held: dict[str, Role] | None = None,
) -> MicrobatchSplit:
    """Split a batch along dimension 0 into at most ``num_microbatches`` micro-batches of nearly equal size.

    Larger micro-batches come first. Tensors and arrays become views, containers are rebuilt with their own type, what
    has no batch dimension (numbers, strings, 0-d tensors, tensors of leading size 1) is shared by all micro-batches;
    mappings of such things are not.
    With one micro-batch the batch itself is returned.

    Args:
        batch: any nesting of mappings, sequences, namedtuples and dataclasses over tensors, arrays and objects.
        num_microbatches: upper bound of the number of micro-batches, at least 1.
        min_rows: rows that each micro-batch has at least, where the batch has as many.
        source: what is known of where the batch comes from.
        held: how earlier batches of the same source were read, by path; this one is added.

    Raises:
        BatchSplitError: more than one micro-batch is asked for and no reading of the batch is certain.
    """
    if num_microbatches == 1:
        rows = batch_rows(batch, source)
        return MicrobatchSplit((batch,), (1 if rows is None else rows,), rows)
    reading = read_batch(batch, source, held)
    if reading.rows is None:
        return MicrobatchSplit((batch,), (1,), None)
    count = max(1, min(num_microbatches, reading.rows // min_rows))
    if count == 1:
        return MicrobatchSplit((batch,), (reading.rows,), reading.rows)
    small, num_larger = divmod(reading.rows, count)
    sizes = tuple(small + 1 if index < num_larger else small for index in range(count))
    starts = tuple(accumulate(sizes[:-1], initial=0))
    parts = _cut(reading.root, reading, tuple(zip(starts, sizes, strict=True)))
    return MicrobatchSplit(tuple(parts), sizes, reading.rows)


def split_two(
    batch: Any, num_microbatches: int, *, min_rows: int, source: BatchSource, held: dict[str, Role] | None
) -> tuple[Any, MicrobatchSplit] | None:
    """The rows of two of these micro-batches, neighbours that differ most in what they have of labels and masks,
    together and one by one; None if there is only one micro-batch.

    Args and Raises:
        as of :func:`split_batch`.
    """
    microbatches, sizes, _ = split_batch(batch, num_microbatches, min_rows=min_rows, source=source, held=held)
    if len(sizes) < 2:
        return None
    reading = read_batch(batch, source, held)
    contents = [*map(_content_of, microbatches)]
    index = max(range(len(sizes) - 1), key=lambda index: _distance(*contents[index : index + 2]))
    start, (first, second) = sum(sizes[:index]), sizes[index : index + 2]
    (together,) = _cut(reading.root, reading, ((start, first + second),))
    parts = _cut(reading.root, reading, ((start, first), (start + first, second)))
    return together, MicrobatchSplit(tuple(parts), (first, second), first + second)


def _content_of(microbatch: Any) -> list[float]:
    """Of each small tensor how many entries are neither 0 nor the label that losses leave out."""
    tensors = [x for _, x in tensors_in(microbatch) if x.layout is torch.strided and x.numel() <= _MOST_COUNTED]
    return [float(((x != 0) & (x != _IGNORED)).sum()) for x in tensors if not x.is_meta]


def _distance(one: list[float], other: list[float]) -> float:
    """How much two micro-batches differ in what they have."""
    return sum(abs(x - y) / max(x + y, 1.0) for x, y in zip(one, other, strict=False))


def batch_rows(batch: Any, source: BatchSource = UNKNOWN) -> int | None:
    """Return the number of rows (samples) of a batch, or ``None`` when that is not certain."""
    try:
        return read_batch(batch, source).rows
    except BatchSplitError:
        return None


def _cut(node: Node, reading: Reading, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the parts of a node for each (start, length) in ``bounds``."""
    value, role = node.value, reading.roles.get(node.path)
    if role is Role.SAMPLES:
        return [rebuild(value, value[start : start + length]) for start, length in bounds]
    if role is Role.ROWS:
        return _cut_rows(value, bounds)
    if any(_is_cut(child, reading) for child in node.children):
        parts = [_cut(child, reading, bounds) for child in node.children]
        return [rebuild(value, entries) for entries in zip(*parts, strict=True)]
    # Micro-batches share the value, but for mappings: steps take entries out of them and put some in. The last one has
    # the originals, so that what it does to them stays, as after one call.
    return [*(mapped(value, anew=Mapping) for _ in bounds[1:]), value]


def _is_cut(node: Node, reading: Reading) -> bool:
    role = reading.roles.get(node.path)
    return role in (Role.ROWS, Role.SAMPLES) or any(_is_cut(child, reading) for child in node.children)


def _cut_rows(value: Any, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [value[start : start + length] for start, length in bounds]
    if value.layout is torch.sparse_coo:  # sparse tensors have no views
        index = torch.arange(sum(length for _, length in bounds), device=value.device)
        return [value.index_select(0, index[start : start + length]) for start, length in bounds]
    views = [value.narrow(0, start, length) for start, length in bounds]
    if value.requires_grad or value.is_inference():
        return views
    # Views have one version together: what one micro-batch changes in place, autograd would miss in the graphs of all.
    return [view.data for view in views]
