"""Random small graphs of units, and their gradients in plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.engine.steps import Steps

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


def make_steps(graph: Graph, planner: Any, **options: Any) -> Steps:
    """Of the graph, whose cells are units; see :class:`Steps`."""
    return Steps(graph, planner, unit_classes=[Cell], **options)


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
