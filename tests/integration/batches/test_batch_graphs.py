"""Batches of graphs that a library has put together: cut between graphs by what they offer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_roundpipe.integration.batches.microbatches import split_batch
from lightning_roundpipe.integration.batches.reading import BatchSource, BatchSplitError
from tests.support.identical import assert_identical
from tests.support.parity import both, compare, make_trainer, ready
from tests.support.small import CLASSES, WIDTH, Small

SIZES = (3, 1, 4, 2, 5, 2)


class Graph:
    """One graph, with what torch_geometric's have that is looked at."""

    def __init__(self, **entries: Any) -> None:
        self.stores = [entries]

    def __getattr__(self, name: str) -> Any:
        stores = self.__dict__.get("stores", [{}])
        if name not in stores[0]:
            raise AttributeError(name)
        return stores[0][name]

    def __cat_dim__(self, key: str, value: Any) -> int:
        return 1 if key == "edge_index" else 0

    def __inc__(self, key: str, value: Any) -> int:
        return len(self.x) if key == "edge_index" else 0


class Batch(Graph):
    """Graphs that were put together, and can be taken apart again."""

    @classmethod
    def from_data_list(cls, graphs: list[Graph], follow_batch: Any = None) -> Any:
        made, first = cls(), graphs[0]
        sizes = [len(graph.x) for graph in graphs]
        starts = torch.tensor([0, *sizes]).cumsum(0)
        for key, value in first.stores[0].items():
            own = [graph.stores[0][key] for graph in graphs]
            shifted = [entry + int(start) for entry, start in zip(own, starts, strict=False)]
            made.stores[0][key] = torch.cat(
                shifted if first.__inc__(key, value) else own, first.__cat_dim__(key, value)
            )
        made.stores[0] |= {"batch": torch.arange(len(graphs)).repeat_interleave(torch.tensor(sizes)), "ptr": starts}
        made.made_of = graphs
        return made

    @property
    def num_graphs(self) -> int:
        return len(self.ptr) - 1

    def index_select(self, index: slice) -> list[Graph]:
        return self.made_of[index]

    def to_data_list(self) -> list[Graph]:
        return self.made_of


def graphs() -> list[Graph]:
    generator = torch.Generator().manual_seed(0)
    return [
        Graph(
            x=torch.randn(size, WIDTH, generator=generator),
            edge_index=torch.randint(0, size, (2, 2 * size), generator=generator),
            y=torch.randint(0, CLASSES, (1,), generator=generator),
            of_nodes=torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in SIZES
    ]


def put_together(**more: Any) -> Any:
    batch = Batch.from_data_list(graphs())
    batch.stores[0].update(more)
    return batch


@pytest.mark.parametrize("count", [2, 4])
def test_parts_are_what_their_graphs_give_together(count: int) -> None:
    """With what a hook has put on the batch since."""
    batch = put_together(position=torch.randn(17, 2), weight=torch.randn(6), temperature=0.5)
    split, start = split_batch((batch, torch.arange(6), torch.arange(17)), count, source=BatchSource((6,))), 0
    for (part, of_graphs, of_nodes), size in zip(split.microbatches, split.sizes, strict=True):
        expected, nodes = Batch.from_data_list(graphs()[start : start + size]), slice(*batch.ptr[[start, start + size]])
        own = {"position": batch.position[nodes], "weight": batch.weight[start : start + size], "temperature": 0.5}
        assert_identical(part.stores[0], expected.stores[0] | own)
        assert torch.equal(of_graphs, torch.arange(6)[start : start + size])
        assert torch.equal(of_nodes, torch.arange(17)[nodes])
        start += size


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"edge_index": torch.zeros(2, 3).long()}, "'edge_index' was changed after"),
        ({"extra": torch.zeros(9)}, r"'extra' of shape \(9,\) was added later"),
    ],
)
def test_graphs_that_were_changed_are_refused(changed: dict[str, Tensor], words: str) -> None:
    with pytest.raises(BatchSplitError, match=f"batch, a Batch of 6 graphs: its {words}"):
        split_batch(put_together(**changed), 2)


def test_one_graph_is_whole() -> None:
    graph = graphs()[0]
    split = split_batch(graph, 4, source=BatchSource((8,)))
    assert split.microbatches[0] is graph
    assert split.batch_size == 1


class OnGraphs(Small):
    """Messages between nodes in front of the small model."""

    def nodes(self, batch: Any) -> Tensor:
        return batch.x.index_add(0, batch.edge_index[1], batch.x[batch.edge_index[0]])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.nodes(batch)
        sums = x.new_zeros(batch.num_graphs, WIDTH).index_add(0, batch.batch, x)
        return F.cross_entropy(self(sums), batch.y)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        nodes = self(self.nodes(batch))
        return {"nodes": nodes, "graphs": nodes.new_zeros(batch.num_graphs, CLASSES).index_add(0, batch.batch, nodes)}


class OnNodes(OnGraphs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(self.nodes(batch)), batch.of_nodes)


@pytest.mark.parametrize("make", [OnGraphs, OnNodes])
def test_training_on_graphs_and_on_nodes(make: Any) -> None:
    """What the loss is a mean over is found out."""
    _, ours = compare(make, [put_together(), put_together()], ours={"num_microbatches": 2})
    assert ours.watch.num_microbatches == [2, 2]


def test_outputs_of_graphs_and_nodes_are_joined() -> None:
    (plain,) = both(lambda kind: make_trainer(kind).predict(OnGraphs(), ready([put_together()])))
    assert {name: len(value) for name, value in plain.items()} == {"nodes": 17, "graphs": 6}
