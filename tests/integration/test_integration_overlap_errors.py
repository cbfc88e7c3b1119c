"""Errors in trainings with updates behind the pipeline: weights are finished, and the ``fit`` ends with the error.

The updates are late, see :class:`Late`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.weights.futures import PendingParameter
from tests.support.identical import assert_identical
from tests.support.late_updates import Late, assert_finished, copied
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

pytestmark = pytest.mark.usefixtures("small_updates")


class Stop(RuntimeError):
    """What a callback raises here."""


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("on_train_batch_end", KeyboardInterrupt),
        ("training_step", KeyboardInterrupt),
        ("after step", Stop),
    ],
)
def test_weights_are_finished_when_fit_ends_in_an_error(late: Late, error: Any, place: str) -> None:
    class Learns(Small):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            self.maybe_stop("after step", 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.maybe_stop("training_step", 2)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.maybe_stop("on_train_batch_end", 2)

        def maybe_stop(self, here: str, step: int) -> None:
            if here == place and self.trainer.global_step >= step:
                assert any(type(p) is PendingParameter for p in self.parameters()) == self.expects_pending
                raise error("now")

    ends = []
    for mode in ("off", "exact"):
        module = Learns()
        module.expects_pending = mode == "exact"
        trainer = make_trainer(options={"optimizer_overlap": mode})
        with pytest.raises((error, SystemExit), match="now" if error is Stop else None):
            trainer.fit(module, make_loader(40))
        assert_finished(trainer, module)
        ends.append((copied(module.state_dict()), [copied(x.state_dict()) for x in trainer.optimizers]))
    assert_identical(ends[1], ends[0])
    assert late.num_buckets > 0


class Fails(torch.optim.SGD):
    """Cannot update the head with a low learning rate."""

    is_separable = True

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            if group["lr"] < 0.03 and any(weight.shape == (3, 6) for weight in group["params"]):
                self.cannot()
        return result

    def cannot(self) -> None:
        raise ZeroDivisionError("no update")


def failing(batch_idx: int) -> Any:
    """The small model, whose update after this batch fails."""

    class Learns(Small):
        def configure_optimizers(self) -> Any:
            return Fails(self.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, now: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 if now == batch_idx else 0.1

    return Learns


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("settings", "failing_batch"), [({}, 2), ({"max_steps": 2}, 1)], ids=["middle", "last step"])
def test_an_error_in_an_update_ends_the_fit(settings: Any, failing_batch: int) -> None:
    """The last update is waited for: what comes is no next step."""
    module, trainer = failing(failing_batch)(), make_trainer(options={"optimizer_overlap": "exact"}, **settings)
    with pytest.raises(ZeroDivisionError, match="no update") as caught:
        trainer.fit(module, make_loader(40))
    assert "cannot" in [entry.name for entry in caught.traceback]
    assert trainer.global_step == (1 if settings else 3)
    assert_finished(trainer, module)
    make_trainer().fit(Small(), make_loader())  # a new fit works


@pytest.mark.parametrize("on_a_thread", [True, False])
def test_an_error_that_a_callback_swallows_ends_the_fit(late: Late, on_a_thread: bool) -> None:
    """A monitor that must never end the training looks at the weights first."""
    swallowed: list[str] = []

    class Monitor(cb.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            def look() -> None:
                try:
                    pl_module.head.weight.detach().norm()
                except ZeroDivisionError as error:
                    swallowed.append(str(error))

            if not on_a_thread:
                look()
                return
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()

    module = failing(3)()
    trainer = make_trainer(options={"optimizer_overlap": "exact"}, callbacks=[Monitor()])
    with pytest.raises(ZeroDivisionError, match="no update"):
        trainer.fit(module, make_loader(40))
    assert swallowed == ["no update"]
    assert_finished(trainer, module)


def test_no_checkpoint_of_weights_after_an_error(tmp_path: Path) -> None:
    """Also where the thread of the updates has ended before anything looks."""

    class Quick(cb.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            trainer.strategy._overlap._updates.join()  # type: ignore[attr-defined]

    files = {}
    for mode in ("off", "exact"):
        saves = cb.ModelCheckpoint(
            tmp_path / mode, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_weights_only=True
        )
        trainer = make_trainer(
            options={"optimizer_overlap": mode}, callbacks=[Quick(), saves], enable_checkpointing=True
        )
        with pytest.raises(ZeroDivisionError, match="no update"):
            trainer.fit(failing(3)(), make_loader(40))
        files[mode] = sorted(os.listdir(tmp_path / mode))
    assert files["off"] == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert files["exact"] == files["off"]


@pytest.mark.parametrize("fails", [False, True], ids=["the run is fine", "the run fails"])
def test_an_error_of_the_end_of_a_fit_is_raised_unless_the_run_has_failed(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Also where the fit is a second try, in the handler of an error that has nothing to do with it."""
    dispose = DevicePool.dispose

    def dispose_badly(pool: DevicePool) -> None:
        dispose(pool)
        raise ZeroDivisionError("no end")

    class Fit(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if fails:
                raise Stop("the run")

    monkeypatch.setattr(DevicePool, "dispose", dispose_badly)
    try:
        raise KeyError("the first try")
    except KeyError:
        with pytest.raises(Stop if fails else ZeroDivisionError, match="the run" if fails else "no end"):
            make_trainer().fit(Fit(), make_loader())
