"""Trains on long sequences: the loss is computed in pieces, and the logits never exist as a whole.

    python examples/long_sequence.py
    python examples/long_sequence.py --measure      # only the memory of both ways to compute the loss

The logits of a language model are its largest tensor: tokens x vocabulary x 4 bytes. The loss here uses the weight of
the head directly, as fused losses of libraries do. For RoundPipe that is a parameter in the user's own code. It needs
no change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_roundpipe  # noqa: F401  (registers the strategy "roundpipe")

MIB = 2**20
PIECE = 128  # tokens whose logits exist at a time


def whole_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The usual loss: all logits at once, and once more for their softmax and for each gradient."""
    return F.cross_entropy(F.linear(hidden, weight), targets)


def loss_in_pieces(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same number, from torch if it has a function for it, else with a piece of the logits at a time."""
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=PIECE)
        return F.linear_cross_entropy(hidden, weight, targets, options=options)
    sums = [
        checkpoint(summed_loss, part, weight, target, use_reentrant=False)  # its logits are made anew in the backward
        for part, target in zip(hidden.split(PIECE), targets.split(PIECE), strict=True)
    ]
    return torch.stack(sums).sum() / len(targets)


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of some tokens."""
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


class Block(nn.Module):
    """Looks back over all tokens before it: the mean of what they say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.said = nn.Linear(width, width)
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        said = self.said(self.norm(x))
        counts = torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        return x + self.out(torch.cat([said, said.cumsum(1) / counts], dim=-1))


class LongSequences(L.LightningModule):
    """A language model whose head is never called: the loss takes its weight."""

    def __init__(self, vocabulary: int, width: int = 64, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return loss_in_pieces(self.norm(x).flatten(0, 1), self.lm_head.weight, batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.print(f"step {self.global_step:3d}  loss {outputs['loss'].item():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory of the host that tensors take while ``function`` runs, beyond what they took before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    taken = most = 0
    for _, num_bytes in changes:
        taken += num_bytes
        most = max(most, taken)
    return most


def measure(num_tokens: int, vocabulary: int, width: int) -> None:
    """Prints what the loss of one micro-batch takes, with its backward, in both ways."""
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = nn.Parameter(torch.randn(vocabulary, width) / width**0.5)
    targets = torch.randint(vocabulary, (num_tokens,))
    print(f"{num_tokens} tokens, vocabulary {vocabulary}, width {width}:")
    print(f"  logits    {4 * num_tokens * vocabulary / MIB:8.1f} MiB (tokens x vocabulary x 4 bytes)")
    for name, loss in (("whole", whole_loss), ("in pieces", loss_in_pieces)):
        peak = peak_bytes(lambda loss=loss: loss(hidden, weight, targets).backward())  # type: ignore[misc]
        hidden.grad = weight.grad = None
        print(f"  {name:9} {peak / MIB:8.1f} MiB at most, for the loss and its backward")


def main() -> None:
    """Measures, or trains on repeating random text, which can be learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="print the memory of the loss, and stop")
    parser.add_argument("--tokens", type=int, default=1024, help="per sequence (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=8, help="optimizer steps (%(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="(%(default)s)")
    args = parser.parse_args()
    L.seed_everything(0)
    if args.measure:
        measure(args.tokens, args.vocabulary, args.width)
        return
    words = torch.randint(args.vocabulary, (64,))
    rows = [words.roll(shift).repeat(args.tokens // 64 + 1)[: args.tokens + 1] for shift in range(64)]
    trainer = L.Trainer(
        strategy="roundpipe",
        accelerator="roundpipe",
        devices=args.devices,
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LongSequences(args.vocabulary, args.width), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
