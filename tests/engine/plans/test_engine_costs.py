"""Measured costs: times of a clock that only the units move."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.device import Run
from lightning_roundpipe.engine.costs import CallEstimates, guess_costs
from lightning_roundpipe.engine.plans import Planner
from lightning_roundpipe.engine.runner import Engine
from lightning_roundpipe.planning import CostProfile, Partition, Stage, StageKind
from lightning_roundpipe.weights.units import Unit
from tests.support.engine.modelled import (
    WIDTH,
    Model,
    ModelledDevice,
    Work,
    kept,
    modelled_pool,
    recomputed,
    run,
    times_of,
)

ROW_BYTES = WIDTH * 4
WEIGHT_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Perceptron(nn.Module):
    """Its graph holds a tensor that it alone knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


# ---------------------------------------------------------------------------------------------------------------------
# Measured costs


@pytest.mark.parametrize("planner", [kept, recomputed], ids=["kept", "recomputed"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_times_are_those_of_the_units(planner: Planner, num_devices: int) -> None:
    """Whatever was recomputed, and without what a unit took when it ran for the first time."""
    model = Model([Work(1.0, 2.0, first_ms=500.0), Work(3.0, 7.0), Work(0.25, 0.5, first_ms=80.0)])
    engine = Engine(model, modelled_pool(num_devices), planner, num_threads=1)
    assert engine.costs("train") is None
    # The first micro-batch is recorded, the second one is the first to run by the plan.
    run(engine, model, rows=3, num_microbatches=3)
    assert times_of(engine.costs("train")) == [(1.0, 2.0), (3.0, 7.0), (0.25, 0.5)]


def test_the_first_run_counts_as_long_as_there_is_no_other() -> None:
    model = Model([Work(1.0, 2.0, first_ms=10.0), Work(1.0, 2.0)])
    engine = Engine(model, modelled_pool(1), kept, num_threads=1)
    run(engine, model, rows=1, num_microbatches=1)
    assert times_of(engine.costs("train"))[0][0] == 11.0


def test_sizes_are_those_of_the_largest_microbatch() -> None:
    model = Model([Work(1.0, 2.0), Perceptron()])
    model.works[0].linear.bias.requires_grad_(False)
    engine = Engine(model, modelled_pool(1), recomputed, num_threads=1)
    run(engine, model, rows=5, num_microbatches=2)
    costs = engine.costs("train")
    assert costs is not None
    work, perceptron = costs.calls
    assert (work.name, perceptron.name) == ("works.0", "works.1")
    assert (work.weight_bytes, work.gradient_bytes) == (WEIGHT_BYTES, WIDTH * WIDTH * 4)
    assert (work.input_bytes, work.output_bytes, work.workspace_bytes) == (3 * ROW_BYTES, 3 * ROW_BYTES, 0)
    # The graph holds the output of the tanh; what it saves of input, result and weights is counted elsewhere.
    assert (perceptron.input_bytes, perceptron.output_bytes) == (3 * ROW_BYTES, 3 * 2 * 4)
    assert perceptron.workspace_bytes == 3 * 6 * 4


def test_smaller_microbatches_do_not_count() -> None:
    model = Model([Work(1.0, 2.0), Work(2.0, 4.0)])
    engine = Engine(model, modelled_pool(2), recomputed, num_threads=1)
    for _ in range(2):
        run(engine, model, rows=11, num_microbatches=4)  # 3 + 3 + 3 + 2 rows
    assert times_of(engine.costs("train")) == [(3.0, 6.0), (6.0, 12.0)]


def test_evaluation_has_no_backward() -> None:
    model = Model([Work(1.0, 2.0), Work(2.0, 4.0)])
    forward = Partition(2, (Stage(0, StageKind.FORWARD, 0, 1), Stage(1, StageKind.FORWARD, 1, 2)))
    engine = Engine(model, modelled_pool(2), lambda *_: forward, num_threads=1)
    with torch.no_grad():
        run(engine, model, rows=3, num_microbatches=3, key="validate", loss_of=None)
    costs = engine.costs("validate")
    assert times_of(costs) == [(1.0, 0.0), (2.0, 0.0)]
    assert costs is not None
    assert [call.gradient_bytes for call in costs.calls] == [0, 0]
    assert engine.costs("train") is None


def test_a_call_without_gradient_has_a_backward_of_no_time() -> None:
    model = Model([Work(1.0, 2.0), Work(2.0, 4.0)])
    model.works[0].requires_grad_(False)
    engine = Engine(model, modelled_pool(1), recomputed, num_threads=1)
    run(engine, model, rows=3, num_microbatches=3)
    assert times_of(engine.costs("train")) == [(1.0, 0.0), (2.0, 4.0)]


def test_the_first_plan_knows_calls_without_a_backward_and_their_weights_stay_away_in_it() -> None:
    model = Model([Work(1.0, 2.0), Work(2.0, 4.0), Work(1.0, 1.0)])
    model.works[0].requires_grad_(False)
    planned: list[list[float]] = []

    def planner(costs: CostProfile, *rest: Any) -> Partition:
        planned.append([call.backward_ms for call in costs.calls])
        return recomputed(costs, *rest)

    engine = Engine(model, modelled_pool(1), planner, num_threads=1)
    run(engine, model, rows=3, num_microbatches=3)
    assert [ms == 0 for ms in planned[0]] == [True, False, False]
    plan = engine.plan_of("train")
    assert plan is not None
    schedule, _ = plan.schedule(3, 0)
    (runs,) = plan.stage_runs_in(schedule)
    assert [[unit.name for unit in stage_run.units] for stage_run in runs] == [
        ["works.0", "works.1"],
        ["works.2"],
        ["works.1"],
    ]


def test_a_backward_that_was_too_short_to_be_measured_is_one() -> None:
    estimates = CallEstimates(units(4), is_training=True)
    estimates.add([runs_of(0, 2.0, 1.0)])
    (cost,) = estimates.profile.calls
    assert 0 < cost.backward_ms < 1e-3


def units(*widths: int) -> list[Unit]:
    return [Unit(f"unit {i}", nn.Linear(width, width, bias=False), i) for i, width in enumerate(widths)]


def runs_of(position: int, forward_ms: float, span_ms: float, *, size: int = 1, learned: bool = False) -> list[Run]:
    """A recomputed call of one micro-batch."""
    device = ModelledDevice(0)
    rest = (0, position, False, learned, size)
    return [Run(device, "F", "", 0.0, forward_ms, *rest), Run(device, "B", "", 0.0, span_ms, *rest)]


def test_neither_a_slow_microbatch_nor_a_slow_step_counts() -> None:
    estimates = CallEstimates(units(4), is_training=True)
    for _ in range(2):
        estimates.add([runs_of(0, 1.0, 3.0), runs_of(0, 1.0, 3.0), runs_of(0, 400.0, 900.0)])
    estimates.add([runs_of(0, 70.0, 800.0)] * 3)
    assert times_of(estimates.profile) == [(1.0, 2.0)]


def test_the_estimate_follows_a_change_that_lasts() -> None:
    estimates = CallEstimates(units(4), is_training=True)
    for ms in (1.0,) * 15 + (2.0,) * 8:
        estimates.add([runs_of(0, ms, 3 * ms)])
    assert times_of(estimates.profile) == [(2.0, 4.0)]


def test_first_runs_give_way_to_others() -> None:
    estimates = CallEstimates(units(4), is_training=True)
    estimates.add([runs_of(0, 9.0, 30.0, learned=True)])
    assert times_of(estimates.profile) == [(9.0, 21.0)]
    estimates.add([runs_of(0, 9.0, 30.0, learned=True), runs_of(0, 1.0, 3.0)])
    estimates.add([runs_of(0, 9.0, 30.0, learned=True)])
    assert times_of(estimates.profile) == [(1.0, 2.0)]


def test_calls_that_were_not_measured_keep_their_guesses_in_the_same_unit() -> None:
    sequence = units(4, 8, 16)
    guesses = guess_costs(sequence).calls
    estimates = CallEstimates(sequence, is_training=True)
    assert estimates.profile.calls == guesses
    estimates.add([runs_of(1, 5.0, 12.0)])
    found = estimates.profile.calls
    scale = 5.0 / guesses[1].forward_ms
    assert (found[1].forward_ms, found[1].backward_ms) == (5.0, 7.0)
    for i in (0, 2):
        assert found[i].forward_ms == pytest.approx(scale * guesses[i].forward_ms)
        assert found[i].backward_ms == pytest.approx(scale * guesses[i].backward_ms)
    assert all(math.isfinite(ms) and ms > 0 for times in times_of(estimates.profile) for ms in times)


def test_another_sequence_keeps_what_is_known_of_its_calls() -> None:
    a, b, c = units(4, 4, 4)
    estimates = CallEstimates([a, b, a], is_training=True)
    estimates.add([[*runs_of(0, 1.0, 3.0), *runs_of(1, 2.0, 6.0), *runs_of(2, 4.0, 9.0)]])
    estimates.rearrange([c, a, a, b, a])
    found = times_of(estimates.profile)
    assert found[1:4] == [(1.0, 2.0), (4.0, 5.0), (2.0, 4.0)]
    mean = (1.0 + 4.0 + 2.0) / 3  # the guess says that all calls are alike
    assert found[0] == found[4] == (pytest.approx(mean), pytest.approx(2 * mean))
    estimates.rearrange([c])
    estimates.rearrange([b])
    assert times_of(estimates.profile) == [(2.0, 4.0)], "paths may alternate"


# ---------------------------------------------------------------------------------------------------------------------
# Stamps that are reached late


def test_stamps_that_are_reached_late_are_read_after_a_later_step() -> None:
    model = Model([Work(1.0, 2.0), Work(3.0, 6.0)])
    pool = modelled_pool(1)
    (device,) = pool.devices
    engine = Engine(model, pool, recomputed, num_threads=1)
    device.is_behind = True
    result = run(engine, model, rows=3, num_microbatches=3)
    assert result.timeline.spans == ()
    sequence = [Unit(f"works.{i}", work, i) for i, work in enumerate(model.works)]
    assert times_of(engine.costs("train")) == times_of(guess_costs(sequence))
    device.is_behind = False
    assert run(engine, model, rows=3, num_microbatches=3).timeline.busy_ms(0) > 0
    assert times_of(engine.costs("train")) == [(1.0, 2.0), (3.0, 6.0)]


def test_stamps_that_are_never_reached_are_given_up() -> None:
    estimates = CallEstimates(units(4), is_training=True)
    steps = [runs_of(0, float(ms), 3.0 * ms) for ms in range(1, 9)]
    for step in steps:
        for noted in step:
            noted.device.is_behind = True
        estimates.add([step])
    for step in steps:
        for noted in step:
            noted.device.is_behind = False
    estimates.add([runs_of(0, 9.0, 27.0)])
    # Of the eight that were behind, the last three were still waited for.
    assert times_of(estimates.profile)[0][0] == 7.5
