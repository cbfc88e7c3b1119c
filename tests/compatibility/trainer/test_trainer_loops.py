"""Arguments of the Trainer that decide which batches are run: the same batches in the same order as plain Lightning.

Every hook of a callback is recorded (see [Note: recorded hooks]). How many batches there are shows that plain Lightning
has listened to the argument: otherwise the comparison would show nothing.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from tests.compatibility.hooks.hook_recording import CALLBACK_HOOKS, Recording, names_of
from tests.support.models import AllSteps
from tests.support.parity import Run, both, compare, fit, make_loader, make_trainer
from tests.support.rows import compat


class Learner(AllSteps):
    """Asks to stop after batch ``stop_at`` of every epoch."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.stop_at:
            self.trainer.should_stop = True


def run(kind: str, stop_at: int | None = None, evaluates: bool = False, **settings: Any) -> dict[str, Any]:
    """Trains, and on request tests and predicts; gives everything that can be compared."""
    recording = Recording(os.getcwd())
    callback = recording.recorded("callback", L.Callback, CALLBACK_HOOKS)()
    loaders = make_loader(20, shuffle=True), make_loader(10, 4)
    trained = fit(kind, partial(Learner, stop_at), *loaders, callbacks=[callback], seed=11, **settings)
    trainer, module = trained.trainer, trained.module
    found = {"hooks": recording.entries, **trained.results}
    found["epochs"] = trainer.fit_loop.epoch_progress.state_dict()
    if evaluates:
        found["tested"] = trainer.test(module, make_loader(12, 4), verbose=False)
        found["predicted"] = trainer.predict(module, make_loader(9, 4))
    return found


# By name: the settings, and how many batches plain Lightning trains with, validates, tests and predicts with them, and
# how often it updates. An epoch has 3 batches for the training and 3 of each evaluation.
LOOPS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "fast_dev_run": ({"fast_dev_run": 2, "evaluates": True}, (2, 2, 2, 2, 2)),
    "min_epochs": ({"min_epochs": 2, "max_epochs": 3, "stop_at": 0}, (6, 6, 0, 0, 6)),
    "min_steps": ({"min_steps": 5, "max_epochs": 3, "stop_at": 0}, (5, 6, 0, 0, 5)),
    "max_steps": ({"max_epochs": -1, "max_steps": 5}, (5, 3, 0, 0, 5)),
    "max_time": ({"max_time": timedelta(0), "max_epochs": 2}, (0, 0, 0, 0, 0)),
    "limits": (
        {
            "limit_train_batches": 0.7,
            "limit_val_batches": 1,
            "limit_test_batches": 2,
            "limit_predict_batches": 0.5,
            "evaluates": True,
        },
        (2, 1, 2, 1, 2),
    ),
    "overfit": ({"overfit_batches": 0.7, "max_epochs": 2}, (4, 4, 0, 0, 4)),
    "val_check": (
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
        (6, 3, 0, 0, 6),
    ),
    "check_val, sanity, accumulate": (
        {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 2, "accumulate_grad_batches": 2, "max_epochs": 2},
        (6, 5, 0, 0, 4),
    ),
}


@compat(
    "Trainer argument",
    "fast_dev_run; max_epochs; min_epochs; max_steps; min_steps; max_time; limit_train_batches; limit_val_batches; "
    "limit_test_batches; limit_predict_batches; overfit_batches; val_check_interval; check_val_every_n_epoch; "
    "num_sanity_val_steps; accumulate_grad_batches",
)
@pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set.*")
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.parametrize("name", LOOPS)
def test_the_same_batches_in_the_same_order(name: str) -> None:
    settings, expected = LOOPS[name]
    plain = both(lambda kind: run(kind, **settings))
    hooks = names_of(plain["hooks"])
    batches = [f"{stage}_batch_start" for stage in ("train", "validation", "test", "predict")]
    assert tuple(hooks.count(f"callback.on_{hook}") for hook in (*batches, "before_optimizer_step")) == expected


# --- the loader of an epoch -------------------------------------------------------------------------------------------


@compat("Trainer argument", "reload_dataloaders_every_n_epochs")
def test_loaders_are_made_anew() -> None:
    def act(kind: str) -> Any:
        module, made = Learner(), []

        def loader(what: str, batch_size: int) -> DataLoader[Any]:
            made.append((what, module.current_epoch))
            return make_loader(8 + len(made), batch_size)

        module.train_dataloader = partial(loader, "train", 4)
        module.val_dataloader = partial(loader, "validation", 5)
        make_trainer(kind, max_epochs=3, reload_dataloaders_every_n_epochs=2).fit(module)
        return made, dict(module.state_dict())

    made, _ = both(act)
    assert [epoch for what, epoch in made if what == "train"] == [0, 2]


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Any:
        return iter(reversed(range(self.num_rows)))

    def __len__(self) -> int:
        return self.num_rows


@compat("Trainer argument", "use_distributed_sampler", note="No effect, as on one device: there is one process.")
def test_samplers_are_kept() -> None:
    loaders = make_loader(20, sampler=Backwards(20)), make_loader(10, 4)
    for run in compare(Learner, *loaders, use_distributed_sampler=True):
        assert type(run.trainer.train_dataloader.sampler) is Backwards
        assert type(run.trainer.val_dataloaders.sampler) is torch.utils.data.SequentialSampler


@compat("Trainer argument", "barebones")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)` but `Trainer\\(barebones=True")
def test_barebones_switches_off_what_plain_switches_off() -> None:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
    settings = {"barebones": True, "num_sanity_val_steps": None, **off}
    for run in compare(Learner, None, make_loader(10, 4), also=names_of_callbacks, **settings):
        assert not run.trainer.callback_metrics
        assert not run.trainer.loggers


def names_of_callbacks(run: Run) -> list[str]:
    return [type(callback).__name__ for callback in run.trainer.callbacks]
