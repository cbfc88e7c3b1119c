"""Loggers get the calls, values and steps of plain Lightning.

What a logger makes of its calls is its own: so one that records them stands for those that need packages.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import loggers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.compatibility.hooks.hook_recording import described
from tests.compatibility.versions import need
from tests.support.parity import KINDS, assert_alike, both, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

Calls = list[tuple[str, Any]]


class Recording(loggers.Logger):
    """A logger of the user that writes down every call."""

    def __init__(self, root: Path, prefix: str = "") -> None:
        super().__init__()
        self.calls: Calls = []
        self._root, self._prefix = root, prefix
        self.images: list[float] = []

    def _note(self, what: str, *details: Any) -> None:
        self.calls.append((what, described(list(details), str(self._root))))

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


@compat(
    "Logger",
    "Logger; Logger (several at once); "
    "Logger (values and steps, hyperparameters, graph, save, finalize, after_save_checkpoint)",
)
@compat("Logger", "WandbLogger; MLFlowLogger; CometLogger; LitLogger", note="The calls that it gets are compared.")
@compat("Trainer argument", "log_every_n_steps; logger")
@compat("LightningModule attribute", "logger; loggers")
@pytest.mark.parametrize(("every", "accumulate"), [(2, 1), (1, 2)])
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
    assert steps == {(2, 1): [1, 3, 5], (1, 2): [0, 1, 2, 3]}[every, accumulate]
    assert any("other/val_epoch" in details[0] for what, details in second.calls if what == "log_metrics")


@compat("Trainer argument", "enable_autolog_hparams")
def test_hyperparameters_that_are_not_to_be_logged(tmp_path: Path) -> None:
    need(L.Trainer, "enable_autolog_hparams")

    def act(kind: str) -> Any:
        logger = Recording(tmp_path)
        make_trainer(kind, logger=logger, enable_autolog_hparams=False).fit(LogsAll(), make_loader())
        return [what for what, _ in logger.calls]

    assert "log_hyperparams" not in both(act)


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


@compat(
    "Logger",
    "CSVLogger; TensorBoardLogger; CSVLogger (`prefix`, `flush_logs_every_n_steps`, beside another logger); "
    "TensorBoardLogger (`log_graph`, `default_hp_metric`, hyperparameters, beside another logger)",
)
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


@compat(
    "Logger",
    "WandbLogger (`watch`)",
    "differs",
    "Parameters are seen once per micro-batch, which `log_freq` counts; gradients once per step.",
)
def test_hooks_of_a_logger_that_watches() -> None:
    """As ``watch`` of Weights & Biases puts them on parameters and on the forward of the module."""
    gradients: list[tuple[str, torch.Tensor]] = []
    weights: deque[torch.Tensor] = deque()  # of which micro-batches have no copies

    def watched() -> Any:
        module = LogsAll()
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda grad, name=name: gradients.append((name, grad.detach().clone())))
        module.register_forward_hook(lambda m, i, o: weights.append(m.head.weight.detach().clone()))
        return module

    def act(kind: str) -> Any:
        gradients.clear()
        weights.clear()
        settings = {"roundpipe": {"options": {"check_split": "off"}}}.get(kind, {})
        make_trainer(kind, **settings).fit(watched(), make_loader(), make_loader(10, 4))
        calls = {"plain": 3 + 3, "roundpipe": 3 * 3 + 3 + 3 + 2}[kind]  # of 8, 8 and 4 rows, and of 4, 4 and 2
        assert len(weights) == calls
        # Once per step and parameter, in whatever order autograd comes to them.
        return [dict(sorted(gradients[start : start + 10])) for start in range(0, len(gradients), 10)]

    assert len(both(act)) == 3
