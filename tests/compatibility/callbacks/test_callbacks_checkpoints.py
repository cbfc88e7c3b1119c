"""Callbacks that write checkpoints: the same files with the same contents as plain Lightning, and they resume."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from tests.support.rows import compat

KINDS = ("plain", "roundpipe")


class Counter(Callback):
    """A callback with a state of its own, and an entry of its own in the file."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.loaded: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["norm"] = float(sum(p.detach().norm() for p in pl_module.parameters()))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(checkpoint["norm"])


class OwnCheckpoint(Checkpoint):
    """The base class tells Lightning that this callback saves checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / f"own-{trainer.current_epoch}.ckpt", weights_only=False)


@pytest.fixture
def logs(small: Any) -> Any:
    """The small model with a scheduler, a logged training loss and a logged validation loss."""

    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    return Logs


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
        Counter(),
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


@compat("Callback", "ModelCheckpoint")
@compat("Callback", "Checkpoint")
@compat("Callback hook", "state_dict")
@compat("Callback hook", "load_state_dict")
@compat("Callback hook", "on_save_checkpoint")
@compat("Callback hook", "on_load_checkpoint")
def test_files_and_contents(logs: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, tmp_path: Path) -> None:
    """Every mode in one run, then a resumed run whose callbacks go on from their states."""
    found, trained = {}, {}
    for kind in KINDS:
        root = tmp_path / kind
        trainer = make_trainer(kind, max_epochs=3, enable_checkpointing=True, callbacks=every_mode(root / "first"))
        trainer.fit(logs(), make_loader(), make_loader(10, 4))
        module, callbacks = logs(), every_mode(root / "again")
        trainer = make_trainer(kind, max_epochs=4, enable_checkpointing=True, callbacks=callbacks)
        path = root / "first" / "own" / "own-1.ckpt"
        trainer.fit(module, make_loader(), make_loader(10, 4), ckpt_path=path, weights_only=False)
        found[kind] = read(root)
        trained[kind] = [dict(module.state_dict()), callbacks[-1].num_batches, callbacks[-1].loaded]
    folders = [path.rsplit("/", 1)[0] for path in found["plain"]]
    assert [folders.count(f"first/{name}") for name in ("min", "steps", "epochs", "often", "seldom")] == [3, 4, 1, 1, 0]
    assert trained["plain"][1] == 12, "the state of the callback was loaded"
    assert_alike(found["roundpipe"], found["plain"])
    assert_alike(trained["roundpipe"], trained["plain"])


@compat("Callback", "ModelCheckpoint")
@compat("Plugin", "AsyncCheckpointIO")
def test_written_by_a_thread(logs: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, tmp_path: Path) -> None:
    """The file holds the state of the step that it is named after, although training has gone on."""
    found = {}
    for kind in KINDS:
        callback = ModelCheckpoint(tmp_path / kind, every_n_train_steps=1, save_top_k=-1)
        settings = {"enable_checkpointing": True, "plugins": [AsyncCheckpointIO()]}
        make_trainer(kind, max_epochs=2, callbacks=[callback], **settings).fit(logs(), make_loader())
        found[kind] = read(tmp_path / kind)
    assert len(found["plain"]) == 6
    assert_alike(found["roundpipe"], found["plain"])


@compat("Callback", "OnExceptionCheckpoint")
@compat("Callback", "ModelCheckpoint")
def test_saved_on_an_exception(
    logs: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, tmp_path: Path
) -> None:
    """Micro-batches may have been under way; what is saved is the state after the last whole step."""

    class Fails(logs):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.trainer.global_step == 4:
                self.body(batch[0])
                raise ValueError("a bad batch")
            return super().training_step(batch, batch_idx)

    class Keeps(OnExceptionCheckpoint):
        """Lightning removes the file when the trainer is torn down."""

        def teardown(self, *_: Any, **__: Any) -> None:
            pass

    found, weights = {}, {}
    for kind in KINDS:
        folder = tmp_path / kind
        callbacks = [Keeps(folder), ModelCheckpoint(folder / "model", save_on_exception=True)]
        trainer = make_trainer(kind, max_epochs=3, enable_checkpointing=True, callbacks=callbacks)
        with pytest.raises(ValueError, match="a bad batch"):
            trainer.fit(Fails(), make_loader(), make_loader(10, 4))
        found[kind] = read(folder)
        module = Fails()
        module.fails = False
        again = make_trainer(kind, max_epochs=3)
        again.fit(module, make_loader(), make_loader(10, 4), ckpt_path=folder / "on_exception.ckpt", weights_only=False)
        weights[kind] = dict(module.state_dict())
    assert found["plain"]["on_exception.ckpt"]["global_step"] == 4
    assert len(found["plain"]) >= 2
    assert_alike(found["roundpipe"], found["plain"])
    assert_alike(weights["roundpipe"], weights["plain"])
