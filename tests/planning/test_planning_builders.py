"""Builders: each schedule against its definition, the closed bubble formulas, and what is in flight."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    Action,
    Schedule,
    StepPlan,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    round_robin,
    simulate,
)
from lightning_roundpipe.planning.partition import assemble
from tests.support.engine.schedule_text import parse_schedule

counts = st.integers(1, 9)
few = st.integers(1, 4)


def forward_and_backward(num_stages: int, forward_ms: float, backward_ms: float) -> Callable[[Action], float]:
    """Times of equal model stages in a chain of 2 `num_stages` stages."""
    return lambda action: forward_ms if action.stage_index < num_stages else backward_ms


def peak_in_flight(schedule: Schedule, device: int) -> int:
    """Most (model stage, micro-batch) pairs that have run forward on the device, but not yet backward."""
    alive = peak = 0
    for action in schedule.devices[device]:
        alive += 1 if action.stage_index < schedule.num_stages // 2 else -1
        peak = max(peak, alive)
    return peak


# ---------------------------------------------------------------------------------------------------------------------
# Round-robin


@settings(derandomize=True, deadline=None, max_examples=100)
@given(counts, counts, counts, st.none() | counts, few, st.data())
def test_groups_of_neighbours_go_to_the_devices_in_turn(
    s: int, m: int, n: int, round_size: int | None, num_steps: int, data: st.DataObject
) -> None:
    """Round by round and stage by stage; each step begins where the one before says."""
    splits = data.draw(st.lists(counts, min_size=s, max_size=s) | counts)
    device = first = data.draw(st.integers(0, n - 1))
    options = {"round_size": round_size, "splits": splits}
    whole = round_robin(s, m, n, **options, first_device=first, num_steps=num_steps)
    assert parse_schedule(whole.format()) == whole
    expected: list[list[Action]] = [[] for _ in range(n)]
    devices: list[list[Action]] = [[] for _ in range(n)]
    size = round_size or m
    plan = StepPlan(assemble(s, range(s + 1), ()), (1,) * s)
    for step in range(num_steps):
        assert device == first
        alone = round_robin(s, m, n, **options, first_device=first)
        for index, actions in enumerate(alone.devices):
            devices[index] += [Action(a.stage_index, step * m + a.microbatch_index) for a in actions]
        first = plan.next_first_device(alone, first)
        for begin in range(0, m, size):
            in_round = range(begin, min(begin + size, m))
            for stage in range(s):
                count = min(splits if isinstance(splits, int) else splits[stage], len(in_round))
                cuts = [len(in_round) * i // count for i in range(count + 1)]
                for start, stop in pairwise(cuts):
                    expected[device] += [Action(stage, step * m + i) for i in in_round[start:stop]]
                    device = (device + 1) % n
                sizes = [stop - start for start, stop in pairwise(cuts)]
                assert max(sizes) - min(sizes) <= 1
    assert whole.devices == tuple(map(tuple, expected)) == tuple(map(tuple, devices))


# ---------------------------------------------------------------------------------------------------------------------
# By hand


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (round_robin(4, 2, 2), ("0:0 0:1 2:0 2:1", "1:0 1:1 3:0 3:1")),
        # The ring keeps rotating from round to round, and from step to step.
        (round_robin(3, 4, 2, round_size=2), ("0:0 0:1 2:0 2:1 1:2 1:3", "1:0 1:1 0:2 0:3 2:2 2:3")),
        (round_robin(3, 2, 2, num_steps=2), ("0:0 0:1 2:0 2:1 1:2 1:3", "1:0 1:1 0:2 0:3 2:2 2:3")),
        # Two rings that share no micro-batch: 0 1 on devices 0 and 2, 2 3 on devices 1 and 3.
        (round_robin(3, 4, 4, splits=2), ("0:0 0:1 2:0 2:1", "0:2 0:3 2:2 2:3", "1:0 1:1", "1:2 1:3")),
        (round_robin(3, 4, 4, splits=(4, 2, 1)), ("0:0 1:0 1:1", "0:1 1:2 1:3", "0:2 2:0 2:1 2:2 2:3", "0:3")),
        # Groups are as equal as they can be, and a round has no more of them than micro-batches.
        (round_robin(2, 5, 2, splits=3), ("0:0 0:3 0:4 1:1 1:2", "0:1 0:2 1:0 1:3 1:4")),
        (round_robin(1, 5, 3, splits=3, round_size=3), ("0:0 0:3", "0:1 0:4", "0:2")),
        (gpipe(2, 3), ("0:0 0:1 0:2 3:0 3:1 3:2", "1:0 1:1 1:2 2:0 2:1 2:2")),
        (
            one_f_one_b(3, 4),
            (
                "0:0 0:1 0:2 5:0 0:3 5:1 5:2 5:3",
                "1:0 1:1 4:0 1:2 4:1 1:3 4:2 4:3",
                "2:0 3:0 2:1 3:1 2:2 3:2 2:3 3:3",
            ),
        ),
        (  # 2 devices with 2 chunks each, 2 groups of 2 micro-batches: 4 and 2 forwards ahead
            interleaved_one_f_one_b(4, 4, 2),
            (
                "0:0 0:1 2:0 2:1 0:2 5:0 0:3 5:1 2:2 7:0 2:3 7:1 5:2 5:3 7:2 7:3",
                "1:0 1:1 3:0 4:0 3:1 4:1 1:2 6:0 1:3 6:1 3:2 4:2 3:3 4:3 6:2 6:3",
            ),
        ),
        (
            looped_bfs(4, 3, 2),
            (
                "0:0 0:1 0:2 2:0 2:1 2:2 5:0 5:1 5:2 7:0 7:1 7:2",
                "1:0 1:1 1:2 3:0 3:1 3:2 4:0 4:1 4:2 6:0 6:1 6:2",
            ),
        ),
    ],
    ids=[
        *("round-robin", "rounds", "steps", "rings", "splits", "unequal", "fewer", "gpipe", "1f1b", "interleaved"),
        "looped",
    ],
)
def test_small_schedules_are_as_they_are_defined(schedule: Schedule, rows: tuple[str, ...]) -> None:
    assert [line.partition(": ")[2] for line in schedule.format().splitlines()[1:]] == list(rows)


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        *((build, (0, 1, 1), "num_stages must be >= 1, got 0") for build in (round_robin, looped_bfs)),
        *((build, (1, 0, 1), "num_microbatches must be >= 1, got 0") for build in (round_robin, looped_bfs)),
        *((build, (1, 1, 0), "num_devices must be >= 1, got 0") for build in (round_robin, looped_bfs)),
        (one_f_one_b, (0, 1), "num_stages must be >= 1, got 0"),
        (one_f_one_b, (1, -2), "num_microbatches must be >= 1, got -2"),
        (partial(round_robin, round_size=0), (1, 1, 1), "round_size must be >= 1, got 0"),
        (partial(round_robin, splits=0), (1, 1, 1), "splits must be >= 1, got 0"),
        (partial(round_robin, splits=(2, 0)), (2, 1, 1), "splits must be >= 1, got 0"),
        (partial(round_robin, splits=(2,)), (2, 1, 1), "1 entries and there are 2 stages"),
        (partial(round_robin, num_steps=0), (1, 1, 1), "num_steps must be >= 1, got 0"),
        (partial(round_robin, first_device=2), (1, 1, 2), "first_device must be one of the 2 devices, got 2"),
        (looped_bfs, (12, 16, 8), "multiple of num_devices=8, got 12: cut the model into 8 or 16 stages"),
        (looped_bfs, (4, 16, 8), "multiple of num_devices=8, got 4: cut the model into 8 stages"),
        (interleaved_one_f_one_b, (16, 20, 8), "num_devices=8, got 20: pass 16 or 24, or take looped_bfs"),
        (interleaved_one_f_one_b, (16, 3, 8), "got 3: pass 8, or take looped_bfs"),
    ],
)
def test_impossible_counts_are_refused(build: Callable[..., object], arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Stages bound to devices


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.sampled_from(["1f1b", "interleaved", "looped"]), few, few, st.integers(1, 6))
def test_bound_stages_stay_on_their_device(name: str, v: int, groups: int, n: int) -> None:
    """Valid, by the constructor; the text says it all; and a backward runs where its forward ran."""
    m = groups * n
    if name == "1f1b":
        schedule = one_f_one_b(n, m)
    else:
        build = interleaved_one_f_one_b if name == "interleaved" else looped_bfs
        schedule = build(v * n, m, n)
    assert parse_schedule(schedule.format()) == schedule
    assert (schedule.num_microbatches, schedule.num_devices) == (m, n)
    last = schedule.num_stages - 1
    for device, actions in enumerate(schedule.devices):
        assert {min(a.stage_index, last - a.stage_index) % n for a in actions} == {device}


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 6), few, st.integers(1, 14), st.sampled_from([(1.0, 2.0), (1.0, 1.0), (3.0, 1.0)]))
def test_bubbles_are_those_of_the_formula(n: int, v: int, m: int, times: tuple[float, float]) -> None:
    """N (N - 1) / (S M + N (N - 1)) for S = v N equal stages, however forward and backward compare.

    Looped schedules need at least N micro-batches, interleaved ones a multiple. Round-robin has one kind of stage.
    """
    s = v * n
    schedules = [gpipe(n, m), one_f_one_b(n, m)] if v == 1 else []
    if m >= n:
        schedules.append(looped_bfs(s, m, n))
    if m % n == 0:
        schedules.append(interleaved_one_f_one_b(s, m, n))
    timelines = [simulate(schedule, forward_and_backward(s, *times)).timeline for schedule in schedules]
    if m >= n:
        timelines.append(simulate(round_robin(s, m, n), lambda action: 1.0).timeline)
    expected = float(Fraction(n * (n - 1), s * m + n * (n - 1)))
    assert [timeline.bubble_ratio for timeline in timelines] == pytest.approx([expected] * len(timelines), abs=1e-12)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 20))
def test_in_flight_with_one_stage_per_device(s: int, m: int) -> None:
    """What 1F1B is for: the activations of S - i micro-batches, where GPipe keeps all M."""
    assert [peak_in_flight(one_f_one_b(s, m), i) for i in range(s)] == [min(m, s - i) for i in range(s)]
    assert [peak_in_flight(gpipe(s, m), i) for i in range(s)] == [m] * s


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 6), few, few)
def test_in_flight_with_several_stages_per_device(n: int, v: int, groups: int) -> None:
    s, m = v * n, groups * n
    ahead = [min(v * m, 2 * (n - 1 - i) + (v - 1) * n + 1) for i in range(n)]
    assert [peak_in_flight(interleaved_one_f_one_b(s, m, n), i) for i in range(n)] == ahead
    assert [peak_in_flight(looped_bfs(s, m, n), i) for i in range(n)] == [v * m] * n
