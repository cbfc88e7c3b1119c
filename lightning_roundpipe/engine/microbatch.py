"""Split a batch into micro-batches, and merge what the micro-batches give back.

Which leaves of a batch hold one row per sample is not declared anywhere: it is inferred from the one batch size that
the leaves have in common. A sequence has two readings, *container* (``[x, y]``: every entry holds all samples) and
*per sample* (``[image, image, ...]``: one entry for each sample). Each reading that is less usual costs a penalty, the
batch size with the lowest total wins, and a tie or a misfit is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lightning_roundpipe.engine.microbatch_containers import (
    children_of,
    common_kind,
    is_array,
    is_sequence,
    rebuild,
    rows_of,
    why_not_split,
)
from lightning_roundpipe.engine.microbatch_merge import merge_batch, merge_outputs

__all__ = ["BatchSplitError", "MicrobatchSplit", "batch_rows", "merge_batch", "merge_outputs", "split_batch"]

_WAYS_OUT = (
    "Split such batches yourself with RoundPipeStrategy(split_batch=fn), or with a method "
    "roundpipe_split_batch(self, batch, num_microbatches) on the LightningModule that returns a list of "
    "micro-batches; or set num_microbatches=1."
)


class BatchSplitError(ValueError):
    """The rows of a batch cannot be inferred; the message names the leaf and the ways out."""


@dataclass(frozen=True)
class MicrobatchSplit:
    """What :func:`split_batch` returns.

    Attributes:
        microbatches: the micro-batches, in row order.
        sizes: rows of each micro-batch; ``(1,)`` when the rows are unknown.
        batch_size: rows of the batch; ``None`` when nothing in it could be split.
    """

    microbatches: tuple[Any, ...]
    sizes: tuple[int, ...]
    batch_size: int | None


def split_batch(batch: Any, num_microbatches: int, *, min_rows: int = 1) -> MicrobatchSplit:
    """Split a batch along dimension 0 into at most ``num_microbatches`` micro-batches of nearly equal size.

    Larger micro-batches come first. Tensors and arrays become views, containers are rebuilt with their own type, what
    has no batch dimension (numbers, strings, 0-d tensors, tensors of leading size 1) is shared by all micro-batches;
    mappings of such things are not.
    With one micro-batch the batch itself is returned.

    Args:
        batch: any nesting of mappings, sequences, namedtuples and dataclasses over tensors, arrays and objects.
        num_microbatches: upper bound of the number of micro-batches, at least 1.
        min_rows: rows that each micro-batch has at least, where the batch has as many.

    Raises:
        ValueError: ``num_microbatches`` or ``min_rows`` is less than 1.
        BatchSplitError: more than one micro-batch is asked for and the leaves agree on no batch size, or on several.
    """
    for name, number in (("num_microbatches", num_microbatches), ("min_rows", min_rows)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")
    if num_microbatches == 1:
        rows = batch_rows(batch)
        return MicrobatchSplit((batch,), (1 if rows is None else rows,), rows)
    root = _read(batch)
    rows = _infer_rows(root)
    if rows is None:
        return MicrobatchSplit((batch,), (1,), None)
    count = max(1, min(num_microbatches, rows // min_rows))
    if count == 1:
        return MicrobatchSplit((batch,), (rows,), rows)
    small, num_larger = divmod(rows, count)
    sizes = tuple(small + 1 if index < num_larger else small for index in range(count))
    starts = tuple(accumulate(sizes[:-1], initial=0))
    return MicrobatchSplit(tuple(_cut(root, rows, tuple(zip(starts, sizes, strict=True)))), sizes, rows)


def batch_rows(batch: Any) -> int | None:
    """Return the number of rows (samples) of a batch, or ``None`` when its leaves do not tell."""
    try:
        return _infer_rows(_read(batch))
    except BatchSplitError:
        return None


@dataclass(slots=True)
class _Node:
    """One value of a batch and the ways in which it may be read.

    ``rows`` is the leading size of an array (``None``: not an array with rows). ``entries`` is the length of a sequence
    that may hold one entry per sample (0: it may not); unless ``proposes``, only if another leaf has that batch size.
    ``penalty`` is what the container reading costs. ``problem`` says why a value can be neither split nor shared.
    """

    path: str
    value: Any
    rows: int | None = None
    children: tuple[_Node, ...] = ()
    entries: int = 0
    proposes: bool = False
    penalty: int = 0
    problem: str = ""


@dataclass(frozen=True)
class _Fit:
    """How a node is read under a given batch size: at what penalty, and whether anything in it is cut."""

    penalty: int
    is_cut: bool
    per_sample: bool = False


def _read(value: Any, path: str = "batch", is_root: bool = True) -> _Node:
    children = children_of(value)
    if children is None:
        return _Node(path, value, rows=rows_of(value), problem=why_not_split(value))
    if is_sequence(value) and all(type(entry) in (str, int, float) for entry in value):
        children = []  # long lists of labels and texts need no node for each entry
    node = _Node(path, value, children=tuple(_read(entry, path + suffix, False) for suffix, entry in children))
    if is_sequence(value):
        _allow_per_sample(node, is_root)
    return node


def _allow_per_sample(node: _Node, is_root: bool) -> None:
    """Decide whether a sequence may hold one entry per sample, and set the fields of its node."""
    kind = common_kind(node.value)
    if kind is None or (is_root and isinstance(node.value, tuple) and kind not in ("text", "object")):
        return
    node.entries = len(node.value)
    # A tuple of tensors is far more often (x, y) or an LSTM state than a tuple of samples: it needs a second witness.
    node.proposes = not (isinstance(node.value, tuple) and kind == "array")
    if kind == "container":
        if any(_is_record(entry) for entry in node.children):
            node.penalty = 1
        elif all(len(_claimed_rows(entry)) == 1 for entry in node.children):
            # Each entry is a consistent batch in itself, such as those of a CombinedLoader: not samples by default.
            node.proposes = False


def _is_record(node: _Node) -> bool:
    """Tell an entry that mixes bare scalars with tensors: more likely one sample than a batch of them."""
    scalars = [
        child.rows is None and not child.children and not child.entries and child.value is not None
        for child in node.children
    ]
    return any(scalars) and not all(scalars)


def _claims(node: _Node) -> Iterator[tuple[int, _Node]]:
    """Yield every batch size that a part of the batch speaks for, with that part, in order."""
    if node.rows is not None:
        yield node.rows, node
    if node.proposes:
        yield node.entries, node
    for child in node.children:
        yield from _claims(child)


def _claimed_rows(node: _Node) -> set[int]:
    return {rows for rows, witness in _claims(node) if witness.rows is not None}


def _fit(node: _Node, rows: int) -> _Fit | None:
    """Return how the node is read if the batch has ``rows`` rows, ``None`` if it cannot be."""
    if node.problem:
        container = None
    elif node.rows is not None:
        container = _Fit(0, node.rows == rows) if node.rows in (1, rows) else None
    else:
        parts = []
        for child in node.children:
            part = _fit(child, rows)
            if part is None:
                break
            parts.append(part)
        is_cut = any(part.is_cut for part in parts)
        # Sharing a sequence is the last resort: with as many entries as rows it is read per sample (penalty 1).
        penalty = node.penalty + (2 if node.entries and not is_cut else 0) + sum(part.penalty for part in parts)
        container = _Fit(penalty, is_cut) if len(parts) == len(node.children) else None
    if node.entries == rows and rows and (container is None or container.penalty > 1):
        return _Fit(1, True, per_sample=True)
    return container


def _infer_rows(root: _Node) -> int | None:
    """Return the batch size that all leaves agree on, ``None`` when no leaf has rows."""
    if isinstance(root.value, Iterator):
        return None
    fits = {rows: fit for rows in dict.fromkeys(rows for rows, _ in _claims(root)) if (fit := _fit(root, rows))}
    fits = {rows: fit for rows, fit in fits.items() if fit.is_cut}
    if not fits:
        if _fit(root, -1) is not None:
            return None
        raise BatchSplitError(_describe_conflict(root))
    if 1 in fits:  # one row is always exact, while the other readings would share the only row as if it were a mask
        return 1
    lowest = min(fit.penalty for fit in fits.values())
    best = [rows for rows, fit in fits.items() if fit.penalty == lowest]
    if len(best) > 1:
        witnesses = {rows: witness for rows, witness in reversed(list(_claims(root)))}
        readings = " or ".join(f"{rows} rows ({_describe(witnesses[rows])})" for rows in best)
        raise BatchSplitError(f"cannot split the batch into micro-batches: it can be read as {readings}. {_WAYS_OUT}")
    return best[0]


def _describe(node: _Node) -> str:
    if is_array(node.value) and not getattr(node.value, "is_nested", False):
        return f"{node.path} of shape {tuple(node.value.shape)}"
    if is_sequence(node.value):
        return f"{node.path}, a {type(node.value).__name__} of {len(node.value)} entries"
    return f"{node.path} of type {type(node.value).__name__}"


def _describe_conflict(root: _Node) -> str:
    votes: dict[int, list[_Node]] = {}
    for rows, witness in _claims(root):
        if witness.rows != 1:
            votes.setdefault(rows, []).append(witness)
    rows = max(votes, key=lambda candidate: len(votes[candidate]), default=-1)
    offender = _offender(root, rows) or root
    text = f"cannot split the batch into micro-batches: {_describe(offender)}"
    text += f" cannot be split ({offender.problem})" if offender.problem else " does not fit"
    if votes:
        text += f", and the batch size is {rows} by {_describe(votes[rows][0])}"
    return f"{text}. {_WAYS_OUT}"


def _offender(node: _Node, rows: int) -> _Node | None:
    """Return the first innermost part that does not fit a batch of ``rows`` rows."""
    if _fit(node, rows) is not None:
        return None
    fits = [_fit(child, rows) for child in node.children]
    if not node.entries or any(fit is not None and fit.is_cut for fit in fits):
        for child in node.children:
            found = _offender(child, rows)
            if found is not None:
                return found
    return node


def _with_own_mappings(value: Any) -> Any:
    """``value``, which micro-batches share, with mappings of its own: steps take entries out of them and put some in.

    The last micro-batch has the original, so that what it does to it stays, as after one call.
    """
    children = children_of(value)
    if children is None:
        return value
    entries = [_with_own_mappings(entry) for _, entry in children]
    is_same = all(own is entry for own, (_, entry) in zip(entries, children, strict=True))
    return value if is_same and not isinstance(value, Mapping) else rebuild(value, entries)


def _cut(node: _Node, rows: int, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the parts of a node for each (start, length) in ``bounds``."""
    fit = _fit(node, rows)
    value = node.value
    if fit is None or not fit.is_cut:
        return [*(_with_own_mappings(value) for _ in bounds[1:]), value]
    if fit.per_sample:
        return [rebuild(value, value[start : start + length]) for start, length in bounds]
    if node.rows is None:
        parts = [_cut(child, rows, bounds) for child in node.children]
        return [rebuild(value, entries) for entries in zip(*parts, strict=True)]
    if not isinstance(value, torch.Tensor):
        return [value[start : start + length] for start, length in bounds]
    if value.layout is torch.sparse_coo:  # sparse tensors have no views
        index = torch.arange(rows, device=value.device)
        return [value.index_select(0, index[start : start + length]) for start, length in bounds]
    views = [value.narrow(0, start, length) for start, length in bounds]
    if value.requires_grad or value.is_inference():
        return views
    # Views have one version together: what one micro-batch changes in place, autograd would miss in the graphs of all.
    return [view.data for view in views]
