"""Every hook of module, callback and datamodule: its place among the others, its arguments, what it sees and is told.

Whole runs with plain Lightning and here are recorded, hook by hook (see [Note: recorded hooks]), and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_roundpipe import RoundPipeStrategy
from tests.compatibility.hooks.hook_recording import (
    CALLBACK_HOOKS,
    DATAMODULE_HOOKS,
    MODULE_HOOKS,
    Recording,
    names_of,
)
from tests.support.late_updates import Late, overlap_small_weights
from tests.support.parity import assert_alike, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import WIDTH, Small

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in both"),
    pytest.mark.filterwarnings("ignore:.*logger=True.*was a"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Loaders:
    """Four batches to train on, the last one smaller; what a module or a datamodule offers."""

    def train_dataloader(self) -> Any:
        return make_loader(28)

    def val_dataloader(self) -> Any:
        return make_loader(11)

    def test_dataloader(self) -> Any:
        return [make_loader(10), make_loader(8)]

    def predict_dataloader(self) -> Any:
        return make_loader(13)


class Everything(Loaders, Small):
    """Logs, returns dicts, and has a scheduler."""

    interval = "epoch"

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"rate": 0.1})
        self.example_input_array = torch.ones(2, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "logits": self(batch[0]).detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val", loss)
        return {"val": loss, "logits": self(batch[0])}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test", self.loss(batch))
        return self(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def configure_callbacks(self) -> Any:
        return [L.Callback()]


class Quiet(TQDMProgressBar):
    """A progress bar that shows nothing."""

    @property
    def is_disabled(self) -> bool:
        return True


class Stateful(L.Callback):
    """A callback with a state in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 5}


class Data(Loaders, L.LightningDataModule):
    """A datamodule with a state in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}


class Session:
    """Makes recorded modules, callbacks, datamodules and their trainers, of one of the two kinds."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.recording = Recording(str(folder))

    def module(self, base: type = Everything) -> Any:
        return self.recording.recorded("module", base, MODULE_HOOKS)()

    def datamodule(self) -> Any:
        return self.recording.recorded("datamodule", Data, DATAMODULE_HOOKS)()

    def trainer(self, *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
        recorded = self.recording.recorded("callback", Stateful, CALLBACK_HOOKS)()
        settings = {"enable_checkpointing": bool(callbacks), "default_root_dir": self.folder, **kwargs}
        if self.kind == "roundpipe":  # rows of steps are counted, those that are only tried as well
            settings["options"] = {"check_split": "off"}
        return make_trainer(self.kind, callbacks=[recorded, *callbacks], **{"max_epochs": None, **settings})


def fit_save_and_resume(session: Session) -> None:
    """With a datamodule, gradient clipping, checkpoints at the end of each epoch, and a second trainer that goes on."""
    saves = ModelCheckpoint(session.folder, filename="{epoch}", save_top_k=-1, monitor="val")
    trainer = session.trainer(
        *(saves, EarlyStopping("val"), Quiet()),
        max_epochs=2,
        num_sanity_val_steps=1,
        gradient_clip_val=0.2,
        enable_progress_bar=True,
        logger=CSVLogger(session.folder, version=0),
        log_every_n_steps=1,
    )
    trainer.fit(session.module(), session.datamodule())
    trainer = session.trainer(max_epochs=2)
    trainer.fit(session.module(), session.datamodule(), ckpt_path=session.folder / "epoch=0.ckpt")


def accumulate(session: Session) -> None:
    """The module has the loaders; a scheduler per step, and validation between the batches of a step."""

    class PerStep(Everything):
        interval = "step"

    trainer = session.trainer(
        max_epochs=2,
        accumulate_grad_batches=3,
        val_check_interval=2,
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
    )
    trainer.fit(session.module(PerStep))


def evaluate(session: Session) -> None:
    """Two loaders for the test. What is not in the datamodule comes from the module."""
    trainer, module, data = session.trainer(), session.module(), session.datamodule()
    trainer.validate(module, data)
    trainer.test(module, data)
    trainer.predict(module, data)
    session.trainer().test(module)
    session.trainer().predict(module)


def fail(session: Session) -> None:
    class Fails(Everything):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("no third batch")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="no third batch"):
        session.trainer(max_epochs=1).fit(session.module(Fails), session.datamodule())
    session.recording.forget_rows_of_the_last_step()


def interrupt(session: Session) -> None:
    class Interrupts(Everything):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        session.trainer(max_epochs=1).fit(session.module(Interrupts), session.datamodule())
    session.recording.forget_rows_of_the_last_step()


def skip_and_stop(session: Session) -> None:
    """A step without a loss, the rest of the first epoch skipped, and an end in the middle of the second one."""

    class Stops(Everything):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 and self.current_epoch == 0 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = batch_idx == 1 and self.current_epoch == 1
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Closure, "warning_cache", WarningCache())  # else warned of once per process
        with pytest.warns(UserWarning, match="returned `None`"):
            session.trainer(max_epochs=4).fit(session.module(Stops))


def optimize_manually(session: Session) -> None:
    """Two optimizers in turns, clipping and a scheduler by hand, two backwards for the second one."""

    class Manual(Everything):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            first.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(first, 0.1, "norm")
            first.step()
            self.untoggle_optimizer(first)
            second.zero_grad()
            for scale in (1.0, 0.5):
                self.manual_backward(scale * self.loss(batch))
            second.step()
            self.lr_schedulers().step()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return {"loss": loss.detach()}

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)
            second = torch.optim.Adam(self.head.parameters(), lr=0.01, eps=1e-4)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.7)]

    session.trainer(max_epochs=1).fit(session.module(Manual), session.datamodule())


SCENARIOS: list[Callable[[Session], None]] = [
    optimize_manually,
    fit_save_and_resume,
    accumulate,
    evaluate,
    fail,
    interrupt,
    skip_and_stop,
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Any], list[Any]]]:
    """Name of the scenario -> what was recorded here, and with plain Lightning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {}
    for scenario in SCENARIOS:
        entries = []
        for kind in ("roundpipe", "plain"):
            session = Session(kind, tmp_path_factory.mktemp(f"{scenario.__name__}_{kind}"))
            torch.manual_seed(0)
            with pytest.MonkeyPatch.context() as patch:
                overlap_small_weights(patch)
                late = Late(patch)
                scenario(session)
            assert (late.num_buckets > 0) == (kind == "roundpipe" and scenario is not evaluate), scenario
            entries.append(session.recording.entries)
        found[scenario.__name__] = (entries[0], entries[1])
    torch.set_num_threads(threads)
    return found


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
@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_hooks_of_all_owners_in_order(runs: Any, scenario: str) -> None:
    """And what the attributes say in them."""
    ours, plain = runs[scenario]
    assert names_of(ours) == names_of(plain)
    assert_alike(ours, plain)


@compat(
    "LightningModule hook",
    "on_fit_start; on_fit_end; on_train_start; on_train_end; on_validation_start; on_validation_end; on_test_start; "
    "on_test_end; on_predict_start; on_predict_end; on_train_batch_start; on_train_batch_end; "
    "on_validation_batch_start; on_validation_batch_end; on_test_batch_start; on_test_batch_end; "
    "on_predict_batch_start; on_predict_batch_end; on_validation_model_zero_grad; on_validation_model_eval; "
    "on_validation_model_train; on_test_model_eval; on_test_model_train; on_predict_model_eval; on_train_epoch_start; "
    "on_train_epoch_end; on_validation_epoch_start; on_validation_epoch_end; on_test_epoch_start; on_test_epoch_end; "
    "on_predict_epoch_start; on_predict_epoch_end; on_before_zero_grad; on_before_backward; on_after_backward; "
    "on_before_optimizer_step; configure_model; prepare_data; setup; teardown; train_dataloader; test_dataloader; "
    "val_dataloader; predict_dataloader; transfer_batch_to_device; on_before_batch_transfer; on_after_batch_transfer; "
    "on_load_checkpoint; on_save_checkpoint; training_step; validation_step; test_step; predict_step; "
    "configure_callbacks; configure_optimizers; configure_gradient_clipping; lr_scheduler_step; optimizer_step; "
    "optimizer_zero_grad; backward",
)
@compat(
    "Callback hook",
    "setup; teardown; on_fit_start; on_fit_end; on_sanity_check_start; on_sanity_check_end; on_train_batch_start; "
    "on_train_batch_end; on_train_epoch_start; on_train_epoch_end; on_validation_epoch_start; "
    "on_validation_epoch_end; on_test_epoch_start; on_test_epoch_end; on_predict_epoch_start; on_predict_epoch_end; "
    "on_validation_batch_start; on_validation_batch_end; on_test_batch_start; on_test_batch_end; "
    "on_predict_batch_start; on_predict_batch_end; on_train_start; on_train_end; on_validation_start; "
    "on_validation_end; on_test_start; on_test_end; on_predict_start; on_predict_end; on_exception; state_dict; "
    "load_state_dict; on_save_checkpoint; on_load_checkpoint; on_before_backward; on_after_backward; "
    "on_before_optimizer_step; on_before_zero_grad",
)
@compat(
    "LightningDataModule",
    "prepare_data; setup; teardown; train_dataloader; test_dataloader; val_dataloader; predict_dataloader; "
    "transfer_batch_to_device; on_before_batch_transfer; on_after_batch_transfer; state_dict; load_state_dict; "
    "on_exception",
)
def test_every_hook_is_called_in_some_run(runs: Any) -> None:
    """So that the comparison of whole runs is one of every hook, those of a newer Lightning included, with answers."""
    called = {name for _, plain in runs.values() for name in names_of(plain)}
    owners = {"module": MODULE_HOOKS, "callback": CALLBACK_HOOKS, "datamodule": DATAMODULE_HOOKS}
    assert {f"{owner}.{name}" for owner, names in owners.items() for name in names} - called == set()
    told = next(
        e["told"]["trainer"] for e in runs["fit_save_and_resume"][1] if e["hook"] == "module.on_train_epoch_end"
    )
    for name in ("callback_metrics", "progress_bar_metrics", "optimizers", "lr_scheduler_configs", "loggers"):
        assert told[name], name
    assert (told["training"], told["log_dir"]) == (True, "FOLDER/lightning_logs/version_0")
    assert [told[f"{name}_callback"] for name in ("early_stopping", "progress_bar")] == ["EarlyStopping", "Quiet"]


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
def test_attributes_that_follow_from_the_strategy() -> None:
    trainer = make_trainer()
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert (trainer.num_devices, trainer.device_ids, trainer.world_size) == (2, [0, 1], 1)
    assert len(trainer.strategy.pool) == len(trainer.strategy.parallel_devices) == 2
