"""Dispatch: which device gets which stage run, the fast clock against the simulator, and devices that differ."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    Action,
    CallCost,
    CostProfile,
    DeviceTraits,
    Machine,
    Simulation,
    StageCost,
    StageMemoryError,
    StepPlan,
    plan_training,
    round_robin,
    simulate,
    stage_costs,
)
from lightning_roundpipe.planning.dispatch import dispatch, dispatch_ms
from lightning_roundpipe.planning.partition import assemble
from lightning_roundpipe.planning.quantities import format_ms
from tests.planning.paper import MODELS, NUM_DEVICES, NUM_MICROBATCHES
from tests.support.engine.schedule_text import parse_schedule

any_costs = st.builds(
    StageCost,
    compute_ms=st.integers(0, 40).map(lambda x: x / 4),
    recompute_ms=st.integers(0, 8).map(lambda x: x / 4),
    weight_bytes=st.sampled_from([0, 10, 35, 90]),
    gradient_bytes=st.sampled_from([0, 10, 35, 90]),
    input_bytes=st.integers(0, 9),
    output_bytes=st.integers(0, 9),
    handover_bytes=st.integers(0, 9),
    workspace_bytes=st.sampled_from([0, 20]),
)
bandwidths = st.sampled_from([math.inf, 40.0, 9.0])
memories = st.sampled_from([None, 400, 150])
traits = st.builds(DeviceTraits, st.sampled_from([1.0, 0.5, 0.8, 3.0]), memories, bandwidths, bandwidths)


@st.composite
def machines(draw: st.DrawFn, *, is_uniform: bool) -> Machine:
    """Machines on which no device's copies slow down those of another."""
    num_devices = draw(st.integers(1, 5))
    devices = () if is_uniform else tuple(draw(traits) for _ in range(num_devices))
    return Machine(
        num_devices,
        draw(memories),
        draw(bandwidths),
        draw(bandwidths),
        transfer_latency_ms=draw(st.sampled_from([0.0, 0.125])),
        optimizer_bytes_per_ms=draw(st.sampled_from([math.inf, 100.0])),
        devices=devices,
        hop_ms=draw(st.sampled_from([0.0, 0.5])),
    )


@pytest.mark.parametrize("is_uniform", [True, False], ids=["in turn", "devices that differ"])
@settings(derandomize=True, deadline=None, max_examples=100)
@given(data=st.data())
def test_the_clock_is_the_simulation(is_uniform: bool, data: st.DataObject) -> None:
    """`dispatch_ms` says what `simulate` says of the schedule that `dispatch` makes, and that one is valid."""
    machine = data.draw(machines(is_uniform=is_uniform))
    costs = data.draw(st.lists(any_costs, min_size=1, max_size=7))
    num_microbatches = data.draw(st.integers(1, 12))
    counts = st.integers(1, 6)
    splits = data.draw(
        st.lists(counts, min_size=len(costs), max_size=len(costs)) | counts.map(lambda r: [r] * len(costs))
    )
    options = {
        "num_microbatches": num_microbatches,
        "splits": splits,
        "round_size": data.draw(st.none() | st.integers(1, 13)),
    }
    schedule = dispatch(costs, machine, **options)
    assert parse_schedule(schedule.format()) == schedule
    expected = simulate(schedule, costs, machine).step_ms
    assert dispatch_ms(costs, machine, **options) == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# By hand


def test_a_device_of_half_the_speed_gets_half_as_much() -> None:
    """Ends at 1 2 | 2, then 3 | 4 would end at 4 on the second device, and does on the first one at 4 as well."""
    machine = Machine(2, devices=(DeviceTraits(1.0), DeviceTraits(0.5)))
    schedule = dispatch([StageCost(1.0)], machine, num_microbatches=6, splits=(2,))
    assert schedule.format() == (
        "schedule stages=1 microbatches=6 devices=2\ndevice 0: 0:0 0:1 0:3 0:4\ndevice 1: 0:2 0:5\n"
    )
    assert simulate(schedule, [StageCost(1.0)], machine).step_ms == 4


def test_the_upload_of_the_weights_counts() -> None:
    """10 ms of weights to the slow link: the other device is done with both micro-batches before."""
    machine = Machine(2, devices=(DeviceTraits(h2d_bytes_per_ms=100.0), DeviceTraits(h2d_bytes_per_ms=10.0)))
    schedule = dispatch([StageCost(3.0, weight_bytes=100)], machine, num_microbatches=2, splits=(2,))
    assert [len(actions) for actions in schedule.devices] == [2, 0]


def test_no_stage_is_on_more_devices_than_its_splits() -> None:
    machine = Machine(4, devices=tuple(DeviceTraits(speed) for speed in (1.0, 0.9, 0.8, 0.7)))
    schedule = dispatch([StageCost(1.0)] * 4, machine, num_microbatches=12, splits=(4, 2, 1, 9))
    used = [len({schedule.device_of(Action(stage, m)) for m in range(12)}) for stage in range(4)]
    assert used[1] == 2
    assert used[2] == 1
    assert used[3] > 2, "more than there are devices means all"


def test_what_does_not_fit_on_a_small_device_is_never_there() -> None:
    devices = (DeviceTraits(1.0, 100), DeviceTraits(0.1, 400), DeviceTraits(1.0, 250))
    costs = [StageCost(1.0, weight_bytes=size, workspace_bytes=50) for size in (50, 51, 200, 201, 350)]
    schedule = dispatch(costs, Machine(3, devices=devices), num_microbatches=9, splits=(3,) * 5)
    used = [{schedule.device_of(Action(stage, m)) for m in range(9)} for stage in range(5)]
    assert 0 in used[0]
    assert [devices_of & {0} for devices_of in used[1:]] == [set()] * 4
    assert used[3] == used[4] == {1}


def test_the_last_additions_on_the_host_count() -> None:
    """Both devices end at 10 ms; then the host adds 100 bytes up, with three passes at 100 bytes/ms."""
    costs = [StageCost(5.0, gradient_bytes=100)]
    machine = Machine(2, host_bytes_per_ms=100.0)
    assert dispatch_ms(costs, machine, num_microbatches=4, splits=(2,)) == 10 + 3
    assert dispatch_ms(costs, machine, num_microbatches=4, splits=(1,)) == 20
    three = dispatch_ms(costs, Machine(3, host_bytes_per_ms=100.0), num_microbatches=4, splits=(2,))
    assert three == 10 + 3, "also where not every device takes part"


# ---------------------------------------------------------------------------------------------------------------------
# What the planner makes of it

HOST_BYTES_PER_MS = 200e6


def planned(name: str, *, may_split: bool = True) -> tuple[StepPlan, Simulation]:
    """One step of 16 micro-batches on the paper's machine with a host memory of 200 GB/s, and an exact optimizer."""
    model = MODELS[name]
    profile, machine = model.profile(), replace(model.machine(NUM_DEVICES), host_bytes_per_ms=HOST_BYTES_PER_MS)
    plan = plan_training(profile, machine, num_microbatches=NUM_MICROBATCHES, may_split=may_split)
    schedule = plan.schedule(profile, machine, NUM_MICROBATCHES)
    return plan, simulate(schedule, stage_costs(plan.partition, profile), machine)


@pytest.mark.parametrize(
    ("name", "percent"),
    [("Qwen3-1.7B", 0.6), ("Llama-3.1-8B", 1.1), ("GPT-OSS-20B", 4.5), ("Qwen3-32B", 0.6), ("Qwen3-235B LoRA", 2.0)],
)
def test_splits_leave_little_bubble_and_the_reason_tells_it(name: str, percent: float) -> None:
    """Found: 0.53, 1.02, 4.45, 0.50 and 1.94 %. Without splits it is several times as much."""
    (plan, simulation), (unsplit_plan, unsplit) = planned(name), planned(name, may_split=False)
    bubble = 100 * simulation.timeline.bubble_ratio
    assert bubble <= percent
    assert 1.9 * bubble < 100 * unsplit.timeline.bubble_ratio
    assert simulation.step_ms < unsplit.step_ms
    low, high = min(plan.splits), max(plan.splits)
    assert high > 1
    assert plan.reason.startswith(f"r={high}: " if low == high else f"r={low} to {high}: ")
    assert f" {format_ms(simulation.step_ms)} a step, " in plan.reason
    assert ("on fewer devices" in plan.reason) == (low < high)
    assert unsplit_plan.reason == "r=1: every stage on one device at a time was asked for"


def random_case(seed: int) -> tuple[CostProfile, Machine, int, list[int]]:
    """Calls, links and memory of all kinds."""
    rng = random.Random(seed)
    weights = rng.choice([0, 20, 100, 400])

    def call(index: int) -> CallCost:
        forward, (up, down) = rng.uniform(1, 3), (int(weights * rng.uniform(0.5, 1.5)) for _ in range(2))
        return CallCost(f"c{index}", forward, forward * rng.uniform(1.5, 2.5), up, down if seed % 3 else 0, 10, 10, 30)

    profile = CostProfile(tuple(call(index) for index in range(rng.choice([3, 6, 12, 25]))))
    num_devices, link = rng.choice([2, 3, 4, 8]), rng.choice([math.inf, 100.0, 30.0])
    host = rng.choice([math.inf, 4 * link, 8 * link, 200.0])
    memory = rng.choice([None, None, 6 * weights + 1000])
    machine = Machine(num_devices, memory, link, link, 0.01, host, rng.choice([math.inf, 1000.0]))
    num_microbatches = rng.choice([num_devices, 2 * num_devices, 2 * num_devices + 1, 4 * num_devices])
    return profile, machine, num_microbatches, rng.choice([[num_microbatches], [2 * num_devices, num_devices]])


# With and without limits of memory and host, with links and without. Splits would make the step of seed 0 slower.
@pytest.mark.parametrize("seed", [0, 3, 4, 9, 12, 16, 18, 21])
def test_splits_never_make_a_step_slower(seed: int) -> None:
    profile, machine, num_microbatches, round_sizes = random_case(seed)
    times = []
    for may_split in (True, False):
        counts = {"num_microbatches": num_microbatches, "round_size": round_sizes}
        plan = plan_training(profile, machine, **counts, may_split=may_split)
        schedule = plan.schedule(profile, machine, num_microbatches)
        times.append(simulate(schedule, stage_costs(plan.partition, profile), machine).step_ms)
    assert times[0] <= times[1] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "speeds"),
    [
        ("Llama-3.1-8B", (1.0, 0.8, 0.6, 0.4) * 2),
        ("GPT-OSS-20B", (1.0, 0.5)),
        ("Qwen3-1.7B", (1.0, 1.0, 0.5, 0.5)),
    ],
)
def test_devices_of_unequal_speed_are_all_busy_to_the_end(name: str, speeds: tuple[float, ...]) -> None:
    """Within 5 % of work / sum of speeds; devices in turn, with splits or not, need at least 30 % more."""
    profile, num_devices = MODELS[name].profile(), len(speeds)
    machine = Machine(num_devices, devices=tuple(map(DeviceTraits, speeds)))
    plan = plan_training(profile, machine, num_microbatches=NUM_MICROBATCHES)
    costs = stage_costs(plan.partition, profile)
    step_ms = simulate(plan.schedule(profile, machine, NUM_MICROBATCHES), costs, machine).step_ms
    assert step_ms <= 1.05 * NUM_MICROBATCHES * math.fsum(cost.duration_ms for cost in costs) / sum(speeds)
    alike = Machine(num_devices)
    for may_split in (True, False):
        blind = plan_training(profile, alike, num_microbatches=NUM_MICROBATCHES, may_split=may_split)
        schedule = blind.schedule(profile, alike, NUM_MICROBATCHES)
        in_turn = simulate(schedule, stage_costs(blind.partition, profile), machine).step_ms
        assert in_turn > 1.3 * step_ms


def test_calls_that_fit_on_one_device_only_are_planned_for_it() -> None:
    """Unequal memory: an error only if a call fits nowhere."""
    calls = (CallCost("small", 1, 1, 10, 10), CallCost("large", 1, 1, 60, 60), CallCost("head", 1, 1, 10, 10))
    profile = CostProfile(calls)
    devices = (DeviceTraits(1.0, 50), DeviceTraits(0.5, 300))
    machine = Machine(2, devices=devices)
    plan = plan_training(profile, machine, num_microbatches=6)
    schedule, costs = plan.schedule(profile, machine, 6), stage_costs(plan.partition, profile)
    for stage, cost in zip(plan.partition.stages, costs, strict=True):
        used = {schedule.device_of(Action(stage.index, m)) for m in range(6)}
        assert used == {1} or cost.resident_bytes + cost.workspace_bytes <= 50, stage.format()
    assert schedule.devices[0], "what fits there may run there"
    peaks = simulate(schedule, costs, machine).memory_bytes
    assert all(peak <= traits.memory_bytes for peak, traits in zip(peaks, devices, strict=True))
    with pytest.raises(StageMemoryError, match=r"'large' needs 120 B .* over the 119 B"):
        plan_training(profile, Machine(2, devices=(DeviceTraits(1.0, 50), DeviceTraits(0.5, 119))), num_microbatches=6)


def test_a_device_with_less_memory_than_what_waits_there_gets_nothing() -> None:
    profile = CostProfile(tuple(CallCost(f"c{i}", 1, 1, 10, 10, 5, 5) for i in range(3)))
    machine = Machine(2, devices=(DeviceTraits(1.0, 6 * 5 - 1), DeviceTraits(1.0, 300)))
    plan = plan_training(profile, machine, num_microbatches=6)
    schedule = plan.schedule(profile, machine, 6)
    assert not schedule.devices[0]
    assert schedule.devices[1]


def test_a_plan_runs_batches_of_other_sizes_and_keeps_the_turns() -> None:
    plan = StepPlan(assemble(1, (0,), (0,)), (4,), 3)
    profile, machine = CostProfile((CallCost("a", 1, 1),)), Machine(2)
    schedule = plan.schedule(profile, machine, 5, first_device=1)
    assert schedule == round_robin(1, 5, 2, round_size=3, splits=2, first_device=1)
    assert plan.next_first_device(schedule, 1) == 1


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5)])
def test_steps_that_overlap_are_as_many_of_one_step_each(speeds: tuple[float, ...]) -> None:
    profile = CostProfile(tuple(CallCost(f"c{i}", 1, 2) for i in range(4)))
    machine = Machine(2, devices=tuple(map(DeviceTraits, speeds)))
    plan = plan_training(profile, machine, num_microbatches=6)
    one, three = (plan.schedule(profile, machine, 6, num_steps=count) for count in (1, 3))
    costs = stage_costs(plan.partition, profile)
    assert three.num_microbatches == 18
    assert simulate(three, costs, machine, microbatches_per_step=6).step_ms == pytest.approx(
        simulate(one, costs, machine).step_ms
    )


def test_micro_batches_in_order_take_the_split_from_a_stage() -> None:
    """Spans of calls stay in one stage, which runs on as many devices as the narrowest of its parts."""
    profile = CostProfile(tuple(CallCost(f"c{i}", 1, 1) for i in range(5)))
    stages = assemble(5, (0, 1, 2, 4), (0, 2, 4))
    plan = StepPlan(stages, (8, 4, 2, 8, 3, 5), 4, "why")
    assert plan.format() == "F 0 x8 | F 1 x4 | F 2-3 x2 | fused 4 x8 | B 2-3 x3 | B 0-1 x5"
    assert plan.with_order([], ()) == plan
    ordered = plan.with_order([(0, 3)], ())
    assert ordered.format() == "F 0-3 x2 | fused 4 x8 | B 2-3 x3 | B 0-1 x5"
    assert (ordered.round_size, ordered.reason) == (4, "why")
    assert plan.with_order([], {1}).splits == (8, 1, 2, 8, 3, 5)
    assert plan.with_order([], {4}).splits == (8, 4, 2, 1, 3, 5)
    assert plan.with_order([(0, 2)], {0}).splits == (1, 2, 8, 3, 5)
    assert stage_costs(ordered.partition, profile)
