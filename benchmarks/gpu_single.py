"""One GPU, and models larger than its memory: tokens/s, hidden transfers, memory; against other ways to train them.

Needs a GPU, except with ``--tiny``. One JSON object goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
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
from benchmarks._report import Report, parser, progress, rounded, spread
from benchmarks.cpu_throughput import Layer
from benchmarks.transfers import overlap

METHOD = """
Llama-like models trained by Lightning's Trainer on random tokens, bf16-mixed. full: fp32 masters, all trained with
AdamW. lora: frozen bf16 weights, adapters of rank 16 (fp32) on all linear layers of the blocks. Every variant sees the
same tokens per optimizer step. roundpipe: RoundPipeStrategy with device_memory_limit = cap, the model as it is, one
micro-batch per microbatch_rows rows. All others: batches of microbatch_rows rows, accumulate_grad_batches =
num_microbatches, torch.utils.checkpoint around every layer. resident: the model and its optimizer on the GPU, without
the cap. fsdp_offload: FSDPStrategy(cpu_offload=True); deepspeed_offload: DeepSpeedStrategy(stage=3) with parameters and
optimizer on the host; both under the cap (torch.cuda.set_per_process_memory_fraction). Each variant runs in a process
of its own. The time of a step, optimizer included, is the median over the steps after the warm-up, between the ends of
successive optimizer steps; engine_seconds_per_step is without the optimizer. A variant that cannot run is null, with
the reason. transfers_under_compute: of the time in which uploads and downloads of one more, traced step are under way,
the share in which the device computes (each transfer from the begin of its first to the end of its last chunk).
peak_device_bytes: of torch's allocator, allocated and reserved; peak_host_bytes: the largest resident set of the
process. With --tiny everything is tiny, the device a virtual one that copies over a link of 25 GB/s, and numbers mean
nothing.
"""
VARIANTS = ("roundpipe", "resident", "fsdp_offload", "deepspeed_offload")
# Rank of the adapters.
RANK = 16


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    context: int
    microbatch_rows: int
    num_microbatches: int
    lora: bool

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.context * self.microbatch_rows * self.num_microbatches


# 3.4 billion parameters: 54 GB of weights, gradients and optimizer state. 12.8 billion: 26 GB of weights in bf16.
CASES = {
    "full": Case(28, 3072, 24, 8192, 32000, 2048, 4, 8, lora=False),
    "lora": Case(40, 5120, 40, 13824, 32000, 2048, 4, 8, lora=True),
}
TINY = {
    "full": Case(3, 32, 2, 64, 61, 16, 2, 3, lora=False),
    "lora": Case(4, 32, 2, 64, 61, 16, 2, 3, lora=True),
}


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Llama(L.LightningModule):
    """A causal language model.

    Args:
        is_checkpointed: whether layers are recomputed in the backward by torch.
    """

    def __init__(self, case: Case, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.case = case
        self.is_checkpointed = is_checkpointed
        with _frozen_dtype(case):
            first = Layer(case.width, case.heads, case.hidden)
            self.tokens = nn.Embedding(case.vocabulary, case.width)
            self.layers = nn.ModuleList([first, *(_copy_of(first, case) for _ in range(case.layers - 1))])
            self.norm = nn.RMSNorm(case.width)
            self.head = nn.Linear(case.width, case.vocabulary, bias=False)
        if case.lora:
            self.requires_grad_(False)
            for layer in self.layers:
                for name, child in list(layer.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(layer, name, Adapted(child))
        half = case.width // case.heads // 2
        angles = torch.outer(torch.arange(case.context).float(), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch[:, :-1])
        for layer in self.layers:
            if self.is_checkpointed:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if isinstance(self.trainer.strategy, L.pytorch.strategies.DeepSpeedStrategy):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(trained, lr=1e-5)
        return torch.optim.AdamW(trained, lr=1e-5, fused=True)


@contextlib.contextmanager
def _frozen_dtype(case: Case) -> Iterator[None]:
    """Frozen weights are made in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if case.lora else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _copy_of(layer: Layer, case: Case) -> Layer:
    """Another layer with the same values: random ones for each would take minutes."""
    with torch.device("meta"):
        made = Layer(case.width, case.heads, case.hidden)
    made = made.to_empty(device=layer.query.weight.device)
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), layer.parameters(), strict=True):
            parameter.copy_(value)
    return made


class StepTimes(L.Callback):
    """When every optimizer step ended, and how long the engine took."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.engine_s: list[float] = []
        self._num_steps = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self._num_steps:
            return  # accumulates
        self._num_steps = trainer.global_step
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended.append(time.perf_counter())
        last_step = getattr(trainer.strategy, "last_step", None)
        if last_step is not None:
            self.engine_s.append(last_step.step_ms / 1e3)


def settings_of(variant: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the Trainer.

    Raises:
        RuntimeError: if the variant cannot run here; the message says why.
    """
    others = {"accumulate_grad_batches": case.num_microbatches}
    if variant == "roundpipe":
        options: dict[str, Any] = {"num_microbatches": case.num_microbatches}
        if args.quick:
            options |= {"virtual_copies": lightning_roundpipe.VirtualLink(gb_per_s=25.0, latency_us=10.0)}
            return {"accelerator": "cpu", "strategy": lightning_roundpipe.RoundPipeStrategy(**options)}
        options["device_memory_limit"] = int(args.cap_gib * 2**30)
        return {"accelerator": "roundpipe", "strategy": lightning_roundpipe.RoundPipeStrategy(**options)}
    if variant == "resident":
        return {"accelerator": "cpu" if args.quick else "cuda", "strategy": "auto", **others}
    if args.quick:
        raise RuntimeError("needs a GPU")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap_gib * 2**30 / total))
    if variant == "fsdp_offload":
        strategy: Any = L.pytorch.strategies.FSDPStrategy(cpu_offload=True, auto_wrap_policy={Layer})
    else:
        if importlib.util.find_spec("deepspeed") is None:
            raise RuntimeError("deepspeed is not installed")
        strategy = L.pytorch.strategies.DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)
    return {"accelerator": "cuda", "strategy": strategy, **others}


def train(variant: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Body of a measuring process.

    Raises:
        Exception: whatever the variant cannot do, for example for lack of memory.
    """
    warnings.filterwarnings("ignore")
    L.seed_everything(0, verbose=False)
    settings = settings_of(variant, case, args)
    rows = case.microbatch_rows * (case.num_microbatches if variant == "roundpipe" else 1)
    num_steps = args.warmup + args.steps
    times = StepTimes()
    callbacks: list[L.Callback] = [times]
    with TemporaryDirectory() as folder:
        if variant == "roundpipe":  # one more step, traced
            callbacks.append(
                lightning_roundpipe.RoundPipeTimeline(Path(folder) / "trace.json", first_step=num_steps, num_steps=1)
            )
        num_all = num_steps + (variant == "roundpipe")
        num_rows = case.microbatch_rows * case.num_microbatches * num_all
        data = torch.randint(0, case.vocabulary, (num_rows, case.context + 1))
        trainer = L.Trainer(
            **settings,
            devices=1,
            precision="bf16-mixed",
            max_epochs=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Llama(case, is_checkpointed=variant != "roundpipe"), DataLoader(data, batch_size=rows))
    ended = times.ended[:num_steps]
    seconds = [after - before for before, after in itertools.pairwise(ended)][max(0, args.warmup - 1) :]
    found: dict[str, Any] = {
        "tokens_per_second": spread([case.tokens / s for s in seconds]),
        "seconds_per_step": rounded(statistics.median(seconds)),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if torch.cuda.is_available():
        found["peak_device_bytes"] = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    if variant == "roundpipe":
        found |= _figures_of(trainer.strategy, times, args)
    return found


def _figures_of(strategy: Any, times: StepTimes, args: argparse.Namespace) -> dict[str, Any]:
    """What the last step, which was traced, tells."""
    step = strategy.last_step
    return {
        "engine_seconds_per_step": rounded(statistics.median(times.engine_s[args.warmup : args.warmup + args.steps])),
        "transfers_under_compute": rounded(overlap(step.timeline)),
        "bytes_up": sum(step.bytes_up),
        "bytes_down": sum(step.bytes_down),
        "host_activation_bytes": step.saved_bytes,
        "num_stages": step.partition.num_stages,
        "num_microbatches": step.num_microbatches,
    }


def measure(name: str, variant: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs a variant in a process of its own."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_single", "--case", name, "--variant", variant]
    command += ["--result", str(result), "--cap-gib", str(args.cap_gib)]
    command += ["--steps", str(args.steps), "--warmup", str(args.warmup), *(["--tiny"] if args.quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600)
    if not result.exists():
        return {"tokens_per_second": None, "reason": f"the process died: {done.stdout[-500:]}"}
    found = json.loads(result.read_text())
    if "reason" in found and not args.quick:
        progress(done.stdout[-2000:])
    return dict(found)


def main() -> None:
    """Measures and prints; with ``--variant``, is one of the measuring processes."""
    options = parser(__doc__, repeats=1)
    options.add_argument("--tiny", dest="quick", action="store_true", help="tiny models on virtual devices, no GPU")
    options.add_argument("--cap-gib", type=float, default=24.0, help="memory of the GPU that may be used, in GiB")
    options.add_argument("--steps", type=int, default=3, help="measured optimizer steps")
    options.add_argument("--warmup", type=int, default=3, help="steps before them")
    options.add_argument("--case", choices=CASES, action="append", help="which models; both if not given")
    options.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if not args.quick and not torch.cuda.is_available():
        options.exit(2, "this benchmark needs a CUDA device; --tiny runs it on virtual devices\n")
    cases = TINY if args.quick else CASES
    names = args.case or list(cases)
    if args.variant:
        try:
            found = train(args.variant, cases[names[0]], args)
        except Exception as error:  # for the report: which variants cannot run, and why
            traceback.print_exc()
            found = {"tokens_per_second": None, "reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        args.result.write_text(json.dumps(found))
        return
    parameters = {name: vars(cases[name]) for name in names}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    shared = {"steps": args.steps, "warmup": args.warmup, "cap_gib": args.cap_gib, "gpu": gpu}
    report = Report("gpu_single", METHOD, {**shared, "cases": parameters})
    results: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        for name in names:
            results[name] = {}
            for variant in VARIANTS:
                found = results[name][variant] = measure(name, variant, args, Path(folder))
                progress(f"{name} {variant}: {found['tokens_per_second'] or found['reason']}")
    report.emit(results)


if __name__ == "__main__":
    main()
