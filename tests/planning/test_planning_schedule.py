"""Schedule: validation that points at the cell, and the text form."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.planning import Action, Schedule, ScheduleError, round_robin
from tests.support.engine.schedule_text import parse_schedule


def random_schedule(num_stages: int, num_microbatches: int, num_devices: int, seed: int) -> Schedule:
    """A random global order that respects the chains, dealt out to random devices: valid by construction."""
    rng = random.Random(seed)
    next_stage = [0] * num_microbatches
    devices: list[list[Action]] = [[] for _ in range(num_devices)]
    for _ in range(num_stages * num_microbatches):
        microbatch = rng.choice([m for m in range(num_microbatches) if next_stage[m] < num_stages])
        devices[rng.randrange(num_devices)].append(Action(next_stage[microbatch], microbatch))
        next_stage[microbatch] += 1
    return Schedule(num_stages, num_microbatches, tuple(map(tuple, devices)))


random_schedules = st.builds(
    random_schedule, st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32)
)


# ---------------------------------------------------------------------------------------------------------------------
# Any schedule


@settings(derandomize=True, deadline=None, max_examples=100)
@given(random_schedules)
def test_any_order_with_a_common_topological_order_is_valid(schedule: Schedule) -> None:
    for device, actions in enumerate(schedule.devices):
        assert all(schedule.device_of(action) == device for action in actions)
    assert parse_schedule(schedule.format()) == schedule


def test_lists_become_tuples_and_schedules_hash() -> None:
    schedule = Schedule(1, 2, [[Action(0, 0)], [Action(0, 1)]])  # type: ignore[arg-type]
    assert hash(schedule) == hash(Schedule(1, 2, ((Action(0, 0),), (Action(0, 1),))))


# ---------------------------------------------------------------------------------------------------------------------
# Validation


def edit(schedule: Schedule, device: int, column: int, *replacement: Action) -> list[list[Action]]:
    devices = [list(actions) for actions in schedule.devices]
    devices[device][column : column + 1] = replacement
    return devices


def error_of(num_stages: int, num_microbatches: int, devices: list[list[Action]]) -> str:
    with pytest.raises(ScheduleError) as caught:
        Schedule(num_stages, num_microbatches, tuple(map(tuple, devices)))
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(random_schedules, st.data())
def test_every_broken_cell_is_named(schedule: Schedule, data: st.DataObject) -> None:
    """Break one random cell in each of the ways a cell can be wrong."""
    s, m = schedule.num_stages, schedule.num_microbatches
    device = data.draw(st.sampled_from([d for d, actions in enumerate(schedule.devices) if actions]))
    column = data.draw(st.integers(0, len(schedule.devices[device]) - 1))
    cell = schedule.devices[device][column]

    for wrong, problem in (
        (Action(s, cell.microbatch_index), f"stage {s} is out of range, the schedule has {s}"),
        (Action(-1, cell.microbatch_index), "stage -1 is out of range"),
        (Action(cell.stage_index, m), f"micro-batch {m} is out of range, the schedule has {m}"),
    ):
        message = error_of(s, m, edit(schedule, device, column, wrong))
        assert message.startswith(f"Device {device}, column {column}, action {wrong.format()}: {problem}")

    message = error_of(s, m, edit(schedule, device, column, cell, cell))
    assert f"Device {device}, column {column + 1}, action {cell.format()}: the action is already at" in message
    assert f"device {device}, column {column}" in message

    message = error_of(s, m, edit(schedule, device, column))
    assert message.startswith(f"Action {cell.format()} (stage {cell.stage_index}, ")
    assert "is missing, 1 in all" in message


def test_a_deadlock_between_devices_is_spelled_out() -> None:
    devices = [[Action(0, 0), Action(1, 1)], [Action(1, 0), Action(0, 1)]]
    schedule = Schedule(2, 2, tuple(map(tuple, devices)))
    assert schedule.num_devices == 2
    crossed = [[Action(1, 1), Action(0, 0)], [Action(1, 0), Action(0, 1)]]
    assert error_of(2, 2, crossed) == (
        "The order is cyclic, the devices would wait for ever: reorder them.\n"
        "  device 0, column 0: 1:1 waits for 0:1\n"
        "  device 1, column 0: 1:0 waits for 0:0"
    )


def test_deadlock_within_a_device_and_behind_it() -> None:
    message = error_of(3, 1, [[Action(2, 0)], [Action(1, 0), Action(0, 0)]])
    assert message.splitlines()[1:] == [
        "  device 0, column 0: 2:0 waits for 0:0",
        "  device 1, column 0: 1:0 waits for 0:0",
    ]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(random_schedules, st.data())
def test_reversed_chain_on_one_device_is_a_deadlock(schedule: Schedule, data: st.DataObject) -> None:
    pairs = [
        (d, i, j)
        for d, row in enumerate(schedule.devices)
        for i, a in enumerate(row)
        for j in range(i + 1, len(row))
        if row[j].microbatch_index == a.microbatch_index
    ]
    if not pairs:
        return
    d, i, j = data.draw(st.sampled_from(pairs))
    devices = [list(row) for row in schedule.devices]
    devices[d][i], devices[d][j] = devices[d][j], devices[d][i]
    assert "The order is cyclic" in error_of(schedule.num_stages, schedule.num_microbatches, devices)


def test_missing_actions_and_impossible_counts_are_refused() -> None:
    assert error_of(1, 2, [[Action(0, 0)]]) == (
        "Action 0:1 (stage 0, micro-batch 1) is missing, 1 in all: add it to a device."
    )
    assert "num_devices of a schedule must be >= 1, got 0" in error_of(1, 1, [])
    assert "num_stages of a schedule must be >= 1, got 0" in error_of(0, 1, [[]])
    assert "num_microbatches of a schedule must be >= 1, got 0" in error_of(1, 0, [[]])


# ---------------------------------------------------------------------------------------------------------------------
# Text


def test_text_is_aligned_in_columns() -> None:
    lines = round_robin(12, 11, 11).format().splitlines()
    assert lines[1].startswith("device 0:    0:0   0:1")
    assert lines[11].startswith("device 10:  10:0  10:1")
    assert parse_schedule("\n".join(lines)) == round_robin(12, 11, 11)
