"""Random small graphs of units over random plans have the gradients of plain autograd, kept or recomputed."""

from __future__ import annotations

import sys
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.engine.runner import Planner, StepResult
from tests.support.engine.partitions import everything_kept, everything_recomputed, planner
from tests.support.engine.random_graphs import (
    NUM_UNITS,
    WIDTH,
    Graph,
    Instruction,
    make_steps,
    names,
    plain_gradients,
    programs,
    some_units,
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    program=programs,
    frozen=some_units,
    devices=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    round_size=st.none() | st.integers(1, 5),
    copies=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_gradients_are_those_of_autograd(
    program: list[Instruction],
    frozen: frozenset[int],
    devices: int,
    num_microbatches: int,
    round_size: int | None,
    copies: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    graph = Graph(program, frozen, dropout=0.0).double()
    rows = torch.randn(5, WIDTH, dtype=torch.float64)
    steps = make_steps(graph, planner(seed), num_devices=devices, round_size=round_size, copies=copies)
    expected = plain_gradients(graph, rows, num_microbatches)
    for step, count in enumerate((num_microbatches, 6 - num_microbatches)):  # recorded, then planned for any number
        result = steps.train(rows.tensor_split(count), step)
        assert result.num_off_plan == 0
        assert names(graph, result.gradients) == names(graph, expected)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(result.gradients[parameter], gradient, rtol=1e-9, atol=1e-12)


def assert_identical(graph: Graph, one: StepResult, other: StepResult) -> None:
    assert torch.equal(torch.stack(one.outputs), torch.stack(other.outputs))
    assert names(graph, one.gradients) == names(graph, other.gradients)
    for name, parameter in graph.named_parameters():
        if parameter in one.gradients:
            assert torch.equal(one.gradients[parameter], other.gradients[parameter]), name


@settings(derandomize=True, deadline=None, max_examples=20)
@given(program=programs, frozen=some_units, devices=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_kept_graph_and_a_recomputed_one_agree(
    program: list[Instruction], frozen: frozenset[int], devices: int, seed: int
) -> None:
    """With dropout: both see the same masks. One micro-batch at a time, so that sums have one order only: but where
    devices have copies, which add up by stages, and a weight is used more than twice."""
    torch.manual_seed(seed)
    graph = Graph(program, frozen, dropout=0.4)
    rows = torch.randn(2, WIDTH)
    recomputed_copies = devices % 2 == 0
    kept = make_steps(graph, everything_kept)
    recomputed = make_steps(graph, everything_recomputed, num_devices=devices, copies=recomputed_copies)
    # The first step records the plan.
    one, other = ([steps.train([rows], seed) for seed in range(2)][1] for steps in (kept, recomputed))
    uses = Counter(i.unit for i in program if i.kind in ("unit", "join", "fork", "share_weight"))
    if not recomputed_copies or max(uses.values(), default=0) <= 2:
        assert_identical(graph, one, other)
        return
    assert torch.equal(one.outputs[0], other.outputs[0])
    assert names(graph, one.gradients) == names(graph, other.gradients)
    for parameter, gradient in one.gradients.items():
        torch.testing.assert_close(other.gradients[parameter], gradient, rtol=1e-5, atol=1e-7)


class Chain(Graph):
    """Five units in a row, so that with dropout every element depends on every mask."""

    def __init__(self) -> None:
        super().__init__([Instruction("unit", i % NUM_UNITS, i + 1, 0) for i in range(5)], frozenset(), dropout=0.5)


def test_kept_and_recomputed_chains_agree_on_any_number_of_devices() -> None:
    graph = Chain()
    parts = torch.randn(11, WIDTH).tensor_split(5)

    def results(plan: Planner, devices: int) -> list[StepResult]:
        steps = make_steps(graph, plan, num_devices=devices)
        return [steps.train(parts, seed) for seed in range(3)]

    kept = results(everything_kept, 1)
    for devices in (2, 8):
        for one, other in zip(kept, results(everything_recomputed, devices), strict=True):
            assert_identical(graph, one, other)
    assert not torch.equal(torch.stack(kept[1].outputs), torch.stack(kept[2].outputs)), "the step's seed has no effect"


@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    program=programs,
    devices=st.integers(2, 4),
    round_size=st.integers(1, 3),
    copies=st.booleans(),
    seed=st.integers(0, 99),
)
def test_several_rounds_give_the_same_bits_in_every_run(
    program: list[Instruction], devices: int, round_size: int, copies: bool, seed: int
) -> None:
    """Whichever device finishes first: parts of a gradient are added up in the order of the rounds."""
    torch.manual_seed(seed)
    graph = Graph(program, frozenset(), dropout=0.3)
    parts = torch.randn(6, WIDTH).chunk(6)
    switch_interval = sys.getswitchinterval()
    results = []
    try:
        for interval in (switch_interval, 1e-5):  # other threads come first
            sys.setswitchinterval(interval)
            steps = make_steps(graph, planner(seed), num_devices=devices, round_size=round_size, copies=copies)
            results.append([steps.train(parts, step) for step in range(2)])
    finally:
        sys.setswitchinterval(switch_interval)
    for one, other in zip(*results, strict=True):
        assert_identical(graph, one, other)
