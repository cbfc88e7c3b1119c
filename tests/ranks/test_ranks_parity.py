"""Trainings over ranks against plain Lightning on one device with the batches of all ranks together.

Ranks have different numbers of rows, and of micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.support.forks import Forks
from tests.support.parity import Watch, assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import values_of_ranks
from tests.support.small import CLASSES, WIDTH, Small

STEPS = 4
# Rows of each rank in a batch.
PARTS = {2: (5, 2), 3: (3, 1, 4)}


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of all ranks together."""
    generator = torch.Generator().manual_seed(1)
    rows = sum(PARTS[size])
    return [
        (torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator))
        for _ in range(STEPS)
    ]


class Adam(Small):
    """Another optimizer, which keeps state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)


class Branches(Small):
    """Has a layer that not every row takes, so that a rank may not use it, and a weight outside of units."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        takes = x[:, 0] > 0.8
        if takes.any():
            x = torch.where(takes[:, None], self.branch(x), x)
        loss: Tensor = self.loss((x * self.scale, y))
        return loss


class Manual(Small):
    """Two backwards, and its own optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for factor in (1.0, 0.5):
            self.manual_backward(self.loss(batch) * factor)
        optimizer.step()
        optimizer.zero_grad()


MODULES: dict[str, Callable[[], L.LightningModule]] = {
    "small": Small,
    "adam": Adam,
    "branches": Branches,
    "manual": Manual,
}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: (module, settings of both, options of the strategy)
    "plain": ("small", {}, {}),
    "adam": ("adam", {}, {}),
    "clipped": ("small", {"gradient_clip_val": 0.05}, {}),
    "accumulated": ("adam", {"accumulate_grad_batches": 2}, {}),
    "accumulated, uneven": ("small", {"accumulate_grad_batches": 3}, {}),
    "branches": ("branches", {}, {}),
    "manual": ("manual", {}, {}),
    "overlap off": ("adam", {}, {"optimizer_overlap": "off"}),
    "copies": ("adam", {}, {"virtual_copies": True}),
}


def make_module(name: str) -> L.LightningModule:
    torch.manual_seed(3)
    return MODULES[name]()


def seen(module: L.LightningModule, trainer: L.Trainer, watch: Watch) -> dict[str, Any]:
    """What must be the same on every rank, and in the plain training."""
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "gradients": watch.gradients,
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "steps": trainer.global_step,
    }


def trained_on_a_rank(case: str) -> dict[str, Any]:
    """The rank's rows of each batch."""
    name, settings, options = SETTINGS[case]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start = sum(PARTS[size][:rank])
    mine = [tuple(part[start : start + PARTS[size][rank]] for part in batch) for batch in batches(size)]
    module, watch = make_module(name), Watch()
    trainer = make_trainer(
        devices=2 * size,
        num_microbatches=2 + rank,
        options=options,
        callbacks=[watch],
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(module, ready(mine))
    return seen(module, trainer, watch)


def trained_plainly(case: str, size: int) -> dict[str, Any]:
    name, settings, _ = SETTINGS[case]
    module, watch = make_module(name), Watch()
    trainer = make_trainer("plain", callbacks=[watch], **settings)
    trainer.fit(module, ready(batches(size)))
    return seen(module, trainer, watch)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", SETTINGS)
def test_ranks_train_as_one_device_with_all_rows(forks: Forks, tmp_path: Path, case: str, size: int) -> None:
    expected = trained_plainly(case, size)
    start = make_module(SETTINGS[case][0]).state_dict()
    assert max(float((value - start[name]).abs().max()) for name, value in expected["state"].items()) > 1e-3
    found = values_of_ranks(forks, tmp_path, size, trained_on_a_rank, case)
    for one in found:
        assert_alike(one, expected, rtol=1e-3, atol=1e-5)
        for name, value in one["state"].items():
            assert torch.equal(value, found[0]["state"][name]), name
