"""Processes of a run: their places, their devices, and what Lightning's interface says on each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.forks import Forks
from tests.support.parity import make_loader, make_trainer
from tests.support.rank_runs.launch import values_of_ranks
from tests.support.small import Small


class Telling(Small):
    """Keeps what it can see of its ranks during a training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def on_train_start(self) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        self.seen["ranks"] = (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
        self.seen["zero"] = trainer.is_global_zero
        self.seen["devices"] = len(strategy.pool)
        self.seen["reduced"] = [
            strategy.reduce(torch.tensor(float(self.global_rank)), reduce_op=op) for op in ("mean", "sum")
        ]
        self.seen["gathered"] = self.all_gather({"a": torch.tensor([self.global_rank, 7])})["a"]
        self.seen["broadcast"] = strategy.broadcast(f"from {self.global_rank}", 1)
        self.seen["all"] = strategy.reduce_boolean_decision(self.global_rank == 0, all=True)
        self.seen["any"] = strategy.reduce_boolean_decision(self.global_rank == 0, all=False)
        loader = trainer.train_dataloader
        assert isinstance(loader, DataLoader)
        assert isinstance(loader.sampler, DistributedSampler)
        self.seen["sampler"] = (loader.sampler.num_replicas, loader.sampler.rank)
        strategy.barrier("here")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank), sync_dist=True)


def seen_by_a_rank() -> dict[str, Any]:
    torch.manual_seed(int(os.environ["RANK"]))  # other weights on each
    module = Telling()
    trainer = make_trainer(devices=4)
    trainer.fit(module, make_loader())
    module.seen["logged"] = float(trainer.callback_metrics["rank"])
    module.seen["state"] = dict(module.state_dict())
    module.seen["after"] = trainer.strategy.broadcast(module.global_rank, 1)
    return module.seen


def test_every_rank_sees_what_ddp_would_show(forks: Forks, tmp_path: Path) -> None:
    found = values_of_ranks(forks, tmp_path, 2, seen_by_a_rank)
    for rank, seen in enumerate(found):
        assert seen["ranks"] == (rank, rank, 0, 2)
        assert seen["zero"] == (rank == 0)
        assert seen["devices"] == 2
        assert [float(value) for value in seen["reduced"]] == [0.5, 1.0]
        assert torch.equal(seen["gathered"], torch.tensor([[0, 7], [1, 7]]))
        assert seen["broadcast"] == "from 1"
        assert (seen["all"], seen["any"]) == (False, True)
        assert seen["sampler"] == (2, rank)
        assert seen["logged"] == 0.5
        assert seen["after"] == 1
