"""Trainings that lose devices: the same results on the others, and with the last one the end."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric

from lightning_roundpipe.devices.device import DeviceLostError
from tests.support.engine.faults import MESSAGE, Fault, Losing
from tests.support.late_updates import Late
from tests.support.parity import Run, assert_alike, compare, fit, make_loader, make_trainer
from tests.support.small import Small

# Those that share the memory of the host cannot be lost.
COPIES = {"virtual_copies": True}
SAVING: dict[str, Any] = {"enable_checkpointing": True}
ONE_OF_TWO = {1: (1, 7)}


class Noting(Small):
    """Logs, counts in a buffer and in a metric, and uses AdamW, whose state tells what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))
        self.seen = MeanMetric()
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        loss = self.loss(batch)
        self.num_rows += len(x)
        self.seen.update(x.mean(), weight=len(x))
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_steps += 1

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.seen.compute())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def names_of(run: Run) -> list[str]:
    """The devices that are left."""
    return [device.name for device in run.trainer.strategy.pool.devices]  # type: ignore[attr-defined]


# A device and one of its uses, for each of two batches: of three devices one is left.
@pytest.mark.parametrize(("losses", "is_late"), [({1: (1, 3), 3: (0, 9)}, False), ({0: (0, 5), 3: (2, 8)}, True)])
def test_training_from_three_devices_to_one_is_that_of_plain_lightning(
    losses: dict[int, tuple[int, int]], is_late: bool
) -> None:
    settings: dict[str, Any] = {"devices": 3, "num_microbatches": 4, "options": COPIES}
    lost = rf"training_step has lost virtual device \d \({MESSAGE}\)\. It is run again .*: on %s, with the same"
    with pytest.warns(UserWarning, match=lost % "2 devices"), pytest.warns(UserWarning, match=lost % "1 device"):
        _, ours = compare(
            Noting,
            make_loader(40),
            callbacks=lambda: [Losing(losses, is_late=is_late)],
            accumulate_grad_batches=2,
            **settings,
        )
    assert len(names_of(ours)) == 1
    assert set(ours.watch.num_microbatches) == {4}
    assert ours.module.num_rows == 40
    assert ours.module.seen.update_count == 5 * 4, "each micro-batch counts once"


def test_update_that_runs_when_a_device_is_lost_ends_as_always(late: Late) -> None:
    _, ours = compare(
        Noting,
        make_loader(40),
        callbacks=lambda: [Losing({2: (1, 2), 3: (0, 10)})],
        devices=3,
        options={**COPIES, "optimizer_overlap": "exact"},
    )
    assert late.num_buckets > 0
    assert len(names_of(ours)) == 1


class Expecting(L.Callback):
    """Keeps the state after every optimizer step."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0].state_dict()["state"]
        self.states.append(
            {
                "weights": {name: value.clone() for name, value in pl_module.state_dict().items()},
                "optimizer": {k: {n: v.clone() for n, v in one.items()} for k, one in optimizer.items()},
            }
        )


def test_with_the_last_device_the_state_of_the_last_finished_step_is_saved(tmp_path: Path) -> None:
    expecting = Expecting()
    callbacks = [Losing({1: (0, 2), 3: (1, 6)}), expecting, OnExceptionCheckpoint(tmp_path, "last")]
    with pytest.raises(
        DeviceLostError, match=rf"training_step has lost virtual device 1 \({MESSAGE}\)\. No other device is left"
    ):
        fit("roundpipe", Noting, make_loader(40), callbacks=callbacks, options=COPIES, **SAVING)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    expected = expecting.states[-1]
    assert len(expecting.states) == saved["global_step"] == 3
    assert expected["weights"]["num_rows"] == 24
    assert_alike(saved["state_dict"], expected["weights"], rtol=0.0, atol=0.0)
    assert_alike(saved["optimizer_states"][0]["state"], expected["optimizer"], rtol=0.0, atol=0.0)


class ByHand(Small):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_optimization_is_run_again_as_long_as_nothing_is_final() -> None:
    compare(ByHand, callbacks=lambda: [Losing(ONE_OF_TWO)], options=COPIES)
    at_the_end = Losing({1: (0, 10**6)})
    fit("roundpipe", ByHand, make_loader(16), callbacks=[at_the_end], options=COPIES)
    last = len(at_the_end.faults[0].uses) - 1

    class Twice(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            super().training_step(batch, batch_idx)

    with pytest.raises(DeviceLostError, match="on the other devices, because manual_backward or an optimizer has been"):
        fit("roundpipe", Twice, make_loader(16), callbacks=[Losing({1: (0, last + 1)})], options=COPIES)


def test_evaluation_and_later_runs_of_the_trainer_go_on_without_the_device() -> None:
    class Evaluating(Noting):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

    class InValidation(L.Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.strategy.pool.devices[-1].number == 2:
                Fault(trainer.strategy.pool.devices[-1], at=1)

    trainer = make_trainer(devices=3, callbacks=[InValidation()], options=COPIES)
    module = Evaluating()
    with pytest.warns(UserWarning, match=r"validation_step has lost virtual device 2 .* on 2 devices"):
        trainer.fit(module, make_loader(), make_loader(8))
    expected = trainer.callback_metrics["val_loss"]
    (found,) = trainer.validate(module, make_loader(8), verbose=False)
    torch.testing.assert_close(torch.tensor(found["val_loss"]), expected)
    assert len(trainer.strategy.pool) == 2  # type: ignore[arg-type, attr-defined]


def test_monitors_traces_and_profiles_show_the_devices_that_there_are(tmp_path: Path) -> None:
    fit(
        "roundpipe",
        Small,
        make_loader(64),
        callbacks=[Losing({4: (0, 6)}), DeviceStatsMonitor()],
        logger=CSVLogger(tmp_path, "", ""),
        log_every_n_steps=1,
        devices=3,
        options={
            **COPIES,
            "trace": tmp_path / "trace.json",
            "save_profile": tmp_path / "costs.json",
        },
    )
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["DeviceStatsMonitor.on_train_batch_end/device2.unit_runs"]]
    figures = [[row[f"DeviceStatsMonitor.on_train_batch_end/device{i}.unit_runs"] for row in rows] for i in range(3)]
    assert len(rows) == 8
    assert figures[0][3]
    assert figures[0][4:] == [""] * 4
    for shown in figures[1:]:
        assert sorted(map(float, shown)) == list(map(float, shown)), "they are counted on"
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "costs.json").read_text())["calls"]
