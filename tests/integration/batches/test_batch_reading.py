"""How a batch is read: what is known of its source, and what is refused."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_roundpipe.integration.batches.microbatches import split_batch
from lightning_roundpipe.integration.batches.reading import BatchSource, BatchSplitError
from tests.support.identical import assert_identical

Pair = namedtuple("Pair", "x y")


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(count, *shape)


def whole(count: int, *shape: int) -> torch.Tensor:
    return rows(count, *shape).long()


def samples(size: int, *shape: int) -> list[torch.Tensor]:
    return [rows(*shape) for _ in range(size)]


def of(size: int, *others: int, **known: bool) -> BatchSource:
    return BatchSource((size, *others), **known)


# name: (batch, source, micro-batches asked for, a part of each -> what it must be)
READ: dict[str, tuple[Any, BatchSource, Callable[[Any], Any], list[Any]]] = {
    "DETR, as many boxes as samples": (
        {"pixels": rows(2, 3, 8, 8), "labels": [{"boxes": rows(2, 4)}, {"boxes": rows(2, 4)}]},
        of(2),
        lambda m: (len(m["pixels"]), [len(target["boxes"]) for target in m["labels"]]),
        [(1, [2]), (1, [2])],
    ),
    "lists of masks": (
        {"pixels": rows(2, 3, 8, 8), "masks": samples(2, 2, 8, 8), "classes": samples(2, 2)},
        of(2),
        lambda m: (len(m["pixels"]), len(m["masks"]), m["classes"][0].shape),
        [(1, 1, (2,))] * 2,
    ),
    "a list of tensors as long as the batch": (
        (rows(4, 3), samples(4, 4)),
        of(4),
        lambda m: (len(m[0]), [tuple(x.shape) for x in m[1]]),
        [(2, [(4,), (4,)])] * 2,
    ),
    "identity collate": (
        [{"x": rows(16), "y": rows(1)} for _ in range(8)],
        of(8),
        lambda m: [tuple(sample["x"].shape) for sample in m],
        [[(16,)] * 4] * 2,
    ),
    "identity collate of ragged tensors": (
        [rows(3), rows(5), rows(3), rows(2)],
        of(4),
        lambda m: [len(x) for x in m],
        [[3, 5], [3, 2]],
    ),
    "pairs of texts from default_collate": (
        default_collate([("a", "b"), ("c", "d")]),
        of(2, is_collated=True),
        lambda m: [list(column) for column in m],
        [[["a"], ["b"]], [["c"], ["d"]]],
    ),
    "pairs of texts in columns": (
        [[f"s{i}" for i in range(4)], [f"t{i}" for i in range(4)]],
        of(4),
        lambda m: m,
        [[["s0", "s1"], ["t0", "t1"]], [["s2", "s3"], ["t2", "t3"]]],
    ),
    "columns of a batch of two from default_collate": (
        default_collate([(rows(5), rows(5)), (rows(5), rows(5))]),
        of(2, is_collated=True),
        lambda m: [tuple(x.shape) for x in m],
        [[(1, 5), (1, 5)]] * 2,
    ),
    "columns of a batch of two in a tuple": (
        (whole(2, 7), whole(2, 7)),
        of(2),
        lambda m: [tuple(x.shape) for x in m],
        [[(1, 7), (1, 7)]] * 2,
    ),
    "torchvision detection, two samples": (
        (tuple(samples(2, 3, 8, 8)), ({"boxes": rows(2, 4)}, {"boxes": rows(5, 4)})),
        of(2),
        lambda m: (len(m[0]), [len(target["boxes"]) for target in m[1]]),
        [(1, [2]), (1, [5])],
    ),
    "torchvision detection, as many samples as colours": (
        (tuple(samples(3, 3, 8, 8)), ({"boxes": rows(2, 4)}, {"boxes": rows(5, 4)}, {"boxes": rows(1, 4)})),
        of(3),
        lambda m: (len(m[0]), [len(target["boxes"]) for target in m[1]]),
        [(2, [2, 5]), (1, [1])],
    ),
    "positions of one row beside tokens": (
        {"ids": whole(4, 6), "positions": whole(1, 6)},
        of(4),
        lambda m: (len(m["ids"]), len(m["positions"])),
        [(2, 1)] * 2,
    ),
    "a list of one tensor": ([rows(8, 3)], of(8), lambda m: len(m[0]), [4, 4]),
    "the last batch": ((rows(2, 3), ["a", "b"]), of(8, 2), lambda m: (len(m[0]), m[1]), [(1, ["a"]), (1, ["b"])]),
    "samples that a collate function left out": ({"x": rows(6, 3), "y": rows(6)}, of(8), lambda m: len(m["y"]), [3, 3]),
    "parts of two loaders": (
        [[rows(4, 3), rows(4)], [rows(4, 3), rows(4)]],
        of(4, is_collated=True, is_joined=True),
        lambda m: [len(x) for part in m for x in part],
        [[2, 2, 2, 2]] * 2,
    ),
    "a batch that a data set has made": (
        Pair(rows(4, 3), rows(4)),
        BatchSource(is_item=True),
        lambda m: len(m.x),
        [2] * 2,
    ),
    "texts with a size that is no list of samples": (
        {"texts": list("abcd"), "size": [224, 224]},
        of(4),
        lambda m: (m["texts"], m["size"]),
        [(["a", "b"], [224, 224]), (["c", "d"], [224, 224])],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_batch_is_read_by_what_is_known_of_its_source(name: str) -> None:
    batch, source, look, expected = READ[name]
    split = split_batch(batch, 2, source=source)
    assert [look(microbatch) for microbatch in split.microbatches] == expected


WHOLE: dict[str, tuple[Any, BatchSource]] = {
    "packed, boundaries in a list": (
        {"ids": whole(1, 48), "labels": whole(1, 48), "cu_seq_lens_q": [0, 20, 48]},
        of(2),
    ),
    "packed, lengths as many as samples": ({"ids": whole(1, 48), "lengths": [20, 28]}, of(2)),
    "packed, lengths in a tensor": ({"ids": whole(1, 48), "lengths": torch.tensor([20, 28])}, of(2)),
    "images in one row of text": ({"ids": whole(1, 9), "pixels": rows(4, 6)}, of(4)),
    "a data loader of single samples": ((rows(3, 8, 8), rows(3)), of(1)),
    "a vector of a data set": (rows(32), BatchSource(is_item=True)),
    "vectors of a data set": ({"x": rows(32), "weight": rows(32), "id": 5}, BatchSource(is_item=True)),
    "a sample of a data set": ((rows(3, 8, 8), 5), BatchSource(is_item=True)),
    "a list of one tensor, from nowhere": ([rows(8, 3)], BatchSource()),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_batch_that_may_be_one_sample_stays_whole(name: str) -> None:
    batch, source = WHOLE[name]
    assert split_batch(batch, 2, source=source).microbatches == (batch,)


REFUSED: dict[str, tuple[Any, BatchSource, list[str]]] = {
    "columns or samples": (
        [rows(2, 5), rows(2, 5)],
        of(2),
        ["one entry per sample (batch, a list of 2 entries)", "all samples in every entry (batch"],
    ),
    "texts, columns or samples": ([["a", "b"], ["c", "d"]], of(2), ["one entry per sample", "all samples in every"]),
    "a state or two samples": (
        {"x": rows(2, 3), "state": (rows(2, 4), rows(2, 4))},
        of(2),
        ["one entry per sample (batch['state'], a tuple of 2 entries)"],
    ),
    "columns of two sizes in a tuple": ((rows(10, 6), rows(14, 6)), of(2), ["batch[1] of shape (14, 6) does not fit"]),
    "labels or a size": (
        {"x": rows(2, 3), "size": (8, 8)},
        of(2),
        ["one entry per sample (batch['size'], a tuple of 2 entries)", "what all samples share"],
    ),
    "columns of two sizes": ([rows(8), rows(5)], of(8), ["batch[1] of shape (5,) does not fit", "8 by batch[0]"]),
    "nodes of graphs": (
        {"x": rows(37, 5), "graph": whole(37)},
        of(4),
        ["gives 4 samples per batch", "batch['x'] of shape (37, 5) has 37 rows"],
    ),
    "graphs with edges": ({"x": rows(37, 5), "edges": whole(2, 80), "y": rows(4)}, of(4), ["batch['x']", "4 by"]),
    "time first, long": ((rows(20, 8, 3), rows(20, 8)), of(8), ["8 samples per batch", "batch[0]", "has 20 rows"]),
    "time first, short": ((rows(5, 8, 3), rows(5, 8)), of(8), ["batch[0] of shape (5, 8, 3)", "second dimension"]),
    "two views of each sample": (rows(16, 3), of(8), ["8 samples", "16 rows"]),
    "loaders of two sizes": (
        {"a": rows(8, 3), "b": rows(5, 3)},
        BatchSource(is_joined=True),
        ["batch['b'] of shape (5, 3) does not fit", "8 by batch['a']"],
    ),
    "samples of a data set": ([rows(3, 8, 8) for _ in range(16)], BatchSource(is_item=True), ["16 rows", "3 rows"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_certain_is_refused(name: str) -> None:
    batch, source, words = REFUSED[name]
    with pytest.raises(BatchSplitError) as caught:
        split_batch(batch, 2, source=source)
    for word in [*words, "split_batch=fn", "roundpipe_split_batch", "num_microbatches=1"]:
        assert word in str(caught.value)


def test_a_reading_is_held() -> None:
    """Two states of two layers are told from samples by the batch before, in which there were more samples."""
    held: dict[str, Any] = {}
    for size in (4, 2):
        batch = {"x": rows(size, 3), "state": (rows(size, 4), rows(size, 4)), "size": [7, 9]}
        for part in split_batch(batch, 2, source=of(4, 2), held=held).microbatches:
            assert [len(state) for state in part["state"]] == [size // 2] * 2
            assert part["size"] == [7, 9]


CHANGED: dict[str, tuple[Any, Any, list[str]]] = {
    "class weights, as many as samples": (
        {"x": rows(8, 3), "y": rows(8), "weights": rows(8)},
        {"x": rows(5, 3), "y": rows(5), "weights": rows(8)},
        ["batch['weights'] of shape (8,)", "held one row per sample", "5 by batch['x']"],
    ),
    "features, as many as samples": (
        {"x": rows(8, 3), "columns": samples(8, 8)},
        {"x": rows(5, 3), "columns": samples(8, 5)},
        ["batch['columns'], a list of 8 entries", "earlier batches", "held one entry per sample"],
    ),
    "samples after columns": (
        {"x": rows(8, 3), "parts": samples(2, 8)},
        {"x": rows(2, 3), "parts": samples(2, 5)},
        ["batch['parts'][0] of shape (5,)", "batch['parts'] held all samples in every entry"],
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_batch_that_contradicts_the_ones_before_is_refused(name: str) -> None:
    first, second, words = CHANGED[name]
    held: dict[str, Any] = {}
    split_batch(first, 2, held=held, source=of(8))
    with pytest.raises(BatchSplitError) as caught:
        split_batch(second, 2, held=held, source=of(8))
    for word in words:
        assert word in str(caught.value)


def _samples(size: int, draw: Any) -> tuple[list[Any], Callable[[list[Any]], Any], bool]:
    """Samples, and one way to collate them; all kinds that collate functions of common projects make."""
    kind = draw(st.sampled_from(["default", "zip", "identity", "dict of lists", "masks", "DETR", "graphs"]))
    length = draw(st.integers(2 if kind == "graphs" else 1, 6))  # graphs of one node look like samples
    found = []
    for index in range(size):
        count = draw(st.integers(0, 6))
        found.append({"x": rows(length, 2) + index, "boxes": rows(count, 4), "name": f"n{index}", "id": index})
    collates: dict[str, Callable[[list[Any]], Any]] = {
        "default": lambda got: default_collate([{**sample, "boxes": rows(3, 4)} for sample in got]),
        "zip": lambda got: tuple(zip(*[(s["x"], {"boxes": s["boxes"], "id": s["id"]}) for s in got], strict=True)),
        "identity": list,
        "dict of lists": lambda got: {key: [sample[key] for sample in got] for key in got[0]},
        "masks": lambda got: {"x": torch.stack([s["x"] for s in got]), "boxes": [s["boxes"] for s in got]},
        "DETR": lambda got: {
            "x": torch.stack([s["x"] for s in got]),
            "labels": [{"boxes": s["boxes"], "id": s["id"]} for s in got],
        },
        "graphs": lambda got: {
            "x": torch.cat([s["x"] for s in got]),
            "graph": torch.cat([torch.full((len(s["x"]),), s["id"] - got[0]["id"]) for s in got]),
        },
    }
    return found, collates[kind], kind == "default"


@given(st.data(), st.integers(2, 7), st.integers(2, 4))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_microbatches_are_what_collating_their_samples_gives_or_the_batch_is_refused(
    data: st.DataObject, size: int, count: int
) -> None:
    found, collate, is_collated = _samples(size, data.draw)
    try:
        split = split_batch(collate(found), count, source=of(size, is_collated=is_collated))
    except BatchSplitError:
        return
    if len(split.microbatches) == 1:
        return
    start = 0
    for part, length in zip(split.microbatches, split.sizes, strict=True):
        assert_identical(part, collate(found[start : start + length]))
        start += length
