"""Parts of a batch that have a number of rows of their own for each sample: points, boxes, nodes, patches of images.

Such a part has a leading size that fits nothing, unless something beside it counts::

    sample             0            1        2
    num_points        [3,           1,       2]      one number for each sample
    points            [a a a        b        c c]    6 = 3 + 1 + 2 rows, cut where the numbers say

- Numbers count for each sample, by name: ``lengths``, ``num_points``. Or boundaries do (``ptr``, ``cu_seqlens``), or
  the sample of each entry (``batch``, ``batch_idx``), in order. What points into a part, such as an ``edge_index``
  beside ``batch``, starts from 0 in each micro-batch. Graphs of :mod:`graphs` count nodes and edges for what lies
  beside them.
- A grid ``(images, 2 or 3)`` counts the patches of each image. Which images a row has, its tokens tell: there is one
  for each patch, or for each square of patches, all of them the same number; images end where rows end::

      image_grid_thw [[1, 4, 4], [1, 2, 4], [1, 4, 4]]       16, 8 and 16 patches, for 4, 2 and 4 tokens
      input_ids      [[. . i i i i . i i .], [. i i i i . . . . .]]      so the first row has two of the images
      pixel_values   (40, d)

Both the name and the sum must fit, and all that counts as many must agree: a sum may fit by chance. It is only looked
for where a batch has no other reading, or earlier batches were read so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .graphs import Bounds, bounds_of_graphs, bounds_of_index, num_graphs_of
from .nodes import Node, is_array, is_floating, is_sequence, walk

_COUNTS = {"num", "n", "number", "count", "counts", "len", "lens", "length", "lengths", "size", "sizes", "seqlens"}
_COUNTS |= {"nums", "natoms", "nnodes"}
_ENDS = {"ptr", "cu", "offsets", "bounds", "boundaries", "splits"}
_OF_EDGES = {"edge", "edges", "bond", "bonds", "e"}
_NAME = re.compile(r"\['([^']*)'\]|\.(\w+)")
# What transformers writes into mm_token_type_ids.
_TOKEN_TYPES = {"image": 1, "video": 2, "videos": 2, "audio": 3}
# A token stands for a square of so many patches in each direction.
_MERGED = (1, 2, 3, 4)


@dataclass(frozen=True)
class Counted:
    """Where the parts of samples lie in a value.

    Attributes:
        bounds: where that of each sample begins, and where that of the last one ends.
        dim: of a tensor.
        offsets: subtracted from what the part of the sample holds, which points into another part.
        has_ends: whether the value holds boundaries, which neighbours share.
        may_miss: whether samples that have none of it get None, as models of images want it.
    """

    bounds: Bounds
    dim: int = 0
    offsets: Bounds | None = None
    has_ends: bool = False
    may_miss: bool = False

    def cut(self, value: Any, start: int, length: int) -> Any:
        """What samples from ``start`` have of a tensor, an array, a sequence, or of their number."""
        first, last = self.bounds[start], self.bounds[start + length] + self.has_ends
        if type(value) is int:
            return last - first
        if self.may_miss and first == last:
            return None
        part = value[:, first:last] if self.dim else value[first:last]
        if self.offsets is not None and self.offsets[start]:
            return part - self.offsets[start]
        tied = isinstance(part, Tensor) and not (part.requires_grad or part.is_inference())
        return part.data if tied else part  # see _cut_rows


@dataclass
class Found:
    """What was found in a batch.

    Attributes:
        parts: by path.
        counts: by what counts them, which outputs may have a row of, too.
        unclear: path of what has no rows that are certain -> why.
    """

    parts: dict[str, Counted] = field(default_factory=dict)
    counts: dict[str, Bounds] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)


def find_counted(root: Node, rows: int, is_held: Mapping[str, bool]) -> Found:
    """The parts of a batch of so many samples that have rows of their own.

    Args:
        is_held: path -> whether it was counted in earlier batches.
    """
    search = _Search(root, rows, is_held)
    if rows > 1:
        search.look()
    return search.found


class _Search:
    def __init__(self, root: Node, rows: int, is_held: Mapping[str, bool]) -> None:
        self.found = Found()
        self._rows = rows
        self._is_held = is_held
        self._nodes = list(walk(root))
        self._arrays = {node.path: node for node in self._nodes if is_array(node.value) and node.rows is not None}
        self._items: list[str] = []  # names of what counts images

    def look(self) -> None:
        for node in self._nodes:
            if num_graphs_of(node.value) == self._rows:
                self.found.counts.update((f"{what} of {node.path}", own) for what, own in bounds_of_graphs(node.value))
        for path, node in self._arrays.items():
            self._look_at_numbers(path, node)
        for node in self._nodes:
            is_named = is_sequence(node.value) and len(node.value) == self._rows and bool(_words(node.path) & _COUNTS)
            if is_named and all(type(entry) is int and entry >= 0 for entry in node.value):
                self.found.counts[node.path] = _bounds(node.value)
        for path, node in self._arrays.items():
            if "grid" in _words(path) and node.value.ndim == 2 and node.value.shape[1] in (2, 3):
                self._look_at_grid(path, _tensor(node.value))
        for path, node in [*self._arrays.items()] * 2:  # what is counted may count
            self._match(path, node)
        self._look_at_others()

    # --- what counts -------------------------------------------------------------------------------------------------

    def _look_at_numbers(self, path: str, node: Node) -> None:
        """Counts, boundaries and the samples of entries."""
        if node.value.ndim != 1 or not _is_integer(node.value):
            return
        words, values = _words(path), _tensor(node.value)
        is_new = node.rows != self._rows or self._is_held.get(path, False)
        if "batch" in words and not words & _ENDS and is_new:
            self._look_at_index(path, values)
        elif words & _ENDS and node.rows == self._rows + 1:
            if int(values[0]) == 0 and not bool((values[1:] < values[:-1]).any()):
                ends = tuple(values.tolist())
                self.found.counts[path] = ends
                self.found.parts[path] = Counted(tuple(range(self._rows + 1)), offsets=ends, has_ends=True)
        elif words & _COUNTS and node.rows == self._rows and not bool((values < 0).any()):
            self.found.counts[path] = _bounds(values.tolist())

    def _look_at_index(self, path: str, values: Tensor) -> None:
        """An entry that names the sample of each row, and edges beside it."""
        bounds = bounds_of_index(values, self._rows)
        if bounds is None:
            self.found.unclear[path] = f"it does not name {self._rows} samples in order"
            return
        self.found.counts[path] = bounds
        self.found.parts[path] = Counted(bounds, offsets=tuple(range(self._rows + 1)))
        where = _container_of(path)
        beside = {other: one for other, one in self._arrays.items() if _container_of(other) == where and other != path}
        for edge_path, edge_node in beside.items():
            if "edge" in _words(edge_path) and "index" in _words(edge_path) and edge_node.value.ndim == 2:
                self._look_at_graph(values, bounds, edge_path, beside)

    def _look_at_graph(self, index: Tensor, nodes: Bounds, edge_path: str, beside: Mapping[str, Node]) -> None:
        """Tensors of graphs beside each other: nodes, edges, and what points at them."""
        ends = _tensor(beside[edge_path].value)
        if ends.numel() and (int(ends.min()) < 0 or int(ends.max()) >= len(index)):
            return
        owners = index[ends]
        edges = bounds_of_index(owners[0], self._rows)
        if edges is None or not torch.equal(owners[0], owners[1]):
            self.found.unclear[edge_path] = "its edges are not those of one graph after the other"
            return
        self.found.counts[edge_path] = edges
        self.found.parts[edge_path] = Counted(edges, dim=1, offsets=nodes)
        owner = owners[0]
        if all(end % 2 == 0 for end in edges):
            self.found.counts[f"pairs of {edge_path}"] = tuple(end // 2 for end in edges)
        for path, node in beside.items():
            words, is_last = _words(path), node.value.ndim == 1 and _is_integer(node.value)
            if path in self.found.parts or node.rows not in (nodes[-1], edges[-1]):
                continue
            is_of_edges = node.rows == edges[-1] and (node.rows != nodes[-1] or bool(words & _OF_EDGES))
            own = edges if is_of_edges else nodes
            if "batch" in words and is_last and is_of_edges and torch.equal(_tensor(node.value), owner):
                self.found.parts[path] = Counted(own, offsets=tuple(range(self._rows + 1)))
            elif "index" in words and is_last:
                self._look_at_pointer(path, _tensor(node.value), owner if is_of_edges else index, own, edges)
            else:
                self.found.parts[path] = Counted(own)

    def _look_at_pointer(self, path: str, values: Tensor, owner: Tensor, own: Bounds, edges: Bounds) -> None:
        """What points from nodes or edges at edges of the same graph."""
        starts, ends = torch.tensor(edges[:-1])[owner.cpu()], torch.tensor(edges[1:])[owner.cpu()]
        if bool(((values.cpu() < starts) | (values.cpu() >= ends)).any()):
            self.found.unclear[path] = "it points at something else than edges of the same graph"
        else:
            self.found.parts[path] = Counted(own, offsets=edges)

    # --- grids -------------------------------------------------------------------------------------------------------

    def _look_at_grid(self, path: str, grid: Tensor) -> None:
        if not _is_integer(grid) or not bool((grid > 0).all()):
            return
        patches = grid.prod(1)
        found = {*self._images_by_tokens(path, patches)}
        if not found:
            found = {bounds for _, bounds in self._counting(len(grid))}
        if not found and len(grid) == self._rows and not any(map(_are_tokens, self._arrays.values())):
            found = {tuple(range(self._rows + 1))}
        if len(found) != 1:
            self.found.unclear[path] = "which of its images belong to which row cannot be told from the tokens"
            return
        (images,) = found
        ends = (0, *patches.cumsum(0).tolist())
        self._items.append(path)
        self.found.parts[path] = Counted(images, may_miss=True)
        self.found.counts[path] = images
        self.found.counts[f"patches of {path}"] = tuple(ends[end] for end in images)

    def _images_by_tokens(self, path: str, patches: Tensor) -> Iterator[Bounds]:
        """Each way to give images to rows that tokens allow."""
        type_ids = [node for node in self._arrays.values() if _are_tokens(node) and "mm_token_type_ids" in node.path]
        kind = next((_TOKEN_TYPES[word] for word in sorted(_words(path)) if word in _TOKEN_TYPES), None)
        named = type_ids if kind is not None else []
        for node in named or [node for node in self._arrays.values() if _are_tokens(node)]:
            if node.rows != self._rows:
                continue
            tokens = _tensor(node.value)
            for side in _MERGED:
                wanted = patches // side**2
                if bool((patches % side**2).any()):
                    continue
                for value in [kind] if named and kind else _of_number(tokens, int(wanted.sum())):
                    bounds = _shared_out(wanted.tolist(), tokens.eq(value).sum(1).tolist())
                    if bounds is not None:
                        yield bounds

    # --- what is counted ---------------------------------------------------------------------------------------------

    def _counting(self, total: int) -> list[tuple[str, Bounds]]:
        return [(what, bounds) for what, bounds in self.found.counts.items() if bounds[-1] == total]

    def _match(self, path: str, node: Node) -> None:
        """A part whose leading size is what something counts."""
        if path in self.found.parts or node.rows is None:
            return
        related = [
            item for item in self._items if "grid" in _words(path) and self.found.parts[item].bounds[-1] == node.rows
        ]
        if node.rows in (1, self._rows) and not self._is_held.get(path, False) and not related:
            return
        counting = self._counting(node.rows)
        if related and node.rows == self._rows:
            counting = [(item, self.found.parts[item].bounds) for item in related]
        bounds = {own for _, own in counting}
        if len(bounds) == 1:
            may_miss = any(what in self._items or what.startswith("patches of ") for what, _ in counting)
            self.found.parts[path] = Counted(bounds.pop(), may_miss=may_miss)
            self._compose(path, node)
        elif bounds:
            ways = " or ".join(what for what, _ in counting)
            self.found.unclear[path] = f"{ways} may count its {node.rows} rows, in different ways"

    def _compose(self, path: str, node: Node) -> None:
        """Numbers that are counted may count something themselves: patches of each of the images of a row."""
        if _words(path) & _COUNTS and node.value.ndim == 1 and _is_integer(node.value):
            ends = _bounds(_tensor(node.value).tolist())
            self.found.counts[path] = tuple(ends[end] for end in self.found.parts[path].bounds)

    def _look_at_others(self) -> None:
        """Lists with an entry for each image, and numbers by which a container says how many samples it has."""
        for node in self._nodes:
            if is_sequence(node.value) and node.kind in ("scalar", "text") and "grid" in _words(node.path):
                bounds = {own for item in self._items if (own := self.found.counts[item])[-1] == len(node.value)}
                if len(bounds) == 1:
                    self.found.parts[node.path] = Counted(bounds.pop(), may_miss=True)
            has_parts = any(child.path in self.found.parts for child in node.children)
            if has_parts and num_samples_of(node.value) == self._rows:
                for child in node.children:
                    if type(child.value) is int and child.value == self._rows and _words(child.path) & _COUNTS:
                        self.found.parts[child.path] = Counted(tuple(range(self._rows + 1)))


def _words(path: str) -> set[str]:
    """The words of the innermost name in a path."""
    names = _NAME.findall(path)
    name = next(filter(None, names[-1]), "") if names else ""
    return {*re.split("[^a-z]+", name.lower())}


def _container_of(path: str) -> str:
    return path[: max(path.rfind("["), path.rfind("."))]


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value)


def _is_integer(value: Any) -> bool:
    return not is_floating(value) and "int" in str(value.dtype)


def _are_tokens(node: Node) -> bool:
    words = _words(node.path)
    return "ids" in words and "position" not in words and node.value.ndim == 2 and _is_integer(node.value)


def num_samples_of(value: Any) -> int | None:
    """How many samples a container says itself that it holds: graphs, or a dataclass that has a length."""
    if isinstance(value, Sized) and is_dataclass(value):
        return len(value)
    return num_graphs_of(value)


def _bounds(counts: Any) -> Bounds:
    return tuple(itertools.accumulate(counts, initial=0))


def _of_number(tokens: Tensor, number: int) -> list[int]:
    """The tokens that there are so many of."""
    values, numbers = torch.unique(tokens, return_counts=True)
    found: list[int] = values[numbers == number].tolist()
    return found


def _shared_out(wanted: list[int], there: list[int]) -> Bounds | None:
    """How many things come before each row, if each takes so many tokens, and rows have so many; None if things do not
    end where rows do."""
    bounds, index = [0], 0
    for number in there:
        while number > 0 and index < len(wanted):
            number -= wanted[index]
            index += 1
        if number:
            return None
        bounds.append(index)
    return tuple(bounds) if index == len(wanted) else None
