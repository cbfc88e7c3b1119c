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
from tests.support.engine.faults import MESSAGE, Losing
from tests.support.parity import assert_alike, fit, make_loader
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
