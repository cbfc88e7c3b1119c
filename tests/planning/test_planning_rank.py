"""The plan of a run: the best of several partitions by the simulator."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    Partition,
    candidate_partitions,
    fastest,
    partition,
    round_robin,
    simulate,
    stage_durations,
)


def makespan_ms(made: Partition, profile: CostProfile, devices: int, microbatches: int, round_size: int) -> float:
    durations = stage_durations(made, profile)
    schedule = round_robin(made.num_stages, microbatches, devices, round_size=round_size)
    return simulate(schedule, lambda action: durations[action.stage_index]).makespan_ms


def profile_of(times: list[int]) -> CostProfile:
    return CostProfile(tuple(CallCost(str(i), float(ms), 2.0 * ms) for i, ms in enumerate(times)))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 8))
def test_never_slower_than_the_plan_of_the_formula(times: list[int], devices: int, microbatches: int) -> None:
    profile = profile_of(times)
    candidates = candidate_partitions(profile, num_devices=devices, num_microbatches=microbatches)
    proxy = partition(profile, num_devices=devices, num_microbatches=microbatches)
    assert candidates[0] == proxy
    assert len(set(candidates)) == len(candidates)
    size = 2 * devices
    chosen = fastest(candidates, profile, num_devices=devices, num_microbatches=microbatches, round_size=size)
    spans = {made: makespan_ms(made, profile, devices, microbatches, size) for made in candidates}
    assert spans[chosen] == min(spans.values()) <= spans[proxy]


def test_it_pays_where_the_formula_counts_on_full_laps() -> None:
    profile = profile_of([1] * 14)
    candidates = candidate_partitions(profile, num_devices=4, num_microbatches=12)
    chosen = fastest(candidates, profile, num_devices=4, num_microbatches=12, round_size=12)
    assert makespan_ms(chosen, profile, 4, 12, 12) < 0.95 * makespan_ms(candidates[0], profile, 4, 12, 12)


def test_a_model_of_a_hundred_layers_is_ranked_in_reasonable_time() -> None:
    profile = profile_of([1 + i % 5 for i in range(100)])
    started = time.perf_counter()
    candidates = candidate_partitions(profile, num_devices=8, num_microbatches=16)
    fastest(candidates, profile, num_devices=8, num_microbatches=16, round_size=16)
    assert time.perf_counter() - started < 10.0


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fastest([], profile_of([1]), num_devices=1, num_microbatches=1)


def test_a_model_without_calls_has_one_plan() -> None:
    assert len(candidate_partitions(CostProfile(()), num_devices=2, num_microbatches=4)) == 1
