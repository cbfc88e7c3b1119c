"""Plans made anew from measured costs, and costs that are preset."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.device import Device
from lightning_roundpipe.engine import plans
from lightning_roundpipe.engine.runner import Engine, StepResult
from lightning_roundpipe.planning import (
    CallCost,
    CostProfile,
    Machine,
    Partition,
    StepPlan,
    plan_training,
    simulate,
    stage_costs,
)
from tests.support.engine.modelled import WIDTH, Model, Work, kept, modelled_pool, recomputed, run, times_of
from tests.support.engine.partitions import any_partition
from tests.support.engine.steps import Steps

# ---------------------------------------------------------------------------------------------------------------------
# Plans made anew


@pytest.mark.parametrize(("share", "is_taken"), [(0.03, True), (0.01, False)])
def test_a_plan_is_taken_if_it_saves_more_than_two_percent(share: float, is_taken: bool) -> None:
    """On one device the step is the sum of its parts, and the second plan saves the recomputation of one call."""
    forward_ms = 100 * share
    rest_ms = 100 - 2 * forward_ms
    model = Model([Work(forward_ms, rest_ms / 2), Work(rest_ms / 4, rest_ms / 4)])
    proposed: list[Partition] = []

    def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        proposed.append((kept if proposed else recomputed)(costs))
        return proposed[-1]

    engine = Engine(model, modelled_pool(1), planner, num_threads=1)
    results = [run(engine, model, rows=3, num_microbatches=3) for _ in range(3)]
    costs = engine.costs("train")
    assert costs is not None
    before, after = ([sum(cost.duration_ms for cost in stage_costs(p, costs))] for p in proposed)
    assert (before, after) == ([pytest.approx(100.0)], [pytest.approx(100.0 - forward_ms)])
    assert [result.replanned for result in results] == [False, is_taken, False]
    assert [result.partition for result in results] == [proposed[0], proposed[0], proposed[1 if is_taken else 0]]


@pytest.mark.parametrize(
    ("sizes", "is_taken"), [((4, 2), True), ((None, 2), True), ((2, 4), False), ((2, None), False)]
)
def test_a_plan_of_smaller_rounds_is_taken(sizes: tuple[int | None, int | None], is_taken: bool) -> None:
    """Although it saves nothing: activations have no room in the larger ones any more."""
    wanted = iter(sizes)

    def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> StepPlan:
        partition = recomputed(costs)
        return StepPlan(partition, (1,) * partition.num_stages, next(wanted))

    model = Model([Work(1.0, 2.0), Work(1.0, 2.0)])
    engine = Engine(model, modelled_pool(1), planner, num_threads=1)
    assert [run(engine, model, rows=4, num_microbatches=4).replanned for _ in range(3)] == [False, is_taken, False]


@pytest.mark.parametrize(("peak", "is_more"), [(10**9, True), (0, False)])
def test_what_user_code_takes_is_kept_free_where_the_last_forward_is(
    peak: int, is_more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the first micro-batch, which runs alone, has taken more than its calls do. Also by later plans."""
    monkeypatch.setattr(Device, "watch_allocator", lambda device: lambda: peak)
    model = Model([Work(8.0, 8.0), Work(1.0, 2.0)])
    wanted = iter([recomputed, kept])
    engine = Engine(model, modelled_pool(1), lambda costs, *args: next(wanted)(costs), num_threads=1)
    for _ in range(2):
        result = run(engine, model, rows=3, num_microbatches=3)
        plan = engine.plan_of("train")
        assert plan is not None
        assert plan.costs is not None
        loose = peak - max(call.activation_bytes(is_training=True) for call in plan.costs.calls)
        expected = [[cost.workspace_bytes, cost.handover_bytes] for cost in stage_costs(plan.partition, plan.costs)]
        expected[plan.partition.forward_stages[-1]][0] += loose * is_more
        assert [list(needed) for needed in plan.activation_bytes] == expected
    assert result.replanned


def test_plans_are_made_after_steps_that_are_powers_of_two() -> None:
    calls: list[tuple[int, bool]] = []

    def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        calls.append((num_microbatches, training))
        return kept(costs)

    model = Model([Work(1.0, 2.0)])
    engine = Engine(model, modelled_pool(1), planner, num_threads=1)
    counts = []
    for step in range(1, 34):
        run(engine, model, rows=4, num_microbatches=1 if step == 8 else 2)
        counts.append(len(calls))
    grown = [step for step, (before, after) in enumerate(pairwise([0, *counts]), start=1) if after > before]
    assert grown == [1, 2, 4, 8, 16, 32]
    assert set(calls) == {(2, True)}, "a step with fewer micro-batches is no reason to plan for fewer"


def test_the_real_planner_finds_what_the_guess_could_not_know() -> None:
    """Equal weights, so equal guesses; the first units take all the time. Split stages would not mind."""
    model = Model([Work(ms, 2 * ms) for ms in (8.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)])

    def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> StepPlan:
        return plan_training(costs, machine, num_microbatches=num_microbatches, may_split=False)

    engine = Engine(model, modelled_pool(2), planner, num_threads=1)
    results = [run(engine, model, rows=8, num_microbatches=8) for _ in range(3)]
    assert [result.replanned for result in results] == [False, True, False]
    costs = engine.costs("train")
    assert costs is not None

    def step_ms(result: StepResult) -> float:
        assert result.partition is not None
        assert result.schedule is not None
        return simulate(result.schedule, stage_costs(result.partition, costs)).step_ms

    assert step_ms(results[2]) < 0.98 * step_ms(results[1])


def test_a_plan_that_cannot_be_made_leaves_the_present_one() -> None:
    def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        if costs.calls[0].forward_ms == 1.0:  # as measured; guesses are much smaller
            raise ValueError("too large by 3 bytes")
        return kept(costs)

    model = Model([Work(1.0, 2.0)])
    engine = Engine(model, modelled_pool(1), planner, num_threads=1)
    run(engine, model, rows=2, num_microbatches=2)
    with pytest.warns(UserWarning, match="the present one stays: too large by 3 bytes"):
        result = run(engine, model, rows=2, num_microbatches=2)
    assert not result.replanned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(engine, model, rows=2, num_microbatches=2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Trained(nn.Module):
    """With dropout in units and in user code, a weight in user code, and a unit that may be called several times."""

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.path = tuple(path)

    def step(self, x: Tensor) -> Tensor:
        for index in self.path:
            x = nn.functional.dropout(self.blocks[index](x) * self.scale, 0.1)
        return self.norm(x).pow(4).mean()


def train(model: Trained, steps: Steps) -> list[StepResult]:
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    results = []
    for step in range(5):
        parts = torch.randn(11, WIDTH, generator=generator).tensor_split(4)
        results.append(steps.train(parts, step))
        for parameter, gradient in results[-1].gradients.items():
            parameter.grad = gradient.clone()
        optimizer.step()
    return results


@pytest.mark.parametrize(("num_devices", "copies"), [(1, True), (4, False), (4, True)])
def test_new_plans_change_no_bit_of_the_results(
    num_devices: int, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_MIN_GAIN", -math.inf)
    rng = random.Random(num_devices)
    # Copies add up the gradients of several calls of a unit in one stage before those of other stages.
    model = Trained([0, 1, 2, 3, 4, 2, 1, 2] if not copies else [0, 1, 2, 3, 4])
    reference = copy.deepcopy(model)
    planned: list[Partition] = []

    def always_another(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        candidate = any_partition(len(costs.calls), training, rng)
        while planned and candidate == planned[-1]:
            candidate = any_partition(len(costs.calls), training, rng)
        planned.append(candidate)
        return candidate

    def make(root: nn.Module, planner: plans.Planner) -> Steps:
        return Steps(root, planner, num_devices=num_devices, copies=copies)

    results = train(model, make(model, always_another))
    expected = train(reference, make(reference, kept))
    assert [step for step, result in enumerate(results, start=1) if result.replanned] == [2, 4]
    assert len(planned) == 3
    assert {result.partition for result in results} == set(planned)
    assert not any(result.num_off_plan for result in results)
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(torch.stack(one.outputs), torch.stack(other.outputs))
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(one.gradients[mine], other.gradients[theirs]), name
    for (name, mine), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_calls_off_the_plan_make_a_new_one_that_keeps_what_was_measured() -> None:
    model = Model([Work(1.0, 2.0), Work(3.0, 6.0), Work(5.0, 10.0), Work(7.0, 14.0)])
    model.path = [0, 1, 2]
    engine = Engine(model, modelled_pool(2), recomputed, num_threads=1)
    run(engine, model, rows=3, num_microbatches=3)
    model.path = [3, 2, 1, 2, 0]
    result = run(engine, model, rows=3, num_microbatches=3)
    assert result.replanned
    assert result.num_off_plan > 0
    plan = engine.plan_of("train")
    assert plan is not None
    assert [unit.name for unit in plan.sequence] == [f"works.{index}" for index in model.path]
    found = times_of(engine.costs("train"))
    assert [found[i] for i in (1, 2, 4)] == [(5.0, 10.0), (3.0, 6.0), (1.0, 2.0)]
    assert found[0] == found[3] == (pytest.approx(3.0), pytest.approx(6.0)), "not measured yet: alike by their sizes"
    result = run(engine, model, rows=3, num_microbatches=3)
    assert (result.num_off_plan, result.replanned) == (0, False)
    assert times_of(engine.costs("train")) == [(7.0, 14.0), (5.0, 10.0), (3.0, 6.0), (5.0, 10.0), (1.0, 2.0)]


# ---------------------------------------------------------------------------------------------------------------------
# Preset costs


PROFILE = CostProfile(tuple(CallCost(f"works.{i}", 10.0 - i, 20.0) for i in range(3)))


def noting(seen: list[CostProfile]) -> plans.Planner:
    def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        seen.append(costs)
        return recomputed(costs)

    return planner


@pytest.mark.parametrize("num_before", [0, 1], ids=["before a step", "between steps"])
def test_preset_costs_are_what_the_only_plan_is_made_from(num_before: int) -> None:
    model, seen = Model([Work(1.0, 2.0) for _ in range(3)]), list[CostProfile]()
    engine = Engine(model, modelled_pool(2), noting(seen), num_threads=1)
    for _ in range(num_before):
        run(engine, model, rows=3, num_microbatches=3)
    seen.clear()
    engine.preset_costs("train", PROFILE)
    assert engine.costs("train") == PROFILE
    results = [run(engine, model, rows=3, num_microbatches=3) for _ in range(5)]
    assert seen == [PROFILE]
    assert not any(result.replanned for result in results[num_before:])
    assert engine.costs("train") == PROFILE
    with torch.no_grad():
        model.works.append(Work(1.0, 2.0))  # not called, but the module tree is another one: all plans are made anew
    run(engine, model, rows=3, num_microbatches=3)
    assert seen == [PROFILE, PROFILE]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["works.0", "works.1"], r"has 2 calls and a micro-batch made 3: call 2 is 'works\.2', .* 'nothing' there"),
        ([f"works.{i}" for i in range(4)], r"has 4 calls and a micro-batch made 3: call 3 is 'nothing', .* 'works\.3'"),
        (["works.0", "layers.1", "works.2"], r"has 3 calls and .* made 3: call 1 is 'works\.1', .* 'layers\.1' there"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["before a step", "between steps"])
def test_preset_costs_of_other_calls_are_refused(names: list[str], message: str, is_first: bool) -> None:
    model = Model([Work(1.0, 2.0) for _ in range(3)])
    engine = Engine(model, modelled_pool(1), recomputed, num_threads=1)
    other = CostProfile(tuple(CallCost(name, 1.0, 2.0) for name in names))
    if is_first:
        engine.preset_costs("train", other)
        with pytest.raises(ValueError, match=message):
            run(engine, model, rows=3, num_microbatches=3)
    else:
        run(engine, model, rows=3, num_microbatches=3)
        with pytest.raises(ValueError, match=message):
            engine.preset_costs("train", other)
        assert run(engine, model, rows=3, num_microbatches=3).num_off_plan == 0
    engine.preset_costs("train", PROFILE)
    assert run(engine, model, rows=3, num_microbatches=3).num_off_plan == 0


def test_the_first_plan_knows_the_sizes_of_the_calls_but_no_times() -> None:
    seen: list[CostProfile] = []

    def planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        seen.append(costs)
        return kept(costs)

    model = Model([Work(1.0, 2.0), Work(3.0, 6.0)])
    engine = Engine(model, modelled_pool(1), planner, num_threads=1)
    run(engine, model, rows=6, num_microbatches=2)
    first, known = seen[0].calls, engine.costs("train")
    assert known is not None
    assert [call.input_bytes for call in first] == [3 * WIDTH * 4] * 2
    assert [call.workspace_bytes for call in first] == [call.workspace_bytes for call in known.calls]
    assert first[0].forward_ms == first[1].forward_ms != known.calls[0].forward_ms


def test_a_forgotten_plan_is_made_anew_from_smaller_microbatches() -> None:
    model = Model([Work(1.0, 2.0)])
    engine = Engine(model, modelled_pool(1), kept, num_threads=1)
    run(engine, model, rows=8, num_microbatches=2)
    engine.forget("train")
    assert engine.plan_of("train") is None
    run(engine, model, rows=8, num_microbatches=4)
    costs = engine.costs("train")
    assert costs is not None
    assert costs.calls[0].input_bytes == 2 * WIDTH * 4
