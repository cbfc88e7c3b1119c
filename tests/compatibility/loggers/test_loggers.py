"""Loggers get the calls, values and steps of plain Lightning.

The packages of most loggers are not needed to test them: a stand-in is put in the place of the package, so that the
code of Lightning's logger runs, and what it asks of the package is recorded.
"""

from __future__ import annotations

import csv
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import loggers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.support.parity import KINDS, assert_alike, both, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small
from tests.support.versions import need

Calls = list[tuple[str, Any]]


class StandIn(ModuleType):
    """Has every attribute, can be called, indexed and entered, and writes down what is done to it.

    Args:
        name: how calls are written down; that of a package for its stand-in.
        calls: what was done, in order.
        root: folder of the run, which is left out of paths.
        answers: what some calls give, by name.
    """

    def __init__(self, name: str, calls: Calls, root: Path, answers: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(_calls=calls, _root=root, _answers=answers, __path__=[])

    def __getattr__(self, name: str) -> Any:
        # Lightning calls methods of Comet with names like this one.
        if name.startswith("__") and not name.startswith("__internal"):
            raise AttributeError(name)
        child = self._child(f"{self.__name__}.{name}")
        self.__dict__[name] = child
        return child

    def _child(self, name: str) -> Any:
        if name in self._answers:
            return self._answers[name]
        return StandIn(name, self._calls, self._root, self._answers)

    def _note(self, what: str, *details: Any) -> None:
        self._calls.append((what, plain_of(details, self._root)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("timestamp", None)
        self._note(self.__name__, *args, kwargs)
        return self._child(f"{self.__name__}()")

    def __getitem__(self, key: Any) -> Any:
        return self._child(f"{self.__name__}[{key}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(f"{self.__name__}[{key}] =", value)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        self._note(f"{self.__name__} left")

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def plain_of(value: Any, root: Path) -> Any:
    """Something that can be compared between two runs."""
    if isinstance(value, dict):
        return {str(key): plain_of(entry, root) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_of(entry, root) for entry in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, float):
        return value
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value).replace(str(root), "<root>")
        return "<folder>" if os.path.isabs(text) else text
    if value is None or isinstance(value, (bool, int)):
        return value
    return repr(value) if isinstance(value, (StandIn, Namespace)) else f"<{type(value).__name__}>"


class Recording(loggers.Logger):
    """A logger of the user that writes down every call."""

    def __init__(self, root: Path, prefix: str = "") -> None:
        super().__init__()
        self.calls: Calls = []
        self._root, self._prefix = root, prefix
        self.images: list[float] = []

    def _note(self, what: str, *details: Any) -> None:
        self.calls.append((what, plain_of(details, self._root)))

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    @property
    def save_dir(self) -> str:
        return str(self._root)

    @property
    def experiment(self) -> Recording:
        return self

    def add_image(self, brightness: float) -> None:
        self.images.append(brightness)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._note("log_metrics", {f"{self._prefix}{k}": v for k, v in metrics.items()}, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._note("log_hyperparams", dict(params), args, kwargs)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        self._note("log_graph", type(model).__name__, input_array)

    def save(self) -> None:
        self._note("save")

    def finalize(self, status: str) -> None:
        self._note("finalize", status)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self._note("after_save_checkpoint", checkpoint_callback.best_model_path, checkpoint_callback.current_score)


class LogsAll(Small):
    """Has hyperparameters, and logs in training, validation and test."""

    def __init__(self, dropout: float = 0.0, fails_at: int = -1) -> None:
        super().__init__(dropout)
        self.save_hyperparameters()
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise ValueError("as wanted")
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", logger=True)
        self.log("hidden", loss, logger=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val", self.loss(batch), on_step=True, on_epoch=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", self.loss(batch))


def nothing(module: Any, trainer: L.Trainer) -> None:
    """Nothing is done before the run."""


@pytest.fixture
def run_both(tmp_path: Path) -> Callable[..., list[Any]]:
    """Fits and tests in both ways with the loggers that ``make_loggers(root)`` gives; gives them, plain first."""

    def run(
        make_loggers: Callable[[Path], Any], before: Callable[[Any, Any], None] = nothing, **kwargs: Any
    ) -> list[Any]:
        made = []
        for kind in KINDS:
            root = tmp_path / kind
            made.append(make_loggers(root))
            module = LogsAll()
            checkpoints = ModelCheckpoint(root / "checkpoints", monitor="val_epoch", save_top_k=-1)
            settings = {"enable_checkpointing": True, "max_epochs": 2, "log_every_n_steps": 2, **kwargs}
            settings |= {"logger": made[-1], "callbacks": [checkpoints], "default_root_dir": root}
            trainer = make_trainer(kind, **settings)
            before(module, trainer)
            trainer.fit(module, make_loader(), make_loader(10, 4))
            trainer.test(module, make_loader(10, 4), verbose=False)
        return made

    return run


@compat("Logger", "Logger")
@compat("Logger", "Logger (several at once)")
@compat("Logger", "Logger (values and steps, hyperparameters, graph, save, finalize, after_save_checkpoint)")
@compat("Trainer argument", "log_every_n_steps")
@compat("Trainer argument", "logger")
@compat("LightningModule attribute", "logger")
@compat("LightningModule attribute", "loggers")
@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (2, 1), (0, 1), (1, 2)])
def test_a_logger_gets_the_same_calls(run_both: Any, every: int, accumulate: int) -> None:
    def check(module: Any, trainer: L.Trainer) -> None:
        trainer.callbacks.append(L.pytorch.callbacks.LambdaCallback(on_train_start=lambda t, m: same(m, t)))

    def same(module: Any, trainer: L.Trainer) -> None:
        assert module.logger is trainer.logger is trainer.loggers[0]
        assert module.loggers == trainer.loggers
        assert len(trainer.loggers) == 2

    settings = {"log_every_n_steps": every, "accumulate_grad_batches": accumulate}
    made = run_both(lambda root: [Recording(root), Recording(root, "other/")], check, **settings)
    for plain, ours in zip(*made, strict=True):
        assert [what for what, _ in ours.calls] == [what for what, _ in plain.calls]
        assert_alike(ours.calls, plain.calls)
    first, second = made[0]
    names = {what for what, _ in first.calls}
    assert names == {"log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint"}
    steps = [details[1] for what, details in first.calls if what == "log_metrics" and "loss_step" in details[0]]
    assert steps == {(1, 1): [0, 1, 2, 3, 4, 5], (2, 1): [1, 3, 5], (0, 1): [], (1, 2): [0, 1, 2, 3]}[every, accumulate]
    assert any("other/val_epoch" in details[0] for what, details in second.calls if what == "log_metrics")


@compat("LightningModule method", "log (the name `step` sets the step of loggers)")
def test_own_steps(tmp_path: Path) -> None:
    class Counts(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            self.log("step", 1000.0 * self.current_epoch + 7 * batch_idx)
            return loss

    logger = Recording(tmp_path)
    make_trainer(logger=logger, log_every_n_steps=1, max_epochs=2).fit(Counts(), make_loader())
    steps = [details[1] for what, details in logger.calls if what == "log_metrics" and "loss" in details[0]]
    assert steps == [0, 7, 14, 1000, 1007, 1014]


def test_a_failed_run_is_finalized_alike(tmp_path: Path) -> None:
    def act(kind: str) -> Calls:
        logger = Recording(tmp_path)
        with pytest.raises(ValueError, match="as wanted"):
            make_trainer(kind, logger=logger, log_every_n_steps=1).fit(LogsAll(fails_at=2), make_loader())
        return logger.calls

    assert both(act)[-1] == ("finalize", ["failed"])


@compat(
    "LightningModule attribute",
    "logger (used directly in a step)",
    "differs",
    "Called once per micro-batch: use it in hooks, or `self.log`.",
)
def test_experiment_in_steps(tmp_path: Path) -> None:
    class Draws(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_image(float(batch[0].sum()))
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.logger.log_metrics({"rows": len(batch[0])}, step=self.global_step)

    made = {}
    for kind in KINDS:
        made[kind] = Recording(tmp_path)
        make_trainer(kind, logger=made[kind]).fit(Draws(), make_loader())
    images = made["roundpipe"].images
    assert len(images) == 3 * 3
    # One micro-batch draws at a time, but in no fixed order: together they have shown the whole batch.
    per_step = [sum(images[i : i + 3]) for i in range(0, 9, 3)]
    assert per_step == pytest.approx(made["plain"].images, rel=1e-4, abs=1e-5)
    by_hook = [[details for what, details in made[kind].calls if what == "log_metrics"] for kind in made]
    assert by_hook[0] == by_hook[1] == [[{"rows": rows}, step] for step, rows in enumerate((8, 8, 4), start=1)]


@compat("Logger", "CSVLogger")
@compat("Logger", "TensorBoardLogger")
@compat("Logger", "CSVLogger (`prefix`, `flush_logs_every_n_steps`, beside another logger)")
@compat("Logger", "TensorBoardLogger (`log_graph`, `default_hp_metric`, hyperparameters, beside another logger)")
@compat("Trainer argument", "logger")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*is deprecated")
def test_files_of_csv_and_tensorboard(run_both: Any) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoardLogger needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def make(root: Path) -> list[Any]:
        board = loggers.TensorBoardLogger(root, "board", "", log_graph=True, default_hp_metric=True)
        return [loggers.CSVLogger(root, "csv", "", prefix="run", flush_logs_every_n_steps=1), board]

    def with_example(module: Any, trainer: Any) -> None:
        module.example_input_array = torch.ones(2, 6)

    made = run_both(make, with_example, log_every_n_steps=1)
    found = []
    for pair in reversed(made):
        table, board = (Path(logger.log_dir) for logger in pair)
        with (table / "metrics.csv").open() as file:
            rows = [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
        events = EventAccumulator(str(board)).Reload()
        tags = events.Tags()
        scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in sorted(tags["scalars"])}
        files = sorted(path.name for path in (*table.iterdir(), *board.iterdir()) if "tfevents" not in path.name)
        hyperparameters = [(folder / "hparams.yaml").read_text() for folder in (table, board)]
        found.append([rows, scalars, tags["graph"], files, hyperparameters])
    assert_alike(*found)
    rows, scalars, has_graph, _, hyperparameters = found[1]
    assert {"run-loss_step", "run-val_epoch", "run-test"} <= set(rows[0])
    assert len(scalars["loss_step"]) == 6
    assert {"hp_metric", "val_epoch", "test"} <= set(scalars)
    assert has_graph
    assert "dropout: 0.0" in hyperparameters[0]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    """Puts a stand-in in the place of a package; ``module`` is where Lightning asks whether it is installed."""

    def put(package: str, submodules: str, root: Path, flag: str | None = None, **answers: Any) -> StandIn:
        calls: Calls = []
        named = {name.replace("__", "."): value for name, value in answers.items()}
        base = StandIn(package, calls, root, named)
        monkeypatch.setitem(sys.modules, package, base)
        for name in submodules.split():
            module: Any = base
            for part in name.split("."):
                module = getattr(module, part)
            monkeypatch.setitem(sys.modules, f"{package}.{name}", module)
        if flag is not None:
            monkeypatch.setattr(flag, True)
        return base

    return put


class WandbRun(StandIn):
    """A run of wandb: ``watch`` puts hooks on parameters and on the model, as the package does."""

    def watch(self, model: nn.Module, log: str, log_freq: int, log_graph: bool) -> None:
        self._note("watch", type(model).__name__, log, log_freq, log_graph)
        self.__dict__.update(gradients=[], weights=[])
        if log in ("gradients", "all"):
            for name, parameter in model.named_parameters():
                parameter.register_hook(lambda grad, name=name: self.gradients.append((name, grad.detach().clone())))
        if log in ("parameters", "all"):
            model.register_forward_hook(lambda m, i, o: self.weights.append(m.head.weight.detach().clone()))


@compat("Logger", "WandbLogger", note="Tested with a stand-in for the package.")
@compat(
    "Logger",
    "WandbLogger (`watch`)",
    "differs",
    "Parameters are seen once per micro-batch, which `log_freq` counts; gradients once per step.",
)
def test_wandb(run_both: Any, stand_in: Any) -> None:
    runs = []

    def make(root: Path) -> Any:
        calls: Calls = []
        run = WandbRun("run", calls, root, {"run.id": "id", "run.name": "name"})
        wandb = stand_in(
            "wandb",
            "sdk sdk.lib wandb_run",
            root,
            "lightning.pytorch.loggers.wandb._WANDB_AVAILABLE",
            **{"wandb__run": None, "wandb__init()": run, "wandb__wandb_run__Run": WandbRun},
            wandb__sdk__lib__RunDisabled=type("RunDisabled", (), {}),
        )
        runs.append((run, wandb))
        return loggers.WandbLogger(save_dir=root, project="tests", log_model="all", prefix="p")

    def watch(module: Any, trainer: L.Trainer) -> None:
        trainer.logger.watch(module, log="all", log_freq=1)

    run_both(make, watch)
    (plain, plain_wandb), (ours, our_wandb) = runs
    assert_alike([ours._calls, our_wandb._calls], [plain._calls, plain_wandb._calls])
    logged = [details[0] for what, details in plain._calls if what == "run.log"]
    assert [entry["trainer/global_step"] for entry in logged if "p-loss_step" in entry] == [1, 3, 5]
    assert {"run.config.update", "run.define_metric", "run.log", "run.log_artifact", "watch"} <= {
        what for what, _ in plain._calls
    }
    assert "wandb.Artifact" in {what for what, _ in plain_wandb._calls}
    # Once per step and parameter, in whatever order autograd comes to them.
    num_parameters = len({name for name, _ in plain.gradients})
    assert len(plain.gradients) == len(ours.gradients) == 6 * num_parameters
    for start in range(0, len(plain.gradients), num_parameters):
        left, right = (dict(run.gradients[start : start + num_parameters]) for run in (ours, plain))
        assert_alike({name: left[name] for name in right}, right)
    batches = [8, 8, 4, 4, 4, 2] * 2 + [4, 4, 2]  # rows: two epochs with validation, then the test
    assert len(plain.weights) == len(batches)
    assert len(ours.weights) == sum(min(rows, 3) for rows in batches)


def fixed_version(module: Any, trainer: L.Trainer) -> None:
    """Else the time of day."""
    trainer.logger._version = "v"  # type: ignore[union-attr]


# By package: its parts, where Lightning asks whether it is installed, how the logger is made, what is done before the
# run, and calls that the package must have seen.
STAND_INS: dict[str, tuple[str, str | None, Callable[[Path], Any], Callable[[Any, Any], None], set[str]]] = {
    "mlflow": (
        "tracking tracking.context entities utils utils.mlflow_tags",
        "lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE",
        lambda root: loggers.MLFlowLogger("tests", run_name="a", tracking_uri=f"file:{root}", log_model="all"),
        nothing,
        {f"mlflow.tracking.MlflowClient().{name}" for name in ("log_batch", "log_artifact", "set_terminated")}
        | {"mlflow.entities.Metric", "mlflow.entities.Param"},
    ),
    "comet_ml": (
        "",
        "lightning.pytorch.loggers.comet._COMET_AVAILABLE",
        lambda root: loggers.CometLogger(project="tests", online=False, prefix="p"),
        nothing,
        {f"comet_ml.start().__internal_api__{name}__" for name in ("log_metrics", "log_parameters", "set_model_graph")}
        | {"comet_ml.start().flush"},
    ),
    "litlogger": (
        "generator",
        None,
        lambda root: loggers.LitLogger(root_dir=root, name="tests", log_model=True),
        fixed_version,
        {f"litlogger.Experiment(){name}" for name in ("[loss_step].append", "[val_epoch].append", ".finalize")}
        | {"litlogger.Model"},
    ),
}


@compat("Logger", "MLFlowLogger", note="Tested with a stand-in for the package.")
@compat("Logger", "CometLogger", note="Tested with a stand-in for the package.")
@compat("Logger", "LitLogger", note="Tested with a stand-in for the package.")
@pytest.mark.filterwarnings("ignore:LitLogger does not support")
@pytest.mark.parametrize("package", STAND_INS)
def test_packages_are_asked_for_the_same(
    run_both: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    if package == "litlogger" and not hasattr(loggers, "LitLogger"):
        pytest.skip("LitLogger is in Lightning from 2.6 on")
    if package == "comet_ml":
        need(loggers.CometLogger, "project")
    monkeypatch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")  # the logger of Comet sets it; this puts it back
    parts, flag, make_logger, before, expected = STAND_INS[package]
    packages: list[Any] = []

    def make(root: Path) -> Any:
        packages.append(stand_in(package, parts, root, flag))
        return make_logger(root)

    run_both(make, before)
    plain, ours = packages
    assert_alike(ours._calls, plain._calls)
    assert expected <= {what for what, _ in plain._calls}
