"""How a batch is cut into micro-batches: sizes, leaves, containers, and what is refused."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from lightning_roundpipe.common.trees import children_of
from lightning_roundpipe.integration.batches.microbatches import MicrobatchSplit, batch_rows, split_batch
from lightning_roundpipe.integration.batches.reading import BatchSplitError
from tests.support.identical import assert_identical
from tests.support.rows import compat


class Pair(NamedTuple):
    image: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "n"


@dataclass
class Derived:
    x: torch.Tensor
    double: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.x
        self.is_large = self.x > 1  # no field
        self.owner = Opaque()


class Mode(enum.Enum):
    TRAIN = "train"


class Opaque:
    pass


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(count, *shape)


def assert_cut(batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> None:
    """The parts are the batch, cut into these sizes: nothing is lost, and what has no rows is in every part."""
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    if isinstance(batch, torch.Tensor) and batch.is_sparse:
        batch, parts = batch.to_dense(), [part.to_dense() for part in parts]
    has_rows = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    if not isinstance(batch, Mapping):
        has_rows = has_rows or bool(getattr(batch, "ndim", 0))
    if has_rows and len(batch) == bounds[-1][1] and [len(part) for part in parts] == list(sizes):
        for part, (start, stop) in zip(parts, bounds, strict=True):
            assert_identical(part, batch[start:stop])
        return
    assert all(type(part) is type(batch) for part in parts)
    entries = children_of(batch)
    if entries is None:
        for part in parts:
            assert_identical(part, batch)
        return
    for index, (suffix, entry) in enumerate(entries):
        found = [(children_of(part) or [])[index] for part in parts]
        assert {name for name, _ in found} == {suffix}
        assert_cut(entry, [value for _, value in found], sizes)


# Sizes ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 6))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_sizes_are_nearly_equal_larger_first_and_not_under_the_minimum(batch: int, count: int, minimum: int) -> None:
    split = split_batch(rows(batch, 2), count, min_rows=minimum)
    assert split.batch_size == sum(split.sizes) == batch
    assert len(split.sizes) == max(1, min(count, batch // minimum)) == len(split.microbatches)
    assert list(split.sizes) == sorted(split.sizes, reverse=True)
    assert max(split.sizes) - min(split.sizes) <= 1
    assert len(split.sizes) == 1 or min(split.sizes) >= minimum
    assert [len(part) for part in split.microbatches] == list(split.sizes)


def test_one_microbatch_is_the_batch_itself() -> None:
    batch = {"x": rows(4)}
    for split in (split_batch(batch, 1), split_batch(batch, 8, min_rows=3)):
        assert split.microbatches[0] is batch
        assert (split.sizes, split.batch_size) == ((4,), 4)
    mismatched = {"x": rows(4), "y": rows(3)}
    assert split_batch(mismatched, 1) == MicrobatchSplit((mismatched,), (1,), None)


def test_zero_rows_and_one_row_are_one_microbatch() -> None:
    assert split_batch({"x": rows(0, 3)}, 4).sizes == (0,)
    assert split_batch([rows(1, 3), rows(1)], 4).sizes == (1,)
    # one row of data next to a list of another length: the row is data, not a mask to share
    assert split_batch({"x": rows(1, 3), "classes": ["a", "b", "c"]}, 4).sizes == (1,)


@compat("Misuse", "batches without rows (text, a number)")
@pytest.mark.parametrize("batch", [None, 3, 2.5, "text", torch.tensor(1.0), iter([1]), {}, {"a": 1, "b": None}, (1, 2)])
def test_batches_without_rows_are_one_untouched_microbatch(batch: Any) -> None:
    split = split_batch(batch, 4)
    assert split.microbatches[0] is batch
    assert (split.sizes, split.batch_size) == ((1,), None)
    assert batch_rows(batch) is None


def test_a_generator_is_not_consumed() -> None:
    generator = (index for index in range(3))
    assert split_batch(generator, 4).microbatches[0] is generator
    assert next(generator) == 0


# Leaves --------------------------------------------------------------------------------------------------------------


def test_parts_are_views_and_keep_gradients() -> None:
    x = rows(6, 2).requires_grad_()
    parts = split_batch({"x": x}, 3).microbatches
    assert all(part["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)
    sum(part["x"].sum() for part in parts).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_numpy_arrays_are_sliced_as_views() -> None:
    np = pytest.importorskip("numpy")
    x = np.arange(12).reshape(6, 2)
    split = split_batch({"x": x, "scale": np.float32(2), "point": np.array(3)}, 2)
    assert all(np.shares_memory(part["x"], x) for part in split.microbatches)
    assert_cut(x, [part["x"] for part in split.microbatches], split.sizes)


def test_mappings_of_shared_leaves_belong_to_their_microbatch() -> None:
    """A step may take entries out of them, or put some in, as if it were called once."""
    table = torch.zeros(1, 2)
    meta = {"task": "nli", "deep": [{"table": table, "k": 1}], "names": ["a", "b"], "found": {}}
    parts = split_batch({"x": rows(6), "meta": meta}, 3).microbatches
    for index, part in enumerate(parts):
        assert part["meta"].pop("task") == "nli"
        assert part["meta"]["deep"][0].pop("k") == 1
        assert part["meta"]["deep"][0]["table"] is table
        assert part["meta"]["names"] is meta["names"]
        assert part["meta"]["found"] == {}
        part["meta"]["found"]["index"] = index
    assert meta == {"deep": [{"table": table}], "names": ["a", "b"], "found": {"index": 2}}


@pytest.mark.parametrize(
    "shared",
    [
        *(None, True, 3, 2.5, 1j, "text", b"bytes", Mode.TRAIN, torch.float16, torch.device("cpu"), torch.Generator()),
        *(torch.Size([3, 4]), torch.tensor(2.0), torch.ones(1, 1, 5, 5), ["a", "b"], [224, 224], ()),
    ],
)
def test_leaves_without_batch_dimension_are_shared(shared: Any) -> None:
    for part in split_batch({"x": rows(6), "other": shared}, 3).microbatches:
        assert part["other"] is shared


def test_sparse_tensors() -> None:
    x = rows(6, 3)
    split = split_batch([x.to_sparse(), x], 4)
    for sparse, dense in split.microbatches:
        assert torch.equal(sparse.to_dense(), dense)
    assert_cut([x.to_sparse(), x], split.microbatches, split.sizes)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_other_sparse_layouts_are_refused() -> None:
    with pytest.raises(BatchSplitError, match=r"batch\[0\].*sparse_csr"):
        split_batch([rows(6, 3).to_sparse_csr(), rows(6, 3)], 2)


# Containers ----------------------------------------------------------------------------------------------------------


class Attributes(dict):
    """A mapping with something besides its items."""

    extra = 0


class Dotted(dict):
    """Items as attributes, as they are often written: what is missing raises a KeyError."""

    __getattr__ = dict.__getitem__


class TaggedList(list):
    tag = ""


class ReadOnly(Mapping):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _default_dict(items: dict[str, Any]) -> defaultdict[str, Any]:
    return defaultdict(list, items)


Point = namedtuple("Point", "a b")

CONTAINERS = [
    *(dict, OrderedDict, UserDict, Counter, Attributes, Dotted, ReadOnly, MappingProxyType, _default_dict),
    *(
        lambda d: tuple(d.values()),
        lambda d: list(d.values()),
        lambda d: Point(*d.values()),
        lambda d: Pair(*d.values()),
    ),
    *(lambda d: Frozen(d["x"]), lambda d: Derived(d["x"]), lambda d: TaggedList(d.values())),
    lambda d: {"outer": [OrderedDict(d), (Pair(*d.values()), Frozen(d["x"]))]},
]


@pytest.mark.parametrize("make", CONTAINERS)
def test_containers_keep_their_type_and_lose_nothing(make: Any) -> None:
    batch = make({"x": rows(7, 2), "y": rows(7)})
    split = split_batch(batch, 3)
    assert split.sizes == (3, 2, 2)
    assert all(type(part) is type(batch) for part in split.microbatches)
    assert_cut(batch, split.microbatches, split.sizes)


def test_subclasses_keep_what_they_carry() -> None:
    tagged, attributes = TaggedList([rows(4)]), Attributes(x=rows(4))
    tagged.tag, attributes.extra = "tag", 7
    batch = {"a": tagged, "b": attributes, "c": _default_dict({"x": rows(4)}), "d": Derived(rows(4))}
    batch["d"].double = 3 * rows(4)
    for index, part in enumerate(split_batch(batch, 2).microbatches):
        assert part["a"].tag == "tag"
        assert part["b"].extra == 7
        assert part["c"].default_factory is list
        assert torch.equal(part["d"].double, 3 * rows(4)[2 * index : 2 * index + 2])
        assert torch.equal(part["d"].is_large, part["d"].x > 1)
        assert part["d"].owner is batch["d"].owner
    assert torch.equal(batch["d"].double, 3 * rows(4))
    assert len(attributes["x"]) == 4


@pytest.mark.parametrize(
    "samples",
    [
        [{"x": torch.ones(3) * i, "name": f"n{i}", "pair": (i, float(i))} for i in range(6)],
        [Point(torch.ones(2), [i, i + 1]) for i in range(6)],
    ],
)
def test_default_collate(samples: list[Any]) -> None:
    batch = default_collate(samples)
    split = split_batch(batch, 4)
    assert split.sizes == (2, 2, 1, 1)
    assert_identical(split.microbatches[0], default_collate(samples[:2]))
    assert_identical(split.microbatches[3], default_collate(samples[5:]))
    assert_cut(batch, split.microbatches, split.sizes)


def detection_samples(count: int) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    return [(rows(3, 4 + i, 5), {"boxes": rows(i, 4), "id": torch.tensor([i])}) for i in range(count)]


@pytest.mark.parametrize("sequence", [list, tuple])
def test_one_entry_per_sample(sequence: Any) -> None:
    images, targets = (sequence(column) for column in zip(*detection_samples(5), strict=True))
    split = split_batch((images, targets), 2)
    assert split.sizes == (3, 2)
    assert split.microbatches[1] == (images[3:], targets[3:])
    assert split_batch({"images": images, "targets": targets}, 2).microbatches[0]["targets"] == targets[:3]


def test_lists_of_samples() -> None:
    assert split_batch(["a", "b", "c"], 2).microbatches == (["a", "b"], ["c"])
    objects = [Opaque() for _ in range(4)]
    assert split_batch({"objects": objects}, 2).microbatches[1] == {"objects": objects[2:]}
    words = [["a", "b"], ["c"], ["d", "e", "f"], []]
    assert split_batch({"words": words, "y": rows(4)}, 2).microbatches[0]["words"] == words[:2]
    gray = [rows(1, 4, 4) for _ in range(4)]  # leading size 1 does not make a list of samples a mask
    assert split_batch((gray, rows(4)), 2).microbatches[0][0] == gray[:2]
    optional = [None, "b", None, "d"]
    assert split_batch({"x": rows(4), "optional": optional}, 2).microbatches[1]["optional"] == optional[2:]


def test_a_tuple_of_equal_tensors_is_a_container() -> None:
    first, second = split_batch((rows(8, 2), rows(8, 2)), 2).microbatches
    assert [part.shape for part in first + second] == [(4, 2)] * 4
    assert batch_rows((rows(2), rows(2))) == 2
    assert batch_rows({"views": [rows(4), rows(4)], "y": rows(4), "names": ["a", "b", "c", "d"]}) == 4


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": rows(8, 3), "weights": rows(7)}, ["batch['weights'] of shape (7,)", "8 by batch['x'] of shape (8, 3)"]),
        ([Pair(rows(4), rows(5)), rows(4)], ["batch[0].mask of shape (5,)", "4 by batch[0].image"]),
        ({"x": rows(4), "graph": Opaque()}, ["batch['graph'] of type Opaque", "4 by batch['x']"]),
        ({"x": rows(4), "more": iter([1])}, ["batch['more'] of type list_iterator"]),
        (Opaque(), ["batch of type Opaque", "rows are unknown"]),
        ({"x": rows(2), "packed": pack_sequence([rows(3), rows(2)])}, ["batch['packed']", "PackedSequence"]),
        (pack_sequence([rows(3), rows(2)]), ["PackedSequence"]),
        ({"x": rows(2), "words": torch.nested.nested_tensor([rows(2), rows(3)])}, ["batch['words']"]),
        ({"x": rows(9), "pair": [rows(9, 2), rows(7, 2)]}, ["batch['pair'][1] of shape (7, 2)", "9 by"]),
        # batches of two loaders, of different sizes, are not two samples
        ([[rows(8, 3), rows(8)], [rows(5, 3), rows(5)]], ["batch[1][0] of shape (5, 3)", "8 by"]),
        ([rows(8), rows(8)], ["2 rows (batch, a list of 2 entries)", "8 rows (batch[0] of shape (8,))"]),
        ([rows(8), rows(5)], ["batch[1] of shape (5,)", "8 by"]),
        # collate_fn=lambda samples: samples, with images of 3 channels
        ([(rows(3, 4, 4), 1), (rows(3, 4, 4), 5)], ["3 rows", "2 rows", "batch, a list of 2 entries"]),
        ({"a": ["x", "y", "z"], "b": ["x", "y"]}, ["can be read as 3 rows", "or 2 rows"]),
    ],
)
@compat("Misuse", "a batch of an unknown kind", "refused", "Use `split_batch` or `num_microbatches=1`.")
def test_what_cannot_be_split_is_refused_with_the_leaf_and_the_ways_out(batch: Any, words: list[str]) -> None:
    with pytest.raises(BatchSplitError) as caught:
        split_batch(batch, 4)
    for word in [*words, "RoundPipeStrategy(split_batch=fn)", "roundpipe_split_batch(self, batch, num_", "=1"]:
        assert word in str(caught.value)
    assert batch_rows(batch) is None
    assert split_batch(batch, 1).microbatches[0] is batch


# Any batch -----------------------------------------------------------------------------------------------------------


def _leaves(batch: int) -> st.SearchStrategy[Any]:
    # Entries of per-sample lists are longer than any batch here, so that no list can be read in both ways.
    return st.one_of(
        st.lists(st.integers(1, 3), max_size=2).map(lambda shape: rows(batch, *shape)),
        st.just(rows(batch).long()),
        st.just([f"text {index}" for index in range(batch)]),
        st.just([rows(50 + index) for index in range(batch)]),
        st.just([Frozen(rows(50 + index)) for index in range(batch)]),
        st.sampled_from([None, 3, 2.5, "text", torch.tensor(4.0), torch.ones(1, 2), torch.float16]),
    )


def _nested(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "c", "d"])
    return st.one_of(
        st.dictionaries(keys, leaf, max_size=4),
        st.dictionaries(keys, leaf, max_size=4).map(OrderedDict),
        st.dictionaries(keys, leaf, max_size=4).map(UserDict),
        st.tuples(leaf, leaf).map(lambda pair: Point(*pair)),
        leaf.map(lambda value: Frozen(value)),
    )


@given(st.data(), st.integers(5, 12), st.integers(2, 6))
@settings(derandomize=True, deadline=None, max_examples=20)
def test_any_batch_is_cut_without_loss(data: st.DataObject, batch_size: int, count: int) -> None:
    tree = st.recursive(_leaves(batch_size), _nested, max_leaves=8)
    batch = data.draw(st.tuples(st.just(rows(batch_size, 2)), tree).map(lambda pair: {"x": pair[0], "rest": pair[1]}))
    split = split_batch(batch, count)
    assert split.batch_size == batch_size
    assert len(split.microbatches) == min(count, batch_size)
    assert all(type(part["rest"]) is type(batch["rest"]) for part in split.microbatches)
    assert_cut(batch, split.microbatches, split.sizes)
