"""Models of the tests that compare; what is special about a model is in the file of its test."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import CatMetric

from tests.support.small import Small

WIDTH = 6


def vectors(*sizes: int, seed: int = 11) -> list[tuple[Tensor, Tensor]]:
    """Batches of so many rows; by default such that no number of micro-batches divides them, the last one smaller."""
    generator = torch.Generator().manual_seed(seed)
    rows = sizes or (7, 7, 5)
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)) for n in rows]


def sequences() -> list[tuple[Tensor, Tensor]]:
    """The same for recurrent layers."""
    generator = torch.Generator().manual_seed(12)
    return [(torch.randn(n, 5, 4, generator=generator), torch.randn(n, 2, generator=generator)) for n in (7, 7, 5)]


def padded_sequences() -> list[tuple[Tensor, Tensor, Tensor]]:
    """With lengths."""
    return [(x, y, 1 + torch.arange(len(x)) % 5) for x, y in sequences()]


def six_vectors() -> list[tuple[Tensor, Tensor]]:
    """For three steps of two batches each."""
    return vectors(7, 7, 5, 6, 6, 4)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class NormedBlock(Block):
    """With a normalisation in front."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Regression(L.LightningModule):
    """A stem, blocks and a head; subclasses wire them."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y)


class Chain(Regression):
    """One block after the other."""

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x)


class Logs(Small):
    """The small model with a logged training loss and a logged validation loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


class AllSteps(Logs):
    """With steps for every entry of the Trainer."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Statistics(nn.Module):
    """A small buffer and a large one, a weight, and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.zeros(2**20))
        self.weight = nn.Parameter(torch.ones(2))
        self.metrics = MetricCollection({"loss": MeanMetric()})
        self.seen = CatMetric()
