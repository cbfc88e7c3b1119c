"""Every number of devices with every number of micro-batches, on batches that do not divide evenly."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.driver import MakeData, assert_parity
from tests.support.models import Chain, NormedBlock, vectors

DEVICES = (1, 2, 4, 8)
GRID = [(n, m) for n in DEVICES for m in dict.fromkeys((1, 2, 3, n + 1))]
CORNERS = [(1, 1), (1, 3), (2, 2), (4, 5), (8, 2), (8, 9)]


class ResidualMLP(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(5))


class SmallTransformer(L.LightningModule):
    def __init__(self, vocabulary: int = 13, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=i % 2 == 0)
            for i in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        tokens = batch["tokens"]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}


def token_data(sizes: tuple[int, ...] = (7, 7, 7)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{"tokens": torch.randint(13, (n, 6), generator=generator)} for n in sizes]


def ten_rows_in_batches_of_four() -> DataLoader[tuple[Tensor, ...]]:
    x, y = (torch.cat(part) for part in zip(*vectors(4, 4, 2), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=4)


def large_batches() -> list[tuple[Tensor, Tensor]]:
    return vectors(11, 11, 5)


@pytest.mark.parametrize(("devices", "num_microbatches"), GRID)
def test_residual_mlp(devices: int, num_microbatches: int) -> None:
    run = assert_parity(ResidualMLP, large_batches, devices=devices, num_microbatches=num_microbatches, min_calls=7)
    assert run.watch.num_microbatches == [min(num_microbatches, n) for n in (11, 11, 5)]


CASES = [(ResidualMLP, ten_rows_in_batches_of_four, (4, 4, 2)), (SmallTransformer, token_data, (7, 7, 7))]


@pytest.mark.parametrize(("devices", "num_microbatches"), CORNERS)
@pytest.mark.parametrize(("model", "make_data", "rows"), CASES, ids=["fewer rows than micro-batches", "transformer"])
@pytest.mark.ways("lazy")
def test_corners(model: type, make_data: MakeData, rows: tuple[int, ...], devices: int, num_microbatches: int) -> None:
    run = assert_parity(model, make_data, devices=devices, num_microbatches=num_microbatches, min_calls=7)
    assert run.watch.num_microbatches == [min(num_microbatches, n) for n in rows]
