"""Nested arguments, results and batches: taken apart, changed and put together again."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from lightning_roundpipe.common import trees

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    tensor: Any
    number: int = field(default=3, init=False)


@dataclass
class Derived:
    """With more than its fields."""

    tensor: Any

    def __post_init__(self) -> None:
        self.mask = Y
        self.cache = {"self": self}
        self.names = [self.tensor]


class Registered:
    """Known to torch's pytrees only."""

    def __init__(self, value: Any) -> None:
        self.value = value


class OwnList(list[Any]):
    """A list with an attribute."""

    name = ""


pytree.register_pytree_node(Registered, lambda node: ([node.value], None), lambda values, _: Registered(*values))

X, Y = torch.zeros(2), nn.Parameter(torch.ones(3))

OPENED: dict[str, tuple[Any, list[Any]]] = {
    "nothing": ((), []),
    "tuple": ((X, 1, None), [X, 1, None]),
    "list": ([X, [Y]], [X, Y]),
    "dict": ({"b": X, "a": {"c": Y}}, [X, Y]),
    "ordered": (OrderedDict(b=X, a=Y), [X, Y]),
    "default": (defaultdict(list, x=X), [X]),
    "deque": (deque([X, Y]), [X, Y]),
    "named tuple": (Pair(X, (Y, 2)), [X, Y, 2]),
    "return type": (torch.max(torch.eye(2), dim=0), list(torch.max(torch.eye(2), dim=0))),
    "dataclass": (Frozen(X), [X, 3]),
    "registered": (Registered([X]), [X]),
    "mapping of the user's class": (UserDict(x=X), [X]),
    "list of the user's class": (OwnList([X]), [X]),
    "namespace": (SimpleNamespace(x=X, y=[Y]), [X, Y]),
}
LEAVES: dict[str, Any] = {
    "tensor": X,
    "parameter": Y,
    "text": "text",
    "size": torch.Size([2]),
    "class": Frozen,
    "object": object(),
}


def are_same(found: list[Any], wanted: list[Any]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a is b or (isinstance(a, Tensor) and a is not X and a is not Y and a.equal(b)) for a, b in pairs)


@pytest.mark.parametrize(("tree", "wanted"), OPENED.values(), ids=OPENED)
def test_a_tree_is_made_again_of_its_leaves(tree: Any, wanted: list[Any]) -> None:
    leaves: list[Any] = []
    structure = trees.flatten(tree, leaves)
    assert are_same(leaves, wanted)
    others = [object() for _ in leaves]
    made = trees.unflatten(structure, others)
    assert type(made) is type(tree)
    assert trees.leaves_of(made) == others
    assert are_same(trees.leaves_of(tree), wanted)  # the original is as it was


def test_tensors_that_a_dataclass_has_beside_its_fields_are_leaves() -> None:
    leaves: list[Any] = []
    derived = Derived(X)
    structure = trees.flatten(derived, leaves)
    assert are_same(leaves, [X, Y])
    made = trees.unflatten(structure, [Y, X])
    assert are_same([made.tensor, made.mask], [Y, X])
    assert are_same([derived.tensor, derived.mask], [X, Y])
    assert made.cache is derived.cache


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_anything_else_is_a_leaf(leaf: Any) -> None:
    leaves: list[Any] = []
    structure = trees.flatten(leaf, leaves)
    assert leaves[0] is leaf
    assert trees.unflatten(structure, ["other"]) == "other"


@pytest.mark.parametrize("call", [((X, 1), {}, []), ((X,), {"y": Y}, []), (([X],), {}, []), ((X,), {}, [Y])])
def test_a_call_is_made_again_of_its_leaves(call: Any) -> None:
    leaves: list[Any] = []
    structure = trees.flatten_call(*call, leaves)
    (args, kwargs), side = trees.unflatten_call(structure, leaves)
    assert are_same(trees.leaves_of((args, kwargs, side)), trees.leaves_of(call))
    assert (type(args), type(kwargs), type(side)) == (tuple, dict, list)


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("wrap", [list, Frozen, Registered, lambda items: {"x": items}])
def test_a_structure_keeps_no_tensor_alive(wrap: Any) -> None:
    tensor = torch.zeros(2)
    alive = weakref.ref(tensor)
    leaves: list[Any] = []
    structure = trees.flatten(wrap([tensor]), leaves)
    leaves.clear()
    del tensor
    gc.collect()
    assert alive() is None
    assert structure is not None


MAPPED = {
    **{name: tree for name, (tree, leaves) in OPENED.items() if leaves},
    "mapping of the user's class": UserDict(x=X),
    "list of the user's class": OwnList([X]),
    "packed sequence": pack_sequence([torch.ones(2, 1), torch.ones(1, 1)]),
}


@pytest.mark.parametrize("value", MAPPED.values(), ids=MAPPED)
def test_mapped_changes_tensors_in_containers_of_the_same_kind(value: Any) -> None:
    seen: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    changed = trees.mapped(value, change)
    assert seen
    assert changed is not value
    assert type(changed) is type(value)
    assert trees.mapped(value) is value


def test_mapped_changes_model_outputs() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    changed = trees.mapped(output := outputs.CausalLMOutputWithPast(loss=X.sum(), logits=X), torch.clone)
    assert type(changed) is type(output)
    assert changed.loss is changed["loss"] is not output.loss


def test_mapped_keeps_what_does_not_change() -> None:
    kept = [X, {"y": Y}]
    changed = trees.mapped([kept, [torch.ones(1)]], lambda tensor: tensor if tensor.numel() > 1 else tensor + 1)
    assert changed[0] is kept
    assert changed[1][0].item() == 2


def test_mapped_makes_containers_of_some_classes_anew() -> None:
    value = {"list": [X], "inner": [{"y": Y}]}
    own = trees.mapped(value, anew=Mapping)
    assert own is not value
    assert own["list"] is value["list"]
    assert own["inner"][0] is not value["inner"][0]
    assert own["inner"][0]["y"] is Y
    everything = trees.mapped(value, anew=object)
    assert everything["list"] is not value["list"]
    assert everything["list"][0] is X


def test_a_mapped_container_may_hold_itself() -> None:
    value: dict[str, Any] = {"x": X}
    value["self"] = value
    changed = trees.mapped(value, torch.clone)
    assert changed["x"] is not X
    assert changed["self"] is value


def test_children_are_named_by_the_way_to_them() -> None:
    value = {"a": [X, Pair(Y, 1)], "b": Frozen({"c": X})}
    assert [path for path, _ in trees.tensors_in(value, "batch")] == [
        "batch['a'][0]",
        "batch['a'][1].left",
        "batch['b'].tensor['c']",
    ]
    packed: PackedSequence = MAPPED["packed sequence"]
    assert trees.children_of(packed) is None
    assert trees.children_of(torch.Size([2])) is None


def test_batch_sizes_of_a_packed_sequence_are_no_leaf() -> None:
    """They must stay on the host, while what is packed goes to a device."""
    packed = pack_sequence([torch.zeros(2, 3), torch.ones(3, 3)], enforce_sorted=False)
    leaves: list[Any] = []
    structure = trees.flatten((packed,), leaves)
    assert all(leaf is not packed.batch_sizes for leaf in leaves)
    (made,) = trees.unflatten(structure, [leaf + 1 for leaf in leaves])
    assert made.data.equal(packed.data + 1)
    assert made.batch_sizes is packed.batch_sizes
    assert made.unsorted_indices.equal(packed.unsorted_indices + 1)


def test_attributes_that_are_the_items_of_a_dict_stay_so() -> None:
    class Record(dict[str, Any]):
        def __init__(self, **items: Any) -> None:
            super().__init__(**items)
            self.__dict__ = self

    leaves: list[Any] = []
    structure = trees.flatten(Record(x=X), leaves)

    made = trees.unflatten(structure, [Y])

    assert made.x is made["x"] is Y
    made.z = 3
    assert made["z"] == 3


def test_a_distribution_is_made_again_of_its_tensors() -> None:
    mean, scale = torch.zeros(2, 3), torch.ones(2, 3)
    leaves: list[Any] = []
    structure = trees.flatten(Independent(Normal(mean, scale), 1), leaves)

    made = trees.unflatten(structure, [leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves])

    assert made.mean.equal(mean + 1)
    assert made.event_shape == (3,)
    assert made.log_prob(mean).equal(Independent(Normal(mean + 1, scale + 1), 1).log_prob(mean))
