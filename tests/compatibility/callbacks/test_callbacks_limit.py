"""The search for a batch size ends where the memory of the pool ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner

from tests.support.rows import compat

LIMIT = 2600  # bytes, of which weights and gradients of a block take 336


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning collects garbage before every trial, which costs more here than the trial."""
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)


@pytest.fixture
def make_module(small: Any, make_loader: Any) -> Callable[..., Any]:
    """Makes the small model with a batch size, and rows of its own."""

    class Sized(small):
        def __init__(self, batch_size: int = 8) -> None:
            super().__init__()
            self.batch_size = batch_size
            self.sizes: list[int] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.sizes.append(len(batch[0]))

        def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.sizes.append(len(batch[0]))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

        def train_dataloader(self) -> Any:
            return make_loader(1024, self.batch_size)

        def val_dataloader(self) -> Any:
            return make_loader(1024, self.batch_size)

    return Sized


@pytest.fixture
def make_limited(make_trainer: Any) -> Callable[..., Any]:
    """Makes a trainer whose two devices have little memory."""

    def make(num_microbatches: Any = 4, **kwargs: Any) -> Any:
        options = {"virtual_copies": True, "device_memory_limit": LIMIT}
        return make_trainer(options=options, num_microbatches=num_microbatches, max_steps=1, **kwargs)

    return make


@pytest.mark.parametrize("num_microbatches", [4, "auto"])
@compat("Callback", "BatchSizeFinder")
def test_the_limit_is_found(make_module: Any, make_limited: Any, num_microbatches: Any) -> None:
    """The size that is found fits as it is; for the next larger one the step has to be run again."""
    callback = BatchSizeFinder("binsearch", steps_per_trial=1, init_val=8, margin=0.0)
    module, trainer = make_module(), make_limited(num_microbatches, limit_val_batches=0, callbacks=[callback])
    trainer.fit(module)
    found = callback.optimal_batch_size
    assert found == module.batch_size == module.sizes[-1]
    assert 8 < found < max(module.sizes), "a larger one was tried"
    assert trainer.strategy.last_step.num_microbatches == 4
    for size, expected in ((found, 4), (found + 1, 8)):
        trainer = make_limited("auto", limit_val_batches=0)
        trainer.fit(make_module(size))
        assert trainer.strategy.last_step.num_microbatches == expected


@compat("Callback", "BatchSizeFinder")
def test_powers_by_the_tuner(make_module: Any, make_limited: Any) -> None:
    """After the search, ``fit`` runs steps again that do not fit, as ever."""
    module, trainer = make_module(), make_limited(limit_val_batches=0)
    found = Tuner(trainer).scale_batch_size(module, steps_per_trial=1, init_val=8)
    assert found == module.batch_size == max(module.sizes) // 2
    assert module.sizes.count(2 * found) == 1
    module.batch_size = 2 * found
    trainer.fit(module)
    assert trainer.strategy.last_step.num_microbatches == 8


@compat("Callback", "BatchSizeFinder")
def test_the_limit_of_evaluation(make_module: Any, make_limited: Any) -> None:
    callback = BatchSizeFinder(steps_per_trial=1, init_val=16)
    module = make_module()
    make_limited(callbacks=[callback], limit_val_batches=1).validate(module, verbose=False)
    assert 16 < callback.optimal_batch_size == max(module.sizes) // 2
