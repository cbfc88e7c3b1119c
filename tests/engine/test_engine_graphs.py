"""Random small graphs of units over random plans have the gradients of plain autograd, kept or recomputed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_roundpipe.engine.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, Planner, StepRequest, StepResult
from lightning_roundpipe.engine.virtual import LazyLink
from lightning_roundpipe.planning import CostProfile, Partition, Stage, StageKind

WIDTH = 3
NUM_UNITS = 4


class Cell(nn.Module):
    """One or two tensors in, one or two out; draws random numbers if it has dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, other: Tensor | None = None, *, both: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        if other is not None:
            hidden = hidden * other
        out = self.second(self.dropout(hidden))
        return (out, hidden) if both else out


@dataclass(frozen=True)
class Instruction:
    """``kind`` of operation on earlier values ``a`` and ``b``, by unit ``unit`` where there is one."""

    kind: str
    unit: int
    a: int
    b: int


KINDS = (
    *("unit", "join", "fork", "without_grad", "add", "multiply", "detach", "parameter", "in_place", "share_weight"),
    *("unit", "join", "fork"),  # more often
)


class Graph(nn.Module):
    """Runs a list of instructions; every value may be used by any later one, or by none."""

    def __init__(self, program: Sequence[Instruction], frozen: frozenset[int], dropout: float) -> None:
        super().__init__()
        self.program = program
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.cells = nn.ModuleList(Cell(dropout) for _ in range(NUM_UNITS))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, 1)
        for index in frozen:
            self.cells[index].requires_grad_(False)

    def step(self, x: Tensor) -> Tensor:
        values = [x, self.stem(x)]
        for instruction in self.program:
            values.extend(self.execute(instruction, values))
        return self.head(values[-1] + values[len(values) // 2]).square().mean()

    def execute(self, instruction: Instruction, values: list[Tensor]) -> list[Tensor]:
        cell = self.cells[instruction.unit]
        a, b = values[instruction.a % len(values)], values[instruction.b % len(values)]
        if instruction.kind == "unit":
            return [cell(a)]
        if instruction.kind == "join":
            return [cell(a, other=b)]
        if instruction.kind == "fork":
            return list(cell(a, both=True))
        if instruction.kind == "without_grad":
            with torch.no_grad():
                return [cell(a)]
        if instruction.kind == "add":
            return [a + b]
        if instruction.kind == "multiply":
            return [a * torch.sigmoid(b)]
        if instruction.kind == "detach":
            return [a.detach()]
        if instruction.kind == "parameter":
            return [a * self.scale]
        if instruction.kind == "in_place":
            changed = cell(a) if instruction.b % 2 else a * 1.0
            changed += b
            return [changed]
        assert instruction.kind == "share_weight"
        return [nn.functional.linear(a, cell.second.weight)]


def random_partition(num_calls: int, training: bool, seed: int) -> Partition:
    """Stages cut anywhere."""
    rng = random.Random(seed)
    if num_calls == 0 or not training:
        kind = StageKind.FUSED if training else StageKind.FORWARD
        return Partition(num_calls, (Stage(0, kind, 0, num_calls),))
    fused = rng.randrange(num_calls)

    def cuts() -> list[tuple[int, int]]:
        inner = sorted(rng.sample(range(1, fused), rng.randint(0, fused - 1))) if fused > 1 else []
        return list(pairwise([0, *inner, fused])) if fused else []

    pieces = [(StageKind.FORWARD, *piece) for piece in cuts()]
    pieces.append((StageKind.FUSED, fused, num_calls))
    pieces.extend((StageKind.BACKWARD, *piece) for piece in reversed(cuts()))
    return Partition(num_calls, tuple(Stage(i, *piece) for i, piece in enumerate(pieces)))


def planner(seed: int) -> Planner:
    def plan(costs: CostProfile, num_microbatches: int, training: bool) -> Partition:
        return random_partition(len(costs.calls), training, seed)

    return plan


def everything_kept(costs: CostProfile, num_microbatches: int, training: bool) -> Partition:
    return Partition(len(costs.calls), (Stage(0, StageKind.FUSED, 0, len(costs.calls)),))


def everything_recomputed(costs: CostProfile, num_microbatches: int, training: bool) -> Partition:
    """All calls but the last are recomputed, each in a stage of its own."""
    last = len(costs.calls) - 1
    pieces = [(StageKind.FORWARD, i, i + 1) for i in range(last)]
    pieces.append((StageKind.FUSED, last, last + 1))
    pieces.extend((StageKind.BACKWARD, i, i + 1) for i in reversed(range(last)))
    return Partition(len(costs.calls), tuple(Stage(i, *piece) for i, piece in enumerate(pieces)))


def make_engine(root: nn.Module, plan: Planner, *, devices: int, round_size: int | None, copies: bool) -> Engine:
    pool = DevicePool([torch.device("cpu")] * devices, link=LazyLink() if copies else None)
    return Engine(root, pool, plan, round_size=round_size, unit_classes=[Cell], num_threads=1)


def run(engine: Engine, graph: Graph, rows: Tensor, num_microbatches: int, seed: int) -> StepResult:
    parts = rows.tensor_split(num_microbatches)
    weights = [len(part) / len(rows) for part in parts]
    return engine.run(StepRequest(graph.step, parts, weights, "train", seed, loss_of=lambda loss: loss))


def plain_gradients(graph: Graph, rows: Tensor, num_microbatches: int) -> dict[nn.Parameter, Tensor]:
    trainable = [p for p in graph.parameters() if p.requires_grad]
    parts = rows.tensor_split(num_microbatches)
    loss = sum(graph.step(part) * (len(part) / len(rows)) for part in parts)
    gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
    return {p: g for p, g in zip(trainable, gradients, strict=True) if g is not None}


def names(graph: Graph, gradients: dict[nn.Parameter, Tensor]) -> set[str]:
    return {name for name, p in graph.named_parameters() if p in gradients}


instructions = st.builds(
    Instruction, st.sampled_from(KINDS), st.integers(0, NUM_UNITS - 1), st.integers(0, 20), st.integers(0, 20)
)
programs = st.lists(instructions, min_size=1, max_size=9)
some_units = st.frozensets(st.integers(0, NUM_UNITS - 1), max_size=2)


@settings(derandomize=True, deadline=None, max_examples=120)
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


@settings(derandomize=True, deadline=None, max_examples=40)
@given(program=programs, frozen=some_units, devices=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_a_kept_graph_and_a_recomputed_one_agree_bit_for_bit(
    program: list[Instruction], frozen: frozenset[int], devices: int, seed: int
) -> None:
    """With dropout: both see the same masks. One micro-batch at a time, so that sums have one order only."""
    torch.manual_seed(seed)
    graph = Graph(program, frozen, dropout=0.4)
    rows = torch.randn(2, WIDTH)
    kept = make_engine(graph, everything_kept, devices=1, round_size=None, copies=False)
    recomputed = make_engine(graph, everything_recomputed, devices=devices, round_size=None, copies=devices % 2 == 0)
    for engine in (kept, recomputed):
        run(engine, graph, rows, 1, seed=0)  # records the plan
    one, other = run(kept, graph, rows, 1, seed=1), run(recomputed, graph, rows, 1, seed=1)
    assert_identical(graph, one, other)


class Chain(Graph):
    """Five units in a row, so that with dropout every element depends on every mask."""

    def __init__(self) -> None:
        super().__init__([Instruction("unit", i % NUM_UNITS, i + 1, 0) for i in range(5)], frozenset(), dropout=0.5)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 5])
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
