"""An averaged generator, which draws better than the one that is being trained."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from torch import nn

from .pictures import save_grid


class GeneratorAverage(L.Callback):
    """Keeps an exponential moving average of the generator, in checkpoints as well, and shows what it draws.

    Args:
        decay: share of the average that stays in each step.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.average: nn.Module | None = None
        self._loaded: dict[str, Any] | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.average = copy.deepcopy(pl_module.generator).requires_grad_(False)
        if self._loaded is not None:
            self.average.load_state_dict(self._loaded)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pairs = zip(self.average.parameters(), pl_module.generator.parameters(), strict=True)
        for average, parameter in pairs:
            average.lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        drawn = self.average(pl_module.shown_noise)
        pl_module.log("ink", (drawn + 1).mean() / 2)
        save_grid(drawn, trainer.log_dir, f"average-{trainer.current_epoch}.pgm")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.average is None else dict(self.average.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
