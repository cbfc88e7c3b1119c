"""One strategy for several Trainers, as when a cell of a notebook runs twice; and callbacks of other libraries."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_roundpipe import RoundPipeStrategy
from tests.support.parity import assert_alike, make_loader
from tests.support.rows import compat
from tests.support.small import Small

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}


def trainer_with(strategy: Any, accelerator: str = "cpu", devices: int = 2, **settings: Any) -> L.Trainer:
    return L.Trainer(strategy=strategy, accelerator=accelerator, devices=devices, max_epochs=1, **QUIET, **settings)


def weights_after(trainer: L.Trainer) -> dict[str, Any]:
    module = Small()
    trainer.fit(module, make_loader(), make_loader())
    return dict(module.state_dict())


class Tested(Small):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class Failing(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            raise RuntimeError("as the user wrote it")
        return super().training_step(batch, batch_idx)


@compat("Trainer argument", "strategy (one object for several Trainers, one after another)")
@pytest.mark.parametrize("accelerator", ["cpu", "auto", "roundpipe"])
def test_one_strategy_for_a_second_trainer(accelerator: str) -> None:
    strategy = RoundPipeStrategy(num_microbatches=3)
    expected = weights_after(trainer_with(RoundPipeStrategy(num_microbatches=3), accelerator))
    for devices in (2, 3, 2):
        trainer = trainer_with(strategy, accelerator, devices, plugins=[LightningEnvironment(), AsyncCheckpointIO()])
        assert strategy.last_step is None
        assert strategy.lightning_module is None
        assert_alike(weights_after(trainer), expected)
        assert len(strategy.pool) == devices
        assert trainer.global_step == 3
        trainer.test(Tested(), make_loader(), verbose=False)


def test_a_module_that_has_forgotten_its_trainer() -> None:
    """Libraries make their modules so that they can be pickled."""
    strategy = RoundPipeStrategy(num_microbatches=3)
    trainer = trainer_with(strategy)
    weights_after(trainer)
    del vars(trainer.lightning_module)["_trainer"]
    expected = weights_after(trainer_with(RoundPipeStrategy(num_microbatches=3)))
    assert_alike(weights_after(trainer_with(strategy)), expected)


def test_precision_of_the_last_trainer_is_gone() -> None:
    strategy = RoundPipeStrategy(num_microbatches=3)
    weights_after(trainer_with(strategy, precision="bf16-mixed"))
    expected = weights_after(trainer_with(RoundPipeStrategy(num_microbatches=3)))
    assert_alike(weights_after(trainer_with(strategy)), expected)


def test_what_the_user_gave_stays() -> None:
    io, environment = AsyncCheckpointIO(), LightningEnvironment()
    strategy = RoundPipeStrategy(checkpoint_io=io, cluster_environment=environment)
    for _ in range(2):
        trainer = trainer_with(strategy)
        assert trainer.strategy.checkpoint_io is io
        assert strategy.cluster_environment is environment


def test_after_a_fit_that_failed() -> None:
    strategy = RoundPipeStrategy(num_microbatches=3)
    expected = weights_after(trainer_with(RoundPipeStrategy(num_microbatches=3), devices=3))
    with pytest.raises(RuntimeError, match="as the user wrote it"):
        trainer_with(strategy).fit(Failing(), make_loader())
    with pytest.raises(MisconfigurationException, match="devices"):
        trainer_with(strategy, "roundpipe", devices=-7)
    assert_alike(weights_after(trainer_with(strategy, devices=3)), expected)


def test_a_trainer_that_is_not_finished_takes_nothing() -> None:
    strategy = RoundPipeStrategy(num_microbatches=3)
    first = trainer_with(strategy)
    with pytest.raises(MisconfigurationException, match="devices"):
        trainer_with(strategy, "roundpipe", devices=-7)
    weights_after(first)
    assert len(strategy.pool) == 2


@compat(
    "Misuse",
    "a strategy given to a later Trainer",
    status="refused",
    note="Make one for each.",
)
def test_the_first_trainer_after_a_second() -> None:
    strategy = RoundPipeStrategy(num_microbatches=3)
    first, second = trainer_with(strategy), trainer_with(strategy, devices=3)
    with pytest.raises(MisconfigurationException, match=r"RoundPipeStrategy object at 0x\w+ was given to another"):
        first.fit(Small(), make_loader())
    weights_after(second)
    assert len(strategy.pool) == 3


def test_a_trainer_while_another_one_runs() -> None:
    strategy = RoundPipeStrategy(num_microbatches=3)

    class Nested(Small):
        def on_train_start(self) -> None:
            with pytest.raises(MisconfigurationException, match=r"RoundPipeStrategy object at 0x\w+ is in use"):
                trainer_with(strategy)

    trainer = trainer_with(strategy)
    trainer.fit(Nested(), make_loader())
    assert trainer.global_step == 3


@compat(
    "Misuse",
    "callbacks of another library",
    status="refused",
    note="Write a `Callback`.",
)
def test_callbacks_of_another_library() -> None:
    transformers = pytest.importorskip("transformers")
    callback = transformers.EarlyStoppingCallback()
    text = r"EarlyStoppingCallback, a transformers.trainer_callback.TrainerCallback.*lightning\w*(\.pytorch)?.Callback"
    trainer = trainer_with("roundpipe", callbacks=[callback])
    for _ in range(2):
        with pytest.raises(MisconfigurationException, match=text):
            trainer.fit(Small(), make_loader())


def test_objects_that_have_all_that_a_callback_has() -> None:
    class Duck:
        state_key = "duck"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return lambda *args, **kwargs: seen.append(name)

        def state_dict(self) -> dict[str, Any]:
            return {}

    seen: list[str] = []
    trainer_with("roundpipe", callbacks=[Duck()]).fit(Small(), make_loader())
    assert {"setup", "on_train_batch_end", "teardown"} <= {*seen}
