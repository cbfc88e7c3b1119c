"""What a step of the user leaves behind of the last one, and the seed of what it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...common.seeds import derive_seed
from ...lightning_packages import kind_of, pl
from ...weights.futures import unwaited

Function = Callable[[Any], Any]


def dropping_old_gradients(function: Function, num_microbatches: int, trainer: pl.Trainer) -> Function:
    """``function``, the user's ``training_step`` for a micro-batch, which drops gradients that nothing can ask for.

    Lightning calls ``zero_grad`` after the training step, which here has brought the new gradients home by then: two
    full sets would be on the host. When the user's code of all micro-batches has run, and no hook that comes before
    ``zero_grad`` is the user's, the old ones can go. The new ones come home later, as far as all micro-batches run in
    one round.
    """
    weights = _about_to_be_zeroed(trainer)
    num_left = num_microbatches if weights else -1

    def step(microbatch: Any) -> Any:
        nonlocal num_left
        result = function(microbatch)
        num_left -= 1  # under the user-code lock
        if num_left == 0:
            with unwaited():  # an update holds the gradients that it still needs
                for weight in weights:
                    weight.grad = None
        return result

    return step


def _about_to_be_zeroed(trainer: pl.Trainer) -> list[nn.Parameter]:
    """The weights whose ``.grad`` Lightning sets to None after this training step, before anything else sees it."""
    module, optimizers = trainer.lightning_module, trainer.optimizers
    skips = trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward
    if trainer.accumulate_grad_batches != 1 or len(optimizers) != 1 or skips:
        return []
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    hooks = [
        (module, "on_before_zero_grad", kind_of(module, pl.LightningModule)),
        (module, "optimizer_zero_grad", kind_of(module, pl.LightningModule)),
        (optimizers[0], "zero_grad", torch.optim.Optimizer),
        *((callback, "on_before_zero_grad", kind_of(callback, pl.Callback)) for callback in callbacks),
    ]
    if any(
        name in vars(owner) or getattr(type(owner), name, None) is not getattr(kind, name)
        for owner, name, kind in hooks
    ):
        return []
    return [weight for group in optimizers[0].param_groups for weight in group["params"]]


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def seed_of_step(trainer: pl.Trainer, name: str) -> int:
    """Identifies the step that is about to run by what a resumed run knows as well: epoch and indices."""
    if name == "training_step":
        place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
    else:
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        place = (trainer.global_step, loop.batch_progress.total.ready)
    return derive_seed(torch.initial_seed(), _STEPS.index(name), *place)
