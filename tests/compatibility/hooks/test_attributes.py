"""What the Trainer and the LightningModule say about themselves, everywhere in a run: as in plain Lightning."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_roundpipe import RoundPipeStrategy
from tests.compatibility.inventory import inventory
from tests.support.parity import KINDS, assert_alike, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import WIDTH, Small

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You have set `limit_"),
]
# Answers that follow from the strategy, see test_attributes_that_follow_from_the_strategy.
OWN = {"strategy", "num_devices", "device_ids"}
# Moment -> owner -> attribute -> what it said.
Record = dict[str, dict[str, dict[str, Any]]]


def described(value: Any, folder: str) -> Any:
    """The value in terms that two runs share: no identities, no folders."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (Optimizer, LRScheduler)):
        return [type(value).__name__, copy.deepcopy(value.state_dict())]
    if isinstance(value, LRSchedulerConfig):
        return described(vars(value), folder)
    if isinstance(value, Mapping):
        return {str(key): described(entry, folder) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(entry, folder) for entry in value]
    if isinstance(value, (str, Path)):
        return str(value).replace(folder, "FOLDER")
    if isinstance(value, (int, float, type(None), torch.dtype, torch.device)):
        return value
    return type(value).__name__


def said(owner: Any, names: list[str], folder: str) -> dict[str, Any]:
    """What the attributes say; an error is an answer as well."""
    found = {}
    for name in names:
        try:
            found[name] = described(getattr(owner, name), folder)
        except (RuntimeError, TypeError, MisconfigurationException) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Asking(Small):
    """Asks the Trainer and itself in hooks and steps of all kinds."""

    def __init__(self, folder: str, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters({"rate": rate})
        self.example_input_array = torch.ones(2, WIDTH)
        self._folder = folder
        self._record: Record = {}

    def ask(self, moment: str) -> None:
        names = inventory()
        # The number of steps makes the loader of the training, if there is none yet: only asked where that is allowed.
        refused = OWN if self.trainer.training else {*OWN, "estimated_stepping_batches"}
        answers = {
            "trainer": said(self.trainer, [n for n in names["Trainer attribute"] if n not in refused], self._folder),
            "module": said(self, names["LightningModule attribute"], self._folder),
        }
        # All micro-batches of a step get the same answers.
        first = self._record.setdefault(moment, answers)
        assert str(first) == str(answers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ask(f"training step {self.global_step}")
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ask(f"validation step {self.global_step} {batch_idx} {self.trainer.sanity_checking}")
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.ask(f"test step {batch_idx}")
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.ask(f"predict step {batch_idx}")
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        self.ask("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["rate"], momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def setup(self, stage: str) -> None:
        self.ask(f"setup {stage}")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ask(f"batch start {self.global_step}")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.ask(f"before optimizer step {self.global_step}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ask(f"batch end {self.global_step}")

    def on_train_epoch_end(self) -> None:
        self.ask(f"epoch end {self.current_epoch}")

    def on_fit_end(self) -> None:
        self.ask("fit end")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Record, L.Trainer]]:
    """By kind of trainer: what was said during ``fit``, ``test`` and ``predict`` and after each, and the trainer."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        trainer = make_trainer(
            kind,
            default_root_dir=folder,
            max_epochs=2,
            min_epochs=1,
            limit_train_batches=2,
            num_sanity_val_steps=1,
            enable_checkpointing=True,
            enable_progress_bar=True,
            log_every_n_steps=1,
            callbacks=[ModelCheckpoint(monitor="val"), EarlyStopping("val"), Quiet()],
            logger=CSVLogger(folder, version=0),
        )
        module, loader = Asking(str(folder)), make_loader()
        trainer.fit(module, loader, loader)
        module.ask("after fit")
        trainer.test(module, loader, ckpt_path="best", verbose=False)
        module.ask("after test")
        trainer.predict(module, loader)
        module.ask("after predict")
        found[kind] = (module._record, trainer)
    return found


class Quiet(TQDMProgressBar):
    """A progress bar that shows nothing."""

    @property
    def is_disabled(self) -> bool:
        return True


@compat(
    "Trainer attribute",
    "accelerator; precision_plugin; global_rank; local_rank; node_rank; world_size; num_nodes; lightning_module; "
    "optimizers; lr_scheduler_configs; precision; scaler; model; log_dir; is_global_zero; distributed_sampler_kwargs; "
    "enable_validation; default_root_dir; early_stopping_callback; early_stopping_callbacks; checkpoint_callback; "
    "checkpoint_callbacks; progress_bar_callback; ckpt_path; interrupted; training; testing; predicting; validating; "
    "evaluating; sanity_checking; received_sigterm; global_step; current_epoch; max_epochs; min_epochs; max_steps; "
    "min_steps; is_last_batch; train_dataloader; val_dataloaders; test_dataloaders; predict_dataloaders; "
    "num_training_batches; num_sanity_val_batches; num_val_batches; num_test_batches; num_predict_batches; logger; "
    "loggers; callback_metrics; logged_metrics; progress_bar_metrics; estimated_stepping_batches",
)
@compat(
    "LightningModule attribute",
    "trainer; fabric; example_input_array; current_epoch; global_step; global_rank; local_rank; on_gpu; "
    "automatic_optimization; strict_loading; logger; loggers; device_mesh; hparams; hparams_initial; dtype; device",
)
def test_attributes_say_the_same(runs: dict[str, tuple[Record, L.Trainer]]) -> None:
    plain, ours = runs["plain"][0], runs["roundpipe"][0]
    assert len(plain) > 20
    assert_alike(ours, plain)
    step = plain["training step 3"]["trainer"]
    assert step["training"]
    assert step["global_step"] == 3
    assert step["callback_metrics"]["loss"] > 0


@compat(
    "Trainer attribute",
    "strategy",
    status="differs",
    note="A `ParallelStrategy`, also with one process.",
)
@compat(
    "Trainer attribute",
    "num_devices",
    status="differs",
    note="The devices of this machine: no number of processes.",
)
@compat(
    "Trainer attribute",
    "device_ids",
    status="differs",
    note="Those of this machine, as in `trainer.strategy.parallel_devices`.",
)
def test_attributes_that_follow_from_the_strategy(runs: dict[str, tuple[Record, L.Trainer]]) -> None:
    trainer = runs["roundpipe"][1]
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert (trainer.num_devices, trainer.device_ids, trainer.world_size) == (2, [0, 1], 1)
    assert len(trainer.strategy.pool) == len(trainer.strategy.parallel_devices) == 2
