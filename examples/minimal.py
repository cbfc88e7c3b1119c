"""The smallest complete example: a plain LightningModule, trained over two virtual CPU devices."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_roundpipe  # noqa: F401  (registers the strategy "roundpipe")


class Classifier(L.LightningModule):
    """Knows nothing of devices, micro-batches or stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(16, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.blocks(x)), y)

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx % 4 == 0:
            print(f"epoch {self.current_epoch}  batch {batch_idx:2d}  loss {outputs['loss'].item():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


if __name__ == "__main__":
    L.seed_everything(0)
    x = torch.randn(1024, 16)
    y = (x[:, 0] * x[:, 1] > 0).long()  # do the first two numbers have the same sign?
    data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    trainer = L.Trainer(
        strategy="roundpipe",  # the one line that is new
        accelerator="cpu",  # "auto" takes the GPUs, if there are any
        devices=2,
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), data)
