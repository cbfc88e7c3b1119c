"""Sequences that are no lists: columns of tables, arrays of texts, ranges."""

from __future__ import annotations

import sys
from collections import UserList
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_roundpipe.integration.batches.merging import merge_outputs
from lightning_roundpipe.integration.batches.microbatches import split_batch
from lightning_roundpipe.integration.batches.reading import BatchSource, BatchSplitError

np = pytest.importorskip("numpy")


class Index:
    """What a table offers for its labels."""

    def __init__(self, values: Any) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, key: Any) -> Any:
        return Index(self.values[key]) if isinstance(key, slice) else self.values[key]

    def __array__(self) -> Any:
        return np.array(self.values)

    def append(self, others: list[Any]) -> Any:
        return Index([*self.values, *(value for other in others for value in other.values)])


class Series(Index):
    """A column of a table: by position only with ``iloc``."""

    @property
    def iloc(self) -> Any:
        return Index(self.values)


COLUMNS = {
    "index": Index("abcde"),
    "series": Series([1.0, 2.0, 3.0, 4.0, 5.0]),
    "texts": np.array(["a", "bb", "c", "d", "e"]),
    "objects": np.array([None, "a", {"k": 1}, 2, (3,)], dtype=object),
    "a list of another class": UserList(["a", "b", "c", "d", "e"]),
    "range": range(3, 8),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_has_an_entry_for_each_sample(name: str) -> None:
    column = COLUMNS[name]
    split = split_batch({"x": torch.zeros(5, 2), "column": column}, 2, source=BatchSource((5,)))
    assert split.sizes == (3, 2)
    cut = [part["column"] for part in split.microbatches]
    assert [list(part) for part in cut] == [list(column)[:3], list(column)[3:]]
    if name != "series":
        assert all(type(part) is type(column) for part in cut)


@pytest.mark.parametrize("names", [np.array(["cat", "dog", "fox"]), Index("abc"), range(3), UserList("abc")])
def test_names_of_classes_are_shared(names: Any) -> None:
    for part in split_batch({"x": torch.zeros(5, 2), "names": names}, 2, source=BatchSource((5,))).microbatches:
        assert part["names"] is names


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(BatchSplitError, match=r"batch\['column'\] of type Series with 3 entries does not fit"):
        split_batch({"x": torch.zeros(5, 2), "column": Series([1.0, 2.0, 3.0])}, 2, source=BatchSource((5,)))


def test_columns_that_steps_return_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ModuleType("pandas")
    table.Series, table.DataFrame, table.Index = type("S", (), {}), type("D", (), {}), Index  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", table)
    for first, second in (
        (Index("abc"), Index("de")),
        (UserList("abc"), UserList("de")),
        (np.array(["a", "bb", "c"]), np.array(["d", "e"])),
    ):
        merged = merge_outputs([first, second], (len(first), len(second)), (3.0, 2.0))
        assert type(merged) is type(first)
        assert list(merged) == [*first, *second]
    assert merge_outputs([range(3), range(2)], (3, 2), (3.0, 2.0)) == [0, 1, 2, 0, 1]
