"""How a batch is read: which of its parts hold one row, or one entry, per sample.

Nothing in a batch says so. What can be known is how many samples the DataLoader has put into it, that all rows must
agree, and how earlier batches of the same loader were read. From that a reading is derived, or there is none::

    DataLoader: 4 samples              batch                              reading
                                       {"pixels": (4, 3, 8, 8),           rows
                                        "labels": [{..}, {..}, {..}, {..}], samples: not looked into
                                        "scales": [(4, 3), (4, 5)],       columns: looked into, rows
                                        "points": (11, 3),                counted: 2 + 4 + 2 + 3 rows
                                        "num_points": [2, 4, 2, 3],       samples
                                        "mask": (1, 8),                   shared
                                        "step": 7}                        shared

- An array is cut along dimension 0 if that has as many rows as there are samples. One of leading size 1, numbers,
  texts, None and 0-d tensors are shared. Every other array is a misfit, unless something in the batch counts its rows
  for each sample, see :mod:`counted`. A batch of graphs (:mod:`graphs`) has as many rows as graphs.
- A list with as many entries as there are samples holds samples, and is not looked into; so does any other sequence, a
  column of a table or an array of texts. Any other list holds columns: every entry is read by itself. If torch's
  ``default_collate`` has made the batch, all of them do.
- The root is where the two are hard to tell apart: ``[x, y]`` for a batch of two samples. A root tuple whose entries
  all have the rows of the batch holds columns, like ``(x, y)``. A list that fits both is refused, unless its entries
  are not alike, so that they cannot be samples. So is a tuple further down, ``(h, c)`` or two samples, and a list if
  the ``collate_fn`` calls ``default_collate``, which makes lists of columns.
- If the DataLoader does not say how many samples there are, or something between it and the step has changed that, all
  rows must agree on a number, and no sequence at the root is taken for samples, except of texts and objects.
- An array of one row beside nothing but integers and texts is data, not a mask: one row, which is not cut. Packed text
  looks like that.

A sequence that was read in one way is read in the same way in later batches. If that does not fit, it is an error:
the first reading was wrong, or this batch is. So it is if what could not be read before fits now, by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .counted import Counted, Found, find_counted, num_samples_of
from .graphs import Bounds, bounds_of_graphs, num_graphs_of
from .nodes import Node, are_alike, describe, is_array, is_column, is_floating, is_sequence, node_of, rows_seen, walk

WAYS_OUT = (
    "Split such batches yourself with RoundPipeStrategy(split_batch=fn), or with a method "
    "roundpipe_split_batch(self, batch, num_microbatches) on the LightningModule that returns a list of "
    "micro-batches; or set num_microbatches=1."
)

# A tuple of so many numbers may be a size, a shape or a box.
_MOST_NUMBERS = 4


class BatchSplitError(ValueError):
    """The rows of a batch cannot be told with certainty; the message names the leaf and the ways out."""


class Role(Enum):
    """What an array or a sequence holds."""

    ROWS = "one row per sample"
    SAMPLES = "one entry per sample"
    COLUMNS = "all samples in every entry"
    COUNTED = "rows of its own for each sample"
    SHARED = "what all samples share"
    UNREAD = "rows that could not be told"


CUT = (Role.ROWS, Role.SAMPLES, Role.COUNTED)


@dataclass(frozen=True)
class BatchSource:
    """What is known of where a batch comes from.

    Attributes:
        sizes: numbers of samples that its DataLoader may have put into it, the usual one first; empty if unknown.
        is_collated: whether it is as torch's ``default_collate`` has made it: every sequence holds columns.
        may_be_collated: whether its ``collate_fn`` calls ``default_collate`` among other things, which makes lists of
            columns.
        is_joined: whether the entries of the root come from a loader each.
        is_item: whether its loader makes no batches: it is an item of a data set, which may be a single sample.
    """

    sizes: tuple[int, ...] = ()
    is_collated: bool = False
    may_be_collated: bool = False
    is_joined: bool = False
    is_item: bool = False


UNKNOWN = BatchSource()


@dataclass
class Reading:
    """How a batch is read.

    Attributes:
        rows: number of samples; None if nothing tells, so that the batch stays whole.
        roles: path of an array that is cut, or of a sequence -> what it holds.
        counted: path of what has rows of its own for each sample -> where these are.
        counts: what there is of for each sample, besides one row -> where these are.
    """

    root: Node
    rows: int | None
    roles: dict[str, Role] = field(default_factory=dict)
    counted: dict[str, Counted] = field(default_factory=dict)
    counts: dict[str, Bounds] = field(default_factory=dict)


@dataclass
class _Fit:
    """A way to read a part: its arrays and sequences that are cut, arrays of one row, sequences with two readings."""

    cut: list[Node] = field(default_factory=list)
    single: list[Node] = field(default_factory=list)
    open: list[Node] = field(default_factory=list)
    roles: dict[str, Role] = field(default_factory=dict)
    found: Found = field(default_factory=Found)

    @property
    def is_cut(self) -> bool:
        """Whether something has rows."""
        return bool(self.cut or self.found.parts)

    def add(self, other: _Fit) -> None:
        self.cut += other.cut
        self.single += other.single
        self.open += other.open
        self.roles.update(other.roles)


def read_batch(batch: Any, source: BatchSource = UNKNOWN, held: dict[str, Role] | None = None) -> Reading:
    """Reads a batch.

    Args:
        held: path -> what it held in earlier batches; that of this batch is added.

    Raises:
        BatchSplitError: if no reading is certain.
    """
    root = node_of(batch)
    if isinstance(batch, Iterator):
        return Reading(root, None)
    if source.sizes == (1,):
        return Reading(root, 1 if rows_seen(root) == {1} else None)
    held = {} if held is None else held
    for rows in source.sizes:
        fit = _fitted(root, rows, source, held)
        if isinstance(fit, _Fit) and fit.is_cut and rows > 1:
            return _settled(root, rows, fit, held)
    return _agreed(root, source, held)


def _fitted(root: Node, rows: int, source: BatchSource, held: Mapping[str, Role]) -> _Fit | Node:
    """The batch as so many samples; the part that does not fit if it cannot be. Parts that have rows of their own are
    only looked for if there is one that does not fit."""
    fit = _Fitting(rows, source, held).fit(root)
    if isinstance(fit, Node):
        found = find_counted(root, rows, {path: role is Role.COUNTED for path, role in held.items()})
        if found.parts:
            fit = _Fitting(rows, source, held, found).fit(root)
            if isinstance(fit, _Fit):
                fit.found = found
    return fit


def _agreed(root: Node, source: BatchSource, held: dict[str, Role]) -> Reading:
    """The reading by what all rows agree on, where the number of samples is not known."""
    if 1 in rows_seen(root) and isinstance(_Fitting(1, source, held).fit(root), _Fit):
        return Reading(root, 1)  # one row is right in any case
    found = {}
    for rows in _candidates(root, held):
        fit = _fitted(root, rows, source, held)
        if isinstance(fit, _Fit) and fit.is_cut:
            found[rows] = fit
    if not found:
        if isinstance(_Fitting(-1, source, held).fit(root), _Fit):
            return Reading(root, None)
        raise BatchSplitError(_conflict(root, source, held))
    if len(found) > 1:
        raise _undecided([f"{rows} rows ({describe((fit.cut or [root])[0])})" for rows, fit in found.items()])
    rows, fit = next(iter(found.items()))
    _check_source(rows, fit, source, held)
    for node in root.children if source.is_joined else (root,):
        if isinstance(node.value, list) and node.kind in ("array", "container") and node.path not in held:
            if len(node.value) == 1:  # a sample or a column: uncut it is right in both readings
                return Reading(root, None)
            if are_alike(node):
                samples = f"{len(node.value)} rows ({describe(node)})"
                raise _undecided([samples, f"{rows} rows ({describe(fit.cut[0])})"])
    if source.is_item and _may_be_sample(root, fit.cut):
        return Reading(root, None)
    return _settled(root, rows, fit, held)


def _settled(root: Node, rows: int, fit: _Fit, held: dict[str, Role]) -> Reading:
    """The reading that ``fit`` gives; it is held from now on."""
    _decide_by_siblings(root, fit)
    if fit.open:
        node = fit.open[0]
        other = Role.SHARED if node.kind == "scalar" else Role.COLUMNS
        raise _undecided([f"{role.value} ({describe(node)})" for role in (Role.SAMPLES, other)])
    arrays = [node.value for node in fit.cut if is_array(node.value)]
    is_data = any(array.ndim > 1 or is_floating(array) for array in arrays)
    shapes = {tuple(array.shape[1:]) for array in arrays}
    single = [node for node in fit.single if is_array(node.value)]
    tokens = [node for node in single if node.value.ndim > 1 and not is_floating(node.value)]
    is_shared = all(tuple(node.value.shape[1:]) in shapes for node in tokens)
    if not is_shared or (fit.single and not (is_data or fit.found.parts)):
        return Reading(root, 1)  # data of one row beside what belongs to it: lengths, images in a text
    if rows > 1:
        held.update(fit.roles)
    counts = {f"{what} of {node.path}": own for node in fit.cut for what, own in bounds_of_graphs(node.value)}
    return Reading(root, rows, fit.roles, fit.found.parts, counts | fit.found.counts)


def _decide_by_siblings(root: Node, fit: _Fit) -> None:
    """What a function like ``zip(*batch)`` makes is all of one kind: one column of samples decides for the others."""
    columns = {child.path: child for child in root.children if is_sequence(child.value)}
    certain = {path for path in columns if fit.roles.get(path) is Role.SAMPLES} - {node.path for node in fit.open}
    kinds = {type(columns[path].value) for path in certain}
    for node in [node for node in fit.open if node.path in columns and type(node.value) in kinds]:
        fit.open.remove(node)
        inside = {id(part) for part in walk(node)}
        fit.roles = {path: role for path, role in fit.roles.items() if not path.startswith(f"{node.path}[")}
        fit.roles[node.path] = Role.SAMPLES
        fit.cut = [*(part for part in fit.cut if id(part) not in inside), node]
        fit.single = [part for part in fit.single if id(part) not in inside]


def _check_source(rows: int, fit: _Fit, source: BatchSource, held: Mapping[str, Role]) -> None:
    """Refuses rows that may not be the samples of the DataLoader: nodes of graphs, points, time.

    Fewer rows may be what a ``collate_fn`` has left of the samples, if two arrays agree, or earlier batches were whole.
    """
    if not source.sizes or rows <= 1 or source.is_collated:
        return
    if not fit.cut or any(num_graphs_of(node.value) is not None for node in fit.cut):
        return  # what counts its samples itself
    size = max(source.sizes)
    named = f"its DataLoader gives {size} samples per batch, but {describe(fit.cut[0])} has {rows} rows"
    if rows > size or (len(fit.cut) == 1 and rows < size and fit.cut[0].path not in held):
        raise BatchSplitError(f"cannot split the batch into micro-batches: {named}. {WAYS_OUT}")
    for node in fit.cut:
        if is_array(node.value) and node.value.ndim > 1 and node.value.shape[1] == size:
            raise BatchSplitError(
                f"cannot split the batch into micro-batches: its DataLoader gives {size} samples per batch, and "
                f"{describe(node)} may have them in its second dimension. {WAYS_OUT}"
            )


class _Fitting:
    """One attempt to read a batch as ``rows`` samples."""

    def __init__(self, rows: int, source: BatchSource, held: Mapping[str, Role], found: Found | None = None) -> None:
        self._rows = rows
        self._source = source
        self._held = held
        self._counted = {} if found is None else found.parts
        self._is_known = rows in source.sizes  # the DataLoader says that there are as many

    def fit(self, node: Node, depth: int = 0) -> _Fit | Node:
        """How the node is read; the part that does not fit if it cannot be."""
        held = self._held.get(node.path)
        if node.path in self._counted or (held is Role.COUNTED and (node.rows is not None or node.kind)):
            if node.path not in self._counted or held not in (None, Role.COUNTED):
                return node
            return _Fit(roles={node.path: Role.COUNTED})
        if node.rows is not None:
            if node.rows == self._rows:
                if held is Role.UNREAD:
                    return node  # it fits by chance
                return _Fit(cut=[node], roles={node.path: Role.ROWS})
            return _Fit(single=[node]) if node.rows == 1 else node
        if node.problem:
            return node
        if node.kind is None or len(node.value) != self._rows or not self._rows:
            return node if self._held.get(node.path) is Role.SAMPLES else self._fit_entries(node, depth)
        return self._fit_sequence(node, depth)

    def _fit_entries(self, node: Node, depth: int) -> _Fit | Node:
        whole = _Fit()
        for child in node.children:
            part = self.fit(child, depth + 1)
            if isinstance(part, Node):
                return part
            whole.add(part)
        if not node.children and node.kind in ("array", "container", "object"):
            return node  # a column of another length
        if is_sequence(node.value):
            whole.roles[node.path] = Role.COLUMNS if whole.cut else Role.SHARED
        return whole

    def _fit_sequence(self, node: Node, depth: int) -> _Fit | Node:
        """A sequence with as many entries as there are samples."""
        if node.children and all(num_samples_of(child.value) == self._rows for child in node.children):
            return self._fit_entries(node, depth)  # graphs of all samples in each
        columns = _Fit() if is_column(node.value) else self._fit_entries(node, depth)
        samples = _Fit(cut=[node], roles={node.path: Role.SAMPLES})
        if (held := self._held.get(node.path)) is not None:
            return samples if held is Role.SAMPLES else columns
        if depth == 0 and self._source.is_joined:
            return columns
        is_root, is_tuple = depth == (1 if self._source.is_joined else 0), isinstance(node.value, tuple)
        if node.kind == "scalar" and is_tuple and not is_root and self._rows <= _MOST_NUMBERS:
            samples.open.append(node)  # labels, or a size such as (height, width)
        if is_root and is_tuple and node.kind not in ("text", "object"):
            return columns
        if node.kind not in ("array", "container"):
            return samples
        if self._source.is_collated or (is_root and not self._is_known):
            return columns
        if isinstance(columns, Node) or not columns.cut:
            return samples
        if not are_alike(node):
            return columns
        if (is_tuple or is_root or self._source.may_be_collated) and self._are_columns(node, depth):
            columns.open.insert(0, node)
            return columns
        return samples

    def _are_columns(self, node: Node, depth: int) -> bool:
        """Whether every entry has rows of its own. Where some have one row and some have more, they are samples."""
        parts = [self.fit(child, depth + 1) for child in node.children if child.value is not None]
        return all(isinstance(part, _Fit) and part.cut for part in parts)


def _candidates(root: Node, held: Mapping[str, Role]) -> list[int]:
    """Every number of rows that a part of the batch speaks for, in order."""
    found: dict[int, None] = {}
    for node in walk(root):
        if node.rows is not None and node.rows != 1:
            found[node.rows] = None
        speaks = node is not root or node.kind not in ("array", "container") or held.get(node.path) is Role.SAMPLES
        if node.kind is not None and speaks:
            found[len(node.value)] = None
    return list(found)


def _may_be_sample(root: Node, cut: list[Node]) -> bool:
    """Whether an item may be one sample: nothing but vectors and numbers, or one array beside numbers."""
    if not all(is_array(node.value) for node in cut):
        return False
    if all(node.value.ndim == 1 for node in cut):
        return True
    leaves = [child for child in root.children if not child.children and child.kind is None]
    return len(cut) == 1 and any(leaf.rows is None and leaf.value is not None for leaf in leaves)


def _undecided(readings: list[str]) -> BatchSplitError:
    return BatchSplitError(
        f"cannot split the batch into micro-batches: it can be read as {' or '.join(readings)}. {WAYS_OUT}"
    )


def _conflict(root: Node, source: BatchSource, held: dict[str, Role]) -> str:
    """What does not fit, in words."""
    votes: dict[int, list[Node]] = {}
    for node in walk(root):
        if node.rows is not None and node.rows != 1:
            votes.setdefault(node.rows, []).append(node)
    nested = {id(leaf) for node in walk(root) if node is not root and node.kind for leaf in walk(node)}

    def weight(rows: int) -> tuple[int, bool, int]:
        """Arrays by themselves tell more than those in lists, which may be samples."""
        return sum(id(node) not in nested for node in votes[rows]), rows in source.sizes, len(votes[rows])

    rows = max(votes, key=weight, default=-1)
    fit = _fitted(root, rows, source, held)
    offender = fit if isinstance(fit, Node) else root
    text = f"cannot split the batch into micro-batches: {describe(offender)}"
    text += f" cannot be split ({offender.problem})" if offender.problem else " does not fit"
    if (was := _reading_before(root, offender, rows, held)) is not None:
        text += f" the reading of earlier batches, in which {was} held {held[was].value}"
    if votes:
        text += f", and the batch size is {rows} by {describe(votes[rows][0])}"
    unclear = find_counted(root, rows, {}).unclear
    if offender.path in unclear:
        text += f" ({unclear[offender.path]})"
    elif unclear:
        text += f" ({next(iter(unclear))}: {next(iter(unclear.values()))})"
    if offender.rows not in (None, rows):
        held.setdefault(offender.path, Role.UNREAD)
    return f"{text}. {WAYS_OUT}"


def _reading_before(root: Node, offender: Node, rows: int, held: Mapping[str, Role]) -> str | None:
    """The path of what earlier batches have settled, and this one contradicts."""
    for node in walk(root):
        role = held.get(node.path)
        if node is offender and (role in CUT or (role is Role.UNREAD and node.rows == rows)):
            return node.path
        if role is Role.COLUMNS and len(node.value) == rows and any(part is offender for part in walk(node)):
            return node.path
    return None
