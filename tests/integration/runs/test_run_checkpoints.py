"""Checkpoints: saved, resumed, and exchanged with plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import default_collate

from tests.support.loaders import Resumable
from tests.support.parity import assert_alike, both, make_loader, make_trainer
from tests.support.small import Small


class SavesAt(L.Callback):
    """Saves a checkpoint after a number of optimizer steps."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def resumable() -> Resumable:
    """20 rows in batches of 8."""
    return Resumable(list(make_loader()))


def weights(module: Any, trainer: L.Trainer) -> dict[str, Any]:
    """A module's state and its first optimizer's."""
    return {"module": dict(module.state_dict()), "optimizer": trainer.optimizers[0].state_dict()}


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """In the middle of an epoch, at its end, and in the second one; with dropout, from the same seed, wherever the
    generator stands. Up to the order of sums: the first step of a process runs its first micro-batch alone."""
    paths = {step: tmp_path / f"{step}.ckpt" for step in (2, 3, 4)}
    L.seed_everything(3, verbose=False)
    module, trainer = Small(0.4), make_trainer(max_epochs=2, callbacks=[SavesAt(*item) for item in paths.items()])
    trainer.fit(module, resumable())
    for step, path in paths.items():
        L.seed_everything(3, verbose=False)
        torch.rand(17)  # what else draws between start and resume must not matter
        resumed, again = Small(0.4), make_trainer(max_epochs=2)
        again.fit(resumed, resumable(), ckpt_path=path)
        assert again.global_step == trainer.global_step == 6
        expected = weights(module, trainer)
        assert_alike(weights(resumed, again), expected, f"from step {step}", rtol=1e-5, atol=1e-7)


def test_a_loader_that_begins_again_in_a_resumed_epoch(tmp_path: Path) -> None:
    """Its first two batches have the indices 1 and 2, at the second of which it would have only 4 rows left."""
    rows: list[int] = []

    class Counts(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rows.append(len(batch[0]))

    def resume(kind: str) -> Any:
        path = tmp_path / f"{kind}.ckpt"
        loader = make_loader(collate_fn=lambda samples: default_collate(samples))
        make_trainer(kind, callbacks=[SavesAt(1, path)]).fit(Small(), loader)
        module, trainer = Counts(), make_trainer(kind, max_epochs=2)
        trainer.fit(module, loader, ckpt_path=path)
        return weights(module, trainer)

    both(resume)
    assert rows == [8, 8, 8, 8, 4] * 2


def test_random_numbers_of_a_step_without_batch_idx(tmp_path: Path) -> None:
    """``training_step(self, batch)`` is allowed: every step has its own numbers, and a resumed run has the same."""
    path = tmp_path / "at.ckpt"
    drawn: dict[int, set[float]] = {}

    class Draws(Small):
        def training_step(self, batch: Any) -> Any:
            drawn.setdefault(self.global_step, set()).add(float(torch.rand(())))
            return self.loss(batch)

    L.seed_everything(3, verbose=False)
    options = {"check_split": "off"}
    make_trainer(max_epochs=2, callbacks=[SavesAt(2, path)], options=options).fit(Draws(), resumable())
    uninterrupted, drawn = drawn, {}
    assert list(uninterrupted) == list(range(6))
    assert len(set.union(*uninterrupted.values())) == 18, "6 steps of 3 micro-batches, and no number twice"
    L.seed_everything(3, verbose=False)
    make_trainer(max_epochs=2, options=options).fit(Draws(), resumable(), ckpt_path=path)
    assert drawn == {step: numbers for step, numbers in uninterrupted.items() if step >= 2}


class Remembers(L.Callback):
    """A callback with a state, and a look at what it is given when that is restored."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"number": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen.append(state_dict)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Any) -> None:
        self.seen.append(sorted(checkpoint["state_dict"]) == sorted(pl_module.state_dict()))


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run with a callback that has a state."""
    path = tmp_path_factory.mktemp("trained") / "trained.ckpt"
    trainer = make_trainer("plain", callbacks=[Remembers()])
    trainer.fit(Small(), make_loader())
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("run", "is_connected"),
    [("fit", False), ("fit", True), ("validate", True), ("test", False), ("predict", True)],
    ids=lambda value: value if isinstance(value, str) else "by hand first" if value else "by the trainer",
)
def test_callbacks_are_restored_in_every_run(checkpoint_path: Path, run: str, is_connected: bool) -> None:
    """Also where a module was connected, and restored, before it has a trainer: experiment managers do that."""

    class Evaluates(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.loss(batch))

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

    def act(kind: str) -> Any:
        module, callback = Evaluates(), Remembers()
        trainer = make_trainer(kind, callbacks=[callback], max_epochs=2, profiler="simple")
        if is_connected:
            trainer.strategy.connect(module)
            trainer.state.fn = TrainerFn(run)
            connector = trainer._checkpoint_connector
            connector.resume_start(checkpoint_path)
            connector.restore_model()
            connector.restore_callbacks()
            connector.resume_end()
        result = getattr(trainer, run)(module, make_loader(), ckpt_path=checkpoint_path)
        return callback.seen, result, dict(module.state_dict())

    assert {"number": 5} in both(act)[0] or run != "fit"
