"""Methods that users call on a LightningModule, a Trainer or a LightningDataModule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.identical import assert_identical
from tests.support.models import AllSteps
from tests.support.parity import KINDS, both, compare, fit, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH, Small


def rows(count: int = 20, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, WIDTH, generator=generator)
    return TensorDataset(x.to(dtype), torch.randint(CLASSES, (count,), generator=generator))


# --- within a run ------------------------------------------------------------------------------------------------


@compat("LightningModule method", "optimizers; lr_schedulers; all_gather")
@compat("LightningModule hook", "forward")
def test_methods_called_in_steps_and_hooks() -> None:
    class Calls(Small):
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[str, Any] = {}

        def note(self, where: str) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            raw = self.optimizers(use_pl_optimizer=False)
            found = {
                "optimizer": [type(optimizer).__name__, optimizer.param_groups[0]["lr"], type(raw).__name__],
                "scheduler": [type(scheduler).__name__, scheduler.last_epoch],
                "gathered": self.all_gather({"step": torch.tensor(float(self.global_step)), "epoch": 1}),
            }
            first = self.found.setdefault(f"{where} {self.global_step}", found)
            assert str(first) == str(found), "micro-batches of a step differ"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("training step")
            logits = self.all_gather(self(batch[0]))
            return nn.functional.cross_entropy(logits, batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.note("validation step")
            self.log("val", self.all_gather(self.loss(batch)))

        def on_train_batch_end(self, *args: Any) -> None:
            self.note("batch end")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    plain, _ = compare(Calls, None, make_loader(10, 4), max_epochs=2, also=lambda run: run.module.found)
    assert len(plain.module.found) > 8


@compat("Trainer method", "print")
@compat(
    "LightningModule method",
    "print",
    status="differs",
    note="In a step once per micro-batch.",
)
def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.print("in the step")
            return self.loss(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            self.print("in", "a hook", sep=" ")
            self.trainer.print("by the trainer")

    printed = {}
    for kind in KINDS:
        make_trainer(kind, max_steps=2).fit(Prints(), make_loader())
        printed[kind] = capsys.readouterr().out.splitlines()
    assert printed["plain"] == ["in the step", "in a hook", "by the trainer"] * 2
    assert printed["roundpipe"] == [*["in the step"] * 3, "in a hook", "by the trainer"] * 2


@compat("LightningModule method", "freeze; unfreeze")
def test_freeze_and_unfreeze() -> None:
    """A part that is a LightningModule itself is frozen, and trained again from the second epoch on."""

    class Outer(Small):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Small()
            self.inner.freeze()
            self.weights: list[Any] = []

        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.inner(x)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.inner.unfreeze()

        def on_train_epoch_end(self) -> None:
            self.weights.append(self.inner.head.weight.detach().clone())

    plain, _ = compare(Outer, max_epochs=2, also=lambda run: (run.module.weights, run.module.inner.training))
    first, second = plain.module.weights
    assert torch.equal(first, Small().head.weight)
    assert not torch.equal(second, first)


# By dtype: what gives it to a module, and tolerances. Half has 11 bits. Gradients and weights of at most 1 are rounded
# a few times in three steps.
CONVERSIONS: dict[torch.dtype, tuple[Callable[[Any], Any], tuple[float, float]]] = {
    torch.float64: (lambda module: module.to("cpu", torch.float64), (1e-9, 1e-12)),
    torch.float16: (lambda module: module.float().cpu().half(), (2**-8, 2**-9)),
}


@compat("LightningModule method", "to; double; type; half; float; cpu")
@pytest.mark.parametrize("dtype", CONVERSIONS, ids=str)
def test_conversions(dtype: torch.dtype) -> None:
    convert, (rtol, atol) = CONVERSIONS[dtype]
    loader = torch.utils.data.DataLoader(rows(dtype=dtype), batch_size=8)
    plain, ours = compare(lambda: convert(Small()), loader, tolerances={"rtol": rtol, "atol": atol})
    assert ours.module.dtype == plain.module.dtype == dtype
    assert {parameter.dtype for parameter in ours.module.parameters()} == {dtype}
    # After the run as well.
    for again, expected in ((Small.float, torch.float32), (Small.double, torch.float64), (Small.half, torch.float16)):
        assert again(ours.module).dtype == expected
    assert ours.module.type(torch.float64).head.weight.dtype == torch.float64


@compat("LightningModule method", "cuda", note="Before `fit`: the weights come back to the host.")
def test_a_module_that_was_on_a_gpu_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what the module says about its device, while its weights never left."""
    monkeypatch.setattr(nn.Module, "cuda", lambda self, device=None: self)

    def make() -> Any:
        module = Small().cuda(torch.device("cuda", 0))
        assert module.device == torch.device("cuda", 0)
        return module

    plain, ours = compare(make)
    assert ours.module.device == plain.module.device == torch.device("cpu")


# --- after a run -------------------------------------------------------------------------------------------------


@compat("LightningModule method", "to_torchscript; to_onnx; to_tensorrt")
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_to_torchscript(tmp_path: Path) -> None:
    """A module is as it was after a run, for other exporters as well."""
    module, sample = fit("roundpipe", Small, make_loader()).module, torch.ones(2, WIDTH)
    for method in ("script", "trace"):
        module.to_torchscript(tmp_path / method, method=method, example_inputs=sample)
        torch.testing.assert_close(torch.jit.load(tmp_path / method)(sample), module(sample))


class Sized(L.LightningModule):
    """Has hyperparameters that decide about its shape."""

    def __init__(self, hidden: int = 5, rate: float = 0.1, unused: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["unused"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hidden)
            self.layers = nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["rate"], momentum=0.9)


class Data(L.LightningDataModule):
    """Has hyperparameters, and loaders of all kinds."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(rows(), batch_size=self.hparams["batch_size"])


@compat("LightningModule method", "save_hyperparameters; load_from_checkpoint")
@compat("LightningDataModule", "save_hyperparameters; load_from_checkpoint")
@compat("Trainer method", "save_checkpoint")
@compat("Migration", "load_from_checkpoint; hyper-parameters in a checkpoint")
def test_hyperparameters_and_checkpoints(tmp_path: Path) -> None:
    def act(kind: str) -> Any:
        trainer = make_trainer(kind)
        trainer.fit(Sized(hidden=4, rate=0.2, unused=object()), datamodule=Data(batch_size=5))
        trainer.save_checkpoint(tmp_path / kind)
        trainer.save_checkpoint(tmp_path / f"{kind}-weights", weights_only=True)
        return [torch.load(tmp_path / f"{kind}{end}", weights_only=True) for end in ("", "-weights")]

    whole, weights = both(act)
    assert whole["hyper_parameters"] == {"hidden": 4, "rate": 0.2}
    assert "optimizer_states" not in weights
    path = tmp_path / "roundpipe"
    loaded = Sized.load_from_checkpoint(path, rate=0.5, map_location="cpu", strict=True)
    assert dict(loaded.hparams) == {"hidden": 4, "rate": 0.5}
    assert_identical(dict(loaded.state_dict()), dict(torch.load(path, weights_only=True)["state_dict"]))
    assert dict(Data.load_from_checkpoint(path).hparams) == {"batch_size": 5}


@compat("LightningDataModule", "from_datasets")
@compat("Trainer method", "fit; validate; test; predict")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_all_entries_with_a_datamodule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry of the trainer after a fit, from the datamodule and from the best checkpoint, and what is shown."""

    def act(kind: str) -> Any:
        torch.manual_seed(3)  # the training set is shuffled
        data = L.LightningDataModule.from_datasets(rows(12), rows(9), [rows(10), rows(7)], rows(11), batch_size=4)
        saves = ModelCheckpoint(tmp_path / kind, monitor="val", save_last=True)
        trainer = make_trainer(kind, max_epochs=2, callbacks=[saves], enable_checkpointing=True)
        module, untrained = AllSteps(), AllSteps()
        with torch.no_grad():
            untrained.head.bias.add_(1.0)
        trainer.fit(module, datamodule=data)
        capsys.readouterr()
        return [
            trainer.validate(module, datamodule=data),
            trainer.test(datamodule=data, ckpt_path="best"),
            capsys.readouterr().out.count("test/dataloader_idx_1"),
            trainer.predict(module, datamodule=data, ckpt_path="last"),
            trainer.predict(module, datamodule=data, return_predictions=False),
            trainer.test(untrained, data.test_dataloader(), verbose=False),
        ]

    found = both(act)
    assert len(found[1]) == 2
    assert len(found[3]) == 3


@compat("Trainer method", "init_module")
def test_init_module() -> None:
    def act(kind: str) -> Any:
        trainer = make_trainer(kind, precision="bf16-true")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with trainer.init_module():
                module = Sized()
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert module.device.type == "cpu"
        with trainer.init_module(empty_init=True):
            empty = Sized()
        empty.load_state_dict(module.state_dict())
        trainer.fit(empty, make_loader())
        return dict(empty.state_dict())

    both(act, rtol=2**-7, atol=2**-7)  # bfloat16 has 8 bits; a few roundings
