"""Ranks that fail, or scale and skip steps, while gradients travel."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.ranks import group as group_module
from tests.support.forks import Forks
from tests.support.parity import assert_alike, make_loader, make_trainer, ready
from tests.support.rank_runs.launch import place, run_ranks, values_of_ranks
from tests.support.rank_runs.paused import Paused, one_by_one
from tests.support.small import CLASSES, WIDTH, Small

TIMEOUT_S = 120.0


def failing(folder: str) -> None:
    """Raises on rank 1 in its third step, when the rank waits for rank 0 with a bucket; rank 0 does not come before."""
    one_by_one(setattr)
    module, is_sending = Paused(), threading.Event()
    batches = list(make_loader(rows=24))
    last = batches[2][0][-1]

    def in_backward(batch_idx: int, x: Tensor) -> None:
        if module.global_rank == 1 and batch_idx == 2 and any(torch.equal(row, last) for row in x):
            assert is_sending.wait(TIMEOUT_S)
            (Path(folder) / "fails").touch()
            raise ValueError("rank 1 fails in its backward")

    module.in_backward = in_backward
    add_up = group_module.ManyRanks.add_up

    def noted(group: Any, tensor: Tensor, what: str, wire: Any = None) -> None:
        if "head.weight in training step 2" in what:
            if group.rank == 0:  # rank 1 waits for this
                while not (Path(folder) / "fails").exists():
                    group.check("the end of rank 1")
            is_sending.set()
        add_up(group, tensor, what, wire)

    group_module.ManyRanks.add_up = noted  # type: ignore[method-assign]
    trainer = make_trainer(use_distributed_sampler=False)
    trainer.fit(module, ready(batches))


def test_a_rank_that_fails_while_its_gradients_travel_ends_the_others_at_once(forks: Forks, tmp_path: Path) -> None:
    ends = run_ranks(forks, tmp_path, 2, failing, str(tmp_path))
    assert [end.status for end in ends] == [1, 1]
    assert "ValueError: rank 1 fails in its backward" in ends[1].output
    assert "RankError: rank 1 (" in ends[0].output
    assert "has failed: ValueError: rank 1 fails in its backward" in ends[0].output
    assert ends[0].late_s < TIMEOUT_S / 2


class Scaled(Small):
    """A single weight, and so a single owner, has a gradient that overflows: on rank 0 alone, in its second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(()))
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, factor = batch
        return F.cross_entropy(self(x).float(), y) + self.large * factor.mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def scaled_batches(rows: slice = slice(8)) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    factors = torch.zeros(5, 8)
    factors[1, :4] = 1e37
    batches = [
        (torch.randn(8, WIDTH, generator=generator), torch.randint(CLASSES, (8,), generator=generator), factor)
        for factor in factors
    ]
    return [tuple(part[rows] for part in batch) for batch in batches]


def train_scaled(kind: str, batches: Any, **settings: Any) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)  # type: ignore[arg-type]
    module = Scaled()
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    make_trainer(kind, plugins=plugins, use_distributed_sampler=False, **settings).fit(module, ready(batches))
    return {"state": dict(module.state_dict()), "scales": module.scales}


def scaled(kind: str, batches: Any, **settings: Any) -> list[dict[str, Any]]:
    return [train_scaled(kind, batches, accumulate_grad_batches=number, **settings) for number in (1, 2)]


def scaled_on_a_rank() -> list[list[dict[str, Any]]]:
    """With a whole optimizer on each rank, and with one that is divided among them."""
    mine = scaled_batches(slice(4) if place()[0] == 0 else slice(4, 8))
    return [scaled("roundpipe", mine, options={"shard_optimizer": shards}) for shards in (False, True)]


def test_all_ranks_skip_the_steps_that_overflow_on_one(forks: Forks, tmp_path: Path) -> None:
    plain = scaled("plain", scaled_batches())
    assert all(min(one["scales"]) < 2.0**8 for one in plain), "no step was skipped"
    for rank in values_of_ranks(forks, tmp_path, 2, scaled_on_a_rank):
        for found in rank:
            assert [one["scales"] for one in found] == [one["scales"] for one in plain]
            assert_alike([one["state"] for one in found], [one["state"] for one in plain], rtol=0.01, atol=1e-3)
