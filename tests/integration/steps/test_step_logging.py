"""``self.log``: the values of plain Lightning, per step and per epoch, in every place where they appear."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torchmetrics import CatMetric, MeanMetric
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


@compat("LightningModule method", "log")
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
