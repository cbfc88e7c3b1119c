"""LightningCLI: the strategy, like everything else, comes from a YAML file.

    python examples/cli/main.py fit --config examples/cli/config.yaml
    python examples/cli/main.py validate --config examples/cli/config.yaml
    python examples/cli/main.py fit --config examples/cli/strategy_options.yaml

Every option can be overridden behind the file, for instance ``--trainer.devices 4 --model.num_blocks 8``.
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_roundpipe  # noqa: F401  (registers the strategy "roundpipe")


class Regressor(L.LightningModule):
    """A residual network for regression.

    Args:
        width: size of the hidden vectors.
        num_blocks: number of residual blocks.
        lr: learning rate.
    """

    def __init__(self, width: int = 32, num_blocks: int = 6, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.stem = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).squeeze(-1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class Waves(L.LightningDataModule):
    """Points of the plane and the height of a wave there.

    Args:
        num_points: points to train on; a quarter as many are held out.
        batch_size: points per batch.
    """

    def __init__(self, num_points: int = 2048, batch_size: int = 64) -> None:
        super().__init__()
        self.num_points, self.batch_size = num_points, batch_size

    def _points(self, number: int, seed: int) -> TensorDataset:
        x = 4 * torch.rand(number, 2, generator=torch.Generator().manual_seed(seed)) - 2
        return TensorDataset(x, torch.sin(2 * x[:, 0]) * torch.cos(x[:, 1]))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._points(self.num_points, 0), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._points(self.num_points // 4, 1), batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(Regressor, Waves)
