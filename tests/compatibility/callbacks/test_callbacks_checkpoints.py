"""Callbacks that write checkpoints: the same files with the same contents as plain Lightning, and they resume."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint

from tests.compatibility.versions import known
from tests.support.models import Logs
from tests.support.parity import both, make_loader, make_trainer
from tests.support.rows import compat


class OwnCheckpoint(Checkpoint):
    """The base class tells Lightning that this callback saves checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"own-{trainer.current_epoch}.ckpt", weights_only=False)


class Scheduled(Logs):
    """With a scheduler, and a loss that is logged per epoch as well."""

    fails_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.fails_at:
            self.body(batch[0])
            raise ValueError("a bad batch")
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def trained(kind: str, callbacks: list[Any], path: Any = None, module: Any = None, **settings: Any) -> Any:
    """The module after a run that may write checkpoints, and goes on from one."""
    module = Scheduled() if module is None else module
    trainer = make_trainer(kind, enable_checkpointing=True, callbacks=callbacks, **settings)
    trainer.fit(module, make_loader(), make_loader(10, 4), ckpt_path=path, **known(trainer.fit, weights_only=False))
    return module


def every_mode(folder: Path) -> list[Any]:
    """One callback per way of saving, each with a folder of its own."""
    return [
        ModelCheckpoint(folder / "min", monitor="val", save_top_k=2, save_last=True, save_on_train_epoch_end=False),
        ModelCheckpoint(folder / "max", "{epoch}-{step}", monitor="loss_epoch", mode="max", save_last="link"),
        ModelCheckpoint(folder / "train-end", monitor="loss_step", save_on_train_epoch_end=True, save_top_k=3),
        ModelCheckpoint(folder / "steps", every_n_train_steps=2, save_top_k=-1, save_weights_only=True),
        ModelCheckpoint(folder / "epochs", every_n_epochs=2, save_top_k=-1, enable_version_counter=False),
        ModelCheckpoint(folder / "often", train_time_interval=timedelta(microseconds=1), save_top_k=1),
        ModelCheckpoint(folder / "seldom", train_time_interval=timedelta(hours=1), save_top_k=-1),
        OwnCheckpoint(folder / "own"),
    ]


def read(folder: Path) -> dict[str, Any]:
    """Name -> contents of every checkpoint below ``folder``, whose name is left out of the paths in them."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {cleaned(key): cleaned(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [cleaned(entry) for entry in value]
        return value.replace(str(folder), "") if isinstance(value, str) else value

    paths = sorted(folder.rglob("*.ckpt"))
    return {str(path.relative_to(folder)): cleaned(torch.load(path, weights_only=False)) for path in paths}


@compat("Callback", "ModelCheckpoint; Checkpoint")
@compat("Migration", "state of loops and callbacks in a checkpoint")
def test_files_and_contents(tmp_path: Path) -> None:
    """Every mode in one run, then a resumed run whose callbacks go on from their states."""

    def act(kind: str) -> Any:
        root = tmp_path / kind
        trained(kind, every_mode(root / "first"), max_epochs=3)
        module = trained(kind, every_mode(root / "again"), root / "first" / "own" / "own-1.ckpt", max_epochs=4)
        return read(root), dict(module.state_dict())

    files, _ = both(act)
    folders = [path.rsplit("/", 1)[0] for path in files]
    assert [folders.count(f"first/{name}") for name in ("min", "steps", "epochs", "often", "seldom")] == [3, 4, 1, 1, 0]


@compat("Callback", "OnExceptionCheckpoint; ModelCheckpoint")
def test_saved_on_an_exception(tmp_path: Path) -> None:
    """Micro-batches may have been under way; what is saved is the state after the last whole step."""

    class Keeps(OnExceptionCheckpoint):
        """Lightning removes the file when the trainer is torn down."""

        def teardown(self, *_: Any, **__: Any) -> None:
            pass

    def act(kind: str) -> Any:
        folder, failing = tmp_path / kind, Scheduled()
        failing.fails_at = 4
        callbacks = [Keeps(folder), ModelCheckpoint(folder / "model", **known(ModelCheckpoint, save_on_exception=True))]
        with pytest.raises(ValueError, match="a bad batch"):
            trained(kind, callbacks, module=failing, max_epochs=3)
        found = read(folder)
        quiet = [ModelCheckpoint(tmp_path / "again", save_top_k=0)]
        return found, dict(trained(kind, quiet, folder / "on_exception.ckpt", max_epochs=3).state_dict())

    files, _ = both(act)
    assert files["on_exception.ckpt"]["global_step"] == 4
    assert len(files) >= 2
