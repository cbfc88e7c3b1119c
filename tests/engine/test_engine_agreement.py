"""The engine's timeline and the simulator's agree: the order of actions exactly, the times within a few percent.

Units sleep, which releases the interpreter lock and needs no core, so that devices really work side by side. The
simulator gets the durations that were measured in the same step: how exactly a busy machine sleeps does not matter,
only when the engine lets which action begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.engine.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.engine.virtual import LazyLink
from lightning_roundpipe.planning import (
    Action,
    CallCost,
    CostProfile,
    Partition,
    Schedule,
    Stage,
    StageKind,
    Timeline,
    next_first_device,
    parse_schedule,
    partition,
    partition_forward,
    round_robin,
    simulate,
    stage_costs,
)

TOLERANCE = 0.05
# Another process may take the cores away for a while. That delays what the engine does between the sleeps, and the
# simulator knows nothing of it; the engine itself would be as late in every step.
MAX_STEPS = 8


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_ms / 1e3)
        return gradients[0], gradients[0], None, None


class Sleeper(nn.Module):
    """A unit that takes a given time."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.times = (forward_ms, backward_ms)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, *self.times)


class Model(nn.Module):
    def __init__(self, times: list[tuple[float, float]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sleeper(*pair) for pair in times)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def stages(*pieces: tuple[str, int, int]) -> Partition:
    """Stages of (kind, first call, last call)."""
    count = max(last for _, _, last in pieces) + 1
    return Partition(count, tuple(Stage(i, StageKind(k), a, b + 1) for i, (k, a, b) in enumerate(pieces)))


@dataclass(frozen=True)
class Case:
    """What runs.

    Attributes:
        times: (forward, backward) of each unit in ms; a recomputed backward takes their sum.
        partition: the stages of the units.
        schedule: (first device) -> schedule, and the first device of the step after.
    """

    times: list[tuple[float, float]]
    partition: Partition
    schedule: Callable[[int], tuple[Schedule, int]]
    num_devices: int
    num_microbatches: int
    copies: bool = False


def ring(num_stages: int, num_microbatches: int, num_devices: int, round_size: int) -> dict[str, Any]:
    """Arguments of a case that goes round-robin, from step to step."""

    def schedule(first: int) -> tuple[Schedule, int]:
        options = {"round_size": round_size, "first_device": first}
        counts = (num_stages, num_microbatches, num_devices)
        return round_robin(*counts, **options), next_first_device(*counts, **options)

    return {"schedule": schedule, "num_devices": num_devices, "num_microbatches": num_microbatches}


def by_hand(text: str) -> dict[str, Any]:
    """Arguments of a case with this schedule in every step."""
    schedule = parse_schedule(text)
    return {
        "schedule": lambda first: (schedule, first),
        "num_devices": schedule.num_devices,
        "num_microbatches": schedule.num_microbatches,
    }


# Few and long actions: on a busy machine each one begins some milliseconds late.
THREE = [(60.0, 50.0), (90.0, 40.0), (50.0, 70.0)]
LONGER = [(110.0, 90.0), (140.0, 70.0), (90.0, 120.0)]
FOUR = [(40.0, 35.0), (35.0, 60.0), (60.0, 40.0), (40.0, 60.0)]
FORWARD_ONLY = [(90.0, 0.0), (120.0, 0.0), (60.0, 0.0), (80.0, 0.0)]
EACH_ITS_STAGE = stages(("F", 0, 0), ("F", 1, 1), ("fused", 2, 2), ("B", 1, 1), ("B", 0, 0))
CUT_DIFFERENTLY = stages(("F", 0, 1), ("F", 2, 2), ("fused", 3, 3), ("B", 1, 2), ("B", 0, 0))
FORWARD = stages(("F", 0, 0), ("F", 1, 1), ("F", 2, 3))
CASES = {
    "training, 3 devices, one round": Case(THREE, EACH_ITS_STAGE, **ring(5, 4, 3, 4)),
    "training, 3 devices, two rounds, copies": Case(FOUR, CUT_DIFFERENTLY, **ring(5, 5, 3, 3), copies=True),
    "training, 4 devices, rounds of 4 and 2": Case(FOUR, CUT_DIFFERENTLY, **ring(5, 6, 4, 4)),
    "training, stages split over devices": Case(
        LONGER,
        EACH_ITS_STAGE,
        **by_hand("""
            schedule stages=5 microbatches=4 devices=3
            device 0: 0:0 0:3 1:2 2:1 3:0 3:3 4:2
            device 1: 0:1 1:0 1:3 2:2 3:1 4:0 4:3
            device 2: 0:2 1:1 2:0 2:3 3:2 4:1"""),
    ),
    "evaluation, 3 devices, one round": Case(FORWARD_ONLY, FORWARD, **ring(3, 6, 3, 6)),
    "evaluation, 4 devices, rounds of 3": Case(FORWARD_ONLY, FORWARD, **ring(3, 6, 4, 3)),
}


def run_step(engine: Engine, model: Model, num_microbatches: int, training: bool) -> StepResult:
    inputs = [torch.zeros(1, requires_grad=training) for _ in range(num_microbatches)]
    shares = [1 / num_microbatches] * num_microbatches
    with torch.set_grad_enabled(training):
        return engine.run(
            StepRequest(model, inputs, shares, "step", 0, loss_of=(lambda loss: loss) if training else None)
        )


def measured_ms(timeline: Timeline) -> dict[Action, float]:
    """How long each action computed, in ms."""
    durations: dict[Action, float] = {}
    for span in timeline.spans:
        if span.kind == "compute" and span.action is not None:
            durations[span.action] = durations.get(span.action, 0.0) + span.end_ms - span.start_ms
    return durations


def starts_ms(timeline: Timeline) -> dict[Action, float]:
    """When each action began, in ms after the first one."""
    starts: dict[Action, float] = {}
    for span in timeline.spans:
        if span.kind == "compute" and span.action is not None:
            begin = span.start_ms - timeline.start_ms
            starts[span.action] = min(begin, starts.get(span.action, begin))
    return starts


@dataclass(frozen=True)
class Comparison:
    """A step beside its simulation."""

    step_ms: float
    simulated_ms: float
    latest: Action
    late_ms: float

    @classmethod
    def of(cls, result: StepResult) -> Comparison:
        assert result.schedule is not None
        durations = measured_ms(result.timeline)
        simulation = simulate(result.schedule, durations.__getitem__)
        assert_same_order(result, simulation.timeline)
        starts, simulated = starts_ms(result.timeline), starts_ms(simulation.timeline)
        late = {action: starts[action] - simulated[action] for action in starts}
        latest = max(late, key=lambda action: abs(late[action]))
        return cls(result.step_ms, simulation.step_ms, latest, late[latest])

    @property
    def worst(self) -> float:
        """The larger deviation, of the step's time or of a start, as a share of the simulated step."""
        return max(abs(self.step_ms - self.simulated_ms), abs(self.late_ms)) / self.simulated_ms

    def __str__(self) -> str:
        return (
            f"step {self.step_ms:.1f} ms, simulated {self.simulated_ms:.1f} ms "
            f"({self.step_ms / self.simulated_ms - 1:+.1%}); largest deviation of a start: "
            f"{self.late_ms:+.1f} ms at {self.latest.format()}"
        )


def assert_same_order(result: StepResult, simulated: Timeline) -> None:
    assert result.schedule is not None
    for device, actions in enumerate(result.schedule.devices):
        assert result.timeline.actions(device) == list(actions)
        assert simulated.actions(device) == list(actions)


@pytest.fixture(autouse=True)
def one_thread_per_operator() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_simulator_knows_when_the_engine_does_what(case: Case) -> None:
    model = Model(case.times)
    engine = Engine(
        model,
        DevicePool([torch.device("cpu")] * case.num_devices, link=LazyLink() if case.copies else None),
        lambda *_: case.partition,
        scheduler=lambda num_stages, num_microbatches, num_devices, first: case.schedule(first),
        num_threads=1,
    )
    training = case.partition.is_training
    run_step(engine, model, 1, training)  # records, and runs no schedule
    compared: list[Comparison] = []
    while not compared or (min(c.worst for c in compared) > TOLERANCE and len(compared) < MAX_STEPS):
        result = run_step(engine, model, case.num_microbatches, training)
        assert result.partition == case.partition
        compared.append(Comparison.of(result))
    best = min(compared, key=lambda comparison: comparison.worst)
    assert best.worst <= TOLERANCE, "\n".join(map(str, compared))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_planned_costs_give_the_order_in_which_the_engine_runs(training: bool) -> None:
    times = [(2.0, 4.0), (1.0, 2.0), (3.0, 6.0), (2.0, 3.0), (1.0, 1.0), (4.0, 8.0)]
    model = Model(times)
    profile = CostProfile(tuple(CallCost(f"layers.{i}", *pair) for i, pair in enumerate(times)))
    make = partition if training else partition_forward
    engine = Engine(
        model,
        DevicePool([torch.device("cpu")] * 3),
        lambda costs, num_microbatches, _: make(costs, num_devices=3, num_microbatches=num_microbatches),
        round_size=3,
        num_threads=1,
    )
    engine.preset_costs("step", profile)
    run_step(engine, model, 1, training)
    for _ in range(2):
        result = run_step(engine, model, 6, training)
        assert result.partition is not None
        assert result.schedule is not None
        assert_same_order(result, simulate(result.schedule, stage_costs(result.partition, profile)).timeline)
