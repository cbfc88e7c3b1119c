"""The schedules that ``roundpipe simulate`` compares, each with the stages that suit it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_roundpipe.planning import (
    CostProfile,
    Machine,
    Partition,
    Schedule,
    Simulation,
    bound_stage_costs,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    plan_training,
    round_robin,
    simulate,
    stage_costs,
)

from .memory import bound_memory
from .schedule_file import ScheduleFile, balanced_stages, read_schedule

Optimizer: TypeAlias = Literal["synchronous", "asynchronous"]

_MAX_CHUNKS = 12
_MAX_PLANNED_STEPS = 4


@dataclass(frozen=True)
class Case:
    """What all contenders run: `round_size` for RoundPipe, `num_steps` for its asynchronous optimizer."""

    profile: CostProfile
    machine: Machine
    num_microbatches: int
    round_size: int
    num_steps: int
    hop_ms: float
    dtype: str


@dataclass(frozen=True)
class Contender:
    """A schedule and how it fared, or the reason why it cannot run.

    Attributes:
        name: Name of the schedule.
        is_bound: Whether its stages are bound to devices, without offloading.
        skipped: Why it cannot run; None if it can.
        stages: Its stages, in short.
        num_stages: How many; of a schedule that binds them, model stages.
        partition: Its stages, if they are not bound.
        simulation: The result of the simulator.
        bubble_ratio: Share of the devices' time spent idle; of an asynchronous optimizer, without the fill of the first
            step and the drain of the last.
        memory_bytes: Peak per device.
    """

    name: str
    is_bound: bool
    skipped: str | None = None
    stages: str = ""
    num_stages: int = 0
    partition: Partition | None = None
    simulation: Simulation | None = None
    bubble_ratio: float = 0.0
    memory_bytes: tuple[int, ...] = ()


def compare(case: Case, names: Iterable[str]) -> list[Contender]:
    """Simulate the named ones of `SCHEDULES` on the same calls and machine."""
    made: list[Contender] = []
    for name in names:
        run, arguments = _RUNS[name]
        made.append(run(case, SCHEDULES[name], *arguments))
    return made


def read_contender(case: Case, path: str) -> Contender:
    """Simulate a schedule given as text.

    Raises:
        ValueError: If it cannot be read, is not valid, or is made for other numbers of devices and micro-batches.
    """
    stages = read_schedule(path, case.profile)
    for what, option, found, wanted in (
        ("devices", "--devices", stages.schedule.num_devices, case.machine.num_devices),
        ("micro-batches", "--microbatches", stages.schedule.num_microbatches, case.num_microbatches),
    ):
        if found != wanted:
            raise ValueError(f"{path} has {found} {what}, and {option} says {wanted}: pass {option} {found}.")
    return _simulate_stages(case, path, stages)


def _bound(case: Case, name: str, build: Callable[[int, int], Schedule]) -> Contender:
    """One model stage per device."""
    num_devices, num_calls = case.machine.num_devices, len(case.profile.calls)
    if num_calls < num_devices:
        return Contender(
            name, is_bound=True, skipped=f"needs a call for each of {num_devices} devices, the profile has {num_calls}"
        )
    return _simulate_bound(case, name, num_devices, build(num_devices, case.num_microbatches))


def _looped(case: Case, name: str, build: Callable[[int, int, int], Schedule]) -> Contender:
    """The fastest number of model stages per device, from 2."""
    num_devices, num_microbatches = case.machine.num_devices, case.num_microbatches
    num_calls = len(case.profile.calls)
    if num_calls < 2 * num_devices:
        return Contender(
            name, is_bound=True, skipped=f"needs 2 calls for each of {num_devices} devices, the profile has {num_calls}"
        )
    if build is interleaved_one_f_one_b and num_microbatches % num_devices:
        return Contender(
            name, is_bound=True, skipped=f"needs a multiple of {num_devices} micro-batches, got {num_microbatches}"
        )
    tried = []
    for chunks in range(2, min(num_calls // num_devices, _MAX_CHUNKS) + 1):
        num_stages = chunks * num_devices
        tried.append(_simulate_bound(case, name, num_stages, build(num_stages, num_microbatches, num_devices)))
    return min(tried, key=lambda contender: contender.simulation.step_ms if contender.simulation else math.inf)


def _simulate_bound(case: Case, name: str, num_stages: int, schedule: Schedule) -> Contender:
    calls_per_stage = balanced_stages(case.profile, num_stages)
    costs = bound_stage_costs(calls_per_stage, case.profile)
    return _simulate_stages(case, name, ScheduleFile(schedule, costs, calls_per_stage, None))


def _simulate_stages(case: Case, name: str, stages: ScheduleFile) -> Contender:
    """One step."""
    schedule, calls_per_stage, partition = stages.schedule, stages.calls_per_stage, stages.partition
    simulation = simulate(schedule, stages.costs, case.machine, hop_ms=case.hop_ms)
    if calls_per_stage is None:
        memory, num_stages = simulation.memory_bytes, schedule.num_stages
        shown = partition.format() if partition else ""
    else:
        memory = bound_memory(calls_per_stage, case.profile, schedule, case.dtype)
        num_stages, shown = len(calls_per_stage), f"calls per stage: {' '.join(map(str, calls_per_stage))}"
    return Contender(
        name,
        is_bound=calls_per_stage is not None,
        stages=shown,
        num_stages=num_stages,
        partition=partition,
        simulation=simulation,
        bubble_ratio=simulation.timeline.bubble_ratio,
        memory_bytes=memory,
    )


def _roundpipe(case: Case, name: str, optimizer: Optimizer) -> Contender:
    """One step, or several that overlap.

    The ring does not stop between steps that overlap, so that a plan for several steps in one may be faster than the
    plan for one; which, the simulator tells.
    """
    num_steps = case.num_steps if optimizer == "asynchronous" else 1
    partitions = dict.fromkeys(
        plan_training(
            case.profile,
            case.machine,
            num_microbatches=planned * case.num_microbatches,
            round_size=case.round_size,
            hop_ms=case.hop_ms,
        )
        for planned in range(1, min(num_steps, _MAX_PLANNED_STEPS) + 1)
    )
    results = [(partition, _simulate_steps(case, partition, num_steps, optimizer)) for partition in partitions]
    partition, simulation = min(results, key=lambda result: result[1].timeline.makespan_ms)
    timeline = simulation.timeline
    return Contender(
        name,
        is_bound=False,
        stages=partition.format(),
        num_stages=partition.num_stages,
        partition=partition,
        simulation=simulation,
        bubble_ratio=timeline.bubble_ratio if optimizer == "synchronous" else timeline.bubble_parts["inside"],
        memory_bytes=simulation.memory_bytes,
    )


def _simulate_steps(case: Case, partition: Partition, num_steps: int, optimizer: Optimizer) -> Simulation:
    schedule = round_robin(
        partition.num_stages,
        case.num_microbatches,
        case.machine.num_devices,
        round_size=case.round_size,
        num_steps=num_steps,
    )
    return simulate(
        schedule,
        stage_costs(partition, case.profile),
        case.machine,
        hop_ms=case.hop_ms,
        microbatches_per_step=case.num_microbatches,
        optimizer=optimizer,
    )


SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "looped-bfs": "looped BFS",
    "roundpipe-sync": "RoundPipe synchronous",
    "roundpipe-async": "RoundPipe asynchronous",
}
_RUNS: dict[str, tuple[Callable[..., Contender], tuple[object, ...]]] = {
    "gpipe": (_bound, (gpipe,)),
    "1f1b": (_bound, (one_f_one_b,)),
    "interleaved": (_looped, (interleaved_one_f_one_b,)),
    "looped-bfs": (_looped, (looped_bfs,)),
    "roundpipe-sync": (_roundpipe, ("synchronous",)),
    "roundpipe-async": (_roundpipe, ("asynchronous",)),
}
