"""Random small graphs of units over random plans have the gradients of plain autograd, kept or recomputed."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
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
    make_engine,
    names,
    plain_gradients,
    programs,
    run,
    some_units,
)


@settings(derandomize=True, deadline=None, max_examples=60)
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
    engine = make_engine(graph, planner(seed), devices=devices, round_size=round_size, copies=copies)
    for step in range(3):  # recorded, planned, and with another number of micro-batches under the same plan
        count = num_microbatches if step < 2 else 6 - num_microbatches
        expected = plain_gradients(graph, rows, count)
        result = run(engine, graph, rows, count, seed=step)
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


@settings(derandomize=True, deadline=None, max_examples=25)
@given(program=programs, frozen=some_units, devices=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_kept_graph_and_a_recomputed_one_agree(
    program: list[Instruction], frozen: frozenset[int], devices: int, seed: int
) -> None:
    """With dropout: both see the same masks. One micro-batch at a time, so that sums have one order only: but where
    devices have copies, which add up by stages, and a weight is used more than twice."""
    torch.manual_seed(seed)
    graph = Graph(program, frozen, dropout=0.4)
    rows = torch.randn(2, WIDTH)
    kept = make_engine(graph, everything_kept, devices=1, round_size=None, copies=False)
    recomputed_copies = devices % 2 == 0
    recomputed = make_engine(graph, everything_recomputed, devices=devices, round_size=None, copies=recomputed_copies)
    for engine in (kept, recomputed):
        run(engine, graph, rows, 1, seed=0)  # records the plan
    one, other = run(kept, graph, rows, 1, seed=1), run(recomputed, graph, rows, 1, seed=1)
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


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_kept_and_recomputed_chains_agree_on_any_number_of_devices(devices: int, num_microbatches: int) -> None:
    graph = Chain()
    rows = torch.randn(11, WIDTH)

    def results(plan: Planner, devices: int) -> list[StepResult]:
        engine = make_engine(graph, plan, devices=devices, round_size=None, copies=False)
        return [run(engine, graph, rows, num_microbatches, seed) for seed in range(3)]

    kept, recomputed = results(everything_kept, 1), results(everything_recomputed, devices)
    for one, other in zip(kept, recomputed, strict=True):
        assert_identical(graph, one, other)
    assert not torch.equal(torch.stack(kept[1].outputs), torch.stack(kept[2].outputs)), "the step's seed has no effect"


@settings(derandomize=True, deadline=None, max_examples=12)
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
    rows = torch.randn(6, WIDTH)
    switch_interval = sys.getswitchinterval()
    results = []
    try:
        for interval in (switch_interval, 1e-5):  # other threads come first
            sys.setswitchinterval(interval)
            engine = make_engine(graph, planner(seed), devices=devices, round_size=round_size, copies=copies)
            results.append([run(engine, graph, rows, 6, seed=step) for step in range(2)])
    finally:
        sys.setswitchinterval(switch_interval)
    for one, other in zip(*results, strict=True):
        assert_identical(graph, one, other)
