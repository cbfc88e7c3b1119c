"""Every hook of module, callback and datamodule: its place among the others, its arguments, and what it sees.

Whole runs with plain Lightning and here are recorded, hook by hook (see [Note: recorded hooks]), and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe import RoundPipeStrategy
from tests.support.hook_recording import (
    CALLBACK_HOOKS,
    DATAMODULE_HOOKS,
    MODULE_HOOKS,
    Recording,
    assert_entries_alike,
    names_of,
)
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH, Small

pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden `.*` in both"),
    pytest.mark.filterwarnings("ignore:.*logger=True.*was a"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


def _loader(rows: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


class Loaders:
    """Four batches to train on, the last one smaller; what a module or a datamodule offers."""

    def train_dataloader(self) -> Any:
        return _loader(28, 1)

    def val_dataloader(self) -> Any:
        return _loader(11, 2)

    def test_dataloader(self) -> Any:
        return [_loader(10, 3), _loader(8, 4)]

    def predict_dataloader(self) -> Any:
        return _loader(13, 5)


class Everything(Loaders, Small):
    """Logs, returns dicts, and has a scheduler."""

    interval = "epoch"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
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
        own: dict[str, Any] = {"devices": 1}
        if self.kind == "roundpipe":
            own = {"devices": 2, "strategy": RoundPipeStrategy(num_microbatches=3)}
        settings = {"num_sanity_val_steps": 0, "enable_checkpointing": bool(callbacks), "logger": False} | own
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        callbacks = (recorded, *callbacks)
        return L.Trainer(
            accelerator="cpu", default_root_dir=self.folder, callbacks=[*callbacks], **settings | quiet | kwargs
        )


def fit_save_and_resume(session: Session) -> None:
    """With a datamodule, gradient clipping, checkpoints at the end of each epoch, and a second trainer that goes on."""
    saves = ModelCheckpoint(session.folder, filename="{epoch}", save_top_k=-1, monitor="val")
    trainer = session.trainer(saves, max_epochs=2, num_sanity_val_steps=1, gradient_clip_val=0.2)
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


def skip_the_rest_of_an_epoch(session: Session) -> None:
    class Skips(Everything):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 and self.current_epoch == 0 else None

    session.trainer(max_epochs=2).fit(session.module(Skips))


def stop(session: Session) -> None:
    class Stops(Everything):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = batch_idx == 1
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

    session.trainer(max_epochs=2).fit(session.module(Manual), session.datamodule())


SCENARIOS: list[Callable[[Session], None]] = [
    optimize_manually,
    fit_save_and_resume,
    accumulate,
    evaluate,
    fail,
    interrupt,
    skip_the_rest_of_an_epoch,
    stop,
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
            scenario(session)
            entries.append(session.recording.entries)
        found[scenario.__name__] = (entries[0], entries[1])
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_hooks_of_all_owners_in_order(runs: Any, scenario: str) -> None:
    ours, plain = runs[scenario]
    assert names_of(ours) == names_of(plain)
    assert_entries_alike(ours, plain)


def _assert_hook_alike(runs: Any, hook: str) -> None:
    """The hook was called, and as in plain Lightning, in every run."""
    num_calls = 0
    for ours, plain in runs.values():
        expected = [entry for entry in plain if entry["hook"] == hook]
        assert_entries_alike([entry for entry in ours if entry["hook"] == hook], expected)
        num_calls += len(expected)
    assert num_calls


OF_MODULES = [
    pytest.param("on_fit_start", marks=compat("LightningModule hook", "on_fit_start")),
    pytest.param("on_fit_end", marks=compat("LightningModule hook", "on_fit_end")),
    pytest.param("on_train_start", marks=compat("LightningModule hook", "on_train_start")),
    pytest.param("on_train_end", marks=compat("LightningModule hook", "on_train_end")),
    pytest.param("on_validation_start", marks=compat("LightningModule hook", "on_validation_start")),
    pytest.param("on_validation_end", marks=compat("LightningModule hook", "on_validation_end")),
    pytest.param("on_test_start", marks=compat("LightningModule hook", "on_test_start")),
    pytest.param("on_test_end", marks=compat("LightningModule hook", "on_test_end")),
    pytest.param("on_predict_start", marks=compat("LightningModule hook", "on_predict_start")),
    pytest.param("on_predict_end", marks=compat("LightningModule hook", "on_predict_end")),
    pytest.param("on_train_batch_start", marks=compat("LightningModule hook", "on_train_batch_start")),
    pytest.param("on_train_batch_end", marks=compat("LightningModule hook", "on_train_batch_end")),
    pytest.param("on_validation_batch_start", marks=compat("LightningModule hook", "on_validation_batch_start")),
    pytest.param("on_validation_batch_end", marks=compat("LightningModule hook", "on_validation_batch_end")),
    pytest.param("on_test_batch_start", marks=compat("LightningModule hook", "on_test_batch_start")),
    pytest.param("on_test_batch_end", marks=compat("LightningModule hook", "on_test_batch_end")),
    pytest.param("on_predict_batch_start", marks=compat("LightningModule hook", "on_predict_batch_start")),
    pytest.param("on_predict_batch_end", marks=compat("LightningModule hook", "on_predict_batch_end")),
    pytest.param(
        "on_validation_model_zero_grad", marks=compat("LightningModule hook", "on_validation_model_zero_grad")
    ),
    pytest.param("on_validation_model_eval", marks=compat("LightningModule hook", "on_validation_model_eval")),
    pytest.param("on_validation_model_train", marks=compat("LightningModule hook", "on_validation_model_train")),
    pytest.param("on_test_model_eval", marks=compat("LightningModule hook", "on_test_model_eval")),
    pytest.param("on_test_model_train", marks=compat("LightningModule hook", "on_test_model_train")),
    pytest.param("on_predict_model_eval", marks=compat("LightningModule hook", "on_predict_model_eval")),
    pytest.param("on_train_epoch_start", marks=compat("LightningModule hook", "on_train_epoch_start")),
    pytest.param("on_train_epoch_end", marks=compat("LightningModule hook", "on_train_epoch_end")),
    pytest.param("on_validation_epoch_start", marks=compat("LightningModule hook", "on_validation_epoch_start")),
    pytest.param("on_validation_epoch_end", marks=compat("LightningModule hook", "on_validation_epoch_end")),
    pytest.param("on_test_epoch_start", marks=compat("LightningModule hook", "on_test_epoch_start")),
    pytest.param("on_test_epoch_end", marks=compat("LightningModule hook", "on_test_epoch_end")),
    pytest.param("on_predict_epoch_start", marks=compat("LightningModule hook", "on_predict_epoch_start")),
    pytest.param("on_predict_epoch_end", marks=compat("LightningModule hook", "on_predict_epoch_end")),
    pytest.param("on_before_zero_grad", marks=compat("LightningModule hook", "on_before_zero_grad")),
    pytest.param("on_before_backward", marks=compat("LightningModule hook", "on_before_backward")),
    pytest.param("on_after_backward", marks=compat("LightningModule hook", "on_after_backward")),
    pytest.param("on_before_optimizer_step", marks=compat("LightningModule hook", "on_before_optimizer_step")),
    pytest.param("configure_model", marks=compat("LightningModule hook", "configure_model")),
    pytest.param("prepare_data", marks=compat("LightningModule hook", "prepare_data")),
    pytest.param("setup", marks=compat("LightningModule hook", "setup")),
    pytest.param("teardown", marks=compat("LightningModule hook", "teardown")),
    pytest.param("train_dataloader", marks=compat("LightningModule hook", "train_dataloader")),
    pytest.param("test_dataloader", marks=compat("LightningModule hook", "test_dataloader")),
    pytest.param("val_dataloader", marks=compat("LightningModule hook", "val_dataloader")),
    pytest.param("predict_dataloader", marks=compat("LightningModule hook", "predict_dataloader")),
    pytest.param("transfer_batch_to_device", marks=compat("LightningModule hook", "transfer_batch_to_device")),
    pytest.param("on_before_batch_transfer", marks=compat("LightningModule hook", "on_before_batch_transfer")),
    pytest.param("on_after_batch_transfer", marks=compat("LightningModule hook", "on_after_batch_transfer")),
    pytest.param("on_load_checkpoint", marks=compat("LightningModule hook", "on_load_checkpoint")),
    pytest.param("on_save_checkpoint", marks=compat("LightningModule hook", "on_save_checkpoint")),
    pytest.param("training_step", marks=compat("LightningModule hook", "training_step")),
    pytest.param("validation_step", marks=compat("LightningModule hook", "validation_step")),
    pytest.param("test_step", marks=compat("LightningModule hook", "test_step")),
    pytest.param("predict_step", marks=compat("LightningModule hook", "predict_step")),
    pytest.param("configure_callbacks", marks=compat("LightningModule hook", "configure_callbacks")),
    pytest.param("configure_optimizers", marks=compat("LightningModule hook", "configure_optimizers")),
    pytest.param("configure_gradient_clipping", marks=compat("LightningModule hook", "configure_gradient_clipping")),
    pytest.param("lr_scheduler_step", marks=compat("LightningModule hook", "lr_scheduler_step")),
    pytest.param("optimizer_step", marks=compat("LightningModule hook", "optimizer_step")),
    pytest.param("optimizer_zero_grad", marks=compat("LightningModule hook", "optimizer_zero_grad")),
    pytest.param("backward", marks=compat("LightningModule hook", "backward")),
]


@pytest.mark.parametrize("hook", OF_MODULES)
def test_hook_of_the_module(runs: Any, hook: str) -> None:
    _assert_hook_alike(runs, f"module.{hook}")


OF_CALLBACKS = [
    pytest.param("setup", marks=compat("Callback hook", "setup")),
    pytest.param("teardown", marks=compat("Callback hook", "teardown")),
    pytest.param("on_fit_start", marks=compat("Callback hook", "on_fit_start")),
    pytest.param("on_fit_end", marks=compat("Callback hook", "on_fit_end")),
    pytest.param("on_sanity_check_start", marks=compat("Callback hook", "on_sanity_check_start")),
    pytest.param("on_sanity_check_end", marks=compat("Callback hook", "on_sanity_check_end")),
    pytest.param("on_train_batch_start", marks=compat("Callback hook", "on_train_batch_start")),
    pytest.param("on_train_batch_end", marks=compat("Callback hook", "on_train_batch_end")),
    pytest.param("on_train_epoch_start", marks=compat("Callback hook", "on_train_epoch_start")),
    pytest.param("on_train_epoch_end", marks=compat("Callback hook", "on_train_epoch_end")),
    pytest.param("on_validation_epoch_start", marks=compat("Callback hook", "on_validation_epoch_start")),
    pytest.param("on_validation_epoch_end", marks=compat("Callback hook", "on_validation_epoch_end")),
    pytest.param("on_test_epoch_start", marks=compat("Callback hook", "on_test_epoch_start")),
    pytest.param("on_test_epoch_end", marks=compat("Callback hook", "on_test_epoch_end")),
    pytest.param("on_predict_epoch_start", marks=compat("Callback hook", "on_predict_epoch_start")),
    pytest.param("on_predict_epoch_end", marks=compat("Callback hook", "on_predict_epoch_end")),
    pytest.param("on_validation_batch_start", marks=compat("Callback hook", "on_validation_batch_start")),
    pytest.param("on_validation_batch_end", marks=compat("Callback hook", "on_validation_batch_end")),
    pytest.param("on_test_batch_start", marks=compat("Callback hook", "on_test_batch_start")),
    pytest.param("on_test_batch_end", marks=compat("Callback hook", "on_test_batch_end")),
    pytest.param("on_predict_batch_start", marks=compat("Callback hook", "on_predict_batch_start")),
    pytest.param("on_predict_batch_end", marks=compat("Callback hook", "on_predict_batch_end")),
    pytest.param("on_train_start", marks=compat("Callback hook", "on_train_start")),
    pytest.param("on_train_end", marks=compat("Callback hook", "on_train_end")),
    pytest.param("on_validation_start", marks=compat("Callback hook", "on_validation_start")),
    pytest.param("on_validation_end", marks=compat("Callback hook", "on_validation_end")),
    pytest.param("on_test_start", marks=compat("Callback hook", "on_test_start")),
    pytest.param("on_test_end", marks=compat("Callback hook", "on_test_end")),
    pytest.param("on_predict_start", marks=compat("Callback hook", "on_predict_start")),
    pytest.param("on_predict_end", marks=compat("Callback hook", "on_predict_end")),
    pytest.param("on_exception", marks=compat("Callback hook", "on_exception")),
    pytest.param("state_dict", marks=compat("Callback hook", "state_dict")),
    pytest.param("load_state_dict", marks=compat("Callback hook", "load_state_dict")),
    pytest.param("on_save_checkpoint", marks=compat("Callback hook", "on_save_checkpoint")),
    pytest.param("on_load_checkpoint", marks=compat("Callback hook", "on_load_checkpoint")),
    pytest.param("on_before_backward", marks=compat("Callback hook", "on_before_backward")),
    pytest.param("on_after_backward", marks=compat("Callback hook", "on_after_backward")),
    pytest.param("on_before_optimizer_step", marks=compat("Callback hook", "on_before_optimizer_step")),
    pytest.param("on_before_zero_grad", marks=compat("Callback hook", "on_before_zero_grad")),
]


@pytest.mark.parametrize("hook", OF_CALLBACKS)
def test_hook_of_the_callback(runs: Any, hook: str) -> None:
    _assert_hook_alike(runs, f"callback.{hook}")


OF_DATAMODULES = [
    pytest.param("prepare_data", marks=compat("LightningDataModule", "prepare_data")),
    pytest.param("setup", marks=compat("LightningDataModule", "setup")),
    pytest.param("teardown", marks=compat("LightningDataModule", "teardown")),
    pytest.param("train_dataloader", marks=compat("LightningDataModule", "train_dataloader")),
    pytest.param("test_dataloader", marks=compat("LightningDataModule", "test_dataloader")),
    pytest.param("val_dataloader", marks=compat("LightningDataModule", "val_dataloader")),
    pytest.param("predict_dataloader", marks=compat("LightningDataModule", "predict_dataloader")),
    pytest.param("transfer_batch_to_device", marks=compat("LightningDataModule", "transfer_batch_to_device")),
    pytest.param("on_before_batch_transfer", marks=compat("LightningDataModule", "on_before_batch_transfer")),
    pytest.param("on_after_batch_transfer", marks=compat("LightningDataModule", "on_after_batch_transfer")),
    pytest.param("state_dict", marks=compat("LightningDataModule", "state_dict")),
    pytest.param("load_state_dict", marks=compat("LightningDataModule", "load_state_dict")),
    pytest.param("on_exception", marks=compat("LightningDataModule", "on_exception")),
]


@pytest.mark.parametrize("hook", OF_DATAMODULES)
def test_hook_of_the_datamodule(runs: Any, hook: str) -> None:
    _assert_hook_alike(runs, f"datamodule.{hook}")


def test_every_hook_is_compared() -> None:
    """A newer Lightning may have more hooks than these."""
    for hooks, known in (
        (OF_MODULES, MODULE_HOOKS),
        (OF_CALLBACKS, CALLBACK_HOOKS),
        (OF_DATAMODULES, DATAMODULE_HOOKS),
    ):
        assert {hook.values[0] for hook in hooks} >= set(known)
