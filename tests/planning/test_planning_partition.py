"""Partition: its form, its lookup tables, and the exactness of the search against exhaustive enumeration."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    Partition,
    Stage,
    StageKind,
    keep_together,
    partition,
    partition_forward,
)
from lightning_roundpipe.planning.cuts import StageSearch

F, FUSED, B = StageKind.FORWARD, StageKind.FUSED, StageKind.BACKWARD


def make_partition(num_calls: int, *pieces: tuple[StageKind, int, int]) -> Partition:
    return Partition(num_calls, tuple(Stage(index, *piece) for index, piece in enumerate(pieces)))


def make_profile(*times: tuple[float, float]) -> CostProfile:
    return CostProfile(tuple(CallCost(f"call{i}", f, b) for i, (f, b) in enumerate(times)))


# ---------------------------------------------------------------------------------------------------------------------
# The form of a partition


ASYMMETRIC = make_partition(10, (F, 0, 5), (F, 5, 8), (FUSED, 8, 10), (B, 6, 8), (B, 3, 6), (B, 0, 3))


def test_each_call_has_its_forward_and_its_backward_stage() -> None:
    assert ASYMMETRIC.forward_stages == (0, 0, 0, 0, 0, 1, 1, 1, 2, 2)
    assert ASYMMETRIC.backward_stages == (5, 5, 5, 4, 4, 4, 3, 3, 2, 2)
    assert ASYMMETRIC.num_stages == 6
    assert ASYMMETRIC.is_training
    evaluation = make_partition(2, (F, 0, 1), (F, 1, 2))
    assert not evaluation.is_training
    assert (evaluation.forward_stages, evaluation.backward_stages) == ((0, 1), ())


def test_text_names_stages_with_their_calls() -> None:
    assert ASYMMETRIC.format() == "F 0-4 | F 5-7 | fused 8-9 | B 6-7 | B 3-5 | B 0-2"
    assert make_partition(1, (FUSED, 0, 1)).format() == "fused 0"
    assert make_partition(0, (FUSED, 0, 0)).format() == "fused (no calls)"


@pytest.mark.parametrize(
    ("num_calls", "pieces", "message"),
    [
        (2, [], "at least one stage"),
        (-1, [(F, 0, 1)], "num_calls=-1"),
        (2, [(F, 0, 1)], r"Stage 0 \(F 0\) is the last one and leaves calls uncovered"),
        (3, [(F, 0, 1), (F, 2, 3)], r"Stage 1 \(F 2\) must be number 1 and begin at call 1"),
        (3, [(F, 0, 2), (F, 1, 3)], r"Stage 1 \(F 1-2\) must be number 1 and begin at call 2"),
        (2, [(F, 0, 1), (FUSED, 1, 2)], r"Stage 1 \(fused 1\) is the last one"),
        (3, [(F, 0, 1), (FUSED, 1, 2), (B, 0, 1)], r"Stage 1 \(fused 1\) must hold the last calls, up to 3"),
        (3, [(F, 0, 2), (FUSED, 2, 3), (B, 0, 1), (B, 1, 2)], r"Stage 2 \(B 0\) must be number 2 and begin at call 2"),
        (2, [(F, 0, 1), (B, 0, 1)], r"F stages alone, got F 0 \| B 0: reorder"),
        (2, [(FUSED, 0, 2), (FUSED, 0, 2)], "one fused stage, then B stages"),
        (2, [(F, 0, 1), (B, 0, 1), (FUSED, 1, 2)], "got F 0 .* B 0 .* fused 1: reorder"),
        (2, [(FUSED, 0, 2), (F, 0, 2)], "F stages first"),
        (2, [(F, 0, 0), (FUSED, 0, 2)], r"Stage 0 \(F \(no calls\)\) has no calls: drop it"),
        (2, [(F, 0, 2), (FUSED, 2, 2), (B, 0, 2)], "Stage 1 .* has no calls"),
        (0, [(FUSED, 0, 0), (B, 0, 0)], "Stage 0 .* has no calls"),
    ],
)
def test_stages_of_another_form_are_refused(
    num_calls: int, pieces: list[tuple[StageKind, int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_partition(num_calls, *pieces)


def test_stages_numbered_wrongly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Stage 1 .* must be number 0"):
        Partition(1, (Stage(1, FUSED, 0, 1),))


@pytest.mark.parametrize(("index", "start", "stop"), [(-1, 0, 1), (0, 2, 1), (0, -1, 1)])
def test_impossible_stages_are_refused(index: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="Stage"):
        Stage(index, F, start, stop)


# ---------------------------------------------------------------------------------------------------------------------
# The search against exhaustive enumeration


def segmentations(stop: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to cut [0, stop) into contiguous pieces."""
    if stop == 0:
        yield []
        return
    inner = range(1, stop)
    for cuts in chain.from_iterable(combinations(inner, count) for count in range(stop)):
        yield list(pairwise((0, *cuts, stop)))


def objective(num_stages: int, longest: Fraction, num_devices: int, num_microbatches: int) -> Fraction:
    if num_stages < num_devices:
        return num_devices * (num_microbatches + num_stages - 1) * longest
    return (num_microbatches * num_stages + num_devices * (num_devices - 1)) * longest


def measure(plan: Partition, profile: CostProfile) -> tuple[Fraction, int]:
    """Exact time of the longest stage, and bytes of the largest one."""
    longest, largest = Fraction(0), 0
    for stage in plan.stages:
        calls = profile.calls[stage.start : stage.stop]
        total = sum((Fraction(c.forward_ms) for c in calls), Fraction(0))
        size = sum(c.weight_bytes for c in calls)
        if stage.kind is not F:
            total += sum((Fraction(c.backward_ms) for c in calls), Fraction(0))
            size += sum(c.gradient_bytes for c in calls)
        longest, largest = max(longest, total), max(largest, size)
    return longest, largest


def all_training_partitions(num_calls: int) -> Iterator[Partition]:
    for fused_start in range(num_calls):
        for forward in segmentations(fused_start):
            for backward in segmentations(fused_start):
                pieces = [(F, *piece) for piece in forward] + [(FUSED, fused_start, num_calls)]
                pieces += [(B, *piece) for piece in reversed(backward)]
                yield make_partition(num_calls, *pieces)


def all_forward_partitions(num_calls: int) -> Iterator[Partition]:
    for forward in segmentations(num_calls):
        yield make_partition(num_calls, *((F, *piece) for piece in forward))


TRAINING = {n: list(all_training_partitions(n)) for n in range(1, 6)}
EVALUATION = {n: list(all_forward_partitions(n)) for n in range(1, 9)}


def best_score(
    plans: list[Partition], profile: CostProfile, num_devices: int, num_microbatches: int, memory_limit: int | None
) -> tuple[Fraction, int]:
    scores = []
    for plan in plans:
        longest, largest = measure(plan, profile)
        if memory_limit is None or largest <= memory_limit:
            scores.append((objective(plan.num_stages, longest, num_devices, num_microbatches), plan.num_stages))
    return min(scores)


# Few distinct values make ties and zero costs frequent; ticks check that no rounding decides.
call_times = st.one_of(st.integers(0, 5), st.integers(0, 10 * 2**20).map(lambda ticks: ticks / 2**20))


@st.composite
def profiles(draw: st.DrawFn, max_calls: int) -> CostProfile:
    num_calls = draw(st.integers(1, max_calls))
    sizes = st.integers(0, 4)
    return CostProfile(
        tuple(
            CallCost(f"call{i}", draw(call_times), draw(call_times), draw(sizes), draw(sizes)) for i in range(num_calls)
        )
    )


devices = st.integers(1, 5)
microbatches = st.sampled_from([1, 2, 3, 8, 50])
memory_limits = st.one_of(st.none(), st.integers(8, 20))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(profiles(max_calls=5), devices, microbatches, memory_limits)
def test_partition_is_optimal(profile: CostProfile, n: int, m: int, memory_limit: int | None) -> None:
    plan = partition(profile, num_devices=n, num_microbatches=m, memory_limit=memory_limit)
    longest, largest = measure(plan, profile)
    assert memory_limit is None or largest <= memory_limit
    score = (objective(plan.num_stages, longest, n, m), plan.num_stages)
    assert score == best_score(TRAINING[len(profile.calls)], profile, n, m, memory_limit)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(profiles(max_calls=8), devices, microbatches, memory_limits)
def test_partition_forward_is_optimal(profile: CostProfile, n: int, m: int, memory_limit: int | None) -> None:
    plan = partition_forward(profile, num_devices=n, num_microbatches=m, memory_limit=memory_limit)
    assert not plan.is_training
    longest, largest = measure(plan, profile)
    assert memory_limit is None or largest <= memory_limit
    score = (objective(plan.num_stages, longest, n, m), plan.num_stages)
    assert score == best_score(EVALUATION[len(profile.calls)], profile, n, m, memory_limit)


# ---------------------------------------------------------------------------------------------------------------------
# Particular cases


def test_backward_stages_hold_a_third_of_the_calls() -> None:
    profile = make_profile(*[(1, 2)] * 12, (1, 2))
    plan = partition(profile, num_devices=4, num_microbatches=16)
    assert plan.format() == "F 0-2 | F 3-5 | F 6-8 | F 9-11 | fused 12 | " + " | ".join(
        f"B {i}" for i in reversed(range(12))
    )


def test_a_step_without_calls_is_one_empty_stage() -> None:
    empty = CostProfile(())
    assert partition(empty, num_devices=3, num_microbatches=2) == make_partition(0, (FUSED, 0, 0))
    assert partition_forward(empty, num_devices=3, num_microbatches=2) == make_partition(0, (F, 0, 0))


def test_memory_limit_cuts_stages() -> None:
    profile = CostProfile(tuple(CallCost(f"c{i}", 1, 2, weight_bytes=10, gradient_bytes=10) for i in range(6)))
    plan = partition(profile, num_devices=1, num_microbatches=4, memory_limit=40)
    assert plan.format() == "F 0-3 | fused 4-5 | B 2-3 | B 0-1"
    assert partition_forward(profile, num_devices=1, num_microbatches=4, memory_limit=20).num_stages == 3


def test_a_call_over_the_memory_limit_is_named() -> None:
    profile = CostProfile((CallCost("body", 1, 1, 10, 10), CallCost("lm_head", 1, 1, 30, 20)))
    message = (
        r"Call 1 \('lm_head'\) needs 50 bytes on a device, 10 bytes over the limit of 40 bytes .*cut it into smaller"
    )
    with pytest.raises(ValueError, match=message):
        partition(profile, num_devices=2, num_microbatches=2, memory_limit=40)
    assert partition_forward(profile, num_devices=2, num_microbatches=2, memory_limit=40).num_stages >= 1
    with pytest.raises(ValueError, match=r"'lm_head'.* 30 bytes on a device, 1 bytes over"):
        partition_forward(profile, num_devices=2, num_microbatches=2, memory_limit=29)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_devices": 0}, "num_devices must be >= 1, got 0"),
        ({"num_microbatches": -2}, "num_microbatches must be >= 1, got -2"),
        ({"memory_limit": -1}, "memory_limit must be >= 0 bytes, got -1"),
    ],
)
@pytest.mark.parametrize("function", [partition, partition_forward])
def test_impossible_arguments_are_refused(function, arguments: dict[str, int], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        function(make_profile((1, 1)), **{"num_devices": 1, "num_microbatches": 1, **arguments})


@pytest.mark.parametrize("num_calls", [100, 400])
def test_few_of_the_limits_are_tried(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bisection fills the stages within each of them in O(L). The benchmark `partitioner` measures the time."""
    rng, tried, count = random.Random(0), [], StageSearch._count

    def counted(search: StageSearch, limit: int) -> int:
        tried.append(limit)
        return count(search, limit)

    monkeypatch.setattr(StageSearch, "_count", counted)
    partition(
        make_profile(*((rng.uniform(0.5, 10), rng.uniform(1, 20)) for _ in range(num_calls))),
        num_devices=8,
        num_microbatches=16,
    )
    assert 0 < len(tried) <= 12 * num_calls


def test_keep_together_takes_out_forward_cuts_only() -> None:
    stages = (
        Stage(0, StageKind.FORWARD, 0, 2),
        Stage(1, StageKind.FORWARD, 2, 4),
        Stage(2, StageKind.FUSED, 4, 6),
        Stage(3, StageKind.BACKWARD, 3, 4),
        Stage(4, StageKind.BACKWARD, 0, 3),
    )
    made = Partition(6, stages)
    assert keep_together(made, []) == made
    assert keep_together(made, [(1, 3)]).format() == "F 0-3 | fused 4-5 | B 3 | B 0-2"
    assert keep_together(made, [(3, 5)]).format() == "F 0-1 | fused 2-5 | B 0-1"
    assert keep_together(made, [(0, 6)]).format() == "fused 0-5"
    forward_only = Partition(4, (Stage(0, StageKind.FORWARD, 0, 2), Stage(1, StageKind.FORWARD, 2, 4)))
    assert keep_together(forward_only, [(1, 3)]).format() == "F 0-3"
    with pytest.raises(ValueError, match="does not lie within the 6 calls"):
        keep_together(made, [(5, 7)])
