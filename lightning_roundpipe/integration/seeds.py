"""Seeds of steps: what a step draws depends on its place in the run, and on nothing else."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from ..autograd.randomness import derive_seed

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def seed_of_step(trainer: pl.Trainer, name: str) -> int:
    """Identifies the step that is about to run by what a resumed run knows as well: epoch and indices.

    Args:
        trainer: which runs it.
        name: of the step, such as ``"training_step"``.
    """
    if name == "training_step":
        place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
    else:
        loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
        place = (trainer.global_step, loop.batch_progress.total.ready)
    return derive_seed(torch.initial_seed(), _STEPS.index(name), *place)
