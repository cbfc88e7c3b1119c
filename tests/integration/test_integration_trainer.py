"""The trainer and the module around a run: flags, several runs, copies, pickles, and what is left untouched."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_roundpipe import RoundPipeStrategy, VirtualLink
from tests.support.rows import compat, compat_each
from tests.support.small import Small


@compat("Trainer method", "fit")
def test_several_fits_with_one_trainer(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    states = []
    for kind in ("roundpipe", "plain"):
        trainer = make_trainer(kind)
        one, two = small(), small()
        trainer.fit(one, make_loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(one, make_loader())
        trainer.fit_loop.max_epochs = 3
        trainer.fit(two, make_loader(12, 4))
        states.append([dict(one.state_dict()), dict(two.state_dict()), trainer.global_step])
    assert_alike(*states)


def test_several_trainers_with_one_module(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    states = []
    for kinds in (("roundpipe", "roundpipe", "plain"), ("plain", "plain", "plain")):
        module = small()
        for rows, kind in zip((20, 12, 9), kinds, strict=True):
            make_trainer(kind).fit(module, make_loader(rows))
        states.append(dict(module.state_dict()))
    assert_alike(*states)


def test_another_module_tree_between_fits(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    states = []
    for kind in ("roundpipe", "plain"):
        module = small()
        make_trainer(kind).fit(module, make_loader())
        torch.manual_seed(1)
        module.body[2] = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))
        module.head = nn.Linear(6, 3)
        make_trainer(kind).fit(module, make_loader())
        states.append(dict(module.state_dict()))
    assert_alike(*states)


def test_parameters_replaced_while_training(small: Any, fit_both: Any, assert_alike: Any) -> None:
    class Replaces(small):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.head.weight.data = self.head.weight.data.clone() * 0.5
                with torch.no_grad():
                    self.body[0][0].weight.zero_()

    plain, ours = fit_both(Replaces, max_epochs=2)
    assert_alike(dict(ours.module.state_dict()), dict(plain.module.state_dict()))


@compat("LightningModule hook", "configure_model")
def test_module_built_in_configure_model(fit_both: Any, assert_alike: Any) -> None:
    class Late(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(5)
                self.net = nn.Sequential(
                    *[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], nn.Linear(6, 3)
                )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plain, ours = fit_both(Late)
    assert_alike(dict(ours.module.state_dict()), dict(plain.module.state_dict()))


def test_module_is_left_as_it_was(small: Any, make_trainer: Any, make_loader: Any) -> None:
    class Own(small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

    module = Own()
    names = {name: set(child.__dict__) for name, child in module.named_modules()}
    parameters = {name: id(parameter) for name, parameter in module.named_parameters()}
    classes = {name: type(child) for name, child in module.named_modules()}
    setattr_before = nn.Module.__setattr__
    trainer = make_trainer()
    trainer.fit(module, make_loader(), make_loader(10, 4))
    plain = Own()
    make_trainer("plain").fit(plain, make_loader(), make_loader(10, 4))
    added = {name: set(child.__dict__) - names[name] for name, child in module.named_modules()}
    added_by_plain = {name: set(child.__dict__) - names[name] for name, child in plain.named_modules()}
    assert added == added_by_plain
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == parameters
    assert {name: type(child) for name, child in module.named_modules()} == classes
    assert all("forward" not in child.__dict__ for child in module.modules())
    assert module.forward.__func__ is small.forward
    assert nn.Module.__setattr__ is setattr_before
    assert module.device == torch.device("cpu")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roundpipe")]


def test_a_forward_set_on_an_instance_survives(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    def make() -> Any:
        module = small()
        layer = module.body[1][0]
        original = layer.forward
        layer.forward = lambda x: 0.5 * original(x)
        layer.kept = layer.forward
        return module

    plain, ours = fit_both(make)
    assert_same_training(plain, ours)
    layer = ours.module.body[1][0]
    assert layer.forward is layer.kept


def test_modes_follow_the_module(small: Any, fit_both: Any, make_loader: Any) -> None:
    class Looks(small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer.training
            assert torch.is_grad_enabled()
            self.seen.append(("train", self.training, self.body[0].training, self.global_step, batch_idx))
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert self.trainer.validating or self.trainer.sanity_checking
            self.seen.append(("validation", self.training, self.body[0].training, self.global_step, batch_idx))

    plain, ours = fit_both(Looks, val_loader=make_loader(10, 4), max_epochs=2)
    assert ours.module.seen == plain.module.seen
    assert len(plain.module.seen) == 12


class EMA(L.Callback):
    """A moving average in a deep copy of the module, made while training."""

    def __init__(self) -> None:
        self.copy: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if self.copy is None:
            self.copy = copy.deepcopy(module)
        with torch.no_grad():
            for mean, value in zip(self.copy.parameters(), module.parameters(), strict=True):
                mean.lerp_(value, 0.3)


@compat("Callback", "Callback")
def test_deepcopy_while_training(small: Any, fit_both: Any, assert_alike: Any, make_loader: Any) -> None:
    runs = fit_both(small, callbacks=lambda: [EMA()], max_epochs=2)
    plain, ours = (next(c for c in run.trainer.callbacks if isinstance(c, EMA)).copy for run in runs)
    assert_alike(dict(ours.state_dict()), dict(plain.state_dict()))
    x, _ = next(iter(make_loader()))
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-6)
    assert not torch.equal(ours.head.weight, runs[1].module.head.weight)


@pytest.mark.parametrize("is_used", [False, True], ids=["before a run", "after a run"])
def test_a_pickled_trainer_trains(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, is_used: bool
) -> None:
    results = []
    for kind in ("plain", "roundpipe"):
        trainer = make_trainer(kind)
        if is_used:
            trainer.fit(small(), make_loader())
            trainer.fit_loop.max_epochs = 2
        trainer = pickle.loads(pickle.dumps(trainer))
        module = small()
        trainer.fit(module, make_loader())
        assert trainer.global_step == (6 if is_used else 3)
        results.append(dict(module.state_dict()))
    assert_alike(results[1], results[0])


class Validates(Small):
    """At the top of a file, so that it can be pickled."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


class Keeps(L.Callback):
    """Refers to everything that it is given, and copies it at the end of a hook."""

    def __init__(self, hook: str, take_copy: Callable[[Any], Any]) -> None:
        self.hook = hook
        self.take_copy = take_copy
        self.kept: Any = None
        self.copies: list[Any] = []

    def note(self, hook: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.kept = trainer, pl_module
        if hook == self.hook and not self.copies:
            self.copies = [self.take_copy(one) for one in (trainer, pl_module, trainer.model, self)]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.note("batch", trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note("validation", trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note("end", trainer, pl_module)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("hook", ["batch", "validation", "end", "after"])
@pytest.mark.parametrize("take_copy", [_pickled, _saved, copy.deepcopy], ids=["pickle", "save", "deepcopy"])
def test_trainers_modules_and_callbacks_are_copied(
    make_trainer: Any, make_loader: Any, tmp_path: Path, hook: str, take_copy: Callable[[Any], Any]
) -> None:
    """While a run is going on, and when it is over: everything that plain Lightning lets users copy."""
    for kind in ("plain", "roundpipe"):
        module, keeps = Validates(), Keeps(hook, take_copy)
        callbacks = [keeps, ModelCheckpoint(tmp_path / kind)]
        trainer = make_trainer(kind, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, make_loader(), make_loader())
        if hook == "after":
            keeps.note("after", trainer, module)
            for callback in trainer.callbacks:
                take_copy(callback)
            assert torch.equal(keeps.copies[2].head.weight, module.head.weight)
        assert [type(one) for one in keeps.copies] == [L.Trainer, Validates, Validates, Keeps]
        assert keeps.copies[1].head.weight is not module.head.weight


def test_strategy_pickles_and_copies() -> None:
    strategy = RoundPipeStrategy(num_microbatches=5, loss_weight="label_tokens", units=["Linear"])
    for other in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert other.options == strategy.options


def test_modules_pickle_while_training(small: Any, make_trainer: Any, make_loader: Any) -> None:
    pickled: list[bytes] = []

    class Pickles(L.Callback):
        def on_before_zero_grad(self, *args: Any) -> None:  # the pipelined step is just over
            pickled.append(pickle.dumps(module.body))

    module = small()
    make_trainer(callbacks=[Pickles()]).fit(module, make_loader())
    assert len(pickled) == 3
    loaded = pickle.loads(pickle.dumps(module.body))
    for left, right in zip(loaded.parameters(), module.body.parameters(), strict=True):
        assert torch.equal(left, right)


FLAGS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2},
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 2},
    "fractions": {"limit_train_batches": 0.67, "limit_val_batches": 0.5},
    "max_steps": {"max_epochs": -1, "max_steps": 5},
    "min_steps": {"max_epochs": 1, "min_steps": 2},
    "max_time": {"max_time": "00:01:00:00"},
    "max_time over": {"max_time": {"seconds": 0}},
    "barebones": {"barebones": True, "logger": None, "enable_checkpointing": None},
    "sanity check": {"num_sanity_val_steps": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "no distributed sampler": {"use_distributed_sampler": False},
    "benchmark": {"benchmark": False},
}


@compat_each(
    "Trainer argument",
    "fast_dev_run overfit_batches limit_train_batches limit_val_batches max_epochs max_steps min_steps max_time "
    "barebones num_sanity_val_steps reload_dataloaders_every_n_epochs use_distributed_sampler benchmark",
)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.filterwarnings("ignore:You are running with `Trainer\\(barebones=True")
@pytest.mark.parametrize("name", FLAGS)
def test_flags(
    small: Any, fit_both: Any, make_loader: Any, assert_same_training: Any, assert_alike: Any, name: str
) -> None:
    class Validates(small):
        validated = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def on_validation_batch_end(self, *args: Any) -> None:
            self.validated += 1

    flags = dict(FLAGS[name])
    if name == "barebones":
        flags.update(enable_progress_bar=None, enable_model_summary=None, num_sanity_val_steps=None)
    plain, ours = fit_both(Validates, val_loader=make_loader(10, 4), **flags)
    assert ours.module.validated == plain.module.validated
    assert ours.trainer.current_epoch == plain.trainer.current_epoch
    if name == "max_time over":
        assert ours.trainer.global_step == plain.trainer.global_step
    else:
        assert_same_training(plain, ours)
    assert_alike(dict(ours.trainer.callback_metrics), dict(plain.trainer.callback_metrics))


def test_simple_profiler(small: Any, make_trainer: Any, make_loader: Any) -> None:
    trainer = make_trainer(profiler="simple")
    trainer.fit(small(), make_loader())
    assert "[Strategy]RoundPipeStrategy.training_step" in trainer.profiler.summary()


@pytest.mark.parametrize("accelerator", ["cpu", "roundpipe"])
def test_model_summary_and_device_stats(
    small: Any, make_trainer: Any, make_loader: Any, tmp_path: Path, accelerator: str
) -> None:
    trainer = make_trainer(
        accelerator=accelerator,
        enable_model_summary=True,
        callbacks=[DeviceStatsMonitor()],
        logger=CSVLogger(tmp_path),
    )
    trainer.fit(small(), make_loader())
    assert trainer.global_step == 3


def test_teacher_in_the_module_keeps_its_mode(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    class Distils(small):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = small(0.5).eval().requires_grad_(False)
            self.teacher.head.weight.neg_()  # with the student's weights there would be nothing to learn

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not self.teacher.training
            with torch.no_grad():
                target = self.teacher(batch[0]).softmax(-1)
            return nn.functional.cross_entropy(self(batch[0]), target)

    plain, ours = fit_both(Distils)
    assert_same_training(plain, ours)


def test_attributes_written_in_a_step(small: Any, fit_both: Any) -> None:
    class Writes(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.current = batch[0]
            features = self.body(self.current)
            self.hidden = features
            self.last_index = batch_idx
            return nn.functional.cross_entropy(self.head(self.hidden), batch[1])

    plain, ours = fit_both(Writes)
    assert ours.module.last_index == plain.module.last_index == 2
    for name, value in plain.module.state_dict().items():
        torch.testing.assert_close(ours.module.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert ours.module.hidden.grad_fn is None


def _no_clock(*args: Any) -> float:
    raise AssertionError("the clock of the process was asked")


CLOCKS: dict[str, Callable[..., float]] = {"stands still": lambda *args: 7.0, "is not to be asked": _no_clock}
CLOCK_OPTIONS: dict[str, dict[str, Any]] = {
    "aliases": {},
    "copies": {"virtual_copies": True},
    "timed link": {"virtual_copies": VirtualLink(1.0, 0.01)},
    "trace": {"trace": "trace.json"},
}


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("options", CLOCK_OPTIONS)
def test_a_replaced_clock(
    fit_both: Any,
    make_loader: Any,
    assert_same_training: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: str,
    options: str,
) -> None:
    """Tests of users replace the functions of ``time``: nothing here looks them up when it needs them."""
    monkeypatch.chdir(tmp_path)
    for name in ("perf_counter", "perf_counter_ns", "sleep"):
        monkeypatch.setattr(time, name, CLOCKS[clock])
    monkeypatch.setattr(time, "monotonic", CLOCKS["stands still"])  # Lightning's loops ask it
    plain, ours = fit_both(Validates, val_loader=make_loader(), ours={"options": CLOCK_OPTIONS[options]})
    assert_same_training(plain, ours)


def test_a_module_can_be_copied_and_pickled_between_steps(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any
) -> None:
    """Between two steps threads wait and methods of classes are replaced; copies and pickles know nothing of it."""
    copies: list[Any] = []

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            copies.append((copy.deepcopy(module.body), pickle.loads(pickle.dumps(module.body))))

    module = small()
    make_trainer(callbacks=[Copies()]).fit(module, make_loader())
    assert len(copies) > 1
    for one in copies[-1]:
        assert_alike(dict(one.state_dict()), dict(module.body.state_dict()))
        assert all("forward" not in child.__dict__ for child in one.modules())
