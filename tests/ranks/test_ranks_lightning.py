"""What Lightning offers over processes, beside DDP: samplers, seeds, logs, metrics, files, predictions."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from tests.support.forks import Forks
from tests.support.parity import assert_alike, make_trainer
from tests.support.rank_runs.launch import run_ranks, values_of_ranks
from tests.support.small import CLASSES, WIDTH, Small

RANKS = 2
ROWS = 24
KINDS = ("ddp", "roundpipe")


class Rows(Dataset[tuple[Tensor, Tensor, int]]):
    """Rows that know their number; a worker adds noise of its own seed."""

    def __init__(self, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(ROWS, WIDTH, generator=generator)
        self.y = torch.randint(CLASSES, (ROWS,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = self.noise * (torch.randn(()) + random.random() + np.random.rand())
        return self.x[index] + noise, self.y[index], index


class Reporting(Small):
    """Logs in all ways, with metrics, and remembers which rows it has seen; normalizes with statistics of rank 0."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.seen: list[tuple[str, list[int], float]] = []
        if normed:
            self.body.append(nn.BatchNorm1d(WIDTH))

    def note(self, stage: str, batch: Any) -> Tensor:
        x, y, index = batch
        self.seen.append((stage, index.tolist(), float(x.sum())))
        self.accuracy.update(self(x), y)
        loss: Tensor = self.loss((x, y))
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank), sync_dist=True, reduce_fx="sum")
        self.seen.append(("train", batch[2].tolist(), float(batch[0].sum())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch[:2])
        self.log("train", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("own", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch[:2]), sync_dist=True)
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)


class Writer(BasePredictionWriter):
    """Keeps what each rank is to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *args: int
    ) -> None:
        self.written.append((prediction.clone(), batch_indices))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written.append((predictions, batch_indices))


def trainer_of(kind: str, folder: str, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    """A trainer that logs, saves and checks, of DDP or of RoundPipe."""
    common: dict[str, Any] = {
        "logger": CSVLogger(f"{folder}/{kind}", version=0),
        "enable_checkpointing": True,
        "max_epochs": 3,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 1,
        "callbacks": callbacks,
        **settings,
    }
    if kind == "roundpipe":
        return make_trainer(**{"num_microbatches": 2, "devices": 4, **common})
    return L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend="gloo"),
        enable_progress_bar=False,
        enable_model_summary=False,
        **common,
    )


def loader(noise: float = 0.0, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Rows(noise), batch_size=4, **settings)


def fitted(kind: str, folder: str) -> dict[str, Any]:
    L.seed_everything(11, workers=True, verbose=False)
    module, writer = Reporting(), Writer()
    best = ModelCheckpoint(f"{folder}/{kind}/files", monitor="val", save_last=True)
    stop = EarlyStopping("val", patience=0, min_delta=0.02)
    trainer = trainer_of(kind, folder, [best, stop, writer])
    trainer.fit(module, loader(0.1, shuffle=True, num_workers=2), loader())
    found: dict[str, Any] = {"fit": dict(trainer.callback_metrics), "epochs": trainer.current_epoch}
    found["best"] = Path(best.best_model_path).name
    found["score"] = float(best.best_model_score)
    found["test"] = trainer.test(module, loader(), verbose=False)
    found["predictions"] = trainer.predict(module, loader())
    found["written"] = writer.written
    found["seen"] = module.seen
    found["state"] = dict(module.state_dict())
    resumed = Reporting()
    trainer = trainer_of(kind, folder, [], max_epochs=5)
    trainer.fit(resumed, loader(shuffle=True), loader(), ckpt_path=f"{folder}/{kind}/files/last.ckpt")
    found["resumed"] = dict(resumed.state_dict())
    found["steps"] = trainer.global_step
    return found


def everything(folder: str) -> dict[str, Any]:
    """With DDP and with RoundPipe, what came of each function."""
    found: dict[str, Any] = {kind: fitted(kind, folder) for kind in KINDS}
    return {**found, "normed": normed(f"{folder}/normed"), "contrasted": contrasted(f"{folder}/contrasted", 1)}


@pytest.fixture(scope="module")
def found(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where files are, and what each rank has found."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, values_of_ranks(forks, folder, RANKS, everything, str(folder))


@pytest.mark.parametrize(
    "what",
    ["seen", "fit", "epochs", "best", "score", "test", "predictions", "written", "state", "resumed", "steps"],
)
def test_ranks_see_the_same_as_with_ddp(found: tuple[Path, list[dict[str, Any]]], what: str) -> None:
    for one in found[1]:
        assert_alike(one["roundpipe"][what], one["ddp"][what], what, rtol=1e-3, atol=1e-5)


def test_rank_0_alone_writes_files(found: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = found[0]
    files = {
        kind: sorted(str(path.relative_to(folder / kind)) for path in (folder / kind).rglob("*") if path.is_file())
        for kind in KINDS
    }
    assert files["roundpipe"] == files["ddp"]
    lines = {kind: len((next((folder / kind).rglob("metrics.csv"))).read_text().splitlines()) for kind in files}
    assert lines["roundpipe"] == lines["ddp"] > 1


class Statistics(L.Callback):
    """Keeps the buffers that a rank evaluates with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.seen.append({name: buffer.clone() for name, buffer in pl_module.named_buffers()})


def normed(folder: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        module = Reporting(normed=True)
        with torch.no_grad():
            module.body[-1].running_mean.fill_(float(os.environ["RANK"]))
        settings: dict[str, Any] = {} if kind == "ddp" else {"num_microbatches": 1}
        statistics = Statistics()
        # After every step: the first one runs its units in another way than those that follow.
        trainer = trainer_of(kind, folder, [statistics], val_check_interval=1, max_epochs=1, **settings)
        trainer.fit(module, loader(), loader())
        found[kind] = (dict(module.state_dict()), dict(trainer.callback_metrics), statistics.seen)
    return found


def test_buffers_are_those_of_rank_0(found: tuple[Path, list[dict[str, Any]]]) -> None:
    ranks = [one["normed"] for one in found[1]]
    assert_alike(ranks[0]["roundpipe"], ranks[0]["ddp"], rtol=1e-3, atol=1e-5)
    for one in ranks:
        assert_alike(one["roundpipe"][1:], one["ddp"][1:], rtol=1e-3, atol=1e-5)


class Contrasting(Small):
    """Its loss compares the rows of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.all_gather(self(batch[0]), sync_grads=True).reshape(-1, CLASSES)
        loss: Tensor = torch.logsumexp(found @ found.T, dim=1).mean()
        return loss


def contrasted(folder: str, num_microbatches: int) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        module = Contrasting()
        settings = {} if kind == "ddp" else {"num_microbatches": num_microbatches}
        trainer_of(kind, folder, [], max_epochs=1, **settings).fit(module, loader())
        found[kind] = dict(module.state_dict())
    return found


def test_a_loss_over_the_rows_of_all_ranks_is_that_of_ddp(found: tuple[Path, list[dict[str, Any]]]) -> None:
    start = Contrasting().state_dict()
    for one in (rank["contrasted"] for rank in found[1]):
        assert_alike(one["roundpipe"], one["ddp"], rtol=1e-3, atol=1e-5)
        assert not torch.allclose(one["ddp"]["head.weight"], start["head.weight"], atol=1e-3)


def test_what_waits_for_ranks_in_the_step_of_a_microbatch_is_refused(forks: Forks, tmp_path: Path) -> None:
    for end in run_ranks(forks, tmp_path, RANKS, contrasted, str(tmp_path), 2):
        assert end.status == 1
        assert "all_gather waits for the other ranks, and is called in a step" in end.output
