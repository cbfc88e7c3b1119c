"""Run a schedule on paper: when would each action start and end, if devices only waited for work."""

from __future__ import annotations

import math
from collections.abc import Callable

from .costs import CostProfile
from .partition import Partition, StageKind
from .schedule import Action, Schedule
from .timeline import Span, Timeline


def simulate(schedule: Schedule, duration_ms: Callable[[Action], float], *, hop_ms: float = 0.0) -> Timeline:
    """Run the schedule as discrete events: an action starts when its device and its micro-batch are both free.

    Devices run their actions in list order. Parameter and gradient transfers are taken to hide behind compute.

    Args:
        schedule: What runs where, in which order.
        duration_ms: Time of an action, in ms; for instance from `stage_durations`.
        hop_ms: Time in ms for which a micro-batch is under way between stages that lie on different devices. Devices
            can compute in the meantime.

    Returns:
        One "compute" span per action, device by device, in list order; times in ms from the begin of the step.

    Raises:
        ValueError: If a duration or `hop_ms` is not a finite number >= 0.
    """
    _check_time("hop_ms", hop_ms)
    spans: list[list[Span]] = [[] for _ in range(schedule.num_devices)]
    device_free = [0.0] * schedule.num_devices
    microbatch_free = [0.0] * schedule.num_microbatches
    next_stage = [0] * schedule.num_microbatches
    pending = list(range(schedule.num_devices))
    while pending:
        device = pending.pop()
        actions = schedule.devices[device]
        while len(spans[device]) < len(actions):
            action = actions[len(spans[device])]
            stage, microbatch = action.stage_index, action.microbatch_index
            if stage != next_stage[microbatch]:
                # The device that runs the stage before puts this one back on the list.
                break
            duration = duration_ms(action)
            _check_time(f"the duration of action {action.format()}", duration)
            start = max(device_free[device], microbatch_free[microbatch])
            end = start + duration
            spans[device].append(Span(device, "compute", start, end, stage, microbatch))
            device_free[device] = microbatch_free[microbatch] = end
            next_stage[microbatch] += 1
            if next_stage[microbatch] < schedule.num_stages:
                following = schedule.device_of(Action(next_stage[microbatch], microbatch))
                if following != device:
                    microbatch_free[microbatch] += hop_ms
                    pending.append(following)
    return Timeline(tuple(span for row in spans for span in row), schedule.num_devices)


def stage_durations(partition: Partition, profile: CostProfile) -> tuple[float, ...]:
    """Return the time of each stage on one micro-batch, in ms.

    The forwards of the calls for an F stage; forwards and backwards for the fused stage; the same for a B stage, which
    recomputes the forwards.

    Raises:
        ValueError: If the partition was made for another number of calls.
    """
    if partition.num_calls != len(profile.calls):
        raise ValueError(
            f"The partition has {partition.num_calls} calls and the profile {len(profile.calls)}: "
            "make the partition from this profile."
        )
    durations = []
    for stage in partition.stages:
        calls = profile.calls[stage.start : stage.stop]
        is_forward = stage.kind is StageKind.FORWARD
        # Compensated summation, so that equal stages get equal times.
        durations.append(math.fsum(call.forward_ms if is_forward else call.recompute_backward_ms for call in calls))
    return tuple(durations)


def _check_time(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of ms >= 0, got {value!r}: measure it again.")
