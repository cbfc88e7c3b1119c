"""The schedules that ``roundpipe simulate`` compares, each with the stages that suit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_roundpipe.planning import (
    CostProfile,
    Machine,
    Schedule,
    Simulation,
    balanced_cuts,
    bound_stage_costs,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    plan_training,
    simulate,
    stage_costs,
)
from lightning_roundpipe.planning.simulate import Optimizer

from .memory import bound_memory

# Model stages per device of schedules that bind them.
_ONE, _SEVERAL = range(1, 2), range(2, 13)


@dataclass(frozen=True)
class Case:
    """What all contenders run; `round_size` and `may_split` are for RoundPipe, `num_steps` for steps that overlap."""

    profile: CostProfile
    machine: Machine
    num_microbatches: int
    round_size: int
    num_steps: int
    dtype: str
    may_split: bool = True


@dataclass(frozen=True)
class Contender:
    """A schedule and how it fared.

    Attributes:
        name: Name of the schedule.
        simulation: The result of the simulator.
        bubble_ratio: Share of the devices' time spent idle; of an asynchronous optimizer, without the fill of the first
            step and the drain of the last.
        memory_bytes: Peak per device.
        num_stages, stages: Their number, and the stages in short.
        binds_stages: Whether they are bound to devices, without offloading; then they are model stages.
    """

    name: str
    simulation: Simulation
    bubble_ratio: float
    memory_bytes: tuple[int, ...]
    num_stages: int
    stages: str
    binds_stages: bool


@dataclass(frozen=True)
class Skipped:
    """A schedule that binds stages to devices and cannot run, and why."""

    name: str
    reason: str


def _bound(
    case: Case, name: str, *, build: Callable[[int, int, int], Schedule], per_device: range
) -> Contender | Skipped:
    """Stages that are bound to devices: the number of model stages per device with which one step is fastest."""
    num_devices, num_microbatches = case.machine.num_devices, case.num_microbatches
    num_calls = len(case.profile.calls)
    if num_calls < per_device.start * num_devices:
        least = "a call" if per_device.start == 1 else f"{per_device.start} calls"
        return Skipped(name, f"needs {least} for each of {num_devices} devices, the profile has {num_calls}")
    if build is interleaved_one_f_one_b and num_microbatches % num_devices:
        return Skipped(name, f"needs a multiple of {num_devices} micro-batches, got {num_microbatches}")
    numbers = [count * num_devices for count in per_device if count * num_devices <= num_calls]
    tried = [
        _simulate_bound(case, name, num_stages, build(num_stages, num_microbatches, num_devices))
        for num_stages in numbers
    ]
    return min(tried, key=lambda contender: contender.simulation.step_ms)


def _simulate_bound(case: Case, name: str, num_stages: int, schedule: Schedule) -> Contender:
    """One step of model stages of about equal time, forward and backward."""
    *body, head = case.profile.calls
    # All but the head recompute their forward.
    times = [*(2 * call.forward_ms + call.backward_ms for call in body), head.forward_ms + head.backward_ms]
    calls_per_stage = balanced_cuts(times, num_stages)
    simulation = simulate(schedule, bound_stage_costs(calls_per_stage, case.profile), case.machine)
    memory = bound_memory(calls_per_stage, case.profile, schedule, case.dtype)
    stages = f"calls per stage: {' '.join(map(str, calls_per_stage))}"
    return Contender(name, simulation, simulation.timeline.bubble_ratio, memory, num_stages, stages, True)


def _roundpipe(case: Case, name: str, *, optimizer: Optimizer) -> Contender:
    """The plan of a training, for one step or for several that overlap."""
    profile, machine, count = case.profile, case.machine, case.num_microbatches
    is_asynchronous = optimizer == "asynchronous"
    plan = plan_training(profile, machine, num_microbatches=count, round_size=case.round_size, may_split=case.may_split)
    schedule = plan.schedule(profile, machine, count, num_steps=case.num_steps if is_asynchronous else 1)
    costs = stage_costs(plan.partition, profile)
    simulation = simulate(schedule, costs, machine, microbatches_per_step=count, optimizer=optimizer)
    timeline, stages = simulation.timeline, plan.partition
    bubble_ratio = timeline.bubble_parts["inside"] if is_asynchronous else timeline.bubble_ratio
    memory = simulation.memory_bytes
    return Contender(name, simulation, bubble_ratio, memory, stages.num_stages, stages.format(), False)


SCHEDULES: dict[str, tuple[str, Callable[[Case, str], Contender | Skipped]]] = {
    "gpipe": ("GPipe", partial(_bound, build=lambda stages, count, devices: gpipe(stages, count), per_device=_ONE)),
    "1f1b": ("1F1B", partial(_bound, build=lambda stages, count, devices: one_f_one_b(stages, count), per_device=_ONE)),
    "interleaved": ("interleaved 1F1B", partial(_bound, build=interleaved_one_f_one_b, per_device=_SEVERAL)),
    "looped-bfs": ("looped BFS", partial(_bound, build=looped_bfs, per_device=_SEVERAL)),
    "roundpipe-sync": ("RoundPipe synchronous", partial(_roundpipe, optimizer="synchronous")),
    "roundpipe-async": ("RoundPipe asynchronous", partial(_roundpipe, optimizer="asynchronous")),
}
