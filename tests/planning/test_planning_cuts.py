"""StageSearch fills stages; balanced_cuts: the exact minimum of the longest part, against all splits."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import CallCost, balanced_cuts, cuts
from lightning_roundpipe.planning.partition import assemble

TICKS_PER_MS = 2**20


@pytest.mark.parametrize(
    ("limit_ms", "memory_limit", "stages"),
    [
        (7, None, "F 0-2 | F 3-4 | fused 5 | B 4 | B 3 | B 2 | B 1 | B 0"),
        (9, None, "F 0-3 | F 4 | fused 5 | B 4 | B 2-3 | B 1 | B 0"),
        (18, 60, "F 0-3 | fused 4-5 | B 2-3 | B 0-1"),
        (2**20, 59, "F 0-4 | fused 5 | B 4 | B 3 | B 2 | B 1 | B 0"),
        (2**20, 10, "F 0 | F 1 | F 2 | F 3 | F 4 | fused 5 | B 4 | B 3 | B 2 | B 1 | B 0"),
    ],
)
def test_stages_are_filled_up_to_the_limits(limit_ms: int, memory_limit: int | None, stages: str) -> None:
    """A call that is over a limit by itself is a stage."""
    calls = [CallCost(f"c{i}", ms, 2.0 * ms, 10, 20) for i, ms in enumerate((3, 2, 2, 1, 4, 2))]
    search = cuts.StageSearch(calls, is_training=True, memory_limit=memory_limit)
    assert assemble(6, *search.cuts(limit_ms * TICKS_PER_MS)).format() == stages


def test_without_a_backward_forward_stages_hold_all_calls() -> None:
    calls = [CallCost(f"c{i}", 1, 2, 10, 20) for i in range(6)]
    search = cuts.StageSearch(calls, is_training=False, memory_limit=20)
    assert assemble(6, *search.cuts(9 * TICKS_PER_MS)).format() == "F 0-1 | F 2-3 | F 4-5"


# In whole ticks, as times are taken.
call_times = st.one_of(st.integers(0, 5), st.integers(0, 10 * 2**20).map(lambda ticks: ticks / 2**20))


def longest(times: list[float], counts: tuple[int, ...]) -> Fraction:
    exact = [Fraction(time) for time in times]
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return max(sum(exact[start:stop], Fraction(0)) for start, stop in pairwise([0, *ends]))


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(call_times, min_size=1, max_size=8), st.data())
def test_the_longest_part_is_as_short_as_possible(times: list[float], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(times)))
    counts = balanced_cuts(times, num_parts)
    assert len(counts) == num_parts
    assert min(counts) >= 1
    assert sum(counts) == len(times)
    cuts = (sorted(inner) for inner in combinations(range(1, len(times)), num_parts - 1))
    splits = (tuple(b - a for a, b in pairwise([0, *inner, len(times)])) for inner in cuts)
    assert longest(times, counts) == min(longest(times, split) for split in splits)


def test_what_is_left_is_shared_evenly() -> None:
    assert balanced_cuts([1.0] * 33, 8) == (4, 4, 4, 4, 4, 4, 4, 5)
    assert balanced_cuts([1.0] * 6, 4) == (1, 2, 1, 2)
    # a head of three layers leaves the last part to itself
    assert balanced_cuts([1.0] * 6 + [3.0], 3) == (3, 3, 1)


def test_parts_are_never_empty() -> None:
    assert balanced_cuts([9.0, 0.0, 0.0], 3) == (1, 1, 1)
    assert min(balanced_cuts([0.0] * 5, 3)) == 1


@pytest.mark.parametrize("num_parts", [8, 500])
def test_the_limit_is_bisected(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, tried = cuts._fill_from_the_back, []

    def counted(prefix: list[int], num_parts: int, limit: int) -> list[int]:
        tried.append(limit)
        return fill(prefix, num_parts, limit)

    monkeypatch.setattr(cuts, "_fill_from_the_back", counted)
    times = [1.0 + (7 * index) % 13 for index in range(1000)]
    balanced_cuts(times, num_parts)
    assert 0 < len(tried) <= round(sum(times) * 2**20).bit_length() + 2


@pytest.mark.parametrize("num_parts", [0, -1, 3])
def test_impossible_numbers_of_parts_are_refused(num_parts: int) -> None:
    with pytest.raises(ValueError, match=rf"2 calls cannot be cut into num_parts={num_parts} parts"):
        balanced_cuts([1.0, 2.0], num_parts)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"times_ms must be finite and >= 0"):
        balanced_cuts([1.0, bad], 1)
