"""The packages ``lightning`` and ``pytorch_lightning``: either of them, and both in one process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeAccelerator, RoundPipeStrategy, RoundPipeTimeline, lightning_cli
from tests.support.forks import Forks
from tests.support.parity import assert_alike
from tests.support.rows import compat

pytest.importorskip("pytorch_lightning", reason="needs the package pytorch-lightning")
PACKAGES = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def fabric_of(package: Any) -> Any:
    return importlib.import_module(PACKAGES[package.__name__])


def module_of(package: Any, *, manual: bool = False) -> Any:
    """A LightningModule of a package; always starts from the same weights."""

    class Net(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
            self.automatic_optimization = not manual
            self.batch_size = 4

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.blocks(batch) - batch).square().mean()
            self.log("loss", loss, on_epoch=True)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                return None
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", (self.blocks(batch) - batch).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

        def train_dataloader(self) -> Any:
            rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
            return DataLoader(list(rows), batch_size=self.batch_size)

        val_dataloader = train_dataloader

    return Net()


QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "max_epochs": 2,
    "logger": False,
}


def ours(package: Any, strategy: Any = None, **settings: Any) -> Any:
    return package.Trainer(
        **{**QUIET, "strategy": strategy or RoundPipeStrategy(num_microbatches=2), "devices": 2, **settings}
    )


def state_of(trainer: Any, module: Any) -> Any:
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    optimizers = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    return {"weights": dict(module.state_dict()), "metrics": metrics, "optimizers": optimizers}


@compat("Trainer argument", "strategy (the package `pytorch_lightning`)")
@pytest.mark.parametrize("manual", [False, True])
def test_trainers_of_both_packages_in_one_process(manual: bool) -> None:
    packages = [importlib.import_module(name) for name in PACKAGES]
    trainers = [ours(package) for package in packages]  # both are made before either runs
    named = [ours(package, "roundpipe") for package in packages]
    for package, *two in zip(packages, trainers, named, strict=True):
        expected, plain = module_of(package, manual=manual), package.Trainer(**QUIET, devices=1)
        plain.fit(expected)
        for trainer in two:
            module = module_of(package, manual=manual)
            trainer.fit(module)
            assert isinstance(trainer.strategy, package.strategies.ParallelStrategy)
            assert_alike(state_of(trainer, module), state_of(plain, expected))
            kinds = {type(optimizer).__module__ for optimizer in trainer.strategy._lightning_optimizers}
            assert {kind.partition(".core")[0] for kind in kinds} <= {package.__name__}


def test_callbacks_loggers_plugins_and_profilers(package: Any, tmp_path: Path) -> None:
    callbacks, plugins = package.callbacks, package.plugins
    finder = callbacks.BatchSizeFinder(mode="binsearch", steps_per_trial=1, max_trials=1, init_val=4)
    logger = package.loggers.CSVLogger(tmp_path)
    trainer = ours(
        package,
        accelerator=RoundPipeAccelerator(),
        precision="bf16-mixed",
        callbacks=[
            RoundPipeTimeline(log_metrics=True),
            finder,
            callbacks.LearningRateMonitor(),
            callbacks.EarlyStopping("val", patience=9),
            callbacks.ModelCheckpoint(tmp_path, monitor="val"),
        ],
        enable_checkpointing=True,
        logger=logger,
        log_every_n_steps=1,
        plugins=[plugins.AsyncCheckpointIO(), fabric_of(package).plugins.environments.LightningEnvironment()],
        profiler=package.profilers.SimpleProfiler(),
    )
    module = module_of(package)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    assert finder.optimal_batch_size is not None
    logger.save()
    assert "roundpipe/bubble" in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    inner = trainer.strategy.checkpoint_io.checkpoint_io
    assert isinstance(inner, fabric_of(package).plugins.TorchCheckpointIO)
    assert isinstance(trainer.precision_plugin, plugins.MixedPrecision)
    assert trainer.precision_plugin.device == "cpu"
    again = ours(package, max_epochs=3)
    again.fit(module_of(package), ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert again.current_epoch == 3


def test_errors_have_the_class_of_the_package(package: Any) -> None:
    errors = package.utilities.exceptions.MisconfigurationException
    trainer = package.Trainer(**QUIET, callbacks=RoundPipeTimeline(log_metrics=True))
    with pytest.raises(errors, match="strategy='roundpipe'"):
        trainer.fit(module_of(package))
    module = module_of(package)
    module.training_step = lambda batch, batch_idx: {"no": module.blocks(batch).mean()}
    with pytest.raises(errors, match="loss"):
        ours(package).fit(module)
    with pytest.raises(errors, match="DeepSpeedStrategy only"):
        ours(package, plugins=plugin_without_init(package.plugins.DeepSpeedPrecision))


def plugin_without_init(kind: Any) -> Any:
    """A plugin whose library is not installed."""
    return kind.__new__(kind)


@compat("Misuse", "`Fabric(strategy='roundpipe')`", "refused", "Use a LightningModule.")
@pytest.mark.parametrize("accelerator", ["auto", "cpu", "roundpipe"])
def test_fabric(package: Any, accelerator: str) -> None:
    fabric = fabric_of(package)
    for strategy in ("roundpipe", RoundPipeStrategy()):
        with pytest.raises(fabric.utilities.exceptions.MisconfigurationException, match="automatic_optimization = Fal"):
            fabric.Fabric(strategy=strategy, accelerator=accelerator)


PROJECT = """
import {package} as pl
import torch
class Net(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, width)
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
"""


@compat("LightningCLI", "command `roundpipe-lightning` (the package `pytorch_lightning`)")
def test_the_command(package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"project_with_{package.__name__.replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text(PROJECT.format(package=package.__name__))
    (tmp_path / "config.yaml").write_text(f"model: {{class_path: {name}.Net}}\ntrainer: {{logger: false}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    seen = []
    monkeypatch.setattr(package.Trainer, "fit", lambda trainer, *args, **kwargs: seen.append(trainer))
    for given in (["-c", "config.yaml"], [f"--model={name}.Net"], ["--model", f"{name}.Net"]):
        assert lightning_cli.main(["fit", *given, f"--data={name}.Data", "--trainer.accelerator=cpu"]) == 0
        assert isinstance(seen.pop().strategy, RoundPipeStrategy)


SCRIPT = """
import sys
{before}
import lightning_roundpipe as r
{after}
import torch
for pl in {packages}:
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 4)
        def training_step(self, batch, batch_idx):
            return self.net(batch).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    settings = dict(accelerator="cpu", devices=2, barebones=True, max_epochs=1)
    trainer = pl.Trainer(strategy="roundpipe", **settings)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    assert trainer.global_step == 2 and isinstance(trainer.strategy, r.RoundPipeStrategy)
"""
WITHOUT_LIGHTNING = "sys.modules.update({name: None for name in [*sys.modules, 'lightning'] if (name + '.')[:10] == "
WITHOUT_LIGHTNING += "'lightning.'})"
ORDERS = {
    "after": ("", "import pytorch_lightning as new, lightning.pytorch as old", "(new,)"),
    "before": ("import pytorch_lightning as new", "import lightning.pytorch as old", "(old,)"),
    "alone": (WITHOUT_LIGHTNING, "import pytorch_lightning as new", "(new,)"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_is_imported_and_when(order: str, forks: Forks, tmp_path: Path) -> None:
    before, after, packages = ORDERS[order]
    (tmp_path / "script.py").write_text(SCRIPT.format(before=before, after=after, packages=packages))
    forks.run(tmp_path / "script.py", folder=tmp_path)


def test_messages_have_the_logger_of_the_package(package: Any) -> None:
    ours(package)
    assert rank_zero.log.name == f"{package.__name__}.utilities.rank_zero"
