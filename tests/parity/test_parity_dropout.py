"""Random numbers belong to the micro-batch and the call: neither devices nor plans nor timing change a result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.driver import assert_same, train
from tests.support.models import vectors
from tests.support.rows import compat

WIDTH = 8


def data() -> list[tuple[Tensor, Tensor]]:
    return vectors(11, 11, 7)


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(42)
    return [torch.randint(11, (n, 6), generator=generator) for n in (11, 11, 7)]


class Block(nn.Module):
    """Draws in several ways: dropout modules, functions, and operators that take no generator argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.inner(x)))
        hidden = F.rrelu(hidden, training=True) + 0.01 * torch.randn_like(hidden)
        return x + F.dropout1d(self.outer(hidden)[:, :, None], 0.2)[:, :, 0] * (torch.rand(()) + 0.5)


class DropoutInAndOutsideUnits(L.LightningModule):
    """With layers that count or do not, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = F.dropout(self.stem(x), 0.1)
        share = np.random.beta(1.0, 1.0)
        x = share * x + (1 - share) * x[torch.as_tensor(np.random.permutation(len(x)))]
        for block in self.blocks:
            # A block that is skipped would be off the plan, and gradients be added in another order.
            x = x + (torch.rand(()) < 0.6) * (block(x) + 0.1 * random.random() * torch.randn(WIDTH))
        return F.mse_loss(self.head(F.dropout(x, 0.1)), y)


class DropoutTransformer(L.LightningModule):
    """With the fused attention, whose dropout is inside one operator, and an LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True) for _ in range(3)
        )
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(WIDTH, 11)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1] - 1)
        x = self.embedding(batch[:, :-1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        x, _ = self.lstm(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())


@pytest.mark.parametrize(
    ("model", "make_data", "num_microbatches"),
    [
        (DropoutInAndOutsideUnits, data, 1),
        (DropoutInAndOutsideUnits, data, 5),
        (DropoutTransformer, tokens, 5),
    ],
)
@pytest.mark.ways("aliases")
def test_results_are_bit_identical_for_every_number_of_devices(
    model: type[L.LightningModule], make_data: Callable[[], list[Any]], num_microbatches: int
) -> None:
    options = {"round_size": num_microbatches}
    one, four, copies = (
        train(
            model,
            make_data,
            devices=devices,
            num_microbatches=num_microbatches,
            strategy_options={**options, "virtual_copies": has_copies},
        )
        for devices, has_copies in ((1, False), (4, False), (3, True))
    )
    assert min(one.watch.num_calls) >= 3
    assert_same(four, one, exact=True)
    assert_same(copies, one, exact=True)


@compat(
    "Library",
    "seed_everything",
    status="differs",
    note="Other random numbers than in plain Lightning; the same for any number of devices.",
)
@pytest.mark.parametrize(("model", "make_data"), [(DropoutInAndOutsideUnits, data), (DropoutTransformer, tokens)])
@pytest.mark.ways("lazy")
def test_the_seed_decides(model: type[L.LightningModule], make_data: Callable[[], list[Any]]) -> None:
    """Other steps and other micro-batches draw other numbers: equal rows get unequal losses."""
    repeated = [make_data()[0]] * 3
    outcome = train(model, lambda: repeated, devices=2, num_microbatches=3, optimizer=lambda p: torch.optim.SGD(p, 0.0))
    assert len({outputs["loss"].item() for outputs in outcome.watch.losses}) == 3
