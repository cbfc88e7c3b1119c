"""LightningCLI: the strategy, like everything else, comes from a YAML file.

    python examples/cli/main.py fit --config examples/cli/config.yaml                  # a tiny model, on the CPU
    python examples/cli/main.py validate --config examples/cli/config.yaml --ckpt_path NAME.ckpt
    python examples/cli/main.py fit --config examples/cli/gpus.yaml --data.path notes.txt      # Qwen3-8B, on GPUs

Every option can be overridden behind the file, for instance ``--trainer.devices 8 --data.batch_size 128``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_roundpipe  # noqa: F401  (registers the strategy "roundpipe")

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import load, load_tokenizer, text_of, token_rows


class CausalLM(L.LightningModule):
    """A causal language model of Hugging Face, whose weights are all trained.

    Args:
        name: on the Hub, or a folder; None for a tiny one with random weights.
        lr: learning rate.
    """

    def __init__(self, name: str | None = None, lr: float = 3e-3) -> None:
        super().__init__()
        self.model, _ = load(name)
        self.lr = lr

    def loss(self, batch: Tensor) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By norm: Lightning's own refuses fused optimizers under mixed precision, also where no loss is scaled."""
        if gradient_clip_val:
            self.trainer.precision_plugin.clip_grad_by_norm(optimizer, gradient_clip_val)


class Text(L.LightningDataModule):
    """A text in rows of tokens; every tenth is held out.

    Args:
        name: of the model whose tokenizer is used.
        path: a file; None for sources of Python's standard library.
        length: tokens per row.
        batch_size: rows per step.
        max_rows: of which the training sees no more; None for all.
    """

    def __init__(
        self,
        name: str | None = None,
        path: Path | None = None,
        length: int = 128,
        batch_size: int = 16,
        max_rows: int | None = None,
    ) -> None:
        super().__init__()
        rows = token_rows(load_tokenizer(name), text_of(path), length)[:max_rows]
        self.held_out, self.batch_size = rows[::10], batch_size
        self.rows = rows[torch.arange(len(rows)) % 10 > 0]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.rows, self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.held_out, self.batch_size)  # type: ignore[arg-type]


if __name__ == "__main__":
    LightningCLI(CausalLM, Text)
