"""Learning rates and batch sizes: found, watched, and the run after the search, as in plain Lightning."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from tests.support.rows import compat

KINDS = ("plain", "roundpipe")


@pytest.fixture
def make_tuned(small: Any, make_loader: Any) -> Callable[..., Any]:
    """Makes the small model with a learning rate and a batch size that can be tuned, and its own data."""

    class Tuned(small):
        def __init__(self, batch_size: int, rows: int) -> None:
            super().__init__()
            self.learning_rate = 0.01
            self.batch_size = batch_size
            self.rows = rows
            self.sizes: list[int] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.sizes.append(len(batch[0]))

        def train_dataloader(self) -> Any:
            return make_loader(self.rows, self.batch_size)

        def val_dataloader(self) -> Any:
            return make_loader(self.rows, self.batch_size)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)

    return lambda batch_size=8, rows=40: Tuned(batch_size, rows)


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning collects garbage before every trial, which costs more here than the trial."""
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)


@compat("Callback", "LearningRateFinder")
def test_learning_rate(make_tuned: Any, make_trainer: Any, assert_alike: Any) -> None:
    """By the tuner and by the callback: the same curve, the same suggestion, the same training after it."""
    found = []
    for kind in KINDS:
        module = make_tuned(rows=120)
        finder = Tuner(make_trainer(kind)).lr_find(module, max_lr=0.5, num_training=15)
        tuned = [finder.results, finder.suggestion(), module.learning_rate, dict(module.state_dict())]
        callback = LearningRateFinder(max_lr=0.5, num_training_steps=15, mode="linear", attr_name="learning_rate")
        module, trainer = make_tuned(rows=120), make_trainer(kind, callbacks=[callback])
        trainer.fit(module)
        found.append(
            [tuned, callback.optimal_lr.results, trainer.optimizers[0].state_dict(), dict(module.state_dict())]
        )
        assert module.learning_rate == callback.optimal_lr.suggestion() != 0.01
        assert trainer.global_step == len(finder.results["loss"]) == 15
    assert_alike(found[1], found[0])


@compat("Callback", "BatchSizeFinder")
def test_batch_size_up_to_the_number_of_rows(make_tuned: Any, make_trainer: Any, assert_alike: Any) -> None:
    """Without a limit of memory: the same sizes are tried, and weights and counters are as before the search."""
    found = []
    for kind in KINDS:
        callback = BatchSizeFinder(steps_per_trial=1, init_val=8)
        module, trainer = make_tuned(), make_trainer(kind, callbacks=[callback])
        trainer.fit(module)
        state = [dict(module.state_dict()), trainer.optimizers[0].state_dict(), trainer.global_step]
        found.append([module.sizes, callback.optimal_batch_size, module.batch_size, state])
    assert found[0][0] == [8, 16, 32, 40, 40], "four trials, and the training"
    assert_alike(found[1], found[0])


@compat("Callback", "LearningRateMonitor")
def test_learning_rates_are_logged(small: Any, make_trainer: Any, make_loader: Any, tmp_path: Path) -> None:
    class Groups(small):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.body.parameters(), "lr": 0.1}, {"params": self.head.parameters(), "name": "head"}]
            optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9, weight_decay=0.01)
            warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.2 * (step + 1)))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step", "name": "rate"}}

    rows = []
    for kind in KINDS:
        monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        logger = CSVLogger(tmp_path, name=kind)
        make_trainer(kind, max_epochs=2, callbacks=[monitor], logger=logger, log_every_n_steps=1).fit(
            Groups(), make_loader()
        )
        rows.append(list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8"))))
        rows.append(monitor.lrs)
    assert {"rate/head", "rate/head-momentum", "rate/head-weight_decay"} <= set(rows[0][0])
    assert len(rows[0]) == 6
    assert rows[2:] == rows[:2]
