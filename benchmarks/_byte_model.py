"""A small GPT over the bytes of Python's standard library: a training whose loss curve is worth looking at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo import Block

VOCABULARY = 256  # a token is a byte


class ByteGPT(L.LightningModule):
    """A language model over bytes, written as for a single device."""

    def __init__(
        self, width: int = 128, num_blocks: int = 4, num_heads: int = 4, context: int = 128, lr: float = 3e-3
    ) -> None:
        super().__init__()
        self.context, self.lr = context, lr
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        text = batch.long()
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01, fused=True)
        total = self.trainer.estimated_stepping_batches
        warm_up_then_decay = lambda step: min((step + 1) / 20, max(0.02, 1 - step / total))  # noqa: E731
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def standard_library(context: int) -> tuple[Tensor, Tensor]:
    """Windows of ``context + 1`` bytes over the library's modules, for training and (every tenth file) validation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    sources = [path.read_bytes() for path in files]
    held_out = b"".join(sources[::10])
    seen = b"".join(source for i, source in enumerate(sources) if i % 10)
    train, val = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (seen, held_out))
    return train.unfold(0, context + 1, context), val.unfold(0, context + 1, context)
