"""Training throughput of a small Llama on two cores: RoundPipe against plain Lightning and DDP.

Every variant runs in a process (or two) of its own, on the same two cores, with the same model, batch and optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_roundpipe
from benchmarks._report import QUIET, Report, parser, progress, rounded, spread
from lightning_roundpipe.devices.pool import num_host_cores

METHOD = """
A Llama-like model in fp32 with fused AdamW, trained by Lightning's Trainer on random tokens; the batch per step is the
same everywhere (two halves for DDP). roundpipe: 2 virtual devices with 1 thread each, the model as it is, a
micro-batch per row.
plain_checkpointed and plain: one process with 2 threads, with torch.utils.checkpoint around every layer and without.
ddp_checkpointed: 2 processes with 1 thread each over gloo. Every process is confined to the same two cores. The
variants run one after the other in every repetition, each in fresh processes; the time of a step is the median over the
steps after the warm-up, between the ends of successive steps (optimizer included). A ratio is roundpipe's tokens/s over
the other's of the same repetition; medians of the repetitions.
"""
GOALS = {"plain_checkpointed": 0.95, "ddp_checkpointed": 0.95}
VARIANTS = ("roundpipe", "plain_checkpointed", "ddp_checkpointed", "plain")
SIZES = {
    "full": {"layers": 8, "width": 512, "heads": 8, "hidden": 1376, "vocabulary": 8192, "context": 256, "rows": 8},
    "quick": {"layers": 2, "width": 64, "heads": 2, "hidden": 128, "vocabulary": 128, "context": 32, "rows": 8},
}


class Layer(nn.Module):
    """RMS norms, rotary attention, gated perceptron."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp_norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            projection(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Llama(L.LightningModule):
    """A causal language model."""

    def __init__(
        self, layers: int, width: int, heads: int, hidden: int, vocabulary: int, context: int, *, checkpointed: bool
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context).float(), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch[:, :-1])
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class StepTimes(L.Callback):
    """When every step ended."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended.append(time.perf_counter())


def train(variant: str, size: dict[str, int], steps: int, warmup: int, result: Path) -> None:
    """Body of a measuring process: trains, and writes the seconds per step."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    warnings.filterwarnings("ignore")
    is_ddp = variant.startswith("ddp")
    torch.set_num_threads(1 if is_ddp else 2)
    L.seed_everything(0, verbose=False)
    rows = size["rows"] // 2 if is_ddp else size["rows"]
    shape = {name: value for name, value in size.items() if name != "rows"}
    model = Llama(**shape, checkpointed=variant.endswith("_checkpointed"))
    data = torch.randint(0, size["vocabulary"], (size["rows"] * (steps + warmup), size["context"] + 1))
    times = StepTimes()
    if variant == "roundpipe":
        how: dict[str, Any] = {
            "strategy": lightning_roundpipe.RoundPipeStrategy(num_microbatches=size["rows"], threads_per_device=1),
            "accelerator": "cpu",
            "devices": 2,
        }
    elif is_ddp:
        how = {"strategy": "ddp", "accelerator": "cpu", "devices": 2}
    else:
        how = {"strategy": "auto", "accelerator": "cpu", "devices": 1}
    trainer = L.Trainer(
        **how,
        max_epochs=1,
        callbacks=[times],
        **QUIET,
    )
    trainer.fit(model, DataLoader(data, batch_size=rows))
    if trainer.is_global_zero:
        taken = [after - before for before, after in zip(times.ended, times.ended[1:], strict=False)]
        result.write_text(json.dumps(taken[max(0, warmup - 1) :]))


def measure(variant: str, args: argparse.Namespace, folder: Path) -> float:
    """Runs a variant in processes of its own; seconds per step."""
    result = folder / "steps.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.cpu_throughput", "--variant", variant, "--result", str(result)]
    command += ["--steps", str(args.steps), "--warmup", str(args.warmup), *(["--quick"] if args.quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
    if done.returncode or not result.exists():
        raise RuntimeError(f"{variant} failed:\n{done.stdout[-4000:]}")
    return statistics.median(json.loads(result.read_text()))


def main() -> None:
    """Measures and prints; with ``--variant``, is one of the measuring processes."""
    options = parser(__doc__, repeats=3)
    options.add_argument("--steps", type=int, default=4, help="measured steps of each variant in each repetition")
    options.add_argument("--warmup", type=int, default=2, help="steps before them")
    options.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    size = SIZES["quick" if args.quick else "full"]
    if args.variant:
        train(args.variant, size, args.steps, args.warmup, args.result)
        return
    repeats = 2 if args.quick else args.repeats
    parameters = {**size, "steps": args.steps, "warmup": args.warmup, "repeats": repeats, "cores_used": 2}
    report = Report("cpu_throughput", METHOD, parameters)
    if num_host_cores() < 2:
        progress("fewer than two cores: the ratios mean nothing here")
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with TemporaryDirectory() as folder:
        for repetition in range(repeats):
            for variant in VARIANTS:
                seconds[variant].append(measure(variant, args, Path(folder)))
                progress(f"{repetition + 1} of {repeats}: {variant} {seconds[variant][-1]:.3g} s per step")
    tokens = size["rows"] * size["context"]
    ours = seconds["roundpipe"]
    ratios = {name: [s / r for s, r in zip(seconds[name], ours, strict=True)] for name in VARIANTS[1:]}
    report.emit(
        {
            "tokens_per_second": {name: spread([tokens / s for s in seconds[name]]) for name in VARIANTS},
            "seconds_per_step": {name: rounded(statistics.median(seconds[name])) for name in VARIANTS},
            "roundpipe_over": {name: {**spread(values), "goal": GOALS.get(name)} for name, values in ratios.items()},
        }
    )


if __name__ == "__main__":
    main()
