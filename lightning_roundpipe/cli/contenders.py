"""The schedules that ``roundpipe simulate`` compares, each with the stages that suit it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from lightning_roundpipe.planning import (
    CostProfile,
    Machine,
    Partition,
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

_MAX_CHUNKS = 12


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
        partition: Its stages; None if they are bound to devices, without offloading.
        calls_per_stage: Then the calls of each model stage.
    """

    name: str
    simulation: Simulation
    bubble_ratio: float
    memory_bytes: tuple[int, ...]
    partition: Partition | None
    calls_per_stage: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages; of a schedule that binds them, model stages."""
        return len(self.calls_per_stage) if self.partition is None else self.partition.num_stages

    @property
    def stages(self) -> str:
        """The stages, in short."""
        if self.partition is None:
            return f"calls per stage: {' '.join(map(str, self.calls_per_stage))}"
        return self.partition.format()


@dataclass(frozen=True)
class Skipped:
    """A schedule that binds stages to devices and cannot run, and why."""

    name: str
    reason: str


def compare(case: Case, names: Iterable[str]) -> list[Contender | Skipped]:
    """Simulate the named ones of `SCHEDULES` on the same calls and machine."""
    return [run(case, title) for title, run in map(SCHEDULES.__getitem__, names)]


def _balanced_stages(profile: CostProfile, num_stages: int) -> tuple[int, ...]:
    """Return the number of calls in each of `num_stages` model stages of about equal time, forward and backward."""
    *body, head = profile.calls
    # All but the head recompute their forward.
    times = [*(2 * call.forward_ms + call.backward_ms for call in body), head.forward_ms + head.backward_ms]
    return balanced_cuts(times, num_stages)


def _simulate_bound(case: Case, name: str, num_stages: int, schedule: Schedule) -> Contender:
    """One step of stages that are bound to devices."""
    calls_per_stage = _balanced_stages(case.profile, num_stages)
    costs = bound_stage_costs(calls_per_stage, case.profile)
    simulation = simulate(schedule, costs, case.machine)
    memory = bound_memory(calls_per_stage, case.profile, schedule, case.dtype)
    return Contender(name, simulation, simulation.timeline.bubble_ratio, memory, None, calls_per_stage)


def _pipeline(case: Case, name: str, *, build: Callable[[int, int], Schedule]) -> Contender | Skipped:
    """One model stage per device."""
    num_devices, num_calls = case.machine.num_devices, len(case.profile.calls)
    if num_calls < num_devices:
        return Skipped(name, f"needs a call for each of {num_devices} devices, the profile has {num_calls}")
    return _simulate_bound(case, name, num_devices, build(num_devices, case.num_microbatches))


def _looped(case: Case, name: str, *, build: Callable[[int, int, int], Schedule]) -> Contender | Skipped:
    """The fastest number of model stages per device, from 2."""
    num_devices, num_microbatches = case.machine.num_devices, case.num_microbatches
    num_calls = len(case.profile.calls)
    if num_calls < 2 * num_devices:
        return Skipped(name, f"needs 2 calls for each of {num_devices} devices, the profile has {num_calls}")
    if build is interleaved_one_f_one_b and num_microbatches % num_devices:
        return Skipped(name, f"needs a multiple of {num_devices} micro-batches, got {num_microbatches}")
    tried = []
    for num_chunks in range(2, min(num_calls // num_devices, _MAX_CHUNKS) + 1):
        num_stages = num_chunks * num_devices
        schedule = build(num_stages, num_microbatches, num_devices)
        tried.append(_simulate_bound(case, name, num_stages, schedule))
    return min(tried, key=lambda contender: contender.simulation.step_ms)


def _roundpipe(case: Case, name: str, *, optimizer: Optimizer) -> Contender:
    """The plan of a training, for one step or for several that overlap."""
    profile, machine, count = case.profile, case.machine, case.num_microbatches
    is_asynchronous = optimizer == "asynchronous"
    counts = {"num_microbatches": count, "round_size": case.round_size}
    plan = plan_training(profile, machine, **counts, may_split=case.may_split)
    num_steps = case.num_steps if is_asynchronous else 1
    schedule = plan.schedule(profile, machine, count, num_steps=num_steps)
    simulation = simulate(
        schedule,
        stage_costs(plan.partition, profile),
        machine,
        microbatches_per_step=count,
        optimizer=optimizer,
    )
    timeline = simulation.timeline
    bubble_ratio = timeline.bubble_parts["inside"] if is_asynchronous else timeline.bubble_ratio
    return Contender(name, simulation, bubble_ratio, simulation.memory_bytes, plan.partition)


SCHEDULES: dict[str, tuple[str, Callable[[Case, str], Contender | Skipped]]] = {
    "gpipe": ("GPipe", partial(_pipeline, build=gpipe)),
    "1f1b": ("1F1B", partial(_pipeline, build=one_f_one_b)),
    "interleaved": ("interleaved 1F1B", partial(_looped, build=interleaved_one_f_one_b)),
    "looped-bfs": ("looped BFS", partial(_looped, build=looped_bfs)),
    "roundpipe-sync": ("RoundPipe synchronous", partial(_roundpipe, optimizer="synchronous")),
    "roundpipe-async": ("RoundPipe asynchronous", partial(_roundpipe, optimizer="asynchronous")),
}
