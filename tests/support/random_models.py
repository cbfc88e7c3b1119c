"""Models put together at random: units of many kinds, called in some order, and user code of many kinds in between.

Each loss is a mean over samples, and no sample looks at another one: the results are those of the whole batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .small import WIDTH, Small


class Residual(nn.Module):
    """Keeps its shape; what the other kinds begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.inner(x))


class Pair(Residual):
    """Several results in containers, and what it was given among them."""

    def forward(self, x: Tensor, scale: float = 0.5, *, mask: Tensor | None = None) -> Any:
        out = super().forward(x) * (1.0 if mask is None else mask)
        return out, {"beside": out.square() * scale, "number": 3, "given": x}


class InPlace(Residual):
    """Changes a tensor of its own, as part of the graph."""

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        out.mul_(0.7).add_(x)
        return F.silu(out)


class Writer(Residual):
    """Assigns an auxiliary loss."""

    def forward(self, x: Tensor) -> Any:
        self.aside = self.inner(x).square().mean()
        return super().forward(x)


class Reader(Residual):
    """Reads what user code has assigned."""

    shift: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + (0.0 if self.shift is None else self.shift)


class Recurrent(nn.Module):
    """A cell that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros_like(x)
        for _ in range(3):
            state = self.cell(x, state)
        return state


class Experts(nn.Module):
    """Which weights a row meets depends on the row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        shares = self.gate(x).softmax(-1)
        out = x
        for index, expert in enumerate(self.experts):
            rows = (shares.argmax(-1) == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * shares[rows, index : index + 1])
        return out


KINDS: list[Callable[[], nn.Module]] = [Residual, Pair, InPlace, Writer, Reader, Recurrent, Experts]
BETWEEN = [
    "nothing", "nothing", "in place", "aside", "without gradient", "checkpoint", "gate", "loose weight", "hook",
    "frozen copy",
]  # fmt: skip


class Random(Small):
    """A model that depends on ``seed`` alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.units = nn.ModuleList(draw.choice(KINDS)() for _ in range(draw.randint(2, 5)))
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
            self.frozen = copy.deepcopy(self.units[0]).requires_grad_(False)
        del self.body
        again = [draw.randrange(len(self.units)) for _ in range(draw.randint(0, 3))]
        self.path = [(index, draw.choice(BETWEEN)) for index in [*range(len(self.units)), *again]]
        for unit in self.units[1:]:
            unit.requires_grad_(draw.random() < 0.85)

    def forward(self, x: Tensor) -> Tensor:
        self.loss_beside = x.new_zeros(())
        for index, between in self.path:
            out = self.call(self.units[index], x, between)
            x = torch.tanh(out if between == "without gradient" else self.after(out, x, between))
        return self.head(x)

    def call(self, unit: nn.Module, x: Tensor, between: str) -> Tensor:
        if isinstance(unit, Reader):
            unit.shift = 0.1 * x.detach() if between == "nothing" else 0.1 * x
        if between == "without gradient":
            with torch.no_grad():
                return x + 0.1 * _tensor(unit(x))
        if between == "checkpoint" and not isinstance(unit, Reader | Writer):
            return _tensor(checkpoint(unit, x, use_reentrant=False))
        out = _tensor(unit(x, mask=(x > 0).float()) if isinstance(unit, Pair) else unit(x))
        if isinstance(unit, Writer):
            self.loss_beside = self.loss_beside + 0.1 * unit.aside
        return out

    def after(self, out: Tensor, x: Tensor, between: str) -> Tensor:
        if between == "in place":
            out = out.clone()
            out += 0.5
            out *= 0.9
        elif between == "aside":
            self.loss_beside = self.loss_beside + 0.1 * (out.detach() * x).mean()
        elif between == "gate":
            out = out * x.sigmoid()
        elif between == "loose weight":
            out = out @ self.weight
        elif between == "hook" and out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)
        elif between == "frozen copy":
            self.loss_beside = self.loss_beside + 0.1 * (out - _tensor(self.frozen(x))).square().mean()
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.5)  # small steps: rounding must not grow

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.loss_beside


def _tensor(result: Any) -> Tensor:
    return result[0] + result[1]["beside"] + 0.1 * result[1]["given"] if isinstance(result, tuple) else result
