"""Schedules as text files: what the cells are, and what the stages hold.

The text is that of `Schedule.format`. A schedule numbers its stages but does not say which calls they hold. A comment
``# stages: F 0-4 | F 5-7 | fused 8-9 | B 6-7 | B 3-5 | B 0-2`` does, in the words of `Partition.format`. Without it,
they are those of a pipeline: the first half forwards of model stages of about equal time, the second half their
backwards in reverse, each on the device of its forward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_roundpipe.planning import (
    Action,
    CostProfile,
    Partition,
    Schedule,
    ScheduleError,
    Stage,
    StageCost,
    StageKind,
    balanced_cuts,
    bound_stage_costs,
    parse_schedule,
    stage_costs,
)

from .arguments import read_text

_STAGES = re.compile(r"^\s*#\s*stages:(.*)$", re.MULTILINE)
_STAGE = re.compile(r"(F|fused|B) (\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule with the costs of its stages: those of a partition, or of a pipeline with so many calls per stage."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    partition: Partition | None
    calls_per_stage: tuple[int, ...] = ()


def format_schedule(schedule: Schedule, partition: Partition) -> str:
    """Return the text that `read_schedule` reads back."""
    return f"# stages: {partition.format()}\n{schedule.format()}"


def read_schedule(path: str, profile: CostProfile) -> ScheduleFile:
    """Read a schedule and find the costs of its stages."""
    text = read_text(path, "schedule")
    try:
        schedule = parse_schedule(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    described = _STAGES.search(text)
    if described is None:
        return _pipeline(path, schedule, profile)
    try:
        partition = parse_partition(described.group(1), len(profile.calls))
    except ValueError as error:
        raise ValueError(f"{path}: in the line '# stages:': {error}") from error
    if partition.num_stages != schedule.num_stages:
        raise ValueError(
            f"{path}: the line '# stages:' has {partition.num_stages} stages and the schedule {schedule.num_stages}: "
            "correct one of the two."
        )
    return ScheduleFile(schedule, stage_costs(partition, profile), partition)


def parse_partition(text: str, num_calls: int) -> Partition:
    """Read what `Partition.format` wrote."""
    stages = []
    for index, piece in enumerate(text.split("|")):
        match = _STAGE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(f"{piece.strip()!r} is no stage: write one like 'F 0-3', 'fused 4' or 'B 0-3'.")
        kind, first, last = match.groups()
        stages.append(Stage(index, StageKind(kind), int(first), int(last or first) + 1))
    return Partition(num_calls, tuple(stages))


def balanced_stages(profile: CostProfile, num_stages: int) -> tuple[int, ...]:
    """Return the number of calls in each of `num_stages` model stages of about equal time, forward and backward."""
    *body, head = profile.calls
    # All but the head recompute their forward.
    times = [*(call.forward_ms + call.recompute_backward_ms for call in body), head.recompute_backward_ms]
    return balanced_cuts(times, num_stages)


def _pipeline(path: str, schedule: Schedule, profile: CostProfile) -> ScheduleFile:
    num_stages, odd = divmod(schedule.num_stages, 2)
    if odd:
        raise ValueError(
            f"{path}: nothing says what the {schedule.num_stages} stages hold, and they are not forwards and backwards "
            "of as many: add a line such as '# stages: F 0-4 | fused 5-9 | B 0-4'."
        )
    for action in (action for actions in schedule.devices for action in actions if action.stage_index < num_stages):
        backward = Action(schedule.num_stages - 1 - action.stage_index, action.microbatch_index)
        if schedule.device_of(action) != schedule.device_of(backward):
            raise ValueError(
                f"{path}: {action.format()} runs on device {schedule.device_of(action)} and {backward.format()}, its "
                f"backward, on device {schedule.device_of(backward)}: put both on one device, or say with a line "
                "'# stages: ...' what the stages hold."
            )
    try:
        calls_per_stage = balanced_stages(profile, num_stages)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return ScheduleFile(schedule, bound_stage_costs(calls_per_stage, profile), None, calls_per_stage)
