"""How long the planner takes, and what splits are worth, over models of 25 to 1000 layers.

The planner runs between two training steps (and in front of anyone who types ``roundpipe plan``), so its time counts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks._report import Report, median, parser, progress, rounded, spread
from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    Machine,
    StepPlan,
    plan_training,
    simulate,
    stage_costs,
)
from tests.planning.paper import MODELS, NUM_DEVICES, NUM_MICROBATCHES

METHOD = """
Wall-clock time of planning.plan_training (the plan of a run: the fastest stages, splits and rounds found in the
simulator) and of the same with every stage on one device at a time ('unsplit'), alternately, in one process; medians of
the repetitions. The same in CPU time of the process, which other processes disturb less. The model is the paper's
profile of Llama-3.1-8B (tests/planning/paper.py) with another number of layers, and its head. 'equal' has equal layers
on a machine without limits: nothing travels. 'uneven' multiplies the times of every layer by factors drawn uniformly
between 0.7 and 1.3, seeded, as measured times would be, and plans for the paper's machine: 24 GiB per device, links of
20 MiB/ms. 'host' is the same with a host memory of 200 GB/s, for which the fastest plans are simulated once more.
splits is the least and the most devices that a stage is on.
"""
NUM_LAYERS = (25, 50, 100, 200, 500, 1000)
GOALS_MS = {100: 50.0, 1000: 2000.0}
MODEL = MODELS["Llama-3.1-8B"]


def equal(num_layers: int) -> tuple[CostProfile, Machine]:
    """Equal layers and a head, without limits."""
    layer, head = MODEL.profile().calls[0], MODEL.profile().calls[-1]
    layers = tuple(replace(layer, name=f"layers.{i}") for i in range(num_layers))
    return CostProfile((*layers, head)), Machine(NUM_DEVICES)


def uneven(num_layers: int) -> tuple[CostProfile, Machine]:
    """Layers of unequal times, on a machine with limits."""
    rng = random.Random(num_layers)
    *layers, head = equal(num_layers)[0].calls

    def vary(call: CallCost) -> CallCost:
        return replace(
            call,
            forward_ms=call.forward_ms * rng.uniform(0.7, 1.3),
            backward_ms=call.backward_ms * rng.uniform(0.7, 1.3),
        )

    return CostProfile((*map(vary, layers), head)), MODEL.machine(NUM_DEVICES)


def host(num_layers: int) -> tuple[CostProfile, Machine]:
    """The same, with a host memory that has a limit."""
    profile, machine = uneven(num_layers)
    return profile, replace(machine, host_bytes_per_ms=200e6)


KINDS = {"equal": equal, "uneven": uneven, "host": host}


class Case:
    """One profile on one machine."""

    def __init__(self, kind: str, num_layers: int) -> None:
        self.kind = kind
        self.num_layers = num_layers
        self._profile, self._machine = KINDS[kind](num_layers)
        self._planners: dict[str, Callable[[], StepPlan]] = {
            "plan_training": self._plan,
            "unsplit": lambda: self._plan(may_split=False),
        }
        self._found: dict[str, StepPlan] = {}
        self._taken_ms: dict[str, list[float]] = {name: [] for name in self._planners}
        self._cpu_ms: dict[str, list[float]] = {name: [] for name in self._planners}

    def _plan(self, *, may_split: bool = True) -> StepPlan:
        return plan_training(self._profile, self._machine, num_microbatches=NUM_MICROBATCHES, may_split=may_split)

    def run(self) -> None:
        """One repetition."""
        for name, planner in self._planners.items():
            wall, cpu = time.perf_counter(), time.process_time()
            self._found[name] = planner()
            self._taken_ms[name].append((time.perf_counter() - wall) * 1e3)
            self._cpu_ms[name].append((time.process_time() - cpu) * 1e3)

    def summary(self) -> dict[str, object]:
        """Figures of this case."""
        steps_ms = {name: self._step_ms(found) for name, found in self._found.items()}
        taken = spread(self._taken_ms["plan_training"])
        goal = GOALS_MS.get(self.num_layers)
        return {
            "kind": self.kind,
            "layers": self.num_layers,
            "plan_training_ms": taken,
            "plan_training_cpu_ms": median(self._cpu_ms["plan_training"]),
            "goal_ms": goal,
            "goal_met": None if goal is None else taken["median"] <= goal,
            "unsplit_cpu_ms": median(self._cpu_ms["unsplit"]),
            "stages": self._found["plan_training"].partition.num_stages,
            "splits": [pick(self._found["plan_training"].splits) for pick in (min, max)],
            "step_over_unsplit": rounded(steps_ms["plan_training"] / steps_ms["unsplit"]),
        }

    def _step_ms(self, found: StepPlan) -> float:
        schedule = found.schedule(self._profile, self._machine, NUM_MICROBATCHES)
        return simulate(schedule, stage_costs(found.partition, self._profile), self._machine).step_ms


def cases(num_layers: tuple[int, ...]) -> Iterator[Case]:
    """All of them."""
    for kind in KINDS:
        for count in num_layers:
            yield Case(kind, count)


def main() -> None:
    """Measures and prints."""
    args = parser(__doc__, repeats=5).parse_args()
    repeats = 2 if args.quick else args.repeats
    num_layers = NUM_LAYERS[:2] if args.quick else NUM_LAYERS
    parameters = {
        "devices": NUM_DEVICES,
        "num_microbatches": NUM_MICROBATCHES,
        "layers": list(num_layers),
        "repeats": repeats,
    }
    report = Report("partitioner", METHOD, parameters)
    shown = list(cases(num_layers))
    for repetition in range(repeats):
        for case in shown:
            case.run()
        progress(f"{repetition + 1} of {repeats} repetitions")
    report.emit([case.summary() for case in shown])


if __name__ == "__main__":
    main()
