"""Lists and dicts of micro-batches, without an engine: what becomes of copies that were changed in any way."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_roundpipe.integration.batches.merging import merge_outputs
from lightning_roundpipe.usercode.collected_lists import CollectedLists, refill
from tests.support.identical import assert_identical

# Two micro-batches of two rows.
merge = functools.partial(merge_outputs, sizes=(2, 2), weights=(1.0, 1.0))


def collected(original: Any, *changes: Callable[[Any], Any]) -> Any:
    """What is in a list or dict after micro-batches have changed their copies."""
    module = nn.Module()
    module.found = original
    lists = CollectedLists([module])
    overlays = []
    for change in changes:
        ((_, name, copy),) = lists.copies().attributes
        change(copy)
        overlays.append({(id(module), name): (module, copy)})
    lists.collect(overlays, merge)
    assert module.found is original
    return original


def changed_twice(found: list[Any], first: int) -> None:
    found.extend([first, first + 1])
    found.pop(0)
    found.extend([first + 2, first + 3])


LISTS: dict[str, tuple[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]], Any]] = {
    "appended": ([0], (lambda c: c.append(1.0), lambda c: c.append(3.0)), [0, 2.0]),
    "appended, what cannot be merged": ([0], (lambda c: c.append("a"), lambda c: c.append("b")), [0, "a", "b"]),
    "extended": ([0], (lambda c: c.extend([1, 2]), lambda c: c.extend([3, 4])), [0, 1, 2, 3, 4]),
    "extended twice": (
        [],
        (lambda c: (c.extend([1, 2]), c.extend("ab")), lambda c: (c.extend([3, 4]), c.extend("cd"))),
        [1, 2, 3, 4, "a", "b", "c", "d"],
    ),
    "extended between": (
        [],
        (lambda c: (c.append(1.0), c.extend([1, 2]), c.append("x")),) * 2,
        [1.0, 1, 2, 1, 2, "x"],
    ),
    "extended by one alone": ([], (lambda c: c.extend([1, 2]), lambda c: None), [1, 2]),
    "extended and appended": ([], (lambda c: c.extend([1, 2]), lambda c: c.append(3)), [1, 2, 3]),
    "taken from": ([0], (lambda c: changed_twice(c, 1), lambda c: changed_twice(c, 5)), [1, 2, 5, 6, 3, 4, 7, 8]),
    "cleared": ([0], (lambda c: (c.clear(), c.extend([1, 2])), lambda c: (c.clear(), c.extend([3, 4]))), [1, 2, 3, 4]),
    "inside": (
        {"a": [0], "b": {}},
        (lambda c: (c["a"].append(1.0), c["b"].update(x=1)), lambda c: (c["a"].append(2.0), c["b"].update(x=1))),
        {"a": [0, 1.5], "b": {"x": 1}},
    ),
    "of a defaultdict": (
        defaultdict(list),
        (lambda c: c["a"].extend([1, 2, 3, 4]), lambda c: c["a"].extend([5, 6, 7, 8])),
        {"a": [1, 2, 3, 4, 5, 6, 7, 8]},
    ),
    "of a defaultdict, by one alone": (defaultdict(list), (lambda c: None, lambda c: c["a"].append(1)), {"a": [1]}),
}


@pytest.mark.parametrize("case", LISTS)
def test_changes_of_micro_batches_are_put_together(case: str) -> None:
    original, changes, expected = LISTS[case]
    found = collected(original, *changes)
    assert found == expected
    for inside in found.values() if isinstance(found, dict) else ():
        assert type(inside) in (list, dict)
    assert not isinstance(found, defaultdict) or found.default_factory is list


def test_a_list_inside_of_what_one_micro_batch_alone_has_filled() -> None:
    """As in the first step, in which a unit is called by some of them."""
    unit = nn.Module()
    unit.store = {"h": ["before"]}
    for index in range(2):
        lists = CollectedLists([], lambda: [(unit, "store")])
        lists._originals = []  # the unit was not known yet
        copies = [lists.copies(), lists.copies()]
        own = copies[index].of(unit.store)
        own["h"].append(index)
        overlays: list[Any] = [{}, {}]
        overlays[index] = {(id(unit), "store"): (unit, own)}
        lists.collect(overlays, merge)
    assert unit.store == {"h": ["before", 0, 1]}


def test_of_lists_that_some_micro_batches_alone_assign_the_last_stays() -> None:
    module = nn.Module()
    for index in range(2):
        module.found = ["before"]
        lists = CollectedLists([module])
        found = [attribute for _, _, attribute in (*lists.copies().attributes, *lists.copies().attributes)]
        found[index] = [1.0]
        found[1 - index].append(2.0)
        lists.collect([{(id(module), "found"): (module, value)} for value in found], merge)
        assert type(module.found) is list
        assert module.found == (["before", 2.0] if index == 0 else [1.0])


@pytest.mark.parametrize("value", [[1.0, 2.0], [torch.arange(2.0), "a"], {"mean": [torch.ones(2)], "n": None}], ids=str)
def test_constants_that_each_micro_batch_makes_stay_as_they_are(value: Any) -> None:
    """At their first use: ``if self.strides is None: self.strides = [1.0, 2.0]``."""
    module = nn.Module()
    module.found = None
    lists = CollectedLists([module])
    found = [copy.deepcopy(value) for _ in range(2)]
    for _ in found:
        lists.copies()
    overlays = [{(id(module), "found"): (module, one)} for one in found]
    lists.collect(overlays, merge)
    assert overlays[-1][id(module), "found"][1] is found[-1]
    assert_identical(found[-1], value)


def test_arrays_in_lists_that_all_micro_batches_assign() -> None:
    module = nn.Module()
    module.found = None
    for first, second, expected in (([0, 1], [2, 3], [0, 1, 2, 3]), ([0, 1], [0, 1], [0, 1])):
        lists = CollectedLists([module])
        overlays = [{(id(module), "found"): (module, [np.array(rows)])} for rows in (first, second)]
        for _ in overlays:
            lists.copies()
        lists.collect(overlays, merge)
        (kept,) = overlays[-1][id(module), "found"][1]
        assert kept.tolist() == expected


@pytest.mark.parametrize("before", [["before"], None])
def test_of_lists_of_activations_the_last_stays(before: Any) -> None:
    """They are the step's own, and may be large."""
    module = nn.Module()
    module.found = before
    lists = CollectedLists([module])
    found = [[torch.ones(2, requires_grad=True) * index] for index in range(2)]
    for _ in found:
        lists.copies()
    overlays = [{(id(module), "found"): (module, value)} for value in found]
    lists.collect(overlays, merge)
    kept = overlays[-1].get((id(module), "found"), (module, module.found))[1]
    assert kept[0] is found[-1][0]


def test_a_copy_is_stored_as_a_list() -> None:
    module = nn.Module()
    module.found = [1]
    ((_, _, copy),) = CollectedLists([module]).copies().attributes
    copy += [2]
    assert type(pickle.loads(pickle.dumps(copy))) is list


def test_a_container_that_is_filled_again_keeps_those_in_it() -> None:
    inner: list[int] = [1]
    own: dict[str, Any] = {"kept": inner, "gone": 1}
    assert refill(own, {"kept": [1, 2], "new": [3]})
    assert own == {"kept": [1, 2], "new": [3]}
    assert own["kept"] is inner
    assert not refill(own, [1])
