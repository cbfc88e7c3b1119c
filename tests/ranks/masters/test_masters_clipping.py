"""``clip_grad_norm_`` of torch where each rank has the gradients of its own weights alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, clip_grad_norm_

from tests.ranks.masters.divided import place
from tests.ranks.test_ranks_sharding import Groups, batches, part_of_rank, state_of
from tests.support.forks import Forks
from tests.support.parity import assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import run_ranks, values_of_ranks

ORDERS = (1.0, 2.0, 3.0, math.inf)
SIZES = (2, 3)
SOON_S = 15.0


class Clips(Groups):
    """Clips all weights, one of no optimizer among them, and then some, by norms of several orders."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Parameter(torch.ones(3))
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch) + 0.3 * self.beside.sum()
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for order in ORDERS:
            self.norms.append(clip_grad_norm_(self.parameters(), 0.2, norm_type=order))
        self.norms.append(nn.utils.clip_grad_norm_(self.head.parameters(), 0.01))
        self.norms.append(nn.utils.clip_grad_norm_(self.body[0][0].bias, math.inf, error_if_nonfinite=True))
        self.beside.grad = None

    def configure_optimizers(self) -> Any:
        rest = [p for name, p in self.named_parameters() if name != "beside"]
        return torch.optim.SGD(rest, lr=0.1, momentum=0.9)


class ByHand(Groups):
    """Clips in its training step."""

    def __init__(self, by_whole_name: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.by_whole_name = by_whole_name
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.by_whole_name:
            self.norms.append(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05))
        else:
            clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


MODULES = {"clips": Clips, "by hand": ByHand}


def trained(kind: str, name: str, loader: Any) -> dict[str, Any]:
    module = MODULES[name]()
    options = {"shard_optimizer": True} if kind == "roundpipe" else None
    trainer = make_trainer(kind, num_microbatches=1, options=options, use_distributed_sampler=False)
    plain = vars(clip_grad)["_get_total_norm"]
    trainer.fit(module, ready(loader))
    assert vars(clip_grad)["_get_total_norm"] is plain
    return {"weights": state_of(module), "norms": module.norms}


def trained_on_a_rank() -> dict[str, Any]:
    return {name: trained("roundpipe", name, part_of_rank(*place())) for name in MODULES}


@pytest.mark.parametrize("size", SIZES)
def test_clipping_by_torch_takes_the_norm_of_all_ranks(forks: Forks, tmp_path: Path, size: int) -> None:
    ranks = values_of_ranks(forks, tmp_path, size, trained_on_a_rank)
    for name in MODULES:
        expected = trained("plain", name, batches(size))
        for rank in ranks:
            assert_alike(rank[name], expected, rtol=1e-3, atol=1e-5)


def train_with_an_imported_name() -> None:
    trainer = make_trainer(num_microbatches=2, options={"shard_optimizer": True}, use_distributed_sampler=False)
    trainer.fit(ByHand(by_whole_name=False), ready(part_of_rank(*place())))


def test_clipping_once_per_microbatch_is_refused(forks: Forks, tmp_path: Path) -> None:
    for end in run_ranks(forks, tmp_path, 2, train_with_an_imported_name):
        assert end.status == 1
        assert end.late_s < SOON_S
        assert "with shard_optimizer=True all ranks clip together, once per batch" in end.output
