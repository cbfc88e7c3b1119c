"""Fixed cost of a training step through the Trainer: models so small that a step is nearly all host.

A multi-layer perceptron with automatic optimization and a GAN with manual optimization, each by this strategy on two
virtual devices and by plain Lightning, in turn in every repetition.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks._report import Report, median, parser, progress, spread
from lightning_roundpipe import RoundPipeStrategy

METHOD = """
CPU time of the process, and wall-clock time, from the begin of a training step to the begin of the next one: what the
Trainer, the strategy, the loader and the optimizers do. CPU time is that of all threads; other processes disturb it
less. Both strategies fit a fresh model in turn in every repetition, with one thread per operator; the first steps of a
fit (recording, planning) do not count. A repetition is the median of its steps; medians and quartiles of the
repetitions. 'mlp': 4 linear layers of width 32 with ReLUs, batches of 8 rows, AdamW. 'gan': generator and critic of 3
linear layers each, two optimizers, two backwards, manual optimization. Micro-batches: as the strategy chooses (4).
"""
WIDTH = 32
ROWS = 8
WARM_UP = 12


def mlp(inputs: int, depth: int, outputs: int) -> nn.Sequential:
    """Linear layers with ReLUs in between."""
    widths = [inputs, *[WIDTH] * (depth - 1), outputs]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Regression(L.LightningModule):
    """The smallest LightningModule that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 4, 1)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch)[:, 0], batch.sum(1))

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Gan(L.LightningModule):
    """The textbook GAN: a step of the critic, then one of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = mlp(WIDTH, 3, WIDTH)
        self.critic = mlp(WIDTH, 3, 1)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_generator, of_critic = self.optimizers()
        fake = self.generator(torch.randn_like(batch))
        loss = F.softplus(-self.critic(batch)).mean() + F.softplus(self.critic(fake.detach())).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        loss = F.softplus(-self.critic(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (self.generator, self.critic)], []


class Stopwatch(L.Callback):
    """Notes when each training step begins."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self.wall.append(time.perf_counter() * 1e3)
        self.cpu.append(time.process_time() * 1e3)


@dataclass
class Case:
    """A module under one strategy, ready to be fitted again and again; milliseconds per step, by repetition."""

    module: Callable[[], L.LightningModule]
    strategy: Callable[[], dict[str, Any]]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, num_steps: int) -> None:
        """One repetition."""
        torch.manual_seed(0)
        torch.set_num_threads(1)
        loader = DataLoader(torch.randn(ROWS * (WARM_UP + num_steps + 1), WIDTH), batch_size=ROWS)
        watch = Stopwatch()
        trainer = L.Trainer(
            **self.strategy(),
            max_epochs=1,
            callbacks=[watch],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(self.module(), loader)
        for times, found in ((watch.wall, self.wall), (watch.cpu, self.cpu)):
            later = times[WARM_UP:]
            found.append(median([after - before for before, after in itertools.pairwise(later)]))


STRATEGIES: dict[str, Callable[[], dict[str, Any]]] = {
    "roundpipe": lambda: {
        "strategy": RoundPipeStrategy(threads_per_device=1),
        "accelerator": CPUAccelerator(),
        "devices": 2,
    },
    "plain": lambda: {"accelerator": "cpu", "devices": 1},
}
MODULES: dict[str, Callable[[], L.LightningModule]] = {"mlp": Regression, "gan": Gan}


def main() -> None:
    """Measures and prints."""
    args = parser(__doc__, repeats=8).parse_args()
    repeats, num_steps = (2, 4) if args.quick else (max(2, args.repeats), 60)
    parameters = {
        "devices": 2,
        "width": WIDTH,
        "rows": ROWS,
        "steps": num_steps,
        "repeats": repeats,
        "goal_ms_per_step": {"mlp": 8, "gan": 15},
    }
    report = Report("step_cost", METHOD, parameters)
    warnings.filterwarnings("ignore")
    cases = {(name, key): Case(MODULES[name], STRATEGIES[key]) for name in MODULES for key in STRATEGIES}
    for repetition in range(repeats):
        for case in cases.values():
            case.measure(num_steps)
        progress(f"{repetition + 1} of {repeats} repetitions")
    results: dict[str, dict[str, object]] = {}
    for (name, key), case in cases.items():
        results.setdefault(name, {})[key] = {
            "cpu_ms_per_step": spread(case.cpu),
            "wall_ms_per_step": spread(case.wall),
        }
    report.emit(results)


if __name__ == "__main__":
    main()
