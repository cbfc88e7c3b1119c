"""Optimizers divided among ranks: stale steps, several fits, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tests.ranks.test_ranks_sharding import batches, part_of_rank, state_of, trained_on_a_rank
from tests.support.forks import Forks
from tests.support.parity import assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import SOON_S, place, run_ranks, values_of_ranks
from tests.support.small import Small


def rank_trainer(**options: Any) -> Any:
    return make_trainer(
        devices=4, num_microbatches=2, options={"shard_optimizer": True, **options}, use_distributed_sampler=False
    )


MODES: list[dict[str, Any]] = [{"optimizer_overlap": "stale"}, {"reduce_dtype": "bf16"}]


def with_and_without_shards() -> list[list[dict[str, Any]]]:
    return [
        [trained_on_a_rank("groups, scheduler", ".", **mode, shard_optimizer=shards) for shards in (True, False)]
        for mode in MODES
    ]


def test_other_modes_train_as_without_shards(forks: Forks, tmp_path: Path) -> None:
    for rank in values_of_ranks(forks, tmp_path, 2, with_and_without_shards):
        for sharded, plain in rank:
            assert_alike(sharded["weights"], plain["weights"], rtol=1e-3, atol=1e-5)
            assert sharded["bytes"] < plain["bytes"]


class Validated(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)


def fitted_twice() -> dict[str, Any]:
    module = Validated()
    trainer = rank_trainer()
    trainer.fit(module, ready(part_of_rank(*place())))
    trainer.validate(module, ready(part_of_rank(*place())), verbose=False)
    before = trainer.optimizers[0]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, ready(part_of_rank(*place())))
    assert not before._optimizer_step_pre_hooks
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)
    return state_of(module)


def test_a_second_fit_and_an_evaluation_work(forks: Forks, tmp_path: Path) -> None:
    first, second = values_of_ranks(forks, tmp_path, 2, fitted_twice)
    assert_alike(first, second, rtol=0.0, atol=0.0)


class Breaks(torch.optim.SGD):
    """Fails in its second step, on the thread of the updates of rank 1."""

    is_separable = True

    def step(self, closure: Any = None) -> Any:
        has_state = any(self.state[p] for group in self.param_groups for p in group["params"] if p in self.state)
        if has_state and place()[0] == 1:
            raise ValueError("boom in an update")
        return super().step(closure)


class Deeds(Small):
    """Configures, or does, something bad."""

    def __init__(self, deed: str) -> None:
        super().__init__()
        self.deed = deed
        self.automatic_optimization = deed != "step past Lightning"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers(use_pl_optimizer=False).step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.deed == "clip":
            clip_grad_norm_(self.parameters(), 0.1)

    def configure_optimizers(self) -> Any:
        if self.deed == "not separable":
            return torch.optim.LBFGS(self.parameters())
        return (Breaks if self.deed == "update" else torch.optim.SGD)(self.parameters(), lr=0.1, momentum=0.9)


def train_badly(deed: str) -> None:
    rank_trainer().fit(Deeds(deed), ready(part_of_rank(*place())))


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (
            "not separable",
            "shard_optimizer=True is not possible: LBFGS is not known to update each parameter by itself",
        ),
        ("step past Lightning", "SGD.step was called past Lightning"),
        ("clip", "torch.nn.utils.clip_grad_norm_ would clip by their norm: use Trainer(gradient_clip_val=...)"),
        ("update", "boom in an update"),
    ],
)
def test_errors_end_all_ranks_soon(forks: Forks, tmp_path: Path, deed: str, message: str) -> None:
    for end in run_ranks(forks, tmp_path, 2, train_badly, deed):
        assert end.status == 1
        assert end.late_s < SOON_S
        assert message in end.output


def test_one_process_keeps_its_whole_optimizer() -> None:
    def trained(*, shards: bool) -> tuple[dict[str, Tensor], Any]:
        module = Small()
        trainer = make_trainer(options={"shard_optimizer": shards})
        trainer.fit(module, ready(batches(1)))
        return state_of(module), trainer.optimizers[0].state_dict()

    assert_alike(trained(shards=True), trained(shards=False), rtol=0.0, atol=0.0)


def test_the_option_is_checked() -> None:
    with pytest.raises(TypeError, match="shard_optimizer='yes': use True or False"):
        make_trainer(options={"shard_optimizer": "yes"})
