"""The simulated machine: weights, gradients and activations on their lanes, memory, host, optimizer."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    DeviceTraits,
    Machine,
    SharedLink,
    Span,
    StageCost,
    bound_stage_costs,
    one_f_one_b,
    round_robin,
    simulate,
    stage_costs,
)
from lightning_roundpipe.planning.partition import assemble
from tests.support.engine.schedule_text import parse_schedule

ONE_DEVICE = parse_schedule("schedule stages=3 microbatches=2 devices=1\ndevice 0: 0:0 0:1 1:0 1:1 2:0 2:1\n")


def moved(spans: tuple[Span, ...], lane: str) -> list[tuple[float, float]]:
    return sorted((span.start_ms, span.end_ms) for span in spans if span.kind == lane)


def test_weights_go_up_during_the_slot_before() -> None:
    """10 ms of weights and 2 x 6 ms of work per slot: only the first upload is waited for."""
    costs = [StageCost(6.0, weight_bytes=100)] * 3
    result = simulate(ONE_DEVICE, costs, Machine(1, h2d_bytes_per_ms=10.0))
    assert result.step_ms == 10 + 6 * 6
    assert moved(result.timeline.spans, "h2d") == [(0, 10), (10, 20), (22, 32)]
    assert result.h2d_bytes == (300,)
    assert result.lower_bounds_ms["h2d"] == 30
    assert result.bound_by == "fill and drain of the pipeline"


def test_waiting_has_other_causes_too() -> None:
    """Unequal stages: device 1 waits inside the step for micro-batches."""
    result = simulate(round_robin(2, 4, 2), [StageCost(3.0), StageCost(1.0)])
    assert result.late_upload_ms == 0
    assert result.bound_by == "waiting inside the step"


def test_an_optimizer_that_holds_up_more_than_the_bubble() -> None:
    costs = [StageCost(4.0), StageCost(4.0, gradient_bytes=10)]
    results = [simulate(round_robin(2, 8, 2), costs, Machine(2, optimizer_bytes_per_ms=rate)) for rate in (1.0, 10.0)]
    assert [result.bound_by for result in results] == ["optimizer", "fill and drain of the pipeline"]


def test_an_upload_longer_than_a_slot_bounds_the_step() -> None:
    costs = [StageCost(1.0, weight_bytes=100)] * 3
    result = simulate(ONE_DEVICE, costs, Machine(1, h2d_bytes_per_ms=10.0, transfer_latency_ms=1.0))
    assert result.step_ms == 3 * 11 + 2
    assert result.bound_by == "h2d"


def test_memory_decides_about_prefetch() -> None:
    """Where no other stage fits beside, every upload is waited for."""
    costs = [StageCost(6.0, weight_bytes=100, workspace_bytes=7)] * 3
    roomy = simulate(ONE_DEVICE, costs, Machine(1, 207, 10.0))
    tight = simulate(ONE_DEVICE, costs, Machine(1, 206, 10.0))
    assert roomy.memory_bytes == (207,)
    assert tight.memory_bytes == (107,)
    assert (roomy.step_ms, tight.step_ms) == (10 + 6 * 6, 3 * (10 + 12))
    assert tight.late_upload_ms == 2 * 10, "the first one is part of the fill"
    assert tight.bound_by == "uploads that come late"


def test_the_larger_activations_of_two_slots_count() -> None:
    """While the weights of the second stage arrive, the first one computes."""
    costs = [StageCost(1.0, weight_bytes=100, workspace_bytes=size) for size in (50, 7, 7)]
    assert simulate(ONE_DEVICE, costs).memory_bytes == (250,)


def test_the_busiest_link_and_both_ends_of_the_ring_count() -> None:
    schedule = parse_schedule("schedule stages=2 microbatches=1 devices=2\ndevice 0: 0:0\ndevice 1: 1:0\n")
    costs = [StageCost(1.0, weight_bytes=10), StageCost(1.0, weight_bytes=70)]
    result = simulate(schedule, costs, Machine(2, h2d_bytes_per_ms=10.0))
    assert result.h2d_bytes == (10, 70)
    assert result.lower_bounds_ms["h2d"] == 7
    # Device 0 waits at the end alone, and no device inside.
    drained = simulate(round_robin(2, 1, 2), [StageCost(1.0), StageCost(1.0)])
    assert drained.timeline.bubble_parts == {"fill": 0.25, "drain": 0.25, "inside": 0.0}
    late = simulate(
        parse_schedule("schedule stages=3 microbatches=1 devices=2\ndevice 0: 0:0 2:0\ndevice 1: 1:0\n"),
        [StageCost(2.0), StageCost(3.0), StageCost(2.0)],
    )
    assert late.timeline.bubble_parts == pytest.approx({"fill": 2 / 14, "drain": 2 / 14, "inside": 3 / 14})
    assert late.bound_by == "fill and drain of the pipeline"


def test_memory_is_free_when_the_gradients_have_arrived() -> None:
    """Slot 2 has to wait for the gradients of slot 0, not only for its end."""
    costs = [StageCost(5.0, weight_bytes=10, gradient_bytes=100), *[StageCost(5.0, weight_bytes=10)] * 2]
    result = simulate(ONE_DEVICE, costs, Machine(1, 1000, 10.0, 5.0))
    # slot 0: upload 0-1, compute 1-11, gradients 11-31; slot 2 may be uploaded from 31 on.
    assert moved(result.timeline.spans, "d2h") == [(11, 31)]
    assert moved(result.timeline.spans, "h2d") == [(0, 1), (1, 2), (31, 32)]
    assert result.step_ms == 32 + 10
    assert result.d2h_bytes == (100,)


def test_activations_go_before_weights_and_stream() -> None:
    """Each action brings 20 bytes up (2 ms); the next weights share the lane with them."""
    costs = [StageCost(6.0, weight_bytes=100, input_bytes=20)] * 3
    result = simulate(ONE_DEVICE, costs, Machine(1, h2d_bytes_per_ms=10.0))
    assert moved(result.timeline.spans, "h2d") == [(0, 10), (10, 24), (24, 38)]
    slow = simulate(ONE_DEVICE, [StageCost(1.0, input_bytes=20, output_bytes=30)] * 3, Machine(1, None, 10.0, 10.0))
    assert slow.step_ms == 6 * 3, "the activations of an action take longer than its compute"


def test_a_handover_goes_down_and_up_and_takes_two_latencies() -> None:
    schedule = parse_schedule("schedule stages=2 microbatches=1 devices=2\ndevice 0: 0:0\ndevice 1: 1:0\n")
    costs = [StageCost(3.0, output_bytes=20, handover_bytes=20), StageCost(3.0, input_bytes=20)]
    machine = Machine(2, h2d_bytes_per_ms=10.0, d2h_bytes_per_ms=20.0, transfer_latency_ms=0.25, hop_ms=1.0)
    assert simulate(schedule, costs, machine).step_ms == 3 + (1 + 1 + 2 + 0.5) + 3


def test_the_host_memory_is_shared() -> None:
    """Two devices upload at once: each link alone takes 10 ms, the host 20 ms for both."""
    schedule = parse_schedule("schedule stages=1 microbatches=2 devices=2\ndevice 0: 0:0\ndevice 1: 0:1\n")
    costs = [StageCost(1.0, weight_bytes=100)]
    alone = simulate(schedule, costs, Machine(2, h2d_bytes_per_ms=10.0))
    shared = simulate(schedule, costs, Machine(2, h2d_bytes_per_ms=10.0, host_bytes_per_ms=10.0))
    assert (alone.step_ms, shared.step_ms) == (11, 21)
    assert shared.lower_bounds_ms["host memory"] == 20
    assert shared.bound_by == "host memory"


def test_activations_that_stream_for_longer_than_they_are_computed_with() -> None:
    """1 ms of work and 20 ms of upload: the device is idle meanwhile, and the link bounds the step."""
    costs = [StageCost(1.0, input_bytes=200)]
    result = simulate(round_robin(1, 4, 1), costs, Machine(1, h2d_bytes_per_ms=10.0))
    assert result.step_ms == 80
    assert result.lower_bounds_ms["compute"] == 4
    assert result.timeline.busy_ms(0) == 4
    assert result.bound_by == "h2d"


def test_activations_alone_can_keep_the_host_memory_busy() -> None:
    costs = [StageCost(1.0, input_bytes=10, output_bytes=10)]
    result = simulate(round_robin(1, 4, 1), costs, Machine(1, host_bytes_per_ms=1.0))
    assert result.step_ms == result.lower_bounds_ms["host memory"] == 80


# ---------------------------------------------------------------------------------------------------------------------
# Additions on the host, shared links, unequal devices

SPLIT = parse_schedule("schedule stages=1 microbatches=2 devices=2\ndevice 0: 0:0\ndevice 1: 0:1\n")


def test_gradients_of_several_runs_of_a_stage_are_added_up_on_the_host() -> None:
    """10 ms of work, then 100 bytes of gradients from both devices: 5 ms on the links, beside 1 + 1 ms of the host
    memory; then that reads the sum and the part and writes the sum: 3 ms."""
    costs = [StageCost(10.0, gradient_bytes=100)]
    result = simulate(SPLIT, costs, Machine(2, d2h_bytes_per_ms=20.0, host_bytes_per_ms=100.0))
    assert result.step_ms == 10 + 5 + 3
    assert result.lower_bounds_ms["host memory"] == 2 + 3
    assert result.timeline.makespan_ms == 15, "adding is the host's"
    alone = simulate(round_robin(1, 2, 1), costs, Machine(1, d2h_bytes_per_ms=20.0, host_bytes_per_ms=100.0))
    assert alone.lower_bounds_ms["host memory"] == 1, "a single run leaves nothing to add"
    assert alone.step_ms == 20 + 5


def test_additions_of_a_stage_wait_for_each_other() -> None:
    """Four parts that come home together: three additions of 3 ms, one after the other."""
    costs = [StageCost(10.0, gradient_bytes=100)]
    result = simulate(round_robin(1, 4, 4, splits=4), costs, Machine(4, d2h_bytes_per_ms=20.0, host_bytes_per_ms=100.0))
    assert result.step_ms == 10 + 5 + 3 * 3


def test_every_round_adds_its_gradients_and_every_step_begins_anew() -> None:
    costs = [StageCost(1.0, gradient_bytes=100)]
    machine = Machine(2, host_bytes_per_ms=100.0)
    rounds = simulate(round_robin(1, 2, 2, round_size=1), costs, machine)
    assert rounds.lower_bounds_ms["host memory"] == 2 + 3
    two_steps = simulate(round_robin(1, 1, 2, num_steps=2), costs, machine, microbatches_per_step=1)
    assert two_steps.lower_bounds_ms["host memory"] == 1


def test_devices_on_a_shared_link_slow_each_other_down() -> None:
    """Devices 0 and 1 get 100 bytes each through 10 bytes/ms in all; device 2 has a way of its own."""
    schedule = parse_schedule(
        "schedule stages=1 microbatches=3 devices=3\ndevice 0: 0:0\ndevice 1: 0:1\ndevice 2: 0:2\n"
    )
    costs = [StageCost(1.0, weight_bytes=100)]
    shared = Machine(3, h2d_bytes_per_ms=10.0, shared_links=(SharedLink((0, 1), 10.0),))
    result = simulate(schedule, costs, shared)
    assert moved(result.timeline.spans, "h2d") == [(0, 10), (0, 10), (0, 20)]
    assert sorted(span.device for span in result.timeline.spans if span.kind == "h2d" and span.end_ms == 10) == [0, 2]
    assert result.step_ms == 21
    wide = Machine(3, h2d_bytes_per_ms=10.0, shared_links=(SharedLink((0, 1), 20.0),))
    assert simulate(schedule, costs, wide).step_ms == 11


def test_a_shared_link_is_one_for_each_direction() -> None:
    """Weights of device 1 come up while gradients of device 0 go down."""
    schedule = parse_schedule("schedule stages=2 microbatches=1 devices=2\ndevice 0: 0:0\ndevice 1: 1:0\n")
    costs = [StageCost(1.0, gradient_bytes=100), StageCost(1.0, weight_bytes=100)]
    machine = Machine(2, h2d_bytes_per_ms=10.0, d2h_bytes_per_ms=10.0, shared_links=(SharedLink((0, 1), 10.0),))
    assert simulate(schedule, costs, machine).step_ms == 11


def test_devices_of_unequal_speed_take_their_own_time() -> None:
    """4 ms of work at half speed are 8 ms; a device at double speed takes 2."""
    devices = (DeviceTraits(0.5), DeviceTraits(2.0))
    result = simulate(SPLIT, [StageCost(4.0)], Machine(2, devices=devices))
    assert [result.timeline.busy_ms(device) for device in range(2)] == [8, 2]
    assert result.step_ms == 8
    assert result.lower_bounds_ms["compute"] == 8 / 2.5


def test_devices_of_unequal_links_and_memory_keep_to_their_own() -> None:
    """The first device uploads at 10 bytes/ms and has no room for two stages, the second one has both."""
    schedule = round_robin(2, 2, 2, splits=2)
    costs = [StageCost(6.0, weight_bytes=100)] * 2
    devices = (DeviceTraits(1.0, 150, 10.0), DeviceTraits(1.0, None, 20.0))
    result = simulate(schedule, costs, Machine(2, devices=devices))
    ends = [max(x.end_ms for x in result.timeline.spans if x.device == device) for device in range(2)]
    assert ends == [10 + 6 + 10 + 6, 5 + 6 + 6]
    assert result.memory_bytes == (100, 200)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.sampled_from([math.inf, 50.0, 5.0]), st.data())
def test_no_resource_is_faster_than_its_bound(s: int, m: int, n: int, host: float, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 9))
    costs = [StageCost(1.0 + (seed + i) % 3, 0.5, 10 * i, 5 * i, (seed * i) % 7, i % 3, i % 3, 2) for i in range(s)]
    speeds = data.draw(st.lists(st.sampled_from([1.0, 0.5, 2.0]), min_size=n, max_size=n))
    devices = tuple(DeviceTraits(speed, None, 20.0 * speed, 10.0) for speed in speeds)
    links = (SharedLink((0, 1), 15.0),) if n > 1 and data.draw(st.booleans()) else ()
    machine = Machine(n, None, 20.0, 10.0, 0.1, host, 30.0, devices, links, hop_ms=0.2)
    splits = data.draw(st.lists(st.integers(1, n), min_size=s, max_size=s))
    schedule = round_robin(s, m, n, splits=splits, round_size=data.draw(st.none() | st.integers(1, 4)))
    result = simulate(schedule, costs, machine)
    bounds = result.lower_bounds_ms
    assert result.step_ms >= max(bounds.values()) * (1 - 1e-12)
    assert result.step_ms >= bounds["optimizer"] + bounds["compute"]
    assert bounds["compute"] == pytest.approx(sum(c.duration_ms for c in costs) * m / sum(speeds))
    unshared = simulate(schedule, costs, Machine(n, None, 20.0, 10.0, 0.1, math.inf, 30.0, devices, hop_ms=0.2))
    assert unshared.step_ms <= result.step_ms * (1 + 1e-12), "what is shared makes nothing faster"
    unlimited = tuple(DeviceTraits(speed) for speed in speeds)
    free = simulate(schedule, costs, Machine(n, devices=unlimited, hop_ms=0.2))
    assert free.step_ms <= unshared.step_ms - bounds["optimizer"] + 1e-9
    assert sum(result.h2d_bytes) == sum(free.h2d_bytes)
    for lane in ("h2d", "d2h"):
        for device in range(n):
            spans = moved(tuple(x for x in result.timeline.spans if x.device == device), lane)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "one copy at a time per lane"


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def ranks(num_ranks: int = 2, bytes_per_ms: float = 10.0, latency_ms: float = 0.5) -> Machine:
    return Machine(1, num_ranks=num_ranks, network_bytes_per_ms=bytes_per_ms, network_latency_ms=latency_ms)


def test_an_all_reduce_goes_twice_around_the_ring() -> None:
    """Each of 4 ranks sends a quarter of the bytes six times."""
    assert ranks(4).all_reduce_ms(120) == pytest.approx(6 * (0.5 + 30 / 10))
    assert ranks(1).all_reduce_ms(120) == 0.0


@pytest.mark.parametrize(("work_ms", "step_ms"), [(20.0, 40 + 11), (4.0, 4 + 11 + 11)])
def test_gradients_of_a_stage_are_added_up_over_ranks_while_the_next_ones_are_made(
    work_ms: float, step_ms: float
) -> None:
    """100 bytes take 2 x (0.5 + 5) ms; behind those of the stage before, if the network is slower than the work."""
    costs = [StageCost(work_ms, gradient_bytes=100)] * 2
    result = simulate(round_robin(2, 1, 1), costs, ranks())
    assert result.step_ms == pytest.approx(step_ms)
    assert result.lower_bounds_ms["network"] == pytest.approx(22)
    assert result.bound_by == "network"
    assert "network" not in simulate(round_robin(2, 1, 1), costs).lower_bounds_ms


def test_ranks_have_one_network_for_all_their_steps() -> None:
    costs = [StageCost(1.0, gradient_bytes=100)]
    schedule = round_robin(1, 1, 1, num_steps=3)
    result = simulate(schedule, costs, ranks(), microbatches_per_step=1, optimizer="asynchronous")
    assert result.step_ms == pytest.approx(11)


# ---------------------------------------------------------------------------------------------------------------------
# Several steps


def steps(optimizer: str, num_steps: int, optimizer_bytes_per_ms: float = 10.0) -> float:
    costs = [StageCost(1.0), StageCost(1.0, gradient_bytes=20)]
    schedule = round_robin(2, 4, 2, num_steps=num_steps)
    machine = Machine(2, optimizer_bytes_per_ms=optimizer_bytes_per_ms)
    return simulate(schedule, costs, machine, microbatches_per_step=4, optimizer=optimizer).step_ms  # type: ignore[arg-type]


def test_a_synchronous_optimizer_holds_up_the_next_step() -> None:
    assert steps("synchronous", 1) == 5 + 2
    assert steps("synchronous", 3) == 5 + 2


def test_an_asynchronous_optimizer_hides_behind_the_next_step() -> None:
    assert steps("asynchronous", 1) == 5
    assert steps("asynchronous", 8) == 4, "no fill, no drain, no optimizer"
    assert steps("asynchronous", 40, 1.0) == 20, "but never faster than the optimizer itself"


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8])
def test_overlapping_steps_are_not_faster_than_the_optimizer(num_steps: int) -> None:
    """The first two steps wait for no update, which the mean over a few steps must not hide."""
    assert steps("asynchronous", num_steps, 0.5) == pytest.approx(40)


def test_staleness_is_one() -> None:
    """Step 2 needs the weights after step 0: it waits for that update, and for no other."""
    costs = [StageCost(1.0, gradient_bytes=30)]
    machine = Machine(1, optimizer_bytes_per_ms=10.0)
    schedule = round_robin(1, 1, 1, num_steps=3)
    result = simulate(schedule, costs, machine, microbatches_per_step=1, optimizer="asynchronous")
    starts = [span.start_ms for span in result.timeline.spans if span.kind == "compute"]
    assert starts == [0, 1, 4]  # step 0 ends at 1 and is updated at 4


def test_steps_in_an_impossible_order_are_refused() -> None:
    schedule = parse_schedule("schedule stages=1 microbatches=2 devices=1\ndevice 0: 0:1 0:0\n")
    with pytest.raises(ValueError, match="order the steps on every device"):
        simulate(schedule, [StageCost(1.0)], microbatches_per_step=1)


# ---------------------------------------------------------------------------------------------------------------------
# Recompute ahead of the gradient


def test_recompute_may_run_ahead_of_the_gradient() -> None:
    text = "schedule stages=3 microbatches=1 devices=2\ndevice 0: 0:0 1:0\ndevice 1: 2:0\n"
    costs = [StageCost(2.0), StageCost(5.0), StageCost(4.0, 3.0)]
    late = simulate(parse_schedule(text), costs)
    early = simulate(parse_schedule(text), costs, recompute_ahead=True)
    assert (late.step_ms, early.step_ms) == (14, 11)
    span = next(x for x in early.timeline.spans if x.stage_index == 2)
    assert (span.start_ms, span.end_ms) == (4, 11)


def test_recompute_does_not_run_before_its_input_is_there() -> None:
    text = "schedule stages=3 microbatches=1 devices=2\ndevice 0: 0:0 1:0\ndevice 1: 2:0\n"
    early = simulate(parse_schedule(text), [StageCost(2.0), StageCost(1.0), StageCost(4.0, 9.0)], recompute_ahead=True)
    span = next(x for x in early.timeline.spans if x.stage_index == 2)
    assert span.start_ms == 2, "the fused stage has started, so the forward of the calls before it has ended"
    assert early.step_ms == 2 + 9 + 4


# ---------------------------------------------------------------------------------------------------------------------
# Costs of stages


def test_stages_of_a_partition_add_up_their_calls() -> None:
    calls = tuple(CallCost(f"c{i}", 1, 2, 10, 20, 3, 4, 100 + i) for i in range(6))
    profile = CostProfile(calls)
    plan = assemble(6, (0, 4), (0, 2, 4))
    forward, fused, b23, b01 = stage_costs(plan, profile)
    assert forward == StageCost(4.0, 0.0, 40, 0, 3, 4 + 3 * 3, 4, 3 + 4 + 103, "F 0-3")
    assert fused == StageCost(6.0, 0.0, 20, 40, 3, 3, 3, 3 + 4 + 104 + 4 + 105 + 7, "fused 4-5")
    assert b23 == StageCost(4.0, 2.0, 20, 40, 3 + 3 + 4, 3, 3, 2 * 7 + 103, "B 2-3")
    assert b01 == StageCost(4.0, 2.0, 20, 40, 3 + 3 + 4, 0, 0, 2 * 7 + 101, "B 0-1")
    evaluation = assemble(6, (0, 3, 6), ())
    assert stage_costs(evaluation, profile)[0] == StageCost(3.0, 0.0, 30, 0, 3, 4, 4, 3 + 4 + 102, "F 0-2"), "no saving"
    with pytest.raises(ValueError, match="partition has 6 calls and the profile 1"):
        stage_costs(plan, CostProfile(calls[:1]))


def test_bound_stages_move_activations_only() -> None:
    profile = CostProfile(tuple(CallCost(f"c{i}", 1, 2, 10, 20, 3, 4, 100) for i in range(5)))
    forward_0, forward_1, backward_1, backward_0 = bound_stage_costs([3, 2], profile)
    assert (forward_0.duration_ms, forward_1.duration_ms) == (3, 2)
    assert (backward_0.duration_ms, backward_0.recompute_ms) == (9, 3)
    assert (backward_1.duration_ms, backward_1.recompute_ms) == (5, 1), "the head is not recomputed"
    assert forward_0.weight_bytes == backward_0.gradient_bytes == 0, "nothing travels but activations"
    assert simulate(one_f_one_b(2, 4), bound_stage_costs([3, 2], profile)).step_ms > 0
    with pytest.raises(ValueError, match="add up to the 5 calls"):
        bound_stage_costs([3, 3], profile)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_devices": 0}, "num_devices must be >= 1, got 0"),
        ({"device_memory_bytes": -1}, "device_memory_bytes must be >= 0, got -1"),
        ({"h2d_bytes_per_ms": 0.0}, "h2d_bytes_per_ms must be > 0"),
        ({"host_bytes_per_ms": math.nan}, "host_bytes_per_ms must be > 0"),
        ({"transfer_latency_ms": -1.0}, "transfer_latency_ms must be a finite number of ms >= 0"),
        ({"hop_ms": math.inf}, "hop_ms must be a finite number of ms >= 0"),
        ({"devices": (DeviceTraits(), DeviceTraits())}, "devices has 2 entries for num_devices=1"),
        ({"shared_links": (SharedLink((0, 1), 5.0),)}, "names a device that is not one of 1"),
    ],
)
def test_impossible_machines_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine(**{"num_devices": 1, **arguments})  # type: ignore[arg-type]


def test_arguments_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="schedule has 1 devices and the machine 2"):
        simulate(ONE_DEVICE, [StageCost(1.0)] * 3, Machine(2))
    with pytest.raises(ValueError, match="schedule has 3 stages and costs has 2 entries"):
        simulate(ONE_DEVICE, [StageCost(1.0)] * 2)
    with pytest.raises(ValueError, match="microbatches_per_step=3 must divide"):
        simulate(ONE_DEVICE, [StageCost(1.0)] * 3, microbatches_per_step=3)
    with pytest.raises(ValueError, match=r"optimizer must be one of .*'asynchronous'\), got 'async'"):
        simulate(ONE_DEVICE, [StageCost(1.0)] * 3, optimizer="async")  # type: ignore[arg-type]
