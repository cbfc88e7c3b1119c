"""Arguments of the Trainer that decide which batches are run: the same batches in the same order as plain Lightning.

A journal notes every hook around batches and epochs, with what the Trainer says about itself. Each argument must also
change the journal of plain Lightning: otherwise the comparison would show nothing.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from tests.support.rows import compat


class Journal(L.Callback):
    """What happened, in order."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def note(self, name: str, trainer: L.Trainer, *what: Any) -> None:
        stage = trainer.state.stage.value if trainer.state.stage is not None else None
        state = (stage, trainer.current_epoch, trainer.global_step, trainer.is_last_batch, trainer.should_stop)
        limits = (trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches)
        self.entries.append((name, state, limits, *what))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.note("train batch", trainer, batch_idx, batch[0][:, 0].tolist())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("train batch end", trainer, batch_idx)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.note("optimizer step", trainer)


def _noting(name: str) -> Callable[..., None]:
    def hook(self: Journal, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.note(name, trainer)

    return hook


def _noting_batch(name: str) -> Callable[..., None]:
    def hook(self: Journal, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(name, trainer, batch_idx, dataloader_idx, batch[0][:, 0].tolist())

    return hook


for _name in ("validation", "test", "predict"):
    setattr(Journal, f"on_{_name}_batch_start", _noting_batch(_name))
    setattr(Journal, f"on_{_name}_epoch_end", _noting(f"{_name} epoch end"))
for _name in ("on_fit_start", "on_sanity_check_start", "on_train_epoch_start", "on_train_epoch_end", "on_fit_end"):
    setattr(Journal, _name, _noting(_name))


def make_learner(small: type, *, stop_at: int | None = None) -> Any:
    """A module that validates, tests, predicts, and asks to stop after batch ``stop_at`` of every epoch."""

    class Learner(small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == stop_at:
                self.trainer.should_stop = True

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    return Learner()


@pytest.fixture
def run(small: Any, make_trainer: Any, make_loader: Any) -> Callable[..., dict[str, Any]]:
    """Trains, and on request tests and predicts; gives everything that can be compared."""

    def run_one(kind: str, stop_at: int | None = None, evaluates: bool = False, **settings: Any) -> dict[str, Any]:
        torch.manual_seed(11)
        journal, module = Journal(), make_learner(small, stop_at=stop_at)
        trainer = make_trainer(kind, callbacks=[journal], **settings)
        trainer.fit(module, make_loader(20, shuffle=True), make_loader(10, 4))
        fitted = dict(trainer.callback_metrics)
        state = [optimizer.state_dict() for optimizer in trainer.optimizers]
        tested = trainer.test(module, make_loader(12, 4), verbose=False) if evaluates else None
        predicted = trainer.predict(module, make_loader(9, 4)) if evaluates else None
        return {
            "journal": journal.entries,
            "weights": dict(module.state_dict()),
            "optimizer": state,
            "metrics": fitted,
            "tested": tested,
            "predicted": predicted,
            "progress": (trainer.current_epoch, trainer.global_step, trainer.fit_loop.epoch_progress.state_dict()),
        }

    return run_one


@pytest.fixture(scope="module")
def journals_without() -> dict[str, Any]:
    """Filled by the tests: journals of plain Lightning without the argument, by the settings."""
    return {}


TAKES_TIMES = "timedelta" in str(inspect.signature(L.Trainer.__init__).parameters["val_check_interval"].annotation)
# id: (settings, settings of the run that plain Lightning must differ from)
TWO_EPOCHS = {"max_epochs": 2}
EVALUATES = {"evaluates": True}
LOOPS: list[Any] = [
    pytest.param({"fast_dev_run": True}, {}, id="fast_dev_run", marks=compat("Trainer argument", "fast_dev_run")),
    pytest.param(
        {"fast_dev_run": 2, "evaluates": True},
        EVALUATES,
        id="fast_dev_run=2",
        marks=compat("Trainer argument", "fast_dev_run"),
    ),
    pytest.param(TWO_EPOCHS, {}, id="max_epochs", marks=compat("Trainer argument", "max_epochs")),
    pytest.param({"max_epochs": 0}, {}, id="max_epochs=0", marks=compat("Trainer argument", "max_epochs")),
    pytest.param(
        {"min_epochs": 2, "max_epochs": 3, "stop_at": 0},
        {"max_epochs": 3, "stop_at": 0},
        id="min_epochs",
        marks=compat("Trainer argument", "min_epochs"),
    ),
    pytest.param({"max_steps": 2}, {}, id="max_steps", marks=compat("Trainer argument", "max_steps")),
    pytest.param(
        {"max_epochs": -1, "max_steps": 5}, {}, id="endless epochs", marks=compat("Trainer argument", "max_steps")
    ),
    pytest.param(
        {"min_steps": 5, "max_epochs": 3, "stop_at": 0},
        {"max_epochs": 3, "stop_at": 0},
        id="min_steps",
        marks=compat("Trainer argument", "min_steps"),
    ),
    pytest.param(
        {"max_time": datetime.timedelta(0), "max_epochs": 2},
        TWO_EPOCHS,
        id="max_time",
        marks=compat("Trainer argument", "max_time"),
    ),
    pytest.param(
        {"limit_train_batches": 2}, {}, id="limit_train", marks=compat("Trainer argument", "limit_train_batches")
    ),
    pytest.param(
        {"limit_train_batches": 0.7},
        {},
        id="limit_train=0.7",
        marks=compat("Trainer argument", "limit_train_batches"),
    ),
    pytest.param({"limit_val_batches": 1}, {}, id="limit_val", marks=compat("Trainer argument", "limit_val_batches")),
    pytest.param({"limit_val_batches": 0}, {}, id="limit_val=0", marks=compat("Trainer argument", "limit_val_batches")),
    pytest.param(
        {"limit_test_batches": 2, "evaluates": True},
        EVALUATES,
        id="limit_test",
        marks=compat("Trainer argument", "limit_test_batches"),
    ),
    pytest.param(
        {"limit_predict_batches": 0.5, "evaluates": True},
        EVALUATES,
        id="limit_predict",
        marks=compat("Trainer argument", "limit_predict_batches"),
    ),
    pytest.param({"overfit_batches": 1}, {}, id="overfit", marks=compat("Trainer argument", "overfit_batches")),
    pytest.param(
        {"overfit_batches": 0.7, "max_epochs": 2},
        TWO_EPOCHS,
        id="overfit=0.7",
        marks=compat("Trainer argument", "overfit_batches"),
    ),
    pytest.param({"val_check_interval": 2}, {}, id="val_check", marks=compat("Trainer argument", "val_check_interval")),
    pytest.param(
        {"val_check_interval": 0.34}, {}, id="val_check=0.34", marks=compat("Trainer argument", "val_check_interval")
    ),
    pytest.param(
        {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
        TWO_EPOCHS,
        id="val_check across epochs",
        marks=[compat("Trainer argument", "val_check_interval"), compat("Trainer argument", "check_val_every_n_epoch")],
    ),
    pytest.param(
        {"val_check_interval": datetime.timedelta(0)},
        {},
        id="val_check by time",
        marks=[
            compat("Trainer argument", "val_check_interval"),
            pytest.mark.skipif(not TAKES_TIMES, reason="this version of Lightning knows no intervals in time"),
        ],
    ),
    pytest.param(
        {"check_val_every_n_epoch": 2, "max_epochs": 2},
        TWO_EPOCHS,
        id="check_val",
        marks=compat("Trainer argument", "check_val_every_n_epoch"),
    ),
    pytest.param(
        {"num_sanity_val_steps": 2}, {}, id="sanity", marks=compat("Trainer argument", "num_sanity_val_steps")
    ),
    pytest.param(
        {"num_sanity_val_steps": -1}, {}, id="sanity=-1", marks=compat("Trainer argument", "num_sanity_val_steps")
    ),
    pytest.param(
        {"accumulate_grad_batches": 2},
        {},
        id="accumulate",
        marks=compat("Trainer argument", "accumulate_grad_batches"),
    ),
]


@pytest.mark.filterwarnings("ignore:.*`max_epochs` was not set.*")
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
@pytest.mark.parametrize(("settings", "otherwise"), LOOPS)
def test_the_same_batches_in_the_same_order(
    run: Any, assert_alike: Any, journals_without: dict[str, Any], settings: dict[str, Any], otherwise: dict[str, Any]
) -> None:
    plain, ours = run("plain", **settings), run("roundpipe", **settings)
    assert ours["journal"] == plain["journal"]
    assert_alike(ours, plain)
    key = repr(otherwise)
    if key not in journals_without:
        journals_without[key] = run("plain", **otherwise)["journal"]
    assert plain["journal"] != journals_without[key]


# --- the loader of an epoch -------------------------------------------------------------------------------------------


@compat("Trainer argument", "reload_dataloaders_every_n_epochs")
@pytest.mark.parametrize(("every", "num_loaders"), [(0, 1), (2, 2)])
def test_loaders_are_made_anew(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, every: int, num_loaders: int
) -> None:
    def fit(kind: str) -> Any:
        module, made = make_learner(small), []

        def loader(what: str, batch_size: int) -> DataLoader[Any]:
            made.append((what, module.current_epoch))
            return make_loader(8 + len(made), batch_size)

        module.train_dataloader = partial(loader, "train", 4)
        module.val_dataloader = partial(loader, "validation", 5)
        make_trainer(kind, max_epochs=3, reload_dataloaders_every_n_epochs=every).fit(module)
        return made, dict(module.state_dict())

    plain, ours = fit("plain"), fit("roundpipe")
    assert [epoch for what, epoch in plain[0] if what == "train"] == [0, 2][:num_loaders]
    assert_alike(ours, plain)


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Any:
        return iter(reversed(range(self.num_rows)))

    def __len__(self) -> int:
        return self.num_rows


@compat("Trainer argument", "use_distributed_sampler", note="No effect, as on one device: there is one process.")
@pytest.mark.parametrize("flag", [True, False])
def test_samplers_are_kept(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, flag: bool) -> None:
    weights = []
    for kind in ("plain", "roundpipe"):
        module = make_learner(small)
        trainer = make_trainer(kind, use_distributed_sampler=flag)
        trainer.fit(module, make_loader(20, sampler=Backwards(20)), make_loader(10, 4))
        assert type(trainer.train_dataloader.sampler) is Backwards
        assert type(trainer.val_dataloaders.sampler) is torch.utils.data.SequentialSampler
        weights.append(dict(module.state_dict()))
    assert_alike(weights[1], weights[0])


@compat("Trainer argument", "barebones")
@pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)` but `Trainer\\(barebones=True")
def test_barebones_switches_off_what_plain_switches_off(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any
) -> None:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
    found = []
    for kind in ("plain", "roundpipe"):
        module = make_learner(small)
        trainer = make_trainer(kind, barebones=True, num_sanity_val_steps=None, **off)
        trainer.fit(module, make_loader(), make_loader(10, 4))
        assert not trainer.callback_metrics
        assert not trainer.loggers
        found.append([dict(module.state_dict()), [type(callback).__name__ for callback in trainer.callbacks]])
    assert_alike(found[1], found[0])
