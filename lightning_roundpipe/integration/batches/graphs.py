"""Batches of graphs that a library has put together into one: how many graphs, and cutting between them.

They are told by what they offer, and no library is imported. An object of torch_geometric knows how its graphs were put
together, also attributes that a class of the user counts in its own way, so it takes itself apart, and graphs are put
together again::

    Batch(x=[9, d], edge_index=[2, 14], y=[3], ptr=[0, 4, 6, 9])      index_select(0:2) -> from_data_list -> Batch of 2
                                                                      index_select(2:3) -> from_data_list -> Batch of 1

What has been put on it since then (a hook that adds positions) has a row for each node, edge or graph, and is cut by
that. Graphs that are plain tensors beside each other are what :mod:`counted` is for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Bounds = tuple[int, ...]
_OF_BATCHES = ("index_select", "to_data_list", "from_data_list", "num_graphs")
_OF_GRAPHS = ("__cat_dim__", "__inc__")


class GraphsError(ValueError):
    """Graphs that cannot be taken apart; says why."""


def num_graphs_of(value: Any) -> int | None:
    """How many graphs an object holds; None if it is something else."""
    kind = _kind_of(value)
    return None if not kind else 1 if kind == "graph" else int(value.num_graphs)


def _kind_of(value: Any) -> str:
    cls: Any = type(value)
    return _kind_of_class(cls)


@functools.lru_cache(maxsize=1024)
def _kind_of_class(cls: Any) -> str:
    if all(hasattr(cls, name) for name in _OF_BATCHES):
        return "batch"
    return "graph" if all(hasattr(cls, name) for name in _OF_GRAPHS) else ""


def bounds_of_graphs(value: Any) -> Iterator[tuple[str, Bounds]]:
    """What the graphs have nodes and edges of, and where those of each begin; the last number is where they end."""
    for store in value.stores if _kind_of(value) == "batch" else ():
        kind = getattr(store, "_key", None)  # of nodes, where there are several
        if "ptr" in store:
            yield "nodes" if kind is None else f"nodes {kind!r}", tuple(store["ptr"].tolist())
        if "ptr" in store and isinstance(store.get("edge_index"), Tensor):
            edges = bounds_of_index(store["batch"][store["edge_index"][0]], len(store["ptr"]) - 1)
            if edges is not None:
                yield "edges", edges


def bounds_of_index(index: Tensor, count: int) -> Bounds | None:
    """Where the entries of each of ``count`` samples begin, if ``index`` names the sample of each entry, in order."""
    if index.numel() and (bool((index[1:] < index[:-1]).any()) or int(index[0]) < 0 or int(index[-1]) >= count):
        return None
    return (0, *torch.bincount(index, minlength=count).cumsum(0).tolist())


def cut_graphs(value: Any, bounds: Sequence[tuple[int, int]]) -> list[Any]:
    """Batches of the graphs that (start, length) name.

    Raises:
        GraphsError: if what the batch holds is not what its graphs held when they were put together.
    """
    made_by = next(cls for cls in type(value).__mro__ if "from_data_list" in vars(cls))
    followed = [key for store in value.stores for key, _ in store.items() if f"{key}_batch" in store]
    try:
        parts = [
            made_by.from_data_list(value.index_select(slice(start, start + length)), follow_batch=followed)  # type: ignore[attr-defined]
            for start, length in bounds
        ]
    except Exception as error:
        raise GraphsError(f"its graphs cannot be taken apart: {str(error).rstrip('.')}") from error
    of_stores = zip(value.stores, *(part.stores for part in parts), strict=True)
    for store, *cut in of_stores:
        _check(store, cut, is_whole=sum(length for _, length in bounds) == value.num_graphs)
        _add_new(value, store, cut, bounds)
    return parts


def _check(store: Any, cut: Sequence[Any], *, is_whole: bool) -> None:
    """Whether the attributes are as long as when the graphs were put together, and edges stay within their graphs."""
    for key, whole in store.items():
        values = [part[key] for part in cut if key in part]
        if not isinstance(whole, Tensor) or len(values) < len(cut) or whole.layout is not torch.strided:
            continue
        is_other = is_whole and sum(value.numel() for value in values) != whole.numel()
        if not is_other and key == "edge_index" and "ptr" in store:
            ends = [int(part["ptr"][-1]) for part in cut]
            is_other = any(
                value.numel() and (int(value.min()) < 0 or int(value.max()) >= end)
                for value, end in zip(values, ends, strict=True)
            )
        if is_other and not key.endswith(("ptr", "batch")):
            raise GraphsError(f"its {key!r} was changed after the graphs were put together")


def _add_new(value: Any, store: Any, cut: Sequence[Any], bounds: Sequence[tuple[int, int]]) -> None:
    """Gives the parts what was put on the whole after the graphs were put together."""
    ends = [("graphs", tuple(range(value.num_graphs + 1))), *bounds_of_graphs(value)]
    for key in [key for key, _ in store.items() if any(key not in part for part in cut)]:
        whole = store[key]
        if not isinstance(whole, Tensor) or not whole.ndim:
            parts = [whole] * len(cut)
        else:
            found = {bounds for _, bounds in ends if bounds[-1] == len(whole)}
            if len(found) != 1:
                shape = f"{key!r} of shape {tuple(whole.shape)}"
                raise GraphsError(f"its {shape} was added later, and is not known to belong to graphs, nodes or edges")
            own = found.pop()
            parts = [whole[own[start] : own[start + length]] for start, length in bounds]
        for part, entry in zip(cut, parts, strict=True):
            part[key] = entry


def lengths_of(bounds: Bounds) -> tuple[int, ...]:
    """How many there are of each."""
    return tuple(after - before for before, after in pairwise(bounds))
