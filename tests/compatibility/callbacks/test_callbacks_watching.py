"""Callbacks that watch, stop and write: what they show and when they stop is as in plain Lightning."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import summarize

from tests.support.parity import KINDS, both, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small


class Watched(Small):
    """Has an example input, and logs in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 6)
        self.flops_per_batch = 1000

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        for name in ("val", "again", "worse", "rises"):
            self.log(name, loss * (1.0 if name == "val" else 1.0 + self.current_epoch))
        self.log("finite", loss if self.current_epoch < 2 else loss / 0.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self(batch[0]), "y": batch[1]}


@compat("Callback", "EarlyStopping")
def test_early_stopping_of_every_kind() -> None:
    """All of them in one run that goes on, and one that ends it."""
    has_reasons = hasattr(EarlyStopping("val"), "stopping_reason")  # newer Lightning

    class Follow(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            stops = [c for c in trainer.callbacks if isinstance(c, EarlyStopping)]
            states = [c.state_dict() for c in stops]
            self.seen.append([[state[k] for k in ("wait_count", "stopped_epoch", "best_score")] for state in states])
            self.seen.append([c.stopping_reason.value for c in stops if has_reasons])

    def act(kind: str) -> Any:
        follow = Follow()
        stops = [
            EarlyStopping("val", patience=2, check_on_train_epoch_end=False, mode="max"),
            EarlyStopping("again", patience=1, check_on_train_epoch_end=True, min_delta=0.01),
            EarlyStopping("worse", patience=9, divergence_threshold=2.0),
            EarlyStopping("rises", patience=9, stopping_threshold=3.0, mode="max"),
            EarlyStopping("finite", patience=9, check_finite=True),
            EarlyStopping("loss_epoch", patience=9, strict=False, check_finite=False),
            EarlyStopping("not logged", strict=False),
        ]
        trainer = make_trainer(kind, min_epochs=4, max_epochs=9, callbacks=[*stops, follow])
        trainer.fit(Watched(), make_loader(8), make_loader(10, 5))
        return follow.seen, trainer.current_epoch, trainer.global_step

    seen, epoch, _ = both(act)
    assert len(set(seen[-1])) == (5 if has_reasons else 0), seen[-1]
    assert epoch == 4, "ended by a callback, after min_epochs"


@compat("Callback", "Timer")
def test_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by a second per batch."""
    seconds = [0.0]

    class Tick(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            seconds[0] += 1.0

        on_validation_batch_start = on_train_batch_start

    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time", SimpleNamespace(monotonic=lambda: seconds[0]))

    def act(kind: str) -> Any:
        timer = Timer(duration={"seconds": 7})
        trainer = make_trainer(kind, max_epochs=9, callbacks=[Tick(), timer])
        trainer.fit(Watched(), make_loader(), make_loader(10, 5))
        times = [timer.time_elapsed("train"), timer.time_elapsed("validate"), timer.time_remaining("train")]
        return [trainer.global_step, *times, timer.state_dict()]

    assert both(act)[:2] == [5, 9.0]


@compat("Callback", "SpikeDetection")
def test_a_spike_of_the_loss(tmp_path: Path) -> None:
    class Spikes(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (100.0 if batch_idx == 3 else 1.0)

    def act(kind: str) -> Any:
        callback = SpikeDetection(exclude_batches_path=tmp_path / kind, rtol=5.0)
        with pytest.raises(TrainingSpikeException, match="batch 3"):
            make_trainer(kind, callbacks=[callback]).fit(Spikes(), make_loader(40))
        return json.loads((tmp_path / kind / "skip_batches.json").read_text(encoding="utf-8"))

    assert both(act) == [2, 3]


class OwnBar(ProgressBar):
    """Notes what a bar would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def disable(self) -> None:
        pass

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.shown.append(str(summarize(pl_module, max_depth=-1)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        metrics = {k: float(v) for k, v in self.get_metrics(trainer, pl_module).items()}
        self.shown.append([self.total_train_batches, args[-1], metrics])

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *indices: int) -> None:
        is_new = self.has_dataloader_changed(indices[1] if len(indices) > 1 else 0)
        self.shown.append([self.total_val_batches_current_dataloader, is_new, *indices])


@compat("Callback", "ProgressBar; TQDMProgressBar; RichProgressBar; ModelSummary; RichModelSummary")
@compat("Trainer argument", "enable_progress_bar; enable_model_summary; callbacks")
def test_bars_and_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich", reason="needs the package rich, which RichProgressBar is made of")
    texts: list[str] = []

    def act(kind: str) -> Any:
        own = OwnBar()
        found: list[Any] = [own.shown]
        for callbacks in ([own, ModelSummary(3)], [TQDMProgressBar(), RichModelSummary(-1)], [RichProgressBar()], []):
            has_summary = len(callbacks) != 1
            settings = {"enable_progress_bar": True, "enable_model_summary": has_summary}
            trainer = make_trainer(kind, callbacks=callbacks, **settings)
            trainer.fit(Watched(), make_loader(), make_loader(10, 5))
            assert set(callbacks) <= set(trainer.callbacks)
            assert any(isinstance(callback, ModelSummary) for callback in trainer.callbacks) == has_summary
            found.append([type(callback).__name__ for callback in trainer.callbacks])
            texts.append(capsys.readouterr().out)
        assert make_trainer(kind).progress_bar_callback is None
        return found

    assert "Params" in both(act)[0][0]
    plain, ours = texts[:4], texts[4:]
    assert "body.0.0" in plain[1].split("Epoch")[0]
    assert ours[1].split("Epoch")[0] == plain[1].split("Epoch")[0], "the table, with sizes of the example input"
    for text in plain[1:] + ours[1:]:
        assert "3/3" in text
        assert "loss_epoch" in text


@compat("Callback", "DeviceStatsMonitor", "differs", "Figures of the host and of every device.")
@compat("Callback", "ThroughputMonitor")
def test_monitors(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="needs the package psutil, which DeviceStatsMonitor reads the host with")
    rows: list[list[dict[str, str]]] = []
    for kind in KINDS:
        throughput = ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].numel(), window_size=2)
        logger = CSVLogger(tmp_path, name=kind)
        settings = {"logger": logger, "log_every_n_steps": 1, "callbacks": [throughput, DeviceStatsMonitor()]}
        make_trainer(kind, max_epochs=2, **settings).fit(Watched(), make_loader(24), make_loader(10, 5))
        with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
            rows.append(list(csv.DictReader(file)))
    plain, ours = ([row for row in found if row["train/time"]] for found in rows)
    counts = [[{k: row[f"train/{k}"] for k in ("batches", "samples", "lengths")} for row in r] for r in (plain, ours)]
    assert counts[0] == counts[1]
    assert counts[0][-1] == {"batches": "6", "samples": "48", "lengths": str(48 * 6)}
    assert set(rows[0][0]) <= set(rows[1][0]), "nothing that plain Lightning logs is missing"
    seconds = [float(row["train/time"]) for row in ours]
    assert seconds == sorted(seconds)
    rate = 8 / (seconds[-1] - seconds[-2])
    assert float(ours[-1]["train/device/samples_per_sec"]) == pytest.approx(rate, rel=1e-3)
    assert float(ours[-1]["train/device/flops_per_sec"]) == pytest.approx(1000 * rate / 8, rel=1e-3)
    assert any(row["DeviceStatsMonitor.on_train_batch_end/device1.unit_runs"] for row in rows[1])


class Writer(BasePredictionWriter):
    """Writes what it is given, and notes for which rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder
        folder.mkdir()
        self.indices: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
        torch.save(prediction, self.folder / f"{rest[-2]}.pt")
        self.indices.append([batch_indices, *rest[-2:]])

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(predictions, self.folder / "all.pt")
        self.indices.append(batch_indices)


@compat("Callback", "BasePredictionWriter")
def test_predictions_are_written(tmp_path: Path) -> None:
    def act(kind: str) -> Any:
        writer = Writer(tmp_path / kind)
        make_trainer(kind, callbacks=[writer]).predict(Watched(), make_loader(), return_predictions=False)
        return {path.name: torch.load(path) for path in sorted(writer.folder.iterdir())}, writer.indices

    files, indices = both(act)
    assert list(files) == ["0.pt", "1.pt", "2.pt", "all.pt"]
    assert indices[2][0] == [16, 17, 18, 19]
