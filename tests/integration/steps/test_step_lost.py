"""Trainings that lose a device: they end, with the state of the last step that was finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torchmetrics import MeanMetric

from lightning_roundpipe.devices.device import DeviceLostError
from tests.support.engine.faults import MESSAGE, Losing
from tests.support.parity import assert_alike, make_loader, make_trainer
from tests.support.small import Small


class Noting(Small):
    """Counts in a buffer and in a metric, and uses AdamW, whose state tells what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        loss = self.loss(batch)
        self.num_rows += len(x)
        self.seen.update(x.mean(), weight=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


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


# Of three devices one is lost, at its first use or a later one, in a run of a unit or in a copy.
@pytest.mark.parametrize(("copies", "at", "is_late"), [(False, 0, False), (True, 6, False), (True, 11, True)])
def test_the_state_of_the_last_finished_step_is_saved_and_later_runs_are_on_the_others(
    tmp_path: Path, copies: bool, at: int, is_late: bool
) -> None:
    expecting, losing = Expecting(), Losing(3, 1, at, is_late=is_late)
    trainer = make_trainer(
        devices=3,
        callbacks=[losing, expecting, OnExceptionCheckpoint(tmp_path, "last")],
        num_microbatches=4,
        options={"virtual_copies": copies},
        enable_checkpointing=True,
    )
    module = Noting()
    with pytest.raises(DeviceLostError, match=rf"training_step has lost virtual device 1 \({MESSAGE}\)\. What helps"):
        trainer.fit(module, make_loader(40))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    expected = expecting.states[-1]
    assert len(expecting.states) == saved["global_step"] == 3
    assert expected["weights"]["num_rows"] == 24
    assert module.seen.update_count == 3 * 4, "each micro-batch of the steps that were finished counts once"
    assert_alike(saved["state_dict"], expected["weights"], rtol=0.0, atol=0.0)
    assert_alike(saved["optimizer_states"][0]["state"], expected["optimizer"], rtol=0.0, atol=0.0)
    assert [device.memory.used for device in trainer.strategy.pool.devices] == [0] * 3  # type: ignore[attr-defined]
    trainer.validate(module, make_loader(8), verbose=False)
    assert len(trainer.strategy.pool) == 2  # type: ignore[arg-type, attr-defined]
