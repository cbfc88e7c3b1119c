"""Dispatch: which device gets which stage run, the fast clock against the simulator, and devices that differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import (
    DeviceTraits,
    Machine,
    SharedLink,
    StageCost,
    parse_schedule,
    round_robin,
    simulate,
)
from lightning_roundpipe.planning.dispatch import dispatch, dispatch_ms

stage_costs_ = st.builds(
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
    )


def check_clock(data: st.DataObject, machine: Machine) -> None:
    """`dispatch_ms` says what `simulate` says of the schedule that `dispatch` makes, and that one is valid."""
    costs = data.draw(st.lists(stage_costs_, min_size=1, max_size=7))
    num_microbatches = data.draw(st.integers(1, 12))
    counts = st.integers(1, 6)
    splits = data.draw(
        st.lists(counts, min_size=len(costs), max_size=len(costs)) | counts.map(lambda r: [r] * len(costs))
    )
    options = {
        "num_microbatches": num_microbatches,
        "splits": splits,
        "round_size": data.draw(st.none() | st.integers(1, 13)),
        "hop_ms": data.draw(st.sampled_from([0.0, 0.5])),
    }
    schedule = dispatch(costs, machine, **options)
    assert parse_schedule(schedule.format()) == schedule
    expected = simulate(schedule, costs, machine, hop_ms=options["hop_ms"]).step_ms
    assert dispatch_ms(costs, machine, **options) == pytest.approx(expected, rel=1e-12)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(machines(is_uniform=True), st.data())
def test_the_clock_of_devices_in_turn_is_the_simulation(machine: Machine, data: st.DataObject) -> None:
    check_clock(data, machine)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(machines(is_uniform=False), st.data())
def test_the_clock_of_devices_that_differ_is_the_simulation(machine: Machine, data: st.DataObject) -> None:
    check_clock(data, machine)
