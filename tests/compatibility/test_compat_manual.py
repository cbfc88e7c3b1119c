"""Optimizers that a step toggles with a context manager. The other methods are in ``parity/test_parity_manual.py``."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.adapter.conftest import CLASSES, WIDTH
from tests.compatibility.rows import compat


class Halves(L.LightningModule):
    """An encoder and a head with an optimizer each: one loss for the head, another one for both that moves one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.encoder = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
            self.head = nn.Linear(WIDTH, CLASSES)
        self.head.bias.requires_grad_(False)  # toggling must put this back
        self.flags: list[Any] = []

    def note(self) -> None:
        flags = [parameter.requires_grad for parameter in self.parameters()]
        if self.flags[-1:] != [flags]:
            self.flags.append(flags)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for index, optimizer in enumerate(self.optimizers()):
            with self.toggled_optimizer(optimizer):
                self.note()
                loss = F.cross_entropy(self.head(self.encoder(x)), y) * (1 + index)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.note()
            self.log(f"loss{index}", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD([self.head.weight], lr=0.2),
        ]


@compat("LightningModule method", "toggled_optimizer")
@pytest.mark.skipif(not hasattr(L.LightningModule, "toggled_optimizer"), reason="Lightning 2.5.0 does not have it yet")
def test_toggled_optimizer(fit_both: Any, assert_same_training: Any, assert_alike: Any) -> None:
    plain, ours = fit_both(Halves, max_epochs=2)
    assert_same_training(plain, ours)
    assert_alike(dict(ours.trainer.callback_metrics), dict(plain.trainer.callback_metrics))
    assert plain.module.flags[:3] == [[True] * 6 + [False] * 2, [True] * 7 + [False], [False] * 6 + [True, False]]
    assert ours.module.flags == plain.module.flags
    assert [p.requires_grad for p in ours.module.parameters()] == [True] * 7 + [False]
