"""Trains a small GPT, byte by byte, on the sources of Python's standard library: real text, no download.

Runs on all GPUs, or on virtual CPU devices where there are none: ``python examples/train_bytes.py --help``. The model
is an ordinary LightningModule; what is particular to RoundPipe is the argument ``strategy`` of the Trainer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy

VOCABULARY = 256  # a token is a byte


class Block(nn.Module):
    """A Transformer block: causal attention, then a two-layer perceptron."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


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

    @torch.no_grad()
    def sample(self, prompt: str, length: int, temperature: float = 0.6) -> str:
        text = torch.tensor([list(prompt.encode())])
        for _ in range(length):
            logits = self(text[:, -self.context :])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def standard_library(context: int) -> tuple[Tensor, Tensor]:
    """Windows of ``context + 1`` bytes over the library's modules, for training and (every tenth file) validation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    sources = [path.read_bytes() for path in files]
    held_out = b"".join(sources[::10])
    seen = b"".join(source for i, source in enumerate(sources) if i % 10)
    print(f"Text: {len(files)} modules, {len(seen):,} bytes to train on, {len(held_out):,} bytes held out.")
    train, val = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (seen, held_out))
    return train.unfold(0, context + 1, context), val.unfold(0, context + 1, context)


class Report(L.Callback):
    """Prints the losses now and then, and remembers what the pipeline did."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.losses: list[float] = []
        self.ended: list[float] = []
        self.bubbles: list[float] = []
        self.plan = ""
        self.num_microbatches = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.ended.append(time.perf_counter())
        self.losses.append(float(outputs["loss"]))
        step = trainer.strategy.last_step
        if step.schedule is not None:  # a first step with a single micro-batch only records
            self.bubbles.append(step.timeline.bubble_ratio)
            self.plan, self.num_microbatches = step.partition.format(), step.schedule.num_microbatches
        if trainer.global_step == 1 or trainer.global_step % self.every == 0:
            recent = self.losses[-self.every :]
            module.print(f"step {trainer.global_step:4d}   training loss {sum(recent) / len(recent):.3f}")

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        loss = float(trainer.callback_metrics["val_loss"])
        module.print(f"step {trainer.global_step:4d}   validation loss {loss:.3f}  ({loss / 0.6931:.2f} bits per byte)")

    def table(self, strategy: RoundPipeStrategy, tokens_per_step: int) -> str:
        steps = [after - before for before, after in zip(self.ended, self.ended[1:], strict=False)]
        speed = (
            f"{tokens_per_step / statistics.median(steps):,.0f} (median step)" if steps else "unknown: one step only"
        )
        idle = (
            f"{statistics.median(self.bubbles):.1%} of the devices' time (median step)" if self.bubbles else "unknown"
        )
        rows = {
            "devices": f"{len(strategy.pool)} {'virtual, on the CPU' if strategy.pool.is_virtual else 'GPUs'}",
            "stages": f"{self.plan.count('|') + 1}   ({self.plan})",
            "micro-batches": f"{self.num_microbatches} per step",
            "bubble": idle,
            "tokens/s": speed,
        }
        return "\n".join(f"{name:>14}  {value}" for name, value in rows.items())


def parse_arguments() -> argparse.Namespace:
    """The options, with their defaults for a machine with two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--max-steps", type=int, default=500, help="optimizer steps, at most one pass over the text")
    parser.add_argument("--max-seconds", type=float, default=110.0, help="training stops after this long")
    parser.add_argument("--devices", default="auto", help="number of devices; auto: all GPUs, or 2 virtual ones")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step")
    parser.add_argument("--num-microbatches", type=int, default=None, help="None: two per device")
    parser.add_argument("--width", type=int, default=128, help="size of the model's vectors")
    parser.add_argument("--blocks", type=int, default=4, help="number of Transformer blocks")
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at its highest")
    parser.add_argument("--val-batches", type=int, default=8, help="batches per validation")
    parser.add_argument("--prompt", default="def ", help="the sampled text begins with this")
    parser.add_argument("--seed", type=int, default=0, help="for weights, shuffling and sampling")
    return parser.parse_args()


def main() -> None:
    """Trains, samples, reports."""
    args = parse_arguments()
    for harmless in (".*does not have many workers", ".*LeafSpec.* is deprecated"):
        warnings.filterwarnings("ignore", harmless)
    L.seed_everything(args.seed, verbose=False)
    train, val = standard_library(args.context)
    model = ByteGPT(args.width, args.blocks, context=args.context, lr=args.lr)
    devices = 2 if args.devices == "auto" and not torch.cuda.is_available() else args.devices
    strategy = RoundPipeStrategy(num_microbatches=args.num_microbatches or "auto")
    report = Report(every=max(1, args.max_steps // 10))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="roundpipe",
        devices=devices,
        max_epochs=1,
        max_steps=args.max_steps,
        max_time=timedelta(seconds=args.max_seconds),
        val_check_interval=max(1, args.max_steps // 3),
        check_val_every_n_epoch=None,
        limit_val_batches=args.val_batches,
        num_sanity_val_steps=0,
        callbacks=[report],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = {"batch_size": args.batch_size, "drop_last": True}
    trainer.fit(model, DataLoader(train, shuffle=True, **data), DataLoader(val, **data))
    print(f"\nSample:\n{model.eval().sample(args.prompt, length=160)}\n")
    print(report.table(strategy, args.batch_size * args.context))


if __name__ == "__main__":
    main()
