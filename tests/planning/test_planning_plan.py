"""The plan of a run: the fastest stages, splits and rounds in the simulator, within the memory of the devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    DeviceTraits,
    Machine,
    Partition,
    StageCost,
    StageMemoryError,
    StepPlan,
    plan_evaluation,
    plan_training,
    simulate,
    stage_costs,
)
from lightning_roundpipe.planning import search as search_module
from lightning_roundpipe.planning.dispatch import dispatch_ms
from lightning_roundpipe.planning.partition import assemble
from lightning_roundpipe.planning.plan import round_sizes
from tests.support.engine.partitions import search_briefly


def profile_of(times: list[int], weight_bytes: int = 0) -> CostProfile:
    return CostProfile(
        tuple(
            CallCost(f"c{i}", float(ms), 2.0 * ms, weight_bytes * ms, weight_bytes * ms, 100, 100, 50 * ms)
            for i, ms in enumerate(times)
        )
    )


def step_ms(plan: StepPlan, profile: CostProfile, machine: Machine, microbatches: int) -> float:
    """The simulated step of a plan."""
    schedule = plan.schedule(profile, machine, microbatches)
    return simulate(schedule, stage_costs(plan.partition, profile), machine).step_ms


times = st.lists(st.integers(1, 9), min_size=1, max_size=14)


def all_partitions(num_calls: int) -> list[Partition]:
    made = []
    for fused in range(num_calls):
        inner = [c for n in range(fused) for c in itertools.combinations(range(1, fused), n)] if fused else [()]
        rows = [[0, *cut, fused] if fused else [0] for cut in inner]
        made += [assemble(num_calls, forward, backward) for forward in rows for backward in rows]
    return made


@pytest.mark.parametrize(
    ("times", "devices", "microbatches", "round_size"),
    [([1, 1, 1, 1, 1, 1], 3, 6, 3), ([1, 1, 1, 1, 4], 3, 9, 9), ([3, 1, 2, 1, 1, 2], 2, 4, 4)],
    ids=str,
)
def test_close_to_the_best_of_all_partitions(
    times: list[int], devices: int, microbatches: int, round_size: int
) -> None:
    """Found: the optimum itself; the search promises nothing, so that 2 % are allowed."""
    profile, machine = profile_of(times), Machine(devices)
    counts = {"num_microbatches": microbatches, "round_size": round_size}
    ring = plan_training(profile, machine, **counts, may_split=False)
    made = [stage_costs(stages, profile) for stages in all_partitions(len(times))]
    best = [
        min(dispatch_ms(costs, machine, splits=[count] * len(costs), **counts) for costs in made)
        for count in range(1, devices + 1)
    ]
    assert step_ms(ring, profile, machine, microbatches) <= 1.02 * best[0]
    limited = Machine(devices, 10**9)  # without a limit the cuts are those of the ring
    plan = plan_training(profile, limited, **counts)
    assert step_ms(plan, profile, machine, microbatches) <= 1.02 * min(best)


@pytest.mark.parametrize(
    ("times", "devices", "microbatches"),
    [([1, 1, 1, 1, 1, 1], 2, 4), ([1, 1, 1, 1, 4], 3, 6), ([3, 1, 2, 1, 1, 2], 3, 9)],
    ids=str,
)
@pytest.mark.parametrize("may_split", [True, False])
def test_close_to_the_best_of_all_forward_partitions(
    times: list[int], devices: int, microbatches: int, may_split: bool
) -> None:
    """Where the devices divide the micro-batches: no other numbers let splits be on all of them."""
    profile, machine = profile_of(times), Machine(devices)
    end = len(times)
    cuts = [c for n in range(end) for c in itertools.combinations(range(1, end), n)]
    made = [stage_costs(assemble(end, [0, *cut, end], []), profile) for cut in cuts]
    counts = [*range(1, devices + 1)] if may_split else [1]
    best = min(
        dispatch_ms(costs, machine, splits=[count] * len(costs), num_microbatches=microbatches)
        for costs in made
        for count in counts
    )
    plan = plan_evaluation(profile, machine, num_microbatches=microbatches, may_split=may_split)
    assert step_ms(plan, profile, machine, microbatches) <= 1.02 * best


def test_evaluation_splits_a_stage_that_keeps_others_waiting() -> None:
    profile, machine = profile_of([1, 6, 1]), Machine(3)
    split, whole = (
        plan_evaluation(profile, machine, num_microbatches=3, **options) for options in ({}, {"may_split": False})
    )
    assert max(split.splits) > 1
    assert max(whole.splits) == 1
    assert step_ms(split, profile, machine, 3) < 0.7 * step_ms(whole, profile, machine, 3)


def test_a_shared_host_memory_decides_between_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are ranked by `simulate` where only it knows the machine."""
    profile = profile_of([1 + i % 3 for i in range(20)], weight_bytes=200)
    machine = Machine(4, h2d_bytes_per_ms=400.0, d2h_bytes_per_ms=400.0, host_bytes_per_ms=100.0)
    best = step_ms(plan_training(profile, machine, num_microbatches=16), profile, machine, 16)
    monkeypatch.setattr(search_module, "_NUM_SIMULATED", 1)
    first = plan_training(profile, machine, num_microbatches=16)
    assert best < 0.95 * step_ms(first, profile, machine, 16), "another number of stage runs shares it better"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(times, st.integers(1, 4), st.integers(1, 8), st.integers(0, 600), st.booleans())
def test_plans_keep_within_the_memory(
    times: list[int], devices: int, microbatches: int, spare: int, is_training: bool
) -> None:
    profile = profile_of(times, weight_bytes=20)
    running = max(c.weight_bytes + c.gradient_bytes + c.workspace_bytes for c in profile.calls) + 400
    waiting = 100 * microbatches  # between stages
    largest = running + waiting
    machine = Machine(devices, device_memory_bytes=largest + spare, h2d_bytes_per_ms=500.0)
    make = plan_training if is_training else plan_evaluation
    with pytest.MonkeyPatch.context() as patch:
        search_briefly(patch.setattr)
        plan = make(profile, machine, num_microbatches=microbatches)
    schedule = plan.schedule(profile, machine, microbatches)
    left = largest + spare - waiting * (len(times) > 1)
    costs = stage_costs(plan.partition, profile)
    result = simulate(schedule, costs, replace(machine, device_memory_bytes=left))
    assert max(result.memory_bytes) <= left
    for stage, cost in zip(plan.partition.stages, costs, strict=True):
        room_for_two = 2 * cost.resident_bytes + cost.workspace_bytes <= left
        assert room_for_two or stage.stop - stage.start == 1


def test_activations_that_wait_between_stages_have_room() -> None:
    """For as many micro-batches as a round has; the last call's result is not handed over."""
    calls = [CallCost(f"c{i}", 1, 1, 20, 20, 10, 10) for i in range(3)]
    calls[-1] = CallCost("head", 1, 1, 20, 20, 10, 10_000)
    needed = 20 + 20 + 2 * (10 + 10_000)
    for num_microbatches, round_size, num_waiting in ((1, None, 1), (6, None, 6), (6, 2, 2)):
        fits = Machine(2, needed + 10 * num_waiting)
        plan_training(CostProfile(tuple(calls)), fits, num_microbatches=num_microbatches, round_size=round_size)
        short = Machine(2, needed + 10 * num_waiting - 1)
        waiting = rf"'head' needs .*, beside {10 * num_waiting} B of activations that wait.* That is 1 B over the "
        with pytest.raises(StageMemoryError, match=waiting):
            plan_training(CostProfile(tuple(calls)), short, num_microbatches=num_microbatches, round_size=round_size)


def test_inputs_of_recomputed_calls_wait_on_the_host() -> None:
    """For two rounds at most. Call 3 gets its input from call 2, in the same stage."""
    profile = CostProfile(tuple(CallCost(f"c{i}", 1.0, 2.0, input_bytes=10**i) for i in range(4)))
    stages = assemble(4, (0, 2), (0, 2))
    for round_size, num_in_flight in ((None, 7), (2, 4), (5, 7)):
        assert StepPlan(stages, (1, 1, 1), round_size).host_activation_bytes(profile, 7) == num_in_flight * 111


LINKS = {"h2d_bytes_per_ms": 100.0, "d2h_bytes_per_ms": 100.0}


@pytest.mark.parametrize(
    ("machine", "room", "is_training", "expected"),
    [
        (Machine(1), 10**9, True, [2, 1]),  # nothing travels
        (Machine(1, **LINKS), 8 * 200, True, [8, 2, 1]),
        (Machine(1, **LINKS), 8 * 200 - 1, True, [3, 2, 1]),  # of two rounds, 6 micro-batches are under way
        (Machine(1, **LINKS), 6 * 200 - 1, True, [2, 1]),
        (Machine(1, **LINKS), 0, False, [8, 2, 1]),  # no inputs wait in an evaluation
        (Machine(1, **LINKS), None, False, [2, 1]),
        (Machine(1, 8 * 8 * 150, **LINKS), 10**9, True, [8, 2, 1]),
        (Machine(1, 8 * 8 * 150 - 1, **LINKS), 10**9, True, [4, 2, 1]),
        (Machine(2, devices=(DeviceTraits(1.0, 10**9, 1.0), DeviceTraits(1.0, 8 * 1100, 1.0))), 10**9, True, [4, 2]),
        (Machine(3, **LINKS), 10**9, True, [8, 6, 4, 3]),
        (Machine(4, **LINKS), 10**9, True, [8, 4]),  # one round as it is
        (Machine(8, **LINKS), 10**9, True, [16, 8]),
    ],
)
def test_rounds_have_more_than_two_per_device_where_weights_travel_and_there_is_room(
    machine: Machine, room: int | None, is_training: bool, expected: list[int]
) -> None:
    profile = CostProfile((CallCost("a", 1.0, 2.0, 0, 0, 50, 100), CallCost("b", 1.0, 2.0, 0, 0, 150, 10**9)))
    assert round_sizes(profile, machine, 8, waiting_on_host=room, is_training=is_training) == expected


@pytest.mark.parametrize(("memory", "fits_if_split"), [(1099, True), (50, True), (40, True), (39, False)])
def test_whether_smaller_microbatches_would_help(memory: int, fits_if_split: bool) -> None:
    calls = (CallCost("a", 1, 1, 20, 20, 100, 100, 600), CallCost("b", 1, 1))
    assert plan_training(CostProfile(calls), Machine(2, 1140), num_microbatches=1)
    with pytest.raises(StageMemoryError) as caught:
        plan_training(CostProfile(calls), Machine(2, memory), num_microbatches=4)
    assert caught.value.fits_if_split is fits_if_split


def test_a_call_that_does_not_fit_is_named() -> None:
    gib = 2**30
    calls = (CallCost("embed", 1, 1, gib), CallCost("head", 1, 1, 3 * gib, 3 * gib, gib // 4, gib // 4, gib))
    with pytest.raises(
        StageMemoryError, match=r"Call 1, 'head' needs 8.00 GiB .* weights 3.00 GiB, gradients 3.00 GiB, "
    ):
        plan_training(CostProfile(calls), Machine(2, 6 * gib), num_microbatches=4)
    with pytest.raises(StageMemoryError, match=r"2.00 GiB over the 6.00 GiB .*num_microbatches=\.\.\., units="):
        plan_training(CostProfile(calls), Machine(2, 6 * gib), num_microbatches=4)
    plan_evaluation(CostProfile(calls), Machine(2, 5 * gib), num_microbatches=4)
    with pytest.raises(StageMemoryError, match=r"weights 3\.00 GiB, activations of one micro-batch 1\.50 GiB"):
        plan_evaluation(CostProfile(calls), Machine(2, 4 * gib), num_microbatches=4)


@pytest.mark.parametrize(("make", "kind"), [(plan_training, "fused"), (plan_evaluation, "F")])
def test_impossible_counts_are_refused_and_empty_models_planned(make: type, kind: str) -> None:
    empty = make(CostProfile(()), Machine(2), num_microbatches=4)
    assert (empty.partition.format(), empty.splits) == (f"{kind} (no calls)", (1,))
    with pytest.raises(ValueError, match="num_microbatches must be >= 1, got 0"):
        make(profile_of([1]), Machine(2), num_microbatches=0)
    with pytest.raises(ValueError, match="round_size must be >= 1, got 0"):
        make(profile_of([1]), Machine(2), num_microbatches=1, round_size=0)


def test_the_plan_is_deterministic() -> None:
    profile = profile_of([1 + i % 4 for i in range(20)])
    assert len({plan_training(profile, Machine(4), num_microbatches=8) for _ in range(2)}) == 1


@pytest.mark.parametrize("num_calls", [100, 250])  # the least budget, and the one per call
@pytest.mark.parametrize("memory", [None, 10**12], ids=["no limit", "limit"])
def test_the_search_keeps_within_its_budget(
    num_calls: int, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of simulated actions; how long they take, the benchmark `partitioner` measures."""
    simulated: list[float] = []
    counts_runs = memory is not None  # without a limit, cuts are searched for the ring

    def counted(costs: Sequence[StageCost], machine: Machine, **options: Any) -> float:
        share = 1 / machine.num_devices if min(options["splits"]) == machine.num_devices else 1  # one device is enough
        num_runs = sum(options["splits"]) * -(-options["num_microbatches"] // options["round_size"])
        num_actions = len(costs) * options["num_microbatches"]
        simulated.append(share * (num_actions + search_module._ACTIONS_PER_RUN * num_runs * counts_runs))
        return dispatch_ms(costs, machine, **options)

    monkeypatch.setattr(search_module, "dispatch_ms", counted)
    profile = profile_of([1 + i % 5 for i in range(num_calls)])
    plan_training(profile, Machine(8, memory), num_microbatches=16, round_size=16)
    budget = max(search_module._NUM_ACTIONS, search_module._NUM_ACTIONS_PER_CALL * num_calls)
    budget *= 1 if counts_runs else search_module._UNSPLIT_SHARE
    assert budget / 2 < sum(simulated) < 1.05 * budget
