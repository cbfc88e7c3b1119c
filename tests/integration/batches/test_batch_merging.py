"""What the micro-batches of a step return becomes what the step on the whole batch would return."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from lightning_roundpipe.integration.batches.merging import merge_outputs
from tests.support.identical import assert_identical


class Pair(NamedTuple):
    image: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "n"


def rows(count: int, *shape: int) -> torch.Tensor:
    return torch.arange(count * max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(count, *shape)


@dataclass
class Computes:
    x: torch.Tensor

    @functools.cached_property
    def double(self) -> torch.Tensor:
        return 2 * self.x


def merge2(*outputs: Any, sizes: tuple[int, ...] = (3, 2), weights: tuple[float, ...] = (3.0, 2.0)) -> Any:
    return merge_outputs(outputs, sizes, weights)


def test_a_single_output_is_returned_unchanged() -> None:
    output = {"loss": torch.ones((), requires_grad=True)}
    assert merge_outputs([output], [4], [0.0]) is output


def test_rows_are_concatenated_and_scalars_averaged() -> None:
    merged = merge2(
        {"loss": torch.tensor(1.0, dtype=torch.bfloat16), "logits": rows(3, 2), "texts": ["a", "b", "c"], "acc": 0.5},
        {"acc": 1.0, "loss": torch.tensor(2.0, dtype=torch.bfloat16), "logits": rows(2, 2), "texts": ["d", "e"]},
    )
    assert list(merged) == ["loss", "logits", "texts", "acc"]
    assert merged["loss"].dtype == torch.bfloat16
    torch.testing.assert_close(merged["loss"], torch.tensor(1.4, dtype=torch.bfloat16))
    assert torch.equal(merged["logits"], torch.cat([rows(3, 2), rows(2, 2)]))
    assert merged["texts"] == ["a", "b", "c", "d", "e"]
    assert merged["acc"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (None, None, None),
        (7, 7, 7),
        (7, 8, [7, 8]),
        (True, False, [True, False]),
        ("a", "a", "a"),
        ("a", "b", ["a", "b"]),
        (None, 1.0, [None, 1.0]),
        (0, 1.0, 0.4),
        (torch.tensor(3), torch.tensor(3), torch.tensor(3)),
        (torch.tensor(3), torch.tensor(4), [torch.tensor(3), torch.tensor(4)]),
        (torch.tensor(1.0), 2.0, torch.tensor(1.4)),
        (rows(4, 4), rows(4, 4), rows(4, 4)),
        (rows(4), rows(4) + 1, [rows(4), rows(4) + 1]),
        (rows(3, 5), rows(2, 6), [rows(3, 5), rows(2, 6)]),
        ({"a": 1}, {"b": 1}, [{"a": 1}, {"b": 1}]),
        ([1.0], [2.0], [1.4]),
        ([rows(3), rows(3)], [rows(2), rows(2)], [torch.cat([rows(3), rows(2)])] * 2),
        ((rows(3), 1.0), (rows(2), 2.0), (torch.cat([rows(3), rows(2)]), 1.4)),
        (("a", "b", "c"), ("d", "e"), ("a", "b", "c", "d", "e")),
        (Pair(rows(3), rows(3)), Pair(rows(2), rows(2)), Pair(*[torch.cat([rows(3), rows(2)])] * 2)),
        (Frozen(rows(3)), Frozen(rows(2)), Frozen(torch.cat([rows(3), rows(2)]))),
        (
            [{"boxes": rows(1, 4)}] * 3,
            [{"boxes": rows(4, 4)}] * 2,
            [{"boxes": rows(1, 4)}] * 3 + [{"boxes": rows(4, 4)}] * 2,
        ),
    ],
)
def test_merge_rules(first: Any, second: Any, expected: Any) -> None:
    merged = merge2(first, second)
    if isinstance(expected, (torch.Tensor, float)):
        torch.testing.assert_close(merged, expected)
    else:
        assert_identical(merged, expected)


@pytest.mark.parametrize("holds_as_many", [(0,), (0, 1)])
def test_samples_that_hold_as_many_things_as_there_are_rows(holds_as_many: tuple[int, ...]) -> None:
    """By chance, in some micro-batches: boxes of an image."""
    counts = [[3, 1], [3, 4]]
    for index in holds_as_many:
        counts[index][index] = 2
    outputs = [[{"boxes": rows(count, 4)} for count in of_one] for of_one in counts]
    assert_identical(merge2(*outputs, sizes=(2, 2)), [*outputs[0], *outputs[1]])


@pytest.mark.parametrize(
    ("first", "second", "sizes", "expected"),
    [
        ([1.0, 2.0], [3.0, 4.0], (2, 2), [1.0, 2.0, 3.0, 4.0]),
        ([1, 2, 3, 4], [5, 6, 7, 8], (2, 2), [1, 2, 3, 4, 5, 6, 7, 8]),
        ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10], (3, 2), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ([1], [], (2, 2), [1]),
        ([1.0, 2.0], [3.0, 4.0], (3, 3), [2.0, 3.0]),
        ([1.0] * 6, [2.0] * 6, (3, 2), [1.4] * 6),
        ([], [], (2, 2), []),
    ],
)
def test_lists_that_extend_another_one(
    first: list[Any], second: list[Any], sizes: tuple[int, ...], expected: list[Any]
) -> None:
    """Several entries for each sample are those of samples; as many for each micro-batch are columns."""
    assert merge_outputs([first, second], sizes, sizes, given_at_once=True) == pytest.approx(expected)


def test_averages_of_equal_values_are_exact() -> None:
    assert merge_outputs([0.1, 0.1, 0.1], [1, 1, 1], [1, 1, 1]) == 0.1


def test_a_microbatch_of_no_weight_does_not_count() -> None:
    assert merge2(1.0, float("nan"), weights=(2.0, 0.0)) == 1.0
    merged = merge2(torch.tensor(1.0), torch.tensor(float("nan")), weights=(2.0, 0.0))
    assert merged == 1.0
    assert merge2(1.0, 3.0, weights=(0.0, 0.0)) == 2.0


def test_the_same_object_everywhere_is_kept() -> None:
    names, table = ["a", "b"], rows(2, 2)
    merged = merge2({"names": names, "table": table}, {"names": names, "table": table}, sizes=(2, 2))
    assert merged["names"] is names
    assert merged["table"] is table


def test_objects_that_cannot_be_compared_become_a_list() -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None

    first, second = Incomparable(), Incomparable()
    merged = merge2(first, second)
    assert merged[0] is first
    assert merged[1] is second


def test_inference_tensors_and_graphs() -> None:
    with torch.inference_mode():
        outputs = [{"x": rows(3), "loss": torch.tensor(1.0)}, {"x": rows(2), "loss": torch.tensor(2.0)}]
    merged = merge2(*outputs)
    assert torch.equal(merged["x"], torch.cat([rows(3), rows(2)]))
    with_graph = merge2(rows(3).requires_grad_() * 2, rows(2).requires_grad_() * 2)
    assert not with_graph.requires_grad


def test_numpy_outputs() -> None:
    np = pytest.importorskip("numpy")
    assert merge2(np.ones((3, 2)), np.zeros((2, 2))).shape == (5, 2)
    assert merge2(np.float32(1.0), np.float32(2.0)) == pytest.approx(1.4)
    assert_identical(merge2(np.ones(4), np.ones(4)), np.ones(4))


@pytest.mark.parametrize("computing", [(0,), (1,), (0, 1)])
def test_what_some_micro_batches_have_computed_for_a_dataclass(computing: tuple[int, ...]) -> None:
    outputs = Computes(rows(3)), Computes(rows(2))
    for index in computing:
        assert len(outputs[index].double) == 3 - index
    merged = merge2(*outputs)
    assert_identical(merged.x, torch.cat([rows(3), rows(2)]))
    assert_identical(merged.double, 2 * merged.x)
