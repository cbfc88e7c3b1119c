"""Trains a small GPT that writes Python, in about a minute on two cores: real training on real text, no download.

    make demo
    python examples/demo.py --help

The text is what every machine has: short functions of Python's standard library. The model is an ordinary
LightningModule; what is particular to RoundPipe is the argument ``strategy`` of the Trainer. Runs on all GPUs, or on
virtual devices where there are none.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import logging
import os
import random
import re
import statistics
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeTimeline, cli

END = "<end>"  # the token between two functions
TOKEN = re.compile(r"\n *|\w+|[^\w\n]+")  # a line break with its indentation, a word, or what is between words
CONTEXT = 64  # tokens
PICTURE = "demo.svg"


class Block(nn.Module):
    """A Transformer block: causal attention, then a two-layer perceptron."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
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


class GPT(L.LightningModule):
    """A language model, written as for a single device."""

    def __init__(self, vocabulary: int, width: int, num_blocks: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * num_blocks) ** 0.5 if is_last else 0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, only_last: bool = False) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, -1:] if only_last else x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
        total = self.trainer.estimated_stepping_batches
        warm_up_then_decay = lambda step: min((step + 1) / 30, 1.02 - step / total)  # noqa: E731
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def functions_of(folder: Path) -> list[str]:
    """The functions in the modules of a folder, each once, without comments and docstrings, all in one style."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    found = []
    for path in sorted(folder.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(folder).parts):
            with contextlib.suppress(SyntaxError, UnicodeDecodeError):
                found += [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.FunctionDef)]
    for node in found:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return list(dict.fromkeys(map(ast.unparse, found)))


def plain(functions: list[str], num_words: int) -> list[list[str]]:
    """The tokens of those functions that fit into the context and use nothing but the commonest words."""
    split = [tokens for tokens in map(TOKEN.findall, functions) if len(tokens) < CONTEXT]
    words = Counter(word for tokens in split for word in set(tokens))
    common = {word for word, count in words.most_common(num_words) if count > 1}
    return [tokens for tokens in split if common.issuperset(tokens)]


class Curve(L.Callback):
    """Prints the loss now and then, as a curve that runs down the page, and shows that the training goes on."""

    WIDTH = 50

    def __init__(self, num_lines: int = 20) -> None:
        self.num_lines = num_lines
        self.losses: list[float] = []
        self.highest = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        """Notes the loss of a step, and prints the mean of those since the last line."""
        self.losses.append(float(outputs["loss"]))
        if trainer.global_step == 1 or trainer.global_step % max(1, trainer.max_steps // self.num_lines) == 0:
            loss, self.losses = statistics.fmean(self.losses), []
            self.highest = max(self.highest, loss)
            place = round(self.WIDTH * loss / self.highest)
            print(f"  step {trainer.global_step:5d}  loss {loss:.3f}  |{' ' * place}*", flush=True)


@torch.no_grad()
def write(model: GPT, vocabulary: list[str], number: int, temperature: float) -> list[str]:
    """Functions that the model writes, token by token, all at the same time."""
    tokens = torch.zeros(number, 1, dtype=torch.long)  # the end of what was before
    while tokens.shape[1] < CONTEXT and not (tokens[:, 1:] == 0).any(1).all():
        likely = (model(tokens, only_last=True)[:, -1] / temperature).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(likely, 1)], dim=1)
    texts = ["".join(vocabulary[token] for token in row) for row in tokens[:, 1:].tolist()]
    return [text.partition(END)[0] for text in texts]


def is_python(text: str) -> bool:
    """Whether Python can parse it."""
    with contextlib.suppress(SyntaxError):
        ast.parse(text)
        return True
    return False


def estimates(model: str, gpu: str) -> str:
    """What ``roundpipe estimate`` says about full fine-tuning on 1, 4 and 8 GPUs."""
    command = ["estimate", "--model", model, "--gpu", gpu, "--seq-len", "2048"]
    rows = [("GPUs", "host memory", "GPU memory", "a step", "tokens/s", "bubble")]
    for number in ("1", "4", "8"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            cli.main([*command, "--devices", number, "--json"])
        full = json.loads(printed.getvalue())["methods"]["full"]
        ends = [full["speed"][end] for end in ("slow", "fast")]
        host = full["host_memory"]["total"] / 2**30
        device = max(end["device_memory_bytes"] for end in ends) / 2**30
        shown = (
            [f"{round(end['step_ms'] / 1e3)}" for end in ends],
            [f"{end['tokens_per_s']:,.0f}" for end in ends],
            [f"{end['bubble_ratio']:.0%}" for end in ends],
        )
        step, speed, bubble = (" to ".join(dict.fromkeys(pair)) for pair in shown)
        rows.append((number, f"{host:.0f} GiB", f"{device:.0f} GiB", f"{step} s", speed, bubble))
    table = "\n".join("  " + "  ".join(f"{cell:>15}" for cell in row) for row in rows)
    origin = "These are estimates, from the slow to the fast end. For your model and GPU, with what they assume:"
    return f"{table}\n\n{origin}\n  roundpipe {' '.join(command)} --devices 4"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    """The options, with their defaults for a machine with two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-steps", type=_count, default=700, help="optimizer steps (%(default)s)")
    parser.add_argument("--devices", default="auto", help="default: all GPUs, or 2 virtual devices")
    parser.add_argument("--batch-size", type=_count, default=16, help="rows per step (%(default)s)")
    parser.add_argument("--width", type=_count, default=128, help="of the model (%(default)s)")
    parser.add_argument("--blocks", type=_count, default=4, help="of the model (%(default)s)")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate at its highest (%(default)s)")
    parser.add_argument(
        "--words", type=_count, default=2500, help="the commonest, of which functions are made (%(default)s)"
    )
    parser.add_argument(
        "--sources",
        type=Path,
        help="folder with Python to learn from (default: that of the standard library)",
    )
    parser.add_argument("--seed", type=int, default=0, help="for weights, shuffling and sampling (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Reads, trains, writes, reports."""
    args = parse_arguments()
    warnings.filterwarnings("ignore")  # what Lightning says about any small example
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(args.seed, verbose=False)
    where = args.sources or "Python's standard library"
    print(f"Reading the functions of {where} ...", flush=True)
    functions = functions_of(args.sources or Path(os.__file__).parent)
    texts = plain(functions, args.words)
    vocabulary = [END, *sorted({token for tokens in texts for token in tokens})]
    numbers = {token: number for number, token in enumerate(vocabulary)}
    random.shuffle(texts)
    stream = torch.tensor([numbers[token] for tokens in texts for token in (END, *tokens)])
    print(
        f"{len(texts):,} of {len(functions):,} are short and plain: {len(stream):,} tokens, {len(vocabulary):,} kinds."
    )

    model = GPT(len(vocabulary), args.width, args.blocks, args.lr)
    print(f"Training {sum(weight.numel() for weight in model.parameters()):,} weights with strategy='roundpipe' ...")
    rows = stream.unfold(0, CONTEXT + 1, CONTEXT // 4)  # rows overlap: a function comes at several places
    trainer = L.Trainer(
        strategy="roundpipe",
        accelerator="roundpipe",  # the GPUs, or virtual devices on a machine without
        devices=2 if args.devices == "auto" and not torch.cuda.is_available() else args.devices,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        callbacks=[
            Curve(),
            RoundPipeTimeline(picture=PICTURE, summary=True, tokens_of=lambda rows: rows[:, 1:].numel()),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(rows, args.batch_size, shuffle=True, drop_last=True))  # type: ignore[arg-type]

    written = write(model.eval(), vocabulary, number=32, temperature=0.5)
    good = [text for text in written if is_python(text)]
    new = [text for text in good if text not in set(functions)]
    print(f"\nOf 32 functions that it writes, Python can parse {len(good)}; {len(new)} are new. The first of them:\n")
    print("\n\n\n".join((new or written)[:3]))
    print("\nFull fine-tuning of Qwen3-8B in the same way, 64 sequences of 2,048 tokens a step, on RTX 4090 (24 GB):\n")
    print(estimates("qwen3-8b", "rtx4090"))
    print(f"\nThe picture of three steps is {PICTURE}: open it in a browser.")


if __name__ == "__main__":
    main()
