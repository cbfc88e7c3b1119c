"""What weighs the batch of a rank among those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.integration.batches.loss_weight import LossWeights
from lightning_roundpipe.integration.batches.rank_shares import NUM_FACTS, share_of
from lightning_roundpipe.integration.steps.notices import Notices

Batch = dict[str, Any]


def shares(rule: str | Callable[[Any], float], *ranks: Sequence[Batch]) -> list[float]:
    """Of ranks with these micro-batches, each of which has as many rows as ``x``."""
    weights = LossWeights(nn.Linear(1, 1), rule, Notices())
    facts = [weights.facts(parts, [len(part["x"]) for part in parts]) for parts in ranks]
    assert all(len(row) == NUM_FACTS for row in facts)
    found = [share_of(rank, facts) for rank in range(len(ranks))]
    assert rule == "sum" or sum(found) == pytest.approx(1.0)
    return found


def rows(count: int, labels: Sequence[Sequence[int]] | Tensor | None = None, **entries: Any) -> Batch:
    made = {"x": torch.zeros(count, 3), **entries}
    return made if labels is None else {**made, "labels": torch.as_tensor(labels)}


def tokens(labels: Sequence[Sequence[int]]) -> Batch:
    """With ``input_ids``, so that the first label of a row counts for nothing."""
    return rows(len(labels), labels, input_ids=torch.tensor(labels).clamp(min=0))


@pytest.mark.parametrize("rule", ["samples", "auto"])
def test_rows_weigh_whatever_the_number_of_microbatches(rule: str) -> None:
    assert shares(rule, [rows(2), rows(1)], [rows(1)]) == [0.75, 0.25]


def test_sums_count_fully() -> None:
    assert shares("sum", [rows(3)], [rows(1)]) == [1.0, 1.0]


def test_a_function_of_the_user_weighs() -> None:
    assert shares(lambda part: 2.0 * len(part["x"]) ** 2, [rows(1), rows(1)], [rows(2)]) == [1 / 3, 2 / 3]


@pytest.mark.parametrize(("rule", "wanted"), [("label_tokens", [0.625, 0.375]), ("causal_label_tokens", [0.6, 0.4])])
def test_labels_weigh_that_are_not_left_out(rule: str, wanted: list[float]) -> None:
    one, other = rows(2, [[1, 1, 1], [1, -100, 1]]), rows(1, [[1, 1, 1]])
    assert shares(rule, [one], [other]) == pytest.approx(wanted)


def test_auto_counts_labels_if_some_are_left_out_on_any_rank() -> None:
    assert shares("auto", [rows(1, [[1, -100, -100]])], [rows(1, [[1, 1, 1]])]) == [0.25, 0.75]
    assert shares("auto", [rows(1, [[1, 1, 1]])], [rows(3, [[1, 1, 1]] * 3)]) == [0.25, 0.75]


def test_auto_counts_labels_that_predict_the_next_token() -> None:
    assert shares("auto", [tokens([[1, 1, -100]])], [tokens([[1, 1, 1]])]) == pytest.approx([1 / 3, 2 / 3])


def test_auto_counts_labels_if_rows_have_different_lengths() -> None:
    """One batch of all of them would be filled up with -100."""
    assert shares("auto", [tokens([[1, 1, 1]])], [tokens([[1] * 7])]) == [0.25, 0.75]


def test_auto_counts_labels_of_samples() -> None:
    assert shares("auto", [rows(2, labels=torch.tensor([1, -100]))], [rows(3, labels=torch.tensor([1, 2, 0]))]) == [
        0.25,
        0.75,
    ]


@pytest.mark.parametrize("items", [3, torch.tensor(3), torch.tensor([3])])
def test_auto_counts_what_the_batch_says_its_loss_is_divided_by(items: int | Tensor) -> None:
    assert shares("auto", [rows(1, num_items_in_batch=items)], [rows(5, num_items_in_batch=1)]) == [0.75, 0.25]


def test_a_rank_without_labels_has_no_share_and_if_none_has_any_rows_weigh() -> None:
    none = rows(1, [[-100, -100]])
    assert shares("auto", [none], [rows(1, [[1, -100]])]) == [0.0, 1.0]
    assert shares("label_tokens", [none], [rows(3, [[-100, -100]] * 3)]) == [0.25, 0.75]
