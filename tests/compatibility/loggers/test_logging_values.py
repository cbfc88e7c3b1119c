"""``self.log``: every kind of value and option, at every batch, as in plain Lightning."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.compatibility.loggers.metrics import MetricsRecorder
from tests.support.parity import COPIES, KINDS, Run, compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

BOTH = {"on_step": True, "on_epoch": True}


def compared(make_module: Any, val: Any = None, **settings: Any) -> list[dict[str, Any]]:
    """Trains for two epochs, compares what callbacks saw, dtypes included, and gives it."""

    def seen(run: Run) -> Any:
        found = next(callback.seen for callback in run.trainer.callbacks if isinstance(callback, MetricsRecorder))
        return found, [str(value.dtype) for entry in found for value in entry["logged_metrics"].values()]

    plain, _ = compare(
        make_module, None, val, callbacks=lambda: [MetricsRecorder()], also=seen, max_epochs=2, **settings
    )
    return seen(plain)[0]


def log_options(module: L.LightningModule, loss: Any, rows: int) -> None:
    """All ways to say where a value goes and how it is reduced."""
    module.log("default", loss)
    module.log("step", loss, on_step=True, on_epoch=False, prog_bar=True)
    module.log("epoch", loss, on_step=False, on_epoch=True, prog_bar=True)
    module.log("both", loss, prog_bar=True, logger=False, **BOTH)
    module.log("sized", loss, batch_size=rows, **BOTH)
    module.log("alone", loss, sync_dist=True, rank_zero_only=True, sync_dist_group=None, **BOTH)
    module.log("graph", loss, enable_graph=True, **BOTH)
    module.log_dict({"first": loss, "second": 2 * loss}, prog_bar=True, **BOTH)


def log_reductions(module: L.LightningModule, x: torch.Tensor) -> None:
    module.log("mean", x.mean(), reduce_fx="mean", **BOTH)
    module.log("average", x.mean(), reduce_fx="avg", **BOTH)
    module.log("sum", x.sum(), reduce_fx="sum", **BOTH)
    module.log("capitals", x.sum(), reduce_fx="SUM", **BOTH)
    module.log("function", x.sum(), reduce_fx=torch.sum, **BOTH)
    module.log("min", x.min(), reduce_fx=min, **BOTH)
    module.log("max", x.max(), reduce_fx=torch.max, **BOTH)
    module.log("by position", x.sum(), True, None, True, True, "sum")
    module.log("size by position", x.mean(), False, None, True, True, "mean", False, False, None, True, len(x))


def log_kinds(module: L.LightningModule, x: torch.Tensor, batch_idx: int) -> None:
    module.log("number", 0.1, **BOTH)
    module.log("large", 1234567.0)
    module.log("integer", 7, **BOTH)
    module.log("bool", batch_idx == 1, **BOTH)
    module.log("numpy", np.float32(x.mean().item()), **BOTH)
    module.log("numpy double", np.float64(x.mean().item()))
    module.log("numpy integer", np.int64(batch_idx))
    module.log("element", x.mean().reshape(1, 1), **BOTH)
    module.log("double", x.double().mean(), **BOTH)
    module.log("integer tensor", torch.tensor(5), **BOTH)
    module.log("bool tensor", torch.tensor(True))


@compat(
    "LightningModule method",
    "log; log (`on_step`, `on_epoch`, `prog_bar`, `logger`); log (`reduce_fx`); log (`batch_size` given or guessed); "
    "log (`sync_dist`, `rank_zero_only`, `enable_graph`); "
    "log (floats, integers, bools, NumPy numbers, tensors with one element); log_dict",
)
@compat("Trainer attribute", "logged_metrics; callback_metrics; progress_bar_metrics")
@pytest.mark.filterwarnings("ignore:.*needs to be floating to be reduced")
@pytest.mark.filterwarnings("ignore:.*no logger configured")
def test_options_and_kinds_of_values() -> None:
    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            log_options(self, loss, len(batch[0]))
            log_reductions(self, batch[0])
            log_kinds(self, batch[0], batch_idx)
            return loss

    seen = compared(Logs)
    batches = [entry for entry in seen if entry["where"] == "train batch"]
    assert len(batches) == 6
    first, end = batches[0]["logged_metrics"], seen[-1]["logged_metrics"]
    assert {"default", "step", "both_step", "sum_step", "first_step"} - set(first) == {"both_step"}  # logger=False
    assert {"epoch", "sum_epoch", "by position_epoch", "second_epoch"} <= set(end)
    assert float(end["number_epoch"]) == pytest.approx(0.1)
    assert float(first["large"]) == 1234567.0
    assert {"step", "both_step", "epoch", "both_epoch", "first_step"} <= set(seen[-1]["progress_bar_metrics"])


@compat("LightningModule method", "log (constants keep every digit)")
def test_constants_keep_every_digit() -> None:
    """The mean over micro-batches of 3, 3 and 2 rows must not change a number that they have in common.

    Nor does a precision with fewer digits.
    """
    constants = {"rate": 0.1, "index": 1234567.0, "third": 1 / 3, "tiny": 1e-7}

    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_dict(constants)
            return self.loss(batch)

    module, trainer = Logs(), make_trainer(precision="bf16-true")
    trainer.fit(module, make_loader())
    for name, value in constants.items():
        assert torch.equal(trainer.logged_metrics[name], torch.tensor(value, dtype=torch.float32)), name


class Bare(nn.Module):
    """A block that logs and measures while it runs, through things that it was handed over."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.updated, self.called = SumMetric(), MeanMetric()
        self.outside: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        for log in self.outside[0]:
            log("unit_sum", y.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
            log("unit_mean", y.mean(), on_step=True, on_epoch=True)
        self.updated.update(y.sum())
        self.called(y.mean(), weight=len(y))
        return y


@compat(
    "LightningModule method",
    "log (called inside a unit); log (a bound method that was kept, `super().log`, `log` of a callback)",
)
@compat("Library", "torchmetrics (metrics that a unit updates)")
@pytest.mark.parametrize("ours", [{"num_microbatches": 1}, COPIES])
def test_logs_that_do_not_come_from_the_step_itself(ours: dict[str, Any]) -> None:
    class Logs(Small):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                self.body.insert(1, Bare(6))
            self.kept = self.log
            self.body[1].outside.append((self.log,))

        def on_train_start(self) -> None:
            recorder = next(c for c in self.trainer.callbacks if isinstance(c, MetricsRecorder))
            self.head.register_forward_hook(lambda m, i, o: recorder.log("hook", o.mean(), on_step=True, on_epoch=True))

        def by_another_name(self, value: Any) -> None:
            super().log("super", value, on_step=True, on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.kept("kept", loss, on_step=True, on_epoch=True)
            self.by_another_name(loss)
            unit = self.body[1]
            self.log("updated", unit.updated, on_step=False, on_epoch=True)
            self.log("called", unit.called, on_step=True, on_epoch=True)
            return loss

    seen = compared(Logs, ours=ours)
    assert {"unit_sum_epoch", "hook_epoch", "super_epoch", "kept_epoch", "updated", "called_epoch"} <= set(
        seen[-1]["logged_metrics"]
    )


@compat(
    "LightningModule method",
    "log (metric objects, `metric_attribute`); log_dict (`MetricCollection`); log (`add_dataloader_idx`)",
)
@compat("Library", "torchmetrics (metrics and collections in steps)")
def test_metrics_and_several_loaders() -> None:
    class Logs(Small):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")
            members = {"micro": MulticlassAccuracy(3, average="micro"), "macro": MulticlassAccuracy(3)}
            self.in_training = MetricCollection(members, prefix="train_")
            self.in_validation = nn.ModuleList(MetricCollection(members, prefix="val_").clone() for _ in range(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            self.log("its value", self.accuracy(logits, batch[1]), **BOTH)
            self.log("accuracy", self.accuracy, metric_attribute="accuracy", prog_bar=True, **BOTH)
            self.in_training(logits, batch[1])
            self.log_dict(self.in_training, **BOTH)
            return nn.functional.cross_entropy(logits, batch[1])

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            logits = self(batch[0])
            self.log("loss", self.loss(batch), prog_bar=True, **BOTH)
            self.log(f"own_{dataloader_idx}", logits.mean(), add_dataloader_idx=False)
            metrics = self.in_validation[dataloader_idx]
            metrics.update(logits, batch[1])
            self.log_dict(metrics, on_epoch=True)

    loaders = [make_loader(10, 4), make_loader(7, 3)]
    end = compared(Logs, loaders)[-1]["callback_metrics"]
    names = {"accuracy_step", "train_macro_epoch", "loss_epoch/dataloader_idx_1", "own_0", "own_1"}
    assert names | {"val_macro/dataloader_idx_0", "val_macro/dataloader_idx_1"} <= set(end)


def test_the_mean_goes_over_the_rows_of_micro_batches_that_log() -> None:
    """There is nothing to compare with."""

    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if float(batch[0][0, 0]) > 0:
                self.log("positive", batch[0][0, 0], on_epoch=True, batch_size=len(batch[0]))
            return self.loss(batch)

    trainer = make_trainer()
    trainer.fit(Logs(), make_loader())
    parts = [part for x, _ in make_loader() for part in torch.tensor_split(x, 3)]
    logged = [(float(part[0, 0]), len(part)) for part in parts if part[0, 0] > 0]
    assert 0 < len(logged) < 9
    expected = sum(value * rows for value, rows in logged) / sum(rows for _, rows in logged)
    assert float(trainer.callback_metrics["positive"]) == pytest.approx(expected, rel=1e-5)


class Child(L.LightningModule):
    def forward(self, batch: Any) -> Any:
        self.log("child", 1.0)
        return batch


# Lightning finds the first two when the held calls are made, and the others in the user's own call.
WRONG = {
    "other options": lambda m, v: (m.log("a", v), m.log("a", v, prog_bar=True)),
    "own function": lambda m, v: m.log("a", v, reduce_fx=torch.std),
    "vector": lambda m, v: m.log("a", torch.ones(3)),
    "foreign metric": lambda m, v: m.log("a", SumMetric()),
    "child": lambda m, v: m.child(v),
}


@compat("LightningModule method", "log (wrong use raises the error of Lightning, with the line of the user)")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_names_the_line(case: str) -> None:
    class Logs(Small):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.mean = Child(), MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            WRONG[case](self, loss)
            return loss

    errors = []
    for kind in KINDS:
        with pytest.raises((MisconfigurationException, ValueError)) as caught:
            make_trainer(kind, fast_dev_run=True).fit(Logs(), make_loader())
        errors.append(caught.value)
    plain, ours = errors
    assert type(ours) is type(plain)
    assert str(ours) == str(plain)
    if sys.version_info >= (3, 11):  # notes on exceptions
        function = Child.forward if case == "child" else WRONG[case]
        line = function.__code__.co_firstlineno + (case == "child")
        shown = "".join(traceback.format_exception(ours))
        assert f'{__file__}", line {line}' in shown or f"{__file__}:{line}" in shown


@compat(
    "LightningModule method",
    "log (a mean with `reduce_fx='min'`, `'max'` or `'sum'`)",
    "differs",
    "The largest mean of a micro-batch, for instance: log the maximum itself, or a metric object.",
)
def test_largest_mean() -> None:
    class Logs(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("largest", batch[0].mean(), reduce_fx="max")

    loader = make_loader()
    (found,) = make_trainer().validate(Logs(), loader, verbose=False)
    means = [float(part.mean()) for x, _ in loader for part in torch.tensor_split(x, 3)]
    assert found["largest"] == pytest.approx(max(means), rel=1e-5)


@compat(
    "LightningModule method",
    "log (a count with `reduce_fx='mean'`)",
    "differs",
    "The mean over the micro-batches, with a warning: use `reduce_fx='sum'`.",
)
def test_counts_get_a_warning() -> None:
    class Logs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rows", len(batch[0]))
            self.log("total", float(len(batch[0])), reduce_fx="sum")
            self.log("index", batch_idx)
            return self.loss(batch)

    trainer = make_trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="it is a count or a sum") as caught:
        trainer.fit(Logs(), make_loader(16))
    (message,) = [str(w.message) for w in caught if "a count or a sum" in str(w.message)]
    assert message.startswith("the value that is logged as 'rows' is 5 for 5 rows as one micro-batch and 2.6 as two: ")
    assert message.count("logged as") == 1
    assert "reduce_fx='sum'" in message
    assert float(trainer.logged_metrics["rows"]) == pytest.approx((3 * 3 + 3 * 3 + 2 * 2) / 8)
