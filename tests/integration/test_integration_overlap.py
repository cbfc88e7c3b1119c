"""Optimizer steps behind the pipeline, in whole trainings: which are not, and who waits for them.

The updates here are late: none begins before something waits for it. That trainings with them are those of plain
Lightning is shown by all of tests/parity and tests/compatibility.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger

from lightning_roundpipe.integration import overlap
from lightning_roundpipe.weights import events
from lightning_roundpipe.weights.futures import PendingParameter
from tests.support.identical import assert_identical
from tests.support.late_updates import Late, assert_finished, copied
from tests.support.parity import COPIES, compare, make_loader, make_trainer
from tests.support.small import Small

pytestmark = pytest.mark.usefixtures("late")


def frozen(module: Any) -> None:
    module.head.requires_grad_(module.global_step % 3 != 1)


def clamped(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("change", [frozen, clamped])
def test_weights_that_are_changed_before_their_update_has_begun(late: Late, change: Callable[[Any], None]) -> None:
    """Under mixed precision the update makes low copies as well, which for frozen weights are told by their values.

    A write by ``data`` leaves no trace.
    """

    class Learns(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            change(self)

    own = {"num_microbatches": 1, **COPIES}  # autocast rounds every micro-batch by itself
    plain, ours = compare(Learns, make_loader(40), precision="bf16-mixed", ours=own)
    assert_identical(ours.results, plain.results)
    assert late.num_buckets > 0


# --- which do not overlap ---------------------------------------------------------------------------------------------


def test_coupled_optimizers_are_not_taken_apart(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    class Learns(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    messages: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", messages.append)
    make_trainer().fit(Learns(), make_loader())
    assert late.num_buckets == 0
    (message,) = messages
    assert "LBFGS is not known to update each parameter by itself" in message


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated:DeprecationWarning")
def test_scripted_modules_do_not_meet_weights_that_are_under_way(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read weights in C++, where no read can wait."""

    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.jit.script(self.head)

    messages: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", messages.append)
    make_trainer().fit(Learns(), make_loader())
    assert late.num_buckets == 0
    (message,) = messages
    assert "torch.jit.ScriptModule" in message


# --- ways out ---------------------------------------------------------------------------------------------------------


class Groups(Small):
    """Parameter groups, and a scheduler."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.head.parameters(), "lr": 0.05},
            {"params": self.body.parameters(), "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Small, {}),
        (Groups, {"options": {"virtual_copies": True}, "gradient_clip_val": 0.05}),
        (Groups, {"precision": "bf16-true"}),
    ],
    ids=["SGD", "copies, clip norm", "bf16-true"],
)
def test_fit_twice(late: Late, make: type[Small], settings: dict[str, Any]) -> None:
    """To the last bit as without overlap."""
    ends = []
    for mode in ("off", "exact"):
        options = {**settings.get("options", {}), "optimizer_overlap": mode}
        module, trainer = make(), make_trainer(**{**settings, "options": options})
        trainer.fit(module, make_loader(32))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, make_loader(32))
        assert_finished(trainer, module)
        assert (late.num_buckets > 0) == (mode == "exact")
        ends.append([copied(module.state_dict()), trainer.optimizers[0].state_dict(), trainer.global_step])
    assert_identical(ends[1], ends[0])
    assert ends[0][-1] == 8


# --- who does not pay -------------------------------------------------------------------------------------------------


class Watches(cb.Callback):
    """Looks at losses and metrics only."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        assert "loss" in trainer.callback_metrics
        assert trainer.optimizers[0].param_groups[0]["lr"] > 0
        assert pl_module.head.weight.shape == (3, 6)
        assert sum(p.numel() for p in pl_module.parameters() if p.requires_grad) > 0


def test_what_only_watches_losses_does_not_wait(late: Late, tmp_path: Path) -> None:
    """The next step has begun, with everything between the steps done, and no thread has waited for the update."""
    demands_at_start: list[int] = []
    demands_after_step: list[int] = []

    class Learns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(demands_at_start) == len(demands_after_step):
                demands_at_start.append(len(late.demands))
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            demands_after_step.append(len(late.demands))
            if len(demands_after_step) not in (1, 5, 10):
                assert all(type(p) is PendingParameter for p in self.parameters())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    watching = Watches()
    trainer = make_trainer(
        options={"optimizer_overlap": "exact"},
        max_epochs=2,
        gradient_clip_val=0.5,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_progress_bar=True,
        callbacks=[
            watching,
            cb.LearningRateMonitor("step"),
            cb.EarlyStopping("loss", patience=5, check_on_train_epoch_end=True),
            cb.Timer(),
        ],
    )
    trainer.fit(Learns(), make_loader(40))
    assert len(watching.losses) == len(demands_after_step) == 10
    # The first steps compare weights before and after, to find mistakes of user code. The last of an epoch waits.
    assert demands_at_start[3:] == demands_after_step[2:-1]


def test_units_wait_for_their_own_weights_in_the_order_of_the_forward(late: Late) -> None:
    class Learns(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                late.demands.clear()

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.trainer.fit_loop.batch_idx == 4:
                self.demanded = list(late.demands)

    module = Learns()
    make_trainer(options={"optimizer_overlap": "exact"}, devices=1, num_microbatches=2).fit(module, make_loader(40))
    names = {p: name for name, p in module.named_parameters()}
    asked = [[names[p] for p in bucket] for bucket in module.demanded if bucket is not None]
    assert [bucket[0] for bucket in asked] == [*(f"body.{i}.0.weight" for i in range(4)), "head.weight"]
    assert all(len(bucket) == 2 for bucket in asked)


class Converted:
    """By which threads low-precision copies are made, in each step; begins with what the update before it has made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[str]] = [[]]
        monkeypatch.setattr(events, "observer", self._note)

    def _note(self, event: str, *args: Any) -> None:
        if event == "refresh":
            self.steps[-1].append(threading.current_thread().name)
        elif event == "step_ended":
            self.steps.append([])


def test_no_step_converts_what_an_update_has_just_written(monkeypatch: pytest.MonkeyPatch) -> None:
    converted = Converted(monkeypatch)
    options = {**COPIES["options"], "verify": 0, "check_split": "off"}
    make_trainer(precision="bf16-mixed", options=options).fit(Small(), make_loader(56))
    # In the first steps units are learned, and weights are looked at for mistakes of the user.
    made_by = [name for step in converted.steps[4:-1] for name in step]
    assert made_by
    assert set(made_by) == {"roundpipe-optimizer"}, converted.steps
