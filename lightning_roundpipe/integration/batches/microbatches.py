"""Split a batch into micro-batches.

Which parts of a batch are cut, and where, is decided in :mod:`reading`; here they are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from ...common.trees import mapped, rebuild, tensors_in
from .graphs import GraphsError, cut_graphs, num_graphs_of
from .nodes import Node, describe, is_column
from .reading import CUT, UNKNOWN, WAYS_OUT, BatchSource, BatchSplitError, Reading, Role, read_batch

# Entries of a tensor that are counted.
_MOST_COUNTED = 2**20
_IGNORED = -100


class Sizes(tuple[int, ...]):
    """Rows of each micro-batch.

    Attributes:
        counts: numbers of other things that outputs may have a row of: nodes, patches.
    """

    counts: tuple[tuple[int, ...], ...]

    def __new__(cls, rows: Iterable[int], counts: Iterable[Iterable[int]] = ()) -> Sizes:
        """Sizes of so many rows."""
        self = super().__new__(cls, rows)
        self.counts = tuple(dict.fromkeys(own for count in counts if (own := tuple(count)) != tuple(self)))
        return self


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
    lengths = tuple(small + 1 if index < num_larger else small for index in range(count))
    starts = tuple(accumulate(lengths[:-1], initial=0))
    bounds = tuple(zip(starts, lengths, strict=True))
    parts = _cut(reading.root, reading, bounds)
    return MicrobatchSplit(tuple(parts), _sizes(reading, bounds), reading.rows)


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
    bounds = ((start, first), (start + first, second))
    parts = _cut(reading.root, reading, bounds)
    return together, MicrobatchSplit(tuple(parts), _sizes(reading, bounds), first + second)


def _sizes(reading: Reading, bounds: Sequence[tuple[int, int]]) -> Sizes:
    """Rows of the parts, and what else is counted of them."""
    counts = [tuple(ends[start + length] - ends[start] for start, length in bounds) for ends in reading.counts.values()]
    return Sizes((length for _, length in bounds), counts)


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
    if role is Role.SAMPLES and is_column(value):
        return [_cut_column(value, start, start + length) for start, length in bounds]
    if role is Role.SAMPLES:
        return [rebuild(value, value[start : start + length]) for start, length in bounds]
    if role is Role.COUNTED:
        return [reading.counted[node.path].cut(value, start, length) for start, length in bounds]
    if role is Role.ROWS and num_graphs_of(value) is not None:
        try:
            return cut_graphs(value, bounds)
        except GraphsError as error:
            raise BatchSplitError(
                f"cannot split the batch into micro-batches: {describe(node)}: {error}. {WAYS_OUT}"
            ) from error
    if role is Role.ROWS:
        return _cut_rows(value, bounds)
    if any(_is_cut(child, reading) for child in node.children):
        parts = [_cut(child, reading, bounds) for child in node.children]
        return [rebuild(value, entries) for entries in zip(*parts, strict=True)]
    # Micro-batches share the value, but for mappings: steps take entries out of them and put some in. The last one has
    # the originals, so that what it does to them stays, as after one call.
    return [*(mapped(value, anew=Mapping) for _ in bounds[1:]), value]


def _is_cut(node: Node, reading: Reading) -> bool:
    return reading.roles.get(node.path) in CUT or any(_is_cut(child, reading) for child in node.children)


def _cut_column(value: Any, start: int, stop: int) -> Any:
    """Entries of a sequence that is no list, in its own type if it can be sliced."""
    try:
        return value.iloc[start:stop] if hasattr(value, "iloc") else value[start:stop]
    except TypeError:
        return [value[index] for index in range(start, stop)]


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
