"""Callbacks of Lightning that average, freeze, prune or accumulate: the same weights as in plain Lightning.

Devices have copies of their own in all runs, which must not be older than what a callback has written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn.utils import prune
from torchmetrics.functional import mean_squared_error

from tests.compatibility.versions import known
from tests.support.models import Logs
from tests.support.parity import COPIES, Run, assert_alike, both, compare, fit, make_loader
from tests.support.rows import compat


def compared(make_module: Any, make_callback: Callable[[], Any], *others: Any, **settings: Any) -> tuple[Run, Run]:
    watched = {"callbacks": lambda: [make_callback(), *others]}
    runs = compare(make_module, None, make_loader(10, 5), **watched, **{"ours": COPIES, **settings})
    assert {"loss", "val"} <= set(runs[0].trainer.callback_metrics)
    return runs


@compat("Callback", "StochasticWeightAveraging")
def test_swa() -> None:
    plain, ours = compared(Logs, lambda: StochasticWeightAveraging(0.05, swa_epoch_start=2), max_epochs=3)
    assert plain.trainer.callbacks[0].n_averaged == ours.trainer.callbacks[0].n_averaged == 2


@compat("Callback", "StochasticWeightAveraging")
def test_swa_renews_the_statistics_of_batch_norm() -> None:
    """A further epoch without backward, in which batch norm averages over all batches; exact with one micro-batch."""

    class Norm(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.body.insert(1, nn.BatchNorm1d(6))

    plain, _ = compared(
        Norm,
        lambda: StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_strategy="linear"),
        max_epochs=2,
        ours={**COPIES, "num_microbatches": 1},
    )
    assert plain.module.body[1].num_batches_tracked == 3, "they were reset, and counted in the last epoch only"


# Once per step, and once per epoch.
AVERAGES: dict[str, Callable[[], L.Callback]] = {
    "mean": lambda: callbacks.WeightAveraging(),
    "ema": lambda: callbacks.EMAWeightAveraging(decay=0.7, update_every_n_steps=0, update_starting_at_epoch=1),
}


def saves_once(folder: Path, epoch: int) -> LambdaCallback:
    """Writes a checkpoint with the kind of the trainer as its name, at the end of one epoch."""

    def save(trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == epoch:
            trainer.save_checkpoint(folder / f"{type(trainer.strategy).__name__}.ckpt")

    return LambdaCallback(on_train_epoch_end=save)


@compat("Callback", "WeightAveraging; EMAWeightAveraging")
@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="averages of weights are in newer Lightning")
@pytest.mark.parametrize("name", AVERAGES)
def test_averages(name: str, tmp_path: Path) -> None:
    """Validation and the end see the average; the file holds both, and a resumed run goes on from both."""

    def path(run: Run) -> Path:
        return tmp_path / f"{type(run.trainer.strategy).__name__}.ckpt"

    plain, _ = compared(
        Logs,
        AVERAGES[name],
        saves_once(tmp_path, 0),
        also=lambda run: torch.load(path(run), weights_only=False),
        max_epochs=2,
        log_every_n_steps=1,
    )
    assert "current_model_state" in torch.load(path(plain), weights_only=False)
    options = {"ckpt_path": path(plain), **known(L.Trainer.fit, weights_only=False)}
    settings = {"callbacks": [AVERAGES[name]()], "fit_options": options, "max_epochs": 2}
    resumed = fit("roundpipe", Logs, make_loader(), **settings, **COPIES)
    assert_alike(resumed.state, plain.state)


class Backbone(L.LightningModule):
    """A backbone with batch norm and a head; only what is trainable at first is given to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
            self.backbone = nn.Sequential(blocks[0], nn.BatchNorm1d(6), *blocks[1:])
            self.head = nn.Linear(6, 1)

    def loss(self, batch: Any) -> Tensor:
        return mean_squared_error(self.head(self.backbone(batch[0])).squeeze(1), batch[1].float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@compat("Callback", "BackboneFinetuning")
@pytest.mark.parametrize(("train_bn", "num_microbatches"), [(True, 1), (False, 3)])
def test_backbone(train_bn: bool, num_microbatches: int) -> None:
    """Frozen batch norm uses the statistics of its batch: only without it the number of micro-batches is free."""
    plain, _ = compared(
        Backbone if train_bn else WithoutNorm,
        lambda: BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01, train_bn=train_bn),
        max_epochs=3,
        ours={**COPIES, "num_microbatches": num_microbatches},
    )
    assert [group["lr"] for group in plain.trainer.optimizers[0].param_groups] == [0.1, pytest.approx(0.015)]


class WithoutNorm(Backbone):
    """The same backbone without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        del self.backbone[1]


class BlockByBlock(BaseFinetuning):
    """Unfreezes one block per epoch, from the end."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone[-epoch], optimizer, lr=0.02)


@compat("Callback", "BaseFinetuning; LambdaCallback")
def test_block_by_block(tmp_path: Path) -> None:
    """Also when the run is resumed after a block was unfrozen (plain Lightning loses momentum there, and so do we)."""
    plain, _ = compared(WithoutNorm, BlockByBlock, saves_once(tmp_path, 1), max_epochs=3)
    assert len(plain.trainer.optimizers[0].param_groups) == 3
    options = {"ckpt_path": tmp_path / "SingleDeviceStrategy.ckpt", **known(L.Trainer.fit, weights_only=False)}

    def resumed(kind: str) -> Any:
        settings = {"callbacks": [BlockByBlock()], "fit_options": options, "max_epochs": 3}
        return fit(kind, WithoutNorm, make_loader(), **settings).results

    both(resumed)


PRUNING: dict[str, dict[str, Any]] = {
    "lottery": {"pruning_fn": "l1_unstructured", "amount": 0.2},
    "structured": {
        "pruning_fn": "ln_structured",
        "amount": 0.3,
        "pruning_dim": 0,
        "pruning_norm": 1,
        "use_global_unstructured": False,
        "use_lottery_ticket_hypothesis": False,
        "parameter_names": ["weight"],
        "make_pruning_permanent": False,
    },
}


@compat("Callback", "ModelPruning")
@pytest.mark.parametrize("name", PRUNING)
def test_pruning(name: str) -> None:
    """Masks are put on weights inside units, more of them after every epoch, and training goes on below them."""
    plain, ours = compared(Logs, lambda: ModelPruning(**PRUNING[name]), max_epochs=2)
    if name == "lottery":
        num_zeros = [sum(int((p == 0).sum()) for p in run.module.parameters()) for run in (plain, ours)]
        assert num_zeros[0] == num_zeros[1] > 30
    else:
        assert "body.0.0.weight_mask" in plain.state
        assert prune.is_pruned(ours.module)


@compat("Callback", "GradientAccumulationScheduler")
def test_accumulation() -> None:
    plain, _ = compared(Logs, lambda: GradientAccumulationScheduler({0: 3, 1: 1, 2: 2}), max_epochs=3)
    assert plain.trainer.global_step == 1 + 3 + 2
