"""A training that loses a device ends, in the state of its last finished step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torchmetrics import MeanMetric

from lightning_roundpipe.devices.device import DeviceLostError
from tests.support.engine.faults import MESSAGE, Fault, Losing
from tests.support.late_updates import Late
from tests.support.parity import assert_alike, fit, make_loader, make_trainer
from tests.support.small import Small

# Those that share the memory of the host cannot be lost.
COPIES = {"virtual_copies": True}


class Noting(Small):
    """Counts in a buffer and in a metric, and uses AdamW, whose state tells what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        self.num_rows += len(x)
        self.seen.update(x.mean(), weight=len(x))
        return self.loss(batch)

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


@pytest.mark.parametrize(("use", "is_late"), [(2, False), (6, True)])
def test_the_state_of_the_last_finished_step_is_saved(tmp_path: Path, use: int, is_late: bool) -> None:
    expecting = Expecting()
    callbacks = [Losing(3, 1, use, is_late=is_late), expecting, OnExceptionCheckpoint(tmp_path, "last")]
    with pytest.raises(DeviceLostError, match=rf"training_step has lost virtual device 1 \({MESSAGE}\)\. What helps"):
        fit("roundpipe", Noting, make_loader(40), callbacks=callbacks, options=COPIES, enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    expected = expecting.states[-1]
    assert len(expecting.states) == saved["global_step"] == 3
    assert expected["weights"]["num_rows"] == 24
    assert_alike(saved["state_dict"], expected["weights"], rtol=0.0, atol=0.0)
    assert_alike(saved["optimizer_states"][0]["state"], expected["optimizer"], rtol=0.0, atol=0.0)


def test_an_update_under_way_when_a_device_is_lost_ends_first(late: Late) -> None:
    class Ending(L.Callback):
        def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
            self.steps = {float(one["step"]) for one in trainer.optimizers[0].state_dict()["state"].values()}

    ending = Ending()
    with pytest.raises(DeviceLostError):
        fit("roundpipe", Noting, make_loader(40), callbacks=[Losing(2, 0, 3), ending], options=COPIES)
    assert late.num_buckets > 0
    assert ending.steps == {2.0}


def test_what_a_step_by_hand_has_done_is_not_taken_back() -> None:
    class ByHand(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            lose(self.trainer)
            self.loss(batch)

    def lose(trainer: Any) -> None:
        device = trainer.strategy.pool[0]
        if device.lost is None:
            Fault(device, at=0)

    with pytest.raises(
        DeviceLostError, match="not have been taken back in full, because manual_backward or an optimizer"
    ):
        fit("roundpipe", ByHand, make_loader(16), options=COPIES)


def test_evaluation_that_loses_a_device() -> None:
    class Evaluating(Noting):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

    class InValidation(L.Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            Fault(trainer.strategy.pool[1], at=1)

    with pytest.raises(DeviceLostError, match=r"validation_step has lost virtual device 1"):
        make_trainer(callbacks=[InValidation()], options=COPIES).fit(Evaluating(), make_loader(), make_loader(8))
