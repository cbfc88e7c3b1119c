"""``self.log``: the values of plain Lightning, per step and per epoch, in every place where they appear."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from tests.support.metric_recorder import Recorder
from tests.support.rows import compat, compat_each


@pytest.fixture
def compare_logs(fit_both: Any, assert_alike: Any) -> Callable[..., list[dict[str, Any]]]:
    """Fits plainly and with RoundPipe, compares all that callbacks saw, and returns it."""

    def compare(make_module: Callable[[], Any], loader: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        kwargs.setdefault("max_epochs", 2)
        plain, ours = fit_both(make_module, loader, callbacks=lambda: [Recorder()], **kwargs)
        logs = [
            next(callback for callback in run.trainer.callbacks if isinstance(callback, Recorder)).seen
            for run in (ours, plain)
        ]
        assert_alike(*logs)
        return logs[1]

    return compare


ON = [
    {},
    {"on_step": True, "on_epoch": True},
    {"on_step": False, "on_epoch": True},
    {"on_step": True, "on_epoch": False},
]


@compat("LightningModule method", "log")
@pytest.mark.parametrize("where", ON, ids=["default", "both", "epoch", "step"])
@pytest.mark.parametrize("given", [True, False], ids=["batch_size", "no-batch_size"])
def test_mean_of_the_loss(small: Any, compare_logs: Any, where: dict[str, bool], given: bool) -> None:
    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            size = {"batch_size": len(batch[0])} if given else {}
            self.log("loss", loss, prog_bar=True, **where, **size)
            self.log_dict({"twice": 2 * loss, "half": loss / 2}, logger=False, **where, **size)
            return loss

    seen = compare_logs(Logs)
    assert any("loss" in name for entry in seen for name in entry["progress_bar_metrics"])
    assert not any("half" in name for entry in seen for name in entry["logged_metrics"])


@pytest.mark.parametrize("reduce_fx", ["sum", "min", "max", torch.sum, torch.max, torch.mean])
def test_reductions(small: Any, compare_logs: Any, reduce_fx: Any) -> None:
    name = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__

    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = getattr(torch, name)(batch[0][:, 0])
            self.log("value", value, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
            return self.loss(batch)

    compare_logs(Logs)


def test_number_of_rows_as_a_sum(small: Any, compare_logs: Any) -> None:
    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("rows", float(len(batch[0])), on_step=True, on_epoch=True, reduce_fx="sum")
            return self.loss(batch)

    seen = compare_logs(Logs, max_epochs=1)
    assert [float(e["callback_metrics"]["rows_step"]) for e in seen if e["where"] == "train batch"] == [8, 8, 4]
    assert float(seen[-1]["callback_metrics"]["rows"]) == 20


def test_python_numbers_and_values_from_outside_the_batch(small: Any, compare_logs: Any) -> None:
    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("index", float(batch_idx), on_step=True, on_epoch=True)
            self.log("epoch", self.current_epoch)
            self.log("rate", self.optimizers().param_groups[0]["lr"], prog_bar=True)
            return self.loss(batch)

    compare_logs(Logs)


def test_log_in_hooks_beside_log_in_steps(small: Any, compare_logs: Any) -> None:
    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("start", float(batch_idx))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("seen", outputs["loss"], on_step=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", self.head.weight.grad.norm(), on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log("epoch", self.head.weight.abs().sum().detach())

    compare_logs(Logs)


def test_log_of_a_child_module(small: Any, compare_logs: Any) -> None:
    class Child(L.LightningModule):
        def forward(self, x: Any) -> Any:
            return x

    class Logs(small):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(self.child(batch))
            self.log("child", loss, on_step=True, on_epoch=True)
            return loss

    compare_logs(Logs)


def test_log_from_forward_called_in_user_code(small: Any, compare_logs: Any) -> None:
    class Logs(small):
        def forward(self, x: Any) -> Any:
            features = self.body(x)
            self.log("mean", features.mean(), on_step=True, on_epoch=True)
            return self.head(features)

    compare_logs(Logs)


class WithMetrics:
    """Mixed into the small model: metric objects, updated inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")
        self.macro = MulticlassAccuracy(num_classes=3)
        self.mean = MeanMetric()

    def measured(self, batch: Any) -> Any:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        return logits, y, loss


def test_metric_objects_on_epoch(small: Any, compare_logs: Any) -> None:
    class Logs(WithMetrics, small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, y, loss = self.measured(batch)
            self.accuracy.update(logits, y)
            self.macro(logits, y)
            self.mean(loss, weight=len(y))
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)
            self.log_dict({"macro": self.macro, "mean": self.mean}, on_step=False, on_epoch=True)
            return loss

    compare_logs(Logs)


def test_metric_objects_on_step(small: Any, compare_logs: Any) -> None:
    class Logs(WithMetrics, small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, y, loss = self.measured(batch)
            self.accuracy(logits, y)
            self.macro(logits, y)
            self.mean(loss.detach(), weight=len(y))
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
            self.log_dict({"macro": self.macro, "mean": self.mean}, on_step=True, on_epoch=True)
            return loss

    compare_logs(Logs)


def test_metric_collection(small: Any, compare_logs: Any) -> None:
    class Logs(small):
        def __init__(self) -> None:
            super().__init__()
            members = {"micro": MulticlassAccuracy(3, average="micro"), "macro": MulticlassAccuracy(3)}
            self.metrics = MetricCollection(members, prefix="train_")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            self.metrics(logits, batch[1])
            self.log_dict(self.metrics, on_step=True, on_epoch=True)
            return torch.nn.functional.cross_entropy(logits, batch[1])

    compare_logs(Logs)


def test_metric_values(small: Any, compare_logs: Any) -> None:
    class Logs(WithMetrics, small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits, y, loss = self.measured(batch)
            self.log("accuracy", self.accuracy(logits, y), on_step=True, on_epoch=True)
            return loss

    compare_logs(Logs)


def test_metric_state_keeps_the_order_of_rows(small: Any, make_trainer: Any, make_loader: Any) -> None:
    class Collects(small):
        def __init__(self) -> None:
            super().__init__()
            self.rows = CatMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.rows.update(self(batch[0])[:, 0])

        def on_validation_epoch_end(self) -> None:
            self.collected = self.rows.compute()

    modules = {}
    for kind in ("plain", "roundpipe"):
        modules[kind] = Collects()
        make_trainer(kind).validate(modules[kind], make_loader(), verbose=False)
    torch.testing.assert_close(modules["roundpipe"].collected, modules["plain"].collected, rtol=1e-4, atol=1e-6)


def test_validation_inside_fit(small: Any, compare_logs: Any, make_loader: Any) -> None:
    class Logs(WithMetrics, small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits, y, loss = self.measured(batch)
            self.log("val", loss, prog_bar=True)
            self.log("val_both", loss, on_step=True, on_epoch=True)
            worst = torch.nn.functional.cross_entropy(logits, batch[1], reduction="none").max()
            self.log("val_worst", worst, reduce_fx="max")
            self.accuracy(logits, y)
            self.log("val_accuracy", self.accuracy)

    seen = compare_logs(Logs, val_loader=make_loader(10, 4), val_check_interval=2)
    assert sum(entry["where"] == "validation batch" for entry in seen) == 6


@compat_each("Trainer method", "validate test")
@compat("LightningModule hook", "test_step")
def test_values_of_validate_and_test(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    class Logs(WithMetrics, small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            logits, y, loss = self.measured(batch)
            self.accuracy(logits, y)
            self.log("loss", loss)
            self.log("accuracy", self.accuracy)
            self.log("rows", float(len(y)), reduce_fx="sum")

        test_step = validation_step

    found: dict[str, Any] = {}
    for kind in ("plain", "roundpipe"):
        module, trainer = Logs(), make_trainer(kind)
        one, two = make_loader(), make_loader(10, 4)
        found[kind] = [
            trainer.validate(module, one, verbose=False),
            trainer.validate(module, [one, two], verbose=False),
            trainer.test(module, one, verbose=False),
            dict(trainer.callback_metrics),
        ]
    assert_alike(found["roundpipe"], found["plain"])
    assert found["plain"][0][0]["rows"] == 20


def test_a_name_only_some_microbatches_log(small: Any, make_trainer: Any, make_loader: Any) -> None:
    """There is nothing to compare with: the mean goes over the rows of those that log."""

    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if float(batch[0][0, 0]) > 0:
                self.log("positive", batch[0][0, 0], on_epoch=True, batch_size=len(batch[0]))
            return self.loss(batch)

    loader = make_loader()
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Logs(), loader)
    firsts, sizes = [], []
    for x, _ in loader:
        for part in torch.tensor_split(x, 3):
            if part[0, 0] > 0:
                firsts.append(float(part[0, 0]))
                sizes.append(len(part))
    assert 0 < len(firsts) < 9
    expected = sum(value * size for value, size in zip(firsts, sizes, strict=True)) / sum(sizes)
    assert float(trainer.callback_metrics["positive"]) == pytest.approx(expected, rel=1e-5)


@compat("Logger", "CSVLogger")
def test_csv_rows_once_per_step(small: Any, fit_both: Any, tmp_path: Path) -> None:
    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("step_only", loss)
            return loss

    fit_both(
        Logs,
        max_epochs=2,
        log_every_n_steps=1,
        plain={"logger": CSVLogger(tmp_path, "plain", "")},
        ours={"logger": CSVLogger(tmp_path, "ours", "")},
    )
    tables = []
    for name in ("ours", "plain"):
        with (tmp_path / name / "metrics.csv").open() as file:
            tables.append(list(csv.DictReader(file)))
    ours, plain = tables
    assert len(plain) == 8  # 2 epochs of 3 steps and 1 summary
    assert [row.keys() for row in ours] == [row.keys() for row in plain]
    for left, right in zip(ours, plain, strict=True):
        for name, value in right.items():
            assert (left[name] == "") == (value == "")
            if value:
                assert float(left[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-6)


@compat("Logger", "TensorBoardLogger")
def test_tensorboard_events_once_per_step(small: Any, fit_both: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    fit_both(
        Logs,
        max_epochs=2,
        log_every_n_steps=1,
        plain={"logger": TensorBoardLogger(tmp_path, "plain", "")},
        ours={"logger": TensorBoardLogger(tmp_path, "ours", "")},
    )
    events = []
    for name in ("ours", "plain"):
        accumulator = EventAccumulator(str(tmp_path / name)).Reload()
        events.append({tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]})
    ours, plain = events
    assert ours.keys() == plain.keys()
    assert len(plain["loss_step"]) == 6
    for tag, expected in plain.items():
        assert [event.step for event in ours[tag]] == [event.step for event in expected]
        assert [e.value for e in ours[tag]] == pytest.approx([e.value for e in expected], rel=1e-4, abs=1e-6)


@compat("Callback", "TQDMProgressBar")
def test_progress_bar_shows_the_merged_value(small: Any, fit_both: Any) -> None:
    from lightning.pytorch.callbacks import TQDMProgressBar

    class Bar(TQDMProgressBar):
        def __init__(self) -> None:
            super().__init__()
            self.shown: list[dict[str, Any]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.shown.append(dict(self.get_metrics(trainer, module)))
            super().on_train_batch_end(trainer, module, *args)

    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True)
            return loss

    runs = fit_both(Logs, callbacks=lambda: [Bar()], enable_progress_bar=True)
    plain, ours = (next(b.shown for b in run.trainer.callbacks if isinstance(b, Bar)) for run in runs)
    assert len(plain) == 3
    assert [shown["loss"] for shown in ours] == pytest.approx([shown["loss"] for shown in plain], rel=1e-4)


WRONG_CALLS = {
    "other options": (lambda m, v: (m.log("a", v, on_epoch=True), m.log("a", v, on_epoch=False, on_step=True)), None),
    "reduce_fx": (lambda m, v: m.log("a", v, reduce_fx="median"), MisconfigurationException),
    "same key twice": (lambda m, v: (m.log("a", v), m.log("a", v, prog_bar=True)), None),
    "slash dataloader": (lambda m, v: m.log("a/dataloader_idx_0", v), MisconfigurationException),
    "string value": (lambda m, v: m.log("a", "text"), ValueError),
    "vector": (lambda m, v: m.log("a", torch.ones(3)), ValueError),
    "dict": (lambda m, v: m.log("a", {"b": {"c": 1.0}}), ValueError),
    "unknown argument": (lambda m, v: m.log("a", v, on_stepp=True), TypeError),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_arguments_raise_what_plain_raises(small: Any, make_trainer: Any, make_loader: Any, name: str) -> None:
    call, kind = WRONG_CALLS[name]

    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            call(self, loss)
            return loss

    errors = []
    for trainer in (make_trainer("plain"), make_trainer()):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            trainer.fit(Logs(), make_loader())
        errors.append(caught.value)
    assert type(errors[1]) is type(errors[0])
    assert kind is None or isinstance(errors[0], kind)
    assert str(errors[1]) == str(errors[0])
