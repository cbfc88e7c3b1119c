"""How close the engine comes to the simulator, and its plans to the paper's, with units that only wait.

Eight virtual devices run models whose units sleep for a modelled time, so that nothing competes for the cores and what
is left is the engine: threads, locks, autograd, dispatch. The models are the five of the RoundPipe paper, arXiv
2604.27085, faster than in life by one factor each, and a small one at two speeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks._report import Report, median, parser, progress, rounded, spread
from benchmarks._waiting import SLEPT, Model, Wait, scaled, sharpen_timers, time_factor
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    DeviceTraits,
    Machine,
    StepPlan,
    plan_training,
    round_robin,
    simulate,
    stage_costs,
)
from tests.planning.paper import MODELS, NUM_DEVICES, NUM_MICROBATCHES, ROUND_SIZE, PaperModel

METHOD = """
Engine on N virtual devices. A unit is a module whose forward sleeps forward_ms and whose backward sleeps backward_ms,
so that a recomputed backward takes their sum. The planner is planning.plan_training, on exactly these times, without
transfers. ideal_ms and ideal_bubble are planning.simulate on the schedule that ran, hops taking no time and no
recompute running ahead. step_ms is the wall-clock time of the whole step, from before the threads start until they have
been joined; over_ideal is step_ms / ideal_ms - 1, and bubble the idle share of N devices over the whole step, the
modelled work taken as work. recorded_bubble is that of the engine's own timeline, from the first to the last run of a
unit. Waits are plain time.sleep calls, which release the interpreter lock, without spinning; the timer slack of the
process is set to its minimum where the system allows. sleep_excess is how much longer the waits of a step took than
modelled, as a share of the work: it is not the engine's, and is part of over_ideal all the same. cpu_share is the CPU
time of the process over the wall-clock time. The first steps, of which one records, are not counted; medians of
the steps after. Cases alternate from step to step. every_stage_on_one_device_at_a_time is the same model with plans
that split no stage. over_total_speed is the step over the work divided by the speed of all devices, minus one;
ideal_over_total_speed the same in the simulator.
scaling: one model on 1, 2, 4 and 8 devices, its times divided by 8 over their number.
unequal_devices: virtual devices of speeds below 1 are busy for longer than their units wait; the engine measures the
speeds in the steps before those that count. Times are those on 8 devices. Without splits each stage still goes to the
device that would end it first.
paper_models: the layers and heads of the paper's table of profiles (tests/planning/paper.py, forward and backward in
ms), all times multiplied by time_factor, the largest power of 1/2 with which every device has at most max_work_ms to
do. M micro-batches in one round. ideal_bubble_with_hops is the schedule that ran, simulated with the table's hop times
the factor between devices, which the engine does not have: virtual devices share the host's memory. In papers:
published_bubble is the paper's figure for RoundPipe with a synchronous optimizer, simulated_bubble that of the paper's
partition in this package's simulator under the paper's rules (rounds of 8, hops, recompute running ahead of the
gradient), step_over_ours its step over the simulated step of the schedule that ran, hops in both: calls in the fused
stage save work, so that a plan with the larger bubble may be the faster one.
small_model: 28 equal layers and a head, in which a backward takes two forwards; 'slow' waits four times as long as
'fast'.
"""
MAX_WORK_MS = 3500.0
NUM_LAYERS = 28
LAYER_MS = (2.0, 4.0)
HEAD_MS = (6.0, 12.0)
SPEEDS = {"fast": 1.0, "slow": 4.0}
GOALS = {"fast": 0.08, "slow": 0.03}
CONFIGURATIONS = ((8, 8), (16, 16), (32, 16))  # (micro-batches, round size)
KEY = "train"
# Steps that do not count. Speeds of devices are known to the plan from the third step on.
NUM_WARM_UP = {False: 2, True: 4}  # by whether devices differ
SCALED = "Llama-3.1-8B"
UNEQUAL = (
    ("Llama-3.1-8B", (1.0, 0.5)),
    ("Llama-3.1-8B", (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5)),
    ("GPT-OSS-20B", (1.0, 0.9, 0.8, 0.5)),
)


def small_profile(speed: str) -> CostProfile:
    """The small model."""
    layers = (CallCost(f"layers.{i}", *LAYER_MS) for i in range(NUM_LAYERS))
    return scaled(CostProfile((*layers, CallCost("lm_head", *HEAD_MS))), SPEEDS[speed])


@dataclass(frozen=True)
class Step:
    """A measured step, times in ms."""

    step_ms: float
    cpu_ms: float
    excess_ms: float
    recorded_bubble: float


class Case:
    """One model with one number of micro-batches and one round size.

    Args:
        device: of torch, "cpu" for virtual devices; otherwise the type of the GPUs.
        unit: makes a unit from what its call costs.
        num_devices: how many there are.
        speeds: of virtual devices that differ; measured by the engine in the steps before those that count.
        may_split: whether a stage may run on several devices at a time.
    """

    def __init__(
        self,
        profile: CostProfile,
        num_microbatches: int,
        round_size: int,
        *,
        device: str = "cpu",
        unit: Callable[[CallCost], nn.Module] = Wait,
        num_devices: int = NUM_DEVICES,
        speeds: Sequence[float] | None = None,
        may_split: bool = True,
    ) -> None:
        self.profile = profile
        self.num_devices, self._speeds, self._may_split = num_devices, speeds, may_split
        self.has_own_speeds = speeds is not None
        self._num_microbatches = num_microbatches
        self._round_size = round_size
        self._model = Model(profile, unit)
        devices = [torch.device(device if device == "cpu" else f"{device}:{i}") for i in range(num_devices)]
        pool = DevicePool(devices, speeds=speeds)
        self._engine = Engine(self._model, pool, self._plan, round_size=round_size, num_threads=1)
        self._engine.preset_costs(KEY, profile)
        self._engine.open()  # as a Trainer does for a fit
        self._weights = [1 / num_microbatches] * num_microbatches
        self._num_steps = 0
        self._last: StepResult | None = None
        self._steps: list[Step] = []

    def _plan(self, costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> StepPlan:
        return plan_training(
            costs,
            machine,
            num_microbatches=num_microbatches,
            round_size=self._round_size,
            may_split=self._may_split,
        )

    def run(self, *, store: bool) -> None:
        """One step."""
        self._num_steps += 1
        inputs = [torch.zeros(1, requires_grad=True) for _ in range(self._num_microbatches)]
        request = StepRequest(self._model, inputs, self._weights, KEY, self._num_steps, loss_of=lambda output: output)
        SLEPT.take()
        wall, cpu = time.perf_counter(), time.process_time()
        result = self._engine.run(request)
        wall_ms, cpu_ms = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
        if store:
            self._steps.append(Step(wall_ms, cpu_ms, SLEPT.take(), result.timeline.bubble_ratio))
            self._last = result

    def ideal(self, hop_ms: float = 0.0) -> tuple[float, float]:
        """Step in ms and bubble of the schedule that ran last, simulated."""
        assert self._last is not None
        assert self._last.partition is not None
        assert self._last.schedule is not None
        costs = stage_costs(self._last.partition, self.profile)
        traits = tuple(map(DeviceTraits, self._speeds or ()))
        machine = Machine(self.num_devices, devices=traits, hop_ms=hop_ms)
        simulation = simulate(self._last.schedule, costs, machine)
        return simulation.step_ms, simulation.timeline.bubble_ratio

    def summary(self) -> dict[str, Any]:
        """Figures of this case."""
        ideal_ms, ideal_bubble = self.ideal()
        assert self._last is not None
        assert self._last.partition is not None
        partition = self._last.partition
        work_ms = self._num_microbatches * sum(cost.duration_ms for cost in stage_costs(partition, self.profile))
        capacity = sum(self._speeds or [1.0] * self.num_devices)
        step_ms = median([step.step_ms for step in self._steps])
        plan = self._engine.plan_of(KEY)
        assert plan is not None
        assert plan.step is not None
        return {
            "num_devices": self.num_devices,
            "splits": sorted(set(plan.step.splits)),
            "num_microbatches": self._num_microbatches,
            "round_size": self._round_size,
            "stages": partition.num_stages,
            "partition": partition.format(),
            "ideal_ms": rounded(ideal_ms),
            "step_ms": spread([step.step_ms for step in self._steps]),
            "over_ideal": spread([step.step_ms / ideal_ms - 1 for step in self._steps]),
            "ideal_bubble": rounded(ideal_bubble),
            "bubble": rounded(1 - work_ms / (capacity * step_ms)),
            "over_total_speed": rounded(step_ms * capacity / work_ms - 1),
            "ideal_over_total_speed": rounded(ideal_ms * capacity / work_ms - 1),
            "recorded_bubble": median([step.recorded_bubble for step in self._steps]),
            "sleep_excess": median([step.excess_ms / work_ms for step in self._steps]),
            "cpu_share": median([step.cpu_ms / step.step_ms for step in self._steps]),
        }


class PaperCase:
    """One of the paper's models."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._paper: PaperModel = MODELS[name]
        profile = self._paper.profile()
        self._factor = time_factor(profile, NUM_MICROBATCHES, MAX_WORK_MS)
        self.case = Case(scaled(profile, self._factor), NUM_MICROBATCHES, NUM_MICROBATCHES)
        self.unsplit = Case(scaled(profile, self._factor), NUM_MICROBATCHES, NUM_MICROBATCHES, may_split=False)

    def summary(self) -> dict[str, Any]:
        """Figures of this case, beside the paper's."""
        hop_ms = self._factor * self._paper.hop_ms
        with_hops_ms, bubble_with_hops = self.case.ideal(hop_ms)
        partition = self._paper.partition()
        schedule = round_robin(partition.num_stages, NUM_MICROBATCHES, NUM_DEVICES, round_size=ROUND_SIZE)
        costs = stage_costs(partition, self.case.profile)
        papers = simulate(schedule, costs, Machine(NUM_DEVICES, hop_ms=hop_ms), recompute_ahead=True)
        return {
            "model": self.name,
            "time_factor": self._factor,
            **self.case.summary(),
            "every_stage_on_one_device_at_a_time": self.unsplit.summary(),
            "ideal_bubble_with_hops": rounded(bubble_with_hops),
            "papers": {
                "published_bubble": rounded(self._paper.bubbles["RoundPipe, synchronous"] / 100),
                "simulated_bubble": rounded(papers.timeline.bubble_ratio),
                "step_over_ours": rounded(papers.step_ms / with_hops_ms),
            },
        }


class OtherDevices:
    """One of the paper's models on other devices."""

    def __init__(self, name: str, num_devices: int, speeds: Sequence[float] | None, *, may_split: bool = True) -> None:
        profile = MODELS[name].profile()
        share = 1.0 if speeds else num_devices / NUM_DEVICES
        profile = scaled(profile, share * time_factor(profile, NUM_MICROBATCHES, MAX_WORK_MS))
        self._name, self._speeds, self._may_split = name, speeds, may_split
        self.case = Case(
            profile,
            NUM_MICROBATCHES,
            NUM_MICROBATCHES,
            num_devices=num_devices,
            speeds=speeds,
            may_split=may_split,
        )

    def summary(self) -> dict[str, Any]:
        """Figures of this case."""
        return {"model": self._name, "speeds": self._speeds, "may_split": self._may_split, **self.case.summary()}


class SmallCase:
    """The small model at one speed."""

    def __init__(self, speed: str, num_microbatches: int, round_size: int) -> None:
        self._speed = speed
        self.case = Case(small_profile(speed), num_microbatches, round_size)

    def summary(self) -> dict[str, Any]:
        """Figures of this case, and whether they meet the goal."""
        figures, goal = self.case.summary(), GOALS[self._speed]
        is_met = figures["over_ideal"]["median"] <= goal
        return {"speed": self._speed, **figures, "goal_over_ideal": goal, "goal_met": is_met}


def markdown(papers: Sequence[dict[str, Any]]) -> str:
    """The table of the documentation."""
    lines = [
        "| | time factor | bubble, engine | simulated | step over simulated | r=1, engine | r=1, simulated | paper |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in papers:
        single = row["every_stage_on_one_device_at_a_time"]
        bubbles = (row["bubble"], row["ideal_bubble"], row["over_ideal"]["median"], single["bubble"])
        bubbles = (*bubbles, single["ideal_bubble"])
        cells = [row["model"], f"{row['time_factor']:g}", *(f"{100 * max(0.0, share):.1f} %" for share in bubbles)]
        cells.append(f"{100 * row['papers']['published_bubble']:.1f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    args = parser(__doc__, repeats=5).parse_args()
    repeats = 2 if args.quick else args.repeats
    names = list(MODELS)[:1] if args.quick else list(MODELS)
    speeds = ["fast"] if args.quick else list(SPEEDS)
    configurations = CONFIGURATIONS[:1] if args.quick else CONFIGURATIONS
    parameters = {
        "devices": NUM_DEVICES,
        "max_work_ms": MAX_WORK_MS,
        "small_model": {
            "layers": NUM_LAYERS,
            "layer_ms": {"forward": LAYER_MS[0], "backward_without_recompute": LAYER_MS[1]},
            "head_ms": {"forward": HEAD_MS[0], "backward_without_recompute": HEAD_MS[1]},
            "time_factors": {speed: SPEEDS[speed] for speed in speeds},
        },
        "repeats": repeats,
        "minimal_timer_slack": sharpen_timers(),
    }
    report = Report("bubble", METHOD, parameters)
    torch.set_num_threads(1)
    papers = [PaperCase(name) for name in names]
    small = [SmallCase(speed, *configuration) for speed in speeds for configuration in configurations]
    scaling = [OtherDevices(SCALED, count, None) for count in ((2,) if args.quick else (1, 2, 4, 8))]
    unequal = [
        OtherDevices(name, len(speeds), speeds, may_split=may_split)
        for name, speeds in UNEQUAL[: 1 if args.quick else None]
        for may_split in (True, False)
    ]
    cases = [
        *(paper.case for paper in papers),
        *(paper.unsplit for paper in papers),
        *(shown.case for shown in (*scaling, *unequal, *small)),
    ]
    for repetition in range(-max(NUM_WARM_UP.values()), repeats):
        for case in cases:
            if repetition >= -NUM_WARM_UP[case.has_own_speeds]:
                case.run(store=repetition >= 0)
        progress(f"{max(0, repetition + 1)} of {repeats} repetitions")
    rows = [paper.summary() for paper in papers]
    progress(markdown(rows))
    report.emit(
        {
            "paper_models": rows,
            "scaling": [shown.summary() for shown in scaling],
            "unequal_devices": [shown.summary() for shown in unequal],
            "small_model": [shown.summary() for shown in small],
        }
    )


if __name__ == "__main__":
    main()
