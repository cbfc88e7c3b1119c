"""The engine begins every action when the simulator says, and in its order.

No time is measured. Units wait for a clock that follows the simulation: it moves on when those micro-batches compute
that do so at its time by the simulation, and no others. A micro-batch that the engine lets begin too early is named at
once; a micro-batch that it keeps waiting is named when the clock has stood for a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import (
    Action,
    CallCost,
    CostProfile,
    Partition,
    Schedule,
    Span,
    Stage,
    StageKind,
    Timeline,
    round_robin,
    simulate,
    stage_costs,
)
from tests.support.engine.lazy_link import cpu_pool
from tests.support.engine.partitions import scheduled
from tests.support.engine.schedule_text import parse_schedule
from tests.support.engine.taps import Tap

PATIENCE_S = 60.0


class Clock:
    """The time of a simulation. Times are whole numbers of ms, so that their sums are exact.

    Args:
        partition: what the stages consist of.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._spans: list[Span] = []
        self._changed = threading.Condition()
        self._now = 0.0
        self._ends: dict[int, float] = {}

    def follow(self, simulated: Timeline) -> None:
        """Begin again, for a step that computes when ``simulated`` does."""
        self._spans = [span for span in simulated.spans if span.kind == "compute"]
        self._now = 0.0

    def spend(self, microbatch: int, call: int, ms: float) -> None:
        """Return ``ms`` later; raise if the micro-batch should not compute this call now. Nothing before ``follow``."""
        if not self._spans:
            return
        with self._changed:
            expected = self._expected()
            assert microbatch in expected, f"micro-batch {microbatch} is too early at {self._now} ms: {expected}"
            stage = self._partition.stages[expected[microbatch].stage_index]
            assert stage.start <= call < stage.stop, f"call {call} of micro-batch {microbatch} at {self._now} ms"
            end = self._ends[microbatch] = self._now + ms
            while self._ends and self._ends.keys() == self._expected().keys():
                self._now = min(self._ends.values())
                self._ends = {index: end for index, end in self._ends.items() if end > self._now}
                self._changed.notify_all()
            came = self._changed.wait_for(lambda: self._now >= end, PATIENCE_S)
            assert came, f"at {self._now} ms should compute {self._expected()}, and do only {sorted(self._ends)}"

    def _expected(self) -> dict[int, Action]:
        """What computes now, by the simulation, per micro-batch."""
        now = [span.action for span in self._spans if span.start_ms <= self._now < span.end_ms]
        return {action.microbatch_index: action for action in now if action is not None}

    def assert_done(self) -> None:
        assert self._now == max(span.end_ms for span in self._spans)


class Timed(nn.Module):
    """A unit that takes a given time of the clock. Its input is the index of the micro-batch."""

    def __init__(self, clock: Clock, call: int, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.clock = clock
        self.call = call
        self.times = (forward_ms, backward_ms)

    def forward(self, x: Tensor) -> Tensor:
        microbatch = int(x)
        forward, backward = (partial(self.clock.spend, microbatch, self.call, ms) for ms in self.times)
        return Tap.apply(x + self.weight, forward, backward)


class Model(nn.Module):
    def __init__(self, clock: Clock, times: list[tuple[float, float]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Timed(clock, call, *pair) for call, pair in enumerate(times))

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
        made = round_robin(num_stages, num_microbatches, num_devices, round_size=round_size, first_device=first)
        return made, (made.device_of(Action(num_stages - 1, num_microbatches - 1)) + 1) % num_devices

    return {"schedule": schedule, "num_devices": num_devices, "num_microbatches": num_microbatches}


def by_hand(text: str) -> dict[str, Any]:
    """Arguments of a case with this schedule in every step."""
    schedule = parse_schedule(text)
    return {
        "schedule": lambda first: (schedule, first),
        "num_devices": schedule.num_devices,
        "num_microbatches": schedule.num_microbatches,
    }


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
    inputs = [torch.full((1,), float(index), requires_grad=training) for index in range(num_microbatches)]
    shares = [1 / num_microbatches] * num_microbatches
    with torch.set_grad_enabled(training):
        return engine.run(
            StepRequest(model, inputs, shares, "step", 0, loss_of=(lambda loss: loss) if training else None)
        )


def profile_of(times: list[tuple[float, float]]) -> CostProfile:
    return CostProfile(tuple(CallCost(f"layers.{i}", *pair) for i, pair in enumerate(times)))


def assert_same_order(result: StepResult, simulated: Timeline) -> None:
    assert result.schedule is not None
    for device, actions in enumerate(result.schedule.devices):
        assert result.timeline.actions(device) == list(actions)
        assert simulated.actions(device) == list(actions)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_simulator_knows_when_the_engine_does_what(case: Case) -> None:
    clock = Clock(case.partition)
    model = Model(clock, case.times)
    engine = Engine(
        model,
        cpu_pool(case.num_devices, copies=case.copies),
        lambda *_: scheduled(
            case.partition,
            lambda num_stages, num_microbatches, num_devices, first: case.schedule(first)[0],
            after=lambda first: case.schedule(first)[1],
        ),
        num_threads=1,
    )
    training = case.partition.is_training
    run_step(engine, model, 1, training)  # records, and runs no schedule
    costs = stage_costs(case.partition, profile_of(case.times))
    first = 0
    for _ in range(2):
        schedule, first = case.schedule(first)
        simulation = simulate(schedule, costs)
        clock.follow(simulation.timeline)
        result = run_step(engine, model, case.num_microbatches, training)
        clock.assert_done()
        assert (result.partition, result.schedule) == (case.partition, schedule)
        assert_same_order(result, simulation.timeline)
