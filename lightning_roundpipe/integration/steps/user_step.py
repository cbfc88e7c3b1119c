"""A step of the user as micro-batches call it, and the seed of what it draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from ...common.seeds import derive_seed


class UserStep:
    """``training_step`` or another step, with its arguments.

    One that takes the iterator over the batches may end with a ``StopIteration``. Then it has not failed: what it has
    logged and written to attributes stays. So the error waits until its only micro-batch has been put together.

    Attributes:
        batch: the first positional argument, or the first keyword.
        rest: positional arguments after it.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._function = function
        self._kwargs = dict(kwargs)
        self._key = None if args else next(iter(kwargs), None)
        self.batch = args[0] if args else self._kwargs.get(self._key or "")
        self.rest = args[1:]
        self._stopped: StopIteration | None = None

    def __call__(self, microbatch: Any) -> Any:
        """Runs it, on the thread of the micro-batch."""
        self._stopped = None
        try:
            if self._key is not None:
                return self._function(**{**self._kwargs, self._key: microbatch})
            return self._function(microbatch, *self.rest, **self._kwargs)
        except StopIteration as stopped:
            if microbatch is not self.batch:  # there are others
                raise
            self._stopped = stopped
            return None

    def end(self) -> None:
        """All that it has done is where it belongs.

        Raises:
            StopIteration: if it has raised it.
        """
        stopped, self._stopped = self._stopped, None
        if stopped is not None:
            raise stopped


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def seed_of_step(trainer: pl.Trainer, name: str) -> int:
    """Identifies the step that is about to run by what a resumed run knows as well: epoch and indices."""
    if name == "training_step":
        place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
    else:
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        place = (trainer.global_step, loop.batch_progress.total.ready)
    return derive_seed(torch.initial_seed(), _STEPS.index(name), *place)
