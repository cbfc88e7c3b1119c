"""What training with weights from before the last update does to the losses of a small GPT, against exact training."""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks._byte_model import ByteGPT, standard_library
from benchmarks._report import QUIET, Report, parser, progress, rounded
from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.reporting.pictures import check_picture

METHOD = """
A small GPT over the bytes of Python's standard library (benchmarks/_byte_model.py; AdamW, warm-up of 20 steps and
linear decay) on 2 virtual devices: the same weights, batches and number of steps with
optimizer_overlap="exact", with "stale", and with "stale" after a tenth of the steps; for several learning rates.
training_loss: means over windows of as many steps as loss_window says. validation_loss: after the last step, over
held-out text. All values are means over the seeds. They do not depend on how busy the machine is.
"""
SIZES = {
    "full": {"width": 64, "num_blocks": 4, "context": 64, "batch": 16, "steps": 400, "window": 10, "val_batches": 32},
    "quick": {"width": 8, "num_blocks": 1, "context": 64, "batch": 4, "steps": 20, "window": 5, "val_batches": 1},
}
LEARNING_RATES = (1e-3, 3e-3, 1e-2)
_COLOURS = {"exact": "#2b6cb0", "stale": "#b8476b", "stale after warm-up": "#e08a1e"}


class Losses(L.Callback):
    """Notes the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def train(size: dict[str, int], lr: float, seed: int, options: dict[str, Any]) -> tuple[list[float], float]:
    """The loss of every training step, and the validation loss after the last one."""
    torch.manual_seed(seed)
    texts = standard_library(size["context"])
    model = ByteGPT(size["width"], size["num_blocks"], context=size["context"], lr=lr)
    losses = Losses()
    trainer = L.Trainer(
        strategy=RoundPipeStrategy(**options),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        max_steps=size["steps"],
        limit_val_batches=size["val_batches"],
        val_check_interval=size["steps"],
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[losses],
        **QUIET,
    )
    loaders = [DataLoader(t, batch_size=size["batch"], drop_last=True, shuffle=i == 0) for i, t in enumerate(texts)]
    trainer.fit(model, *loaders)
    return losses.values, float(trainer.callback_metrics["val_loss"])


def compare(size: dict[str, int], lr: float, num_seeds: int) -> dict[str, Any]:
    """Losses of all ways to train, by their names."""
    ways: dict[str, dict[str, Any]] = {
        "exact": {"optimizer_overlap": "exact"},
        "stale": {"optimizer_overlap": "stale"},
        "stale after warm-up": {"optimizer_overlap": "stale", "stale_after_steps": size["steps"] // 10},
    }
    found: dict[str, Any] = {}
    for name, options in ways.items():
        runs = [train(size, lr, seed, options) for seed in range(num_seeds)]
        curve = [statistics.fmean(step) for step in zip(*(losses for losses, _ in runs), strict=True)]
        starts = range(0, len(curve), size["window"])
        found[name] = {
            "training_loss": [rounded(statistics.fmean(curve[start : start + size["window"]])) for start in starts],
            "validation_loss": rounded(statistics.fmean(loss for _, loss in runs)),
        }
        progress(f"lr {lr:g}, {name}: validation loss {found[name]['validation_loss']}")
    return found


def draw(results: dict[str, Any], window: int, path: Path) -> None:
    """Writes the curves of all learning rates into a picture.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed (the extra ``plot``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for panel, (lr, ways) in zip(panels, results.items(), strict=True):
        for name, losses in ways.items():
            curve = losses["training_loss"]
            places = [window * (i + 0.5) for i in range(len(curve))]
            label = f"{name} (validation {losses['validation_loss']:.3f})"
            panel.plot(places, curve, label=label, color=_COLOURS[name], linewidth=1.4)
        panel.set_title(f"learning rate {float(lr):g}", fontsize=10)
        panel.set_xlabel("optimizer step")
        panel.grid(color="#d9dce2", linewidth=0.6)
        panel.legend(fontsize=8, frameon=False)
    panels[0].set_ylabel(f"training loss, mean of {window} steps")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse_arguments() -> argparse.Namespace:
    """The options."""
    made = parser(__doc__, repeats=1)
    made.add_argument("--picture", type=Path, default=None, help="draws the curves into this file")
    return made.parse_args()


def main() -> None:
    """Measures, and prints the result."""
    arguments = parse_arguments()
    if arguments.picture is not None:
        check_picture(arguments.picture)
    size = SIZES["quick" if arguments.quick else "full"]
    rates = LEARNING_RATES[1:2] if arguments.quick else LEARNING_RATES
    report = Report("staleness", METHOD, {**size, "learning_rates": rates, "seeds": arguments.repeats})
    warnings.filterwarnings("ignore")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    results = {f"{lr:g}": compare(size, lr, arguments.repeats) for lr in rates}
    if arguments.picture is not None:
        draw(results, size["window"], arguments.picture)
    report.emit({"loss_window": size["window"], "by_learning_rate": results})


if __name__ == "__main__":
    main()
