"""Learning rates and batch sizes: found, watched, and the run after the search, as in plain Lightning."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from tests.compatibility.versions import known
from tests.support.models import Logs
from tests.support.parity import both, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small


class Tuned(Logs):
    """Has a learning rate and a batch size that can be tuned, and its own data."""

    def __init__(self, batch_size: int = 8, rows: int = 40) -> None:
        super().__init__()
        self.learning_rate = 0.01
        self.batch_size = batch_size
        self.rows = rows
        self.sizes: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.state.fn == "validate":
            self.sizes.append(len(batch[0]))

    def train_dataloader(self) -> Any:
        return make_loader(self.rows, self.batch_size)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning collects garbage before every trial, which costs more here than the trial."""
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)


@compat("Callback", "LearningRateFinder")
def test_learning_rate() -> None:
    """By the tuner and by the callback: the same curve, the same suggestion, the same training after it."""

    def make() -> Tuned:
        module = Tuned(batch_size=4, rows=60)
        module.val_dataloader = lambda: make_loader(8)  # all of it is validated on in a search
        return module

    def act(kind: str) -> Any:
        module = make()
        finder = Tuner(make_trainer(kind)).lr_find(module, max_lr=0.5, num_training=15)
        tuned = [finder.results, finder.suggestion(), module.learning_rate, dict(module.state_dict())]
        callback = LearningRateFinder(max_lr=0.5, num_training_steps=15, mode="linear", attr_name="learning_rate")
        module, trainer = make(), make_trainer(kind, callbacks=[callback])
        trainer.fit(module)
        assert module.learning_rate == callback.optimal_lr.suggestion() != 0.01
        assert len(finder.results["loss"]) == 15
        assert trainer.global_step in (0, 15), "Lightning 2.5.0 does not train after a search"
        state = [trainer.optimizers[0].state_dict(), dict(module.state_dict()), trainer.global_step]
        return tuned, callback.optimal_lr.results, state

    both(act)


@compat("Callback", "BatchSizeFinder")
def test_batch_size_up_to_the_number_of_rows() -> None:
    """Without a limit of memory: the same sizes are tried, and weights and counters are as before the search."""

    def act(kind: str) -> Any:
        callback = BatchSizeFinder(steps_per_trial=1, init_val=8)
        module, trainer = Tuned(), make_trainer(kind, callbacks=[callback])
        trainer.fit(module)
        state = [dict(module.state_dict()), trainer.optimizers[0].state_dict(), trainer.global_step]
        return module.sizes, callback.optimal_batch_size, module.batch_size, state

    assert both(act)[0] == [8, 16, 32, 40, 40], "four trials, and the training"


# --- the search ends where the memory of the pool ends -----------------------------------------------------------

LIMIT = 2600  # bytes, of which weights and gradients of a block take 336


def limited(num_microbatches: int | str = 4, **settings: Any) -> Any:
    """A trainer whose two devices have little memory."""
    options = {"virtual_copies": True, "device_memory_limit": LIMIT}
    return make_trainer(options=options, num_microbatches=num_microbatches, max_steps=1, **settings)


@compat("Callback", "BatchSizeFinder")
def test_the_limit_is_found() -> None:
    """The size that is found fits as it is; for the next larger one the step has to be run again."""
    callback = BatchSizeFinder("binsearch", steps_per_trial=1, init_val=8, **known(BatchSizeFinder, margin=0.0))
    module, trainer = Tuned(rows=1024), limited("auto", limit_val_batches=0, callbacks=[callback])
    trainer.fit(module)
    found = callback.optimal_batch_size
    assert found == module.batch_size == module.sizes[-1]
    assert 8 < found < max(module.sizes), "a larger one was tried"
    assert trainer.strategy.last_step.num_microbatches == 4
    for size, expected in ((found, 4), (found + 1, 8)):
        trainer = limited("auto", limit_val_batches=0)
        trainer.fit(Tuned(size, rows=1024))
        assert trainer.strategy.last_step.num_microbatches == expected


@compat("Callback", "BatchSizeFinder")
def test_powers_by_the_tuner() -> None:
    """After the search, ``fit`` runs steps again that do not fit, as ever."""
    module, trainer = Tuned(rows=1024), limited(limit_val_batches=0)
    found = Tuner(trainer).scale_batch_size(module, steps_per_trial=1, init_val=8)
    assert found == module.batch_size == max(module.sizes) // 2
    assert module.sizes.count(2 * found) == 1
    module.batch_size = 2 * found
    trainer.fit(module)
    assert trainer.strategy.last_step.num_microbatches == 8


@compat("Callback", "BatchSizeFinder")
def test_the_limit_of_evaluation() -> None:
    callback = BatchSizeFinder(steps_per_trial=1, init_val=16)
    module = Tuned(rows=1024)
    limited(callbacks=[callback], limit_val_batches=1).validate(module, verbose=False)
    assert 16 < callback.optimal_batch_size == max(module.sizes) // 2


# --- what is logged ----------------------------------------------------------------------------------------------


@compat("Callback", "LearningRateMonitor")
def test_learning_rates_are_logged(tmp_path: Path) -> None:
    class Groups(Small):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.body.parameters(), "lr": 0.1}, {"params": self.head.parameters(), "name": "head"}]
            optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9, weight_decay=0.01)
            warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 0.2 * (step + 1)))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step", "name": "rate"}}

    def act(kind: str) -> Any:
        monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        logger = CSVLogger(tmp_path, name=kind)
        settings = {"max_epochs": 2, "callbacks": [monitor], "logger": logger, "log_every_n_steps": 1}
        make_trainer(kind, **settings).fit(Groups(), make_loader())
        table = (Path(logger.log_dir) / "metrics.csv").read_text(encoding="utf-8")
        return list(csv.DictReader(io.StringIO(table))), monitor.lrs

    rows, _ = both(act)
    assert {"rate/head", "rate/head-momentum", "rate/head-weight_decay"} <= set(rows[0])
    assert len(rows) == 6
