"""Parts of a batch that have rows of their own for each sample: points, boxes, graphs, patches of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.integration.batches.microbatches import split_batch
from lightning_roundpipe.integration.batches.reading import BatchSource, BatchSplitError
from tests.support.identical import assert_identical

SIZE, EDGES = (3, 1, 2, 4), (4, 0, 2, 6)
IMAGE, VIDEO = 90, 91


def rows(count: int, *shape: int) -> Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(count, *shape)


def of(size: int) -> BatchSource:
    return BatchSource((size,))


@dataclass(repr=False, eq=False, slots=True)
class Molecules:
    """Graphs beside each other, as chemprop has them: told by their tensors."""

    graphs: InitVar[Sequence[tuple[Tensor, Tensor, Tensor]]]
    V: Tensor = field(init=False)
    E: Tensor = field(init=False)
    edge_index: Tensor = field(init=False)
    rev_edge_index: Tensor = field(init=False)
    batch: Tensor = field(init=False)
    __size: int = field(init=False)

    def __post_init__(self, graphs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.__size = len(graphs)
        nodes = [0, *torch.tensor([len(v) for v, _, _ in graphs]).cumsum(0).tolist()]
        edges = [0, *torch.tensor([len(e) for _, e, _ in graphs]).cumsum(0).tolist()]
        self.V = torch.cat([v for v, _, _ in graphs])
        self.E = torch.cat([e for _, e, _ in graphs])
        self.edge_index = torch.cat([ends + nodes[i] for i, (_, _, ends) in enumerate(graphs)], 1)
        self.rev_edge_index = torch.cat([torch.arange(len(e)).flip(0) + edges[i] for i, (_, e, _) in enumerate(graphs)])
        self.batch = torch.cat([torch.full((len(v),), i) for i, (v, _, _) in enumerate(graphs)])

    def __len__(self) -> int:
        return self.__size


class Labelled(NamedTuple):
    graphs: Any
    of_nodes: Tensor
    y: Tensor


def molecules(start: int = 0, stop: int = 4) -> Molecules:
    made = []
    for i in range(start, stop):
        ends = torch.arange(2 * EDGES[i]).reshape(2, -1) % SIZE[i]
        made.append((rows(SIZE[i], 2) + 10 * i, rows(EDGES[i], 3) + 100 * i, ends))
    return Molecules(made)


def fields(graphs: Molecules) -> list[Tensor]:
    return [graphs.V, graphs.E, graphs.edge_index, graphs.rev_edge_index, graphs.batch]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_graphs_of_tensors_are_cut_between_graphs(count: int) -> None:
    split = split_batch(Labelled(molecules(), rows(10, 5), rows(4, 1)), count, source=of(4))
    start = 0
    for part, size in zip(split.microbatches, split.sizes, strict=True):
        expected = molecules(start, start + size)
        assert_identical(fields(part.graphs), fields(expected))
        first = sum(SIZE[:start])
        assert torch.equal(part.of_nodes, rows(10, 5)[first : first + len(expected.V)])
        assert len(part.graphs) == len(part.y) == size
        start += size


def test_two_components_of_two_molecules_are_columns() -> None:
    batch = {"graphs": [molecules(0, 2), molecules(2, 4)], "y": rows(2)}
    for index, part in enumerate(split_batch(batch, 2, source=of(2)).microbatches):
        first, second = part["graphs"]
        assert_identical(fields(first), fields(molecules(index, index + 1)))
        assert_identical(fields(second), fields(molecules(2 + index, 3 + index)))


COUNTED: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "numbers": (
        {"points": rows(7, 3), "num_points": torch.tensor([3, 1, 1, 2]), "y": rows(4)},
        [
            {"points": rows(7, 3)[:4], "num_points": torch.tensor([3, 1]), "y": rows(4)[:2]},
            {"points": rows(7, 3)[4:], "num_points": torch.tensor([1, 2]), "y": rows(4)[2:]},
        ],
    ),
    "numbers in a list": (
        {"points": rows(7, 3), "lengths": [3, 1, 1, 2], "y": rows(4)},
        [
            {"points": rows(7, 3)[:4], "lengths": [3, 1], "y": rows(4)[:2]},
            {"points": rows(7, 3)[4:], "lengths": [1, 2], "y": rows(4)[2:]},
        ],
    ),
    "boundaries": (
        {"tokens": rows(9), "cu_seqlens": torch.tensor([0, 3, 4, 6, 9]), "y": rows(4)},
        [
            {"tokens": rows(9)[:4], "cu_seqlens": torch.tensor([0, 3, 4]), "y": rows(4)[:2]},
            {"tokens": rows(9)[4:], "cu_seqlens": torch.tensor([0, 2, 5]), "y": rows(4)[2:]},
        ],
    ),
    "the sample of each box": (
        {"img": rows(4, 3, 2, 2), "bboxes": rows(5, 4), "batch_idx": torch.tensor([0, 0, 2, 3, 3])},
        [
            {"img": rows(4, 3, 2, 2)[:2], "bboxes": rows(5, 4)[:2], "batch_idx": torch.tensor([0, 0])},
            {"img": rows(4, 3, 2, 2)[2:], "bboxes": rows(5, 4)[2:], "batch_idx": torch.tensor([0, 1, 1])},
        ],
    ),
    "numbers of what is counted": (
        {"x": rows(9, 2), "num_tiles": torch.tensor([2, 3, 4]), "num_images": torch.tensor([2, 1]), "y": rows(2)},
        [
            {"x": rows(9, 2)[:5], "num_tiles": torch.tensor([2, 3]), "num_images": torch.tensor([2]), "y": rows(1)},
            {"x": rows(9, 2)[5:], "num_tiles": torch.tensor([4]), "num_images": torch.tensor([1]), "y": rows(2)[1:]},
        ],
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted_is_cut_where_the_numbers_say(name: str) -> None:
    batch, expected = COUNTED[name]
    size = sum(len(part.get("y", part.get("img", ()))) for part in expected)
    assert_identical(list(split_batch(batch, 2, source=of(size)).microbatches), expected)


def test_as_many_boxes_as_samples_are_told_by_earlier_batches() -> None:
    held: dict[str, Any] = {}
    for indices in ([0, 1, 1], [0, 0]):
        batch = {"img": rows(2, 3), "bboxes": rows(len(indices), 4), "batch_idx": torch.tensor(indices)}
        first, _ = split_batch(batch, 2, source=of(2), held=held).microbatches
        assert len(first["bboxes"]) == indices.count(0)


# Grids ---------------------------------------------------------------------------------------------------------------


def vision(images: list[list[tuple[int, int, int]]], *, videos: Any = None, has_types: bool = False) -> dict[str, Any]:
    """Rows with the grids of their images and videos, with a token for each square of four patches."""
    found: dict[str, Any] = {}
    texts: list[list[int]] = [[1, 2] for _ in images]
    for token, name, suffix, grids in ((IMAGE, "image", "", images), (VIDEO, "video", "_videos", videos)):
        for text, row in zip(texts, grids or [], strict=False):
            for t, h, w in row:
                text += [3, *[token] * (t * h * w // 4), 4]
        flat = [grid for row in grids or [] for grid in row]
        if flat:
            found[f"pixel_values{suffix}"] = rows(sum(t * h * w for t, h, w in flat), 2)
            found[f"{name}_grid_thw"] = torch.tensor(flat)
    if videos is not None:
        found["second_per_grid_ts"] = rows(len(found["video_grid_thw"]))
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    if has_types:
        found["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return {"input_ids": ids, "labels": ids.clone(), **found}


SMALL, WIDE, LARGE = (1, 2, 2), (1, 2, 4), (1, 4, 4)


@pytest.mark.parametrize("has_types", [False, True])
def test_patches_go_with_the_rows_that_name_their_images(has_types: bool) -> None:
    images, videos = [[SMALL], [WIDE, LARGE], [], [WIDE]], [[], [(2, 2, 2)], [(3, 2, 2), SMALL], []]
    batch = vision(images, videos=videos, has_types=has_types)
    first, second = split_batch(batch, 2, source=of(4)).microbatches
    for part, own in ((first, slice(0, 2)), (second, slice(2, 4))):
        of_rows = vision(images[own], videos=videos[own])
        assert torch.equal(part["image_grid_thw"], of_rows["image_grid_thw"])
        assert torch.equal(part["video_grid_thw"], of_rows["video_grid_thw"])
        assert len(part["pixel_values"]) == len(of_rows["pixel_values"])
        assert len(part["pixel_values_videos"]) == len(of_rows["pixel_values_videos"])
        assert torch.equal(part["input_ids"], batch["input_ids"][own])
    assert torch.equal(torch.cat([first["pixel_values"], second["pixel_values"]]), batch["pixel_values"])
    assert [part["second_per_grid_ts"].tolist() for part in (first, second)] == [[0.0], [1.0, 2.0]]


def test_as_many_images_as_rows_that_are_not_one_in_each() -> None:
    first, second = split_batch(vision([[SMALL, WIDE], []]), 2, source=of(2)).microbatches
    assert first["image_grid_thw"].tolist() == [[*SMALL], [*WIDE]]
    assert len(first["pixel_values"]) == 12
    assert second["image_grid_thw"] is second["pixel_values"] is None


# What is not certain -------------------------------------------------------------------------------------------------


def _two_ways() -> dict[str, Any]:
    return {
        "x": rows(4),
        "points": rows(7, 3),
        "lengths": torch.tensor([3, 1, 1, 2]),
        "sizes": torch.tensor([1, 3, 1, 2]),
    }


def _not_in_order() -> dict[str, Any]:
    return {"x": rows(3), "y": rows(3, 2), "z": rows(3), "boxes": rows(4, 4), "batch_idx": torch.tensor([0, 2, 1, 2])}


def _tokens_that_do_not_fit() -> dict[str, Any]:
    batch = vision([[SMALL], [WIDE], [LARGE]])
    return batch | {"input_ids": torch.full_like(batch["input_ids"], 7)}


def _another_image() -> dict[str, Any]:
    batch = vision([[SMALL], [WIDE], [LARGE]])
    return batch | {"image_grid_thw": torch.tensor([WIDE, SMALL, LARGE])}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_two_ways, ["batch['points'] of shape (7, 3)", "batch['lengths'] or batch['sizes'] may count its 7 rows"]),
        (_not_in_order, ["batch['batch_idx']", "does not name 3 samples in order"]),
        (_tokens_that_do_not_fit, ["batch['pixel_values'] of shape (28, 2)", "batch['image_grid_thw']: which of its"]),
        (_another_image, ["batch['pixel_values'] of shape (28, 2)", "cannot be told from the tokens"]),
        # class weights beside labels that add up to as many
        (lambda: {"x": rows(4, 2), "y": torch.tensor([1, 2, 3, 1]), "weights": rows(7)}, ["batch['weights']"]),
    ],
)
def test_what_may_be_counted_in_two_ways_is_refused(make: Callable[[], Any], words: list[str]) -> None:
    batch = make()
    with pytest.raises(BatchSplitError) as caught:
        split_batch(batch, 2, source=of(len(next(iter(batch.values())))))
    for word in [*words, "split_batch=fn"]:
        assert word in str(caught.value)


def test_what_could_not_be_read_is_not_read_by_chance_later() -> None:
    """Time first: in a later batch there are as many steps as samples."""
    held: dict[str, Any] = {}
    for steps in (5, 4):
        with pytest.raises(BatchSplitError, match=r"batch\['x'\] of shape \(., 4, 3\)"):
            split_batch({"x": rows(steps, 4, 3), "y": rows(4), "z": rows(4)}, 2, source=of(4), held=held)
