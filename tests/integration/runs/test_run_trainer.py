"""The trainer and the module around a run: several runs, copies, pickles, and what is left untouched."""

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
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from lightning_roundpipe import VirtualLink
from tests.support.parity import both, compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small


@compat("Trainer method", "fit")
def test_several_fits_with_one_trainer() -> None:
    def act(kind: str) -> Any:
        trainer = make_trainer(kind)
        one, two = Small(), Small()
        trainer.fit(one, make_loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(one, make_loader())
        trainer.fit_loop.max_epochs = 3
        trainer.fit(two, make_loader(12, 4))
        return [dict(one.state_dict()), dict(two.state_dict()), trainer.global_step]

    both(act)


def test_several_trainers_with_one_module() -> None:
    def act(kind: str) -> Any:
        module = Small()
        for rows, each in zip((20, 12, 9), (kind, kind, "plain"), strict=True):
            make_trainer(each).fit(module, make_loader(rows))
        return dict(module.state_dict())

    both(act)


def test_another_module_tree_between_fits() -> None:
    def act(kind: str) -> Any:
        module = Small()
        make_trainer(kind).fit(module, make_loader())
        torch.manual_seed(1)
        module.body[2] = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6))
        module.head = nn.Linear(6, 3)
        make_trainer(kind).fit(module, make_loader())
        return dict(module.state_dict())

    both(act)


def test_module_is_left_as_it_was() -> None:
    class Own(Small):
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
    assert module.forward.__func__ is Small.forward
    assert nn.Module.__setattr__ is setattr_before
    assert module.device == torch.device("cpu")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roundpipe")]


def test_a_forward_set_on_an_instance_survives() -> None:
    def make() -> Any:
        module = Small()
        layer = module.body[1][0]
        original = layer.forward
        layer.forward = lambda x: 0.5 * original(x)
        layer.kept = layer.forward
        return module

    _, ours = compare(make)
    layer = ours.module.body[1][0]
    assert layer.forward is layer.kept


class Snapshot(Small):
    """Copies its head in the middle of the first step, and does not move far from what that gives."""

    def __init__(self, take_copy: Callable[[Any], Any]) -> None:
        super().__init__()
        self.take_copy = take_copy
        self.before: tuple[nn.Module, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.before:
            self.before = (self.take_copy(self.head),)
        x, y = batch
        hidden = self.body(x)
        now, before = self.head(hidden), self.before[0](hidden.detach()).detach()
        return F.cross_entropy(now, y) + F.mse_loss(now, before)


@pytest.mark.parametrize("take_copy", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_units_in_the_middle_of_a_step(take_copy: Callable[[Any], Any]) -> None:
    x, _ = next(iter(make_loader()))
    _, ours = compare(lambda: Snapshot(take_copy), also=lambda run: run.module.before[0](x))
    torch.testing.assert_close(ours.module.before[0].weight, ours.start["head.weight"])


class Validates(Small):
    """At the top of a file, so that it can be pickled."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


class Keeps(L.Callback):
    """Refers to everything that it is given, and copies it in hooks.

    Attributes:
        copies: by the name of the hook, what was copied when it was called first.
    """

    def __init__(self, take_copy: Callable[[Any], Any]) -> None:
        self.take_copy = take_copy
        self.kept: Any = None
        self.copies: dict[str, list[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copies": {}}  # copies of copies would double them

    def note(self, hook: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.kept = trainer, pl_module
        if hook not in self.copies:
            self.copies[hook] = [self.take_copy(one) for one in (trainer, pl_module, trainer.model, self)]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.note("batch", trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note("validation", trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note("end", trainer, pl_module)


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("take_copy", [_saved, copy.deepcopy], ids=["save", "deepcopy"])
def test_trainers_modules_and_callbacks_are_copied(tmp_path: Path, take_copy: Callable[[Any], Any]) -> None:
    """While a run is going on, and when it has ended: everything that plain Lightning lets users copy."""
    for kind in ("plain", "roundpipe"):
        module, keeps = Validates(), Keeps(take_copy)
        callbacks = [keeps, ModelCheckpoint(tmp_path / kind)]
        trainer = make_trainer(kind, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, make_loader(), make_loader())
        keeps.note("after", trainer, module)
        for callback in trainer.callbacks:
            take_copy(callback)
        assert set(keeps.copies) == {"batch", "validation", "end", "after"}
        for copies in keeps.copies.values():
            assert [type(one) for one in copies] == [L.Trainer, Validates, Validates, Keeps]
            assert copies[1].head.weight is not module.head.weight
        assert torch.equal(keeps.copies["after"][2].head.weight, module.head.weight)


def _no_clock(*args: Any) -> float:
    raise AssertionError("the clock of the process was asked")


@pytest.mark.parametrize("copies", [False, VirtualLink(1.0, 0.01)], ids=["aliases", "timed link"])
def test_a_replaced_clock(monkeypatch: pytest.MonkeyPatch, copies: Any) -> None:
    """Tests of users replace the functions of ``time``: nothing here looks them up when it needs them."""
    for name in ("perf_counter", "perf_counter_ns", "sleep"):
        monkeypatch.setattr(time, name, _no_clock)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)  # Lightning's loops ask it
    options = {"virtual_copies": copies, "trace": "trace.json"}
    compare(Validates, val=make_loader(8), ours={"options": options})
    assert Path("trace.json").exists()
