"""What an optimizer step costs behind the pipeline and before it, and how close it comes to the memory's bandwidth.

Virtual devices train a model whose units wait for a modelled time and hold real weights, which a real AdamW updates: in
``optimizer_overlap="off"`` before the next step begins, else behind its forward.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from benchmarks._report import QUIET, Report, parser, progress, rounded, spread
from benchmarks._waiting import sharpen_timers
from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.patches import intra_op_threads
from lightning_roundpipe.integration.pool import host_threads
from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.planning import CallCost, CostProfile

METHOD = """
steps: Trainer(strategy=RoundPipeStrategy(...)).fit on virtual devices with one thread each. Every layer holds a square
weight in float32; its forward sleeps forward_ms and its backward twice as long, without taking a core, and the first
micro-batch of a step brings a gradient of the size of the weight (the others bring none, so that nothing has to be
added up). The optimizer is AdamW(fused=True), in 'none' one whose step does nothing. step_ms is the time from the
moment in which Lightning takes one batch to that of the next, so zero_grad, optimizer and data loading are in it; the
first steps of a fit are left out, and so is the last. Modes alternate, fit by fit; hidden is formed within a repetition
and, as of_fastest, of the fastest step of each mode, which other work on the cores disturbs least.
update_ms is optimizer.step with 'off'. hidden is (off - mode) / (off - none), the share of the cost of the update that
is not seen in the step. ideal_ms is the larger of 'none' and the update with the threads that it has behind the
pipeline (bandwidth.behind): a step in which only the longer of the two is seen. forward_over_update is the forward of
one micro-batch through all layers over that update: below 1, the first micro-batch waits for weights on its way.
bandwidth: gb_per_s of updates counts what AdamW must move, 28 bytes per weight in float32: weight, gradient and two
moments read, weight and moments written. 'plain' is optimizer.step, 'shares' the same through engine.optimizer.Updates,
from its beginning until all are updated; 'loop' is AdamW with torch's defaults on the host (foreach=None, fused=None).
copy is Tensor.copy_ between two tensors that do not fit into caches, read and written bytes counted (8 per element):
the processor reads the lines of the target as well before it writes them, unless it is told otherwise, which makes it
12. triad is torch.add(a, b, out=b), 12 bytes per element, where this does not happen, as it does not in the update.
What is compared runs alternately.
"""
SIZES: dict[str, dict[str, Any]] = {
    "full": {"layers": 32, "width": 2520, "devices": 4, "forward_ms": (2.5, 10.0, 25.0)},
    "quick": {"layers": 3, "width": 64, "devices": 2, "forward_ms": (1.0,)},
}
MODES = ("none", "off", "exact", "stale")
GOAL = 0.9
BYTES_PER_WEIGHT = 28
SKIPPED = 2  # steps at the beginning of a fit


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_ms: float) -> Tensor:
        ctx.backward_ms = 2 * forward_ms
        ctx.weight = weight
        ctx.is_first = bool(x.detach().flatten()[0] == 0)
        time.sleep(forward_ms / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(ctx.backward_ms / 1e3)
        return gradient, torch.full_like(ctx.weight, 1e-3) if ctx.is_first else None, None


class Wait(nn.Module):
    """A unit of a modelled duration with a weight of real size."""

    def __init__(self, width: int, forward_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width, width), 0.1))
        self.forward_ms = forward_ms

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Waiting.apply(x, self.weight, self.forward_ms)
        return waited


class NoUpdate(Optimizer):
    """Calls the closure."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()


class TimedAdamW(torch.optim.AdamW):
    """Notes what its updates take, without their closures."""

    is_separable = True

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-4, fused=True)
        self.updates_s: list[float] = []

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None if closure is None else closure()
        started = time.perf_counter()
        super().step()
        self.updates_s.append(time.perf_counter() - started)
        return result


class Batches:
    """The batches of a fit; notes when each is taken.

    Args:
        count: how many there are.
        num_rows: of each.
    """

    def __init__(self, count: int, num_rows: int) -> None:
        self._count = count
        self._rows = torch.arange(num_rows, dtype=torch.float32).reshape(-1, 1)
        self.starts: list[float] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self._count):
            self.starts.append(time.perf_counter())
            yield self._rows


class Model(pl.LightningModule):
    """Layers that wait."""

    def __init__(self, size: dict[str, Any], forward_ms: float, mode: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wait(size["width"], forward_ms) for _ in range(size["layers"]))
        self._mode = mode

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    @override
    def configure_optimizers(self) -> Optimizer:
        return NoUpdate(self.parameters()) if self._mode == "none" else TimedAdamW(self.parameters())


@dataclass(frozen=True)
class Measured:
    """Steps and updates of one fit, in ms."""

    steps_ms: list[float]
    updates_ms: list[float]

    @property
    def step_ms(self) -> float:
        return statistics.median(self.steps_ms)


def train(size: dict[str, Any], forward_ms: float, mode: str, num_steps: int) -> Measured:
    """Some steps; those at the beginning and the last one are not in the result."""
    num_microbatches = 2 * size["devices"]
    costs = [CallCost(f"layers.{i}", forward_ms, 2 * forward_ms) for i in range(size["layers"])]
    strategy = RoundPipeStrategy(
        num_microbatches=num_microbatches,
        threads_per_device=1,
        cost_profile=CostProfile(tuple(costs)),
        optimizer_overlap="off" if mode == "none" else mode,  # type: ignore[arg-type]
    )
    num_batches = SKIPPED + num_steps + 1
    model = Model(size, forward_ms, mode)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=size["devices"], max_epochs=1, **QUIET)
    batches = Batches(num_batches, num_microbatches)
    trainer.fit(model, batches)
    steps = [1e3 * (after - before) for before, after in pairwise(batches.starts)]
    (optimizer,) = trainer.optimizers
    updates = optimizer.updates_s if mode == "off" else []  # type: ignore[attr-defined]
    return Measured(steps[SKIPPED:], [1e3 * taken for taken in updates[SKIPPED:]])


def steps(size: dict[str, Any], forward_ms: float, num_steps: int, repeats: int, behind_ms: float) -> dict[str, Any]:
    """Steps of all modes, with one modelled compute.

    Args:
        behind_ms: what the update takes with the threads that it has behind the pipeline.
    """
    found: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    for repetition in range(repeats):
        for mode in MODES:
            found[mode].append(train(size, forward_ms, mode, num_steps))
            progress(f"{forward_ms} ms, {repetition + 1} of {repeats}, {mode}: {found[mode][-1].step_ms:.0f} ms")
    fastest = {mode: min(step for fit in fits for step in fit.steps_ms) for mode, fits in found.items()}
    step_ms = {mode: [fit.step_ms for fit in fits] for mode, fits in found.items()}
    ideal_ms = max(statistics.median(step_ms["none"]), behind_ms)
    forward_pass_ms = forward_ms * size["layers"]
    hidden = {
        mode: [(off - ours) / (off - none) for none, off, ours in zip(step_ms["none"], step_ms["off"], of, strict=True)]
        for mode, of in step_ms.items()
        if mode not in ("none", "off")
    }
    return {
        "forward_ms": forward_ms,
        "forward_of_a_microbatch_ms": rounded(forward_pass_ms),
        "forward_over_update": rounded(forward_pass_ms / behind_ms),
        "step_ms": {mode: spread(values) for mode, values in step_ms.items()},
        "update_ms": spread([update for fit in found["off"] for update in fit.updates_ms]),
        "ideal_ms": rounded(ideal_ms),
        "over_ideal": {mode: spread([value / ideal_ms - 1 for value in values]) for mode, values in step_ms.items()},
        "fastest_step_ms": {mode: rounded(value) for mode, value in fastest.items()},
        "hidden": {
            mode: {
                **spread(values),
                "of_fastest": rounded((fastest["off"] - fastest[mode]) / (fastest["off"] - fastest["none"])),
                "goal": GOAL,
            }
            for mode, values in hidden.items()
        },
    }


def threads_behind(num_devices: int) -> int:
    """Intra-op threads of an update that runs behind so many virtual devices."""
    return host_threads(DevicePool([torch.device("cpu")] * num_devices))


def alternately(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every candidate, which take turns; the first round is left out."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-1, repeats):
        for name, run in candidates.items():
            started = time.perf_counter()
            run()
            if repetition >= 0:
                taken[name].append(time.perf_counter() - started)
    return taken


def bandwidth(size: dict[str, Any], num_threads: int, repeats: int) -> tuple[dict[str, Any], float]:
    """Bytes per second of updates and copies with so many intra-op threads; and the time of an update in shares, ms."""
    progress(f"bandwidth, {num_threads} threads")
    with intra_op_threads(num_threads):
        parameters = [nn.Parameter(torch.full((size["width"], size["width"]), 0.1)) for _ in range(size["layers"])]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        count = sum(parameter.numel() for parameter in parameters)
        source, target = torch.full((count,), 0.1), torch.zeros(count)
        plain = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        loop = torch.optim.AdamW(parameters, lr=1e-4)
        plain.step()
        loop.state = plain.state
        updates, order = Updates(num_threads), [[parameter] for parameter in parameters]

        def in_shares() -> None:
            updates.start(plain, order)
            updates.wait()

        taken = alternately(
            {
                "copy": lambda: target.copy_(source),
                "triad": lambda: torch.add(source, target, out=target),
                "plain": plain.step,
                "shares": in_shares,
                "loop": loop.step,
            },
            repeats,
        )
        updates.close()
    bytes_of = {"copy": 8, "triad": 12}
    rates = {name: [bytes_of.get(name, BYTES_PER_WEIGHT) * count / s / 1e9 for s in taken[name]] for name in taken}
    behind_ms = 1e3 * statistics.median(taken["shares"])
    ratios = {name: [ours / base for ours, base in zip(rates["shares"], rates[name], strict=True)] for name in rates}
    return {
        "threads": num_threads,
        "gb_per_s": {name: spread(values) for name, values in rates.items()},
        "ms": {name: spread([1e3 * s for s in values]) for name, values in taken.items()},
        "shares_over": {name: spread(values) for name, values in ratios.items() if name != "shares"},
    }, behind_ms


def main() -> None:
    """Measures, and prints the result."""
    options = parser(__doc__, repeats=3)
    options.add_argument("--steps", type=int, default=3, help="measured steps of each fit")
    for name in ("layers", "width", "devices"):
        options.add_argument(f"--{name}", type=int, help="instead of that of the size")
    options.add_argument("--forward-ms", type=float, nargs="+", help="forward of a layer")
    args = options.parse_args()
    size = dict(SIZES["quick" if args.quick else "full"])
    size |= {name: value for name in size if (value := getattr(args, name)) is not None}
    repeats, num_steps = (2, 2) if args.quick else (args.repeats, args.steps)
    behind_threads = threads_behind(size["devices"])
    parameters = {
        **size,
        "weights": size["layers"] * size["width"] ** 2,
        "num_microbatches": 2 * size["devices"],
        "steps": num_steps,
        "repeats": repeats,
        "minimal_timer_slack": sharpen_timers(),
    }
    report = Report("optimizer", METHOD, parameters)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    before, behind_ms = bandwidth(size, torch.get_num_threads(), 2 * repeats)
    behind = before
    if behind_threads != torch.get_num_threads():
        behind, behind_ms = bandwidth(size, behind_threads, 2 * repeats)
    rows = [steps(size, forward_ms, num_steps, repeats, behind_ms) for forward_ms in size["forward_ms"]]
    report.emit({"steps": rows, "bandwidth": {"before": before, "behind": behind}})


if __name__ == "__main__":
    main()
