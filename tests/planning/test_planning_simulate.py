"""The simulator: every action starts as soon as its device and its micro-batch are free; what a stage costs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    Action,
    CallCost,
    CostProfile,
    Machine,
    Partition,
    Stage,
    StageKind,
    round_robin,
    simulate,
    stage_costs,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.25]),
    st.integers(0, 2**32),
)
def test_an_action_starts_when_device_and_microbatch_are_free(
    s: int, m: int, n: int, round_size: int | None, splits: int, hop_ms: float, seed: int
) -> None:
    schedule = round_robin(s, m, n, round_size=round_size, splits=splits)
    rng = random.Random(seed)
    durations = {Action(i, j): rng.choice([0.0, 0.5, 1.0, 3.0]) for i in range(s) for j in range(m)}
    timeline = simulate(schedule, durations.__getitem__, Machine(n, hop_ms=hop_ms)).timeline
    spans = {span.action: span for span in timeline.spans}
    assert len(timeline.spans) == s * m
    for device, actions in enumerate(schedule.devices):
        assert timeline.actions(device) == list(actions)
        for column, action in enumerate(actions):
            span = spans[action]
            device_free = spans[actions[column - 1]].end_ms if column else 0.0
            arrival = 0.0
            if action.stage_index:
                before = Action(action.stage_index - 1, action.microbatch_index)
                arrival = spans[before].end_ms + (hop_ms if schedule.device_of(before) != device else 0.0)
            assert span.start_ms == max(device_free, arrival)
            assert span.end_ms - span.start_ms == durations[action]
            assert span.device == device


@pytest.mark.parametrize("duration", [-1.0, math.nan, math.inf])
def test_impossible_durations_are_refused(duration: float) -> None:
    with pytest.raises(ValueError, match="duration of action 0:0 must be a finite number"):
        simulate(round_robin(1, 1, 1), lambda action: duration)


def test_a_backward_stage_skips_calls_without_a_backward() -> None:
    """Frozen calls at the beginning cost a forward, and nothing more; in the fused stage that forward still counts."""
    sizes = {"weight_bytes": 10, "gradient_bytes": 3, "input_bytes": 2, "output_bytes": 2}
    frozen, trained = CallCost("frozen", 1.0, 0.0, **sizes), CallCost("trained", 1.0, 2.0, **sizes)
    stages = (
        *(Stage(0, StageKind.FORWARD, 0, 3), Stage(1, StageKind.FUSED, 3, 5)),
        *(Stage(2, StageKind.BACKWARD, 1, 3), Stage(3, StageKind.BACKWARD, 0, 1)),
    )
    profile = CostProfile((frozen, frozen, trained, frozen, trained))
    forward, fused, mixed, empty = stage_costs(Partition(5, stages), profile)
    assert (forward.duration_ms, forward.weight_bytes) == (3.0, 30)
    assert (fused.duration_ms, fused.weight_bytes) == (4.0, 20)
    alone = stage_costs(Partition(2, (Stage(0, StageKind.FORWARD, 0, 1), *_last_two())), CostProfile((trained,) * 2))[2]
    assert (mixed.compute_ms, mixed.recompute_ms) == (alone.compute_ms, alone.recompute_ms) == (2.0, 1.0)
    assert (mixed.weight_bytes, mixed.gradient_bytes, mixed.input_bytes) == (10, 3, alone.input_bytes)
    assert (empty.duration_ms, empty.resident_bytes, empty.input_bytes) == (0.0, 0, 0)


def _last_two() -> tuple[Stage, Stage]:
    return Stage(1, StageKind.FUSED, 1, 2), Stage(2, StageKind.BACKWARD, 0, 1)
