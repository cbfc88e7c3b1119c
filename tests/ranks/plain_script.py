"""A training script as users write it: ``plain_script.py FOLDER RANKS_PER_NODE [STEP]``.

Where a step is given, rank 1 raises in it, unless torchrun has started it again: in the first training, or in the one
that follows it, of one more epoch. If it is -1, rank 1 ends before it has imported anything. Checkpoints are written
after each epoch; the newest one is gone on from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.argv[3:] == ["-1"] and os.environ.get("LOCAL_RANK") == "1":
    sys.exit(3)

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe import RoundPipeStrategy

WIDTH, ROWS = 4, 16


class Model(L.LightningModule):
    """Two layers."""

    def __init__(self, fails_in: int | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.fails_in = fails_in

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.trainer.global_step == self.fails_in and self.global_rank == 1 and is_first:
            raise ValueError("boom")
        return F.mse_loss(self.layers(batch[0]), batch[0].sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(folder: str, ranks_per_node: int, fails_in: int | None) -> None:
    """Trains, and writes what this rank is and has."""
    L.seed_everything(3)
    trainer = L.Trainer(
        strategy=RoundPipeStrategy(ranks_per_node=ranks_per_node or None),
        accelerator="cpu",
        devices=4,
        max_epochs=3,
        logger=False,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_progress_bar=False,
    )
    module = Model(fails_in)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    trainer.fit(module, loader, ckpt_path="last")
    found = (trainer.world_size, len(trainer.strategy.pool), dict(module.state_dict()))
    torch.save(found, Path(folder) / f"rank-{trainer.global_rank}.pt")
    if fails_in is not None and fails_in >= trainer.global_step:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
