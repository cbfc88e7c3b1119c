"""Trains on long sequences: the loss is computed in pieces, and the logits never exist as a whole.

    python examples/long_sequence.py                                                # a tiny model, on the CPU
    python examples/long_sequence.py --model Qwen/Qwen3-8B --devices 8 --text book.txt \\
        --length 32768 --batch-size 16 --lr 1e-5 --max-steps 1000                   # GPUs of 24 GB
    python examples/long_sequence.py --measure        # only the memory of both ways to compute the loss

The logits of a language model are its largest tensor: tokens x vocabulary x 4 bytes. The loss here uses the weight of
the head directly, as fused losses of libraries do. For RoundPipe that is a parameter in the user's own code. It needs
no change.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import PRECISION, PrintLosses, load, parser_for, text_of, token_rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeTimeline

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


class LongSequences(L.LightningModule):
    """Trains a causal language model whose head is never called: the loss takes its weight."""

    def __init__(self, model: Any, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.model.base_model(input_ids=batch, use_cache=False).last_hidden_state
        weight = self.model.get_output_embeddings().weight
        loss = loss_in_pieces(hidden[:, :-1].flatten(0, 1), weight, batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


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
    """Measures the loss, or trains with it."""
    parser = parser_for(__doc__, length=1024, batch_size=4, max_steps=20, lr=3e-3)
    measuring = parser.add_argument_group("with --measure")
    measuring.add_argument("--measure", action="store_true", help="print the memory of the loss, and stop")
    measuring.add_argument("--tokens", type=int, default=1024, help="of a micro-batch (%(default)s)")
    measuring.add_argument("--vocabulary", type=int, default=8192, help="(%(default)s)")
    measuring.add_argument("--width", type=int, default=64, help="of the model (%(default)s)")
    args = parser.parse_args()
    L.seed_everything(0)
    if args.measure:
        measure(args.tokens, args.vocabulary, args.width)
        return
    model, tokenizer = load(args.model)
    rows = token_rows(tokenizer, text_of(args.text), args.length)
    trainer = L.Trainer(
        strategy="roundpipe",
        accelerator="roundpipe",  # the GPUs, or virtual devices on a machine without
        devices=args.devices,
        precision=PRECISION,
        max_steps=args.max_steps,
        callbacks=[PrintLosses(), RoundPipeTimeline(picture="long_sequence.svg", summary=True, tokens_of=Tensor.numel)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LongSequences(model, args.lr), DataLoader(rows, args.batch_size, shuffle=True))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
