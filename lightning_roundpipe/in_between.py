"""Code of the user between the last gradient of a training step and the step of the optimizer, or the next batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback

_OF_MODULES = (
    "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
    "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients",
)  # fmt: skip
_OF_CALLBACKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
# Where Lightning's own callbacks do nothing that disturbs.
_OF_BATCHES = (
    "on_train_batch_start", "on_train_batch_end", "on_before_batch_transfer", "transfer_batch_to_device",
    "on_after_batch_transfer",
)  # fmt: skip


def runs_in_between(module: pl.LightningModule) -> bool:
    """Whether there is any such code: in hooks of the module or of a callback, or in a precision plugin."""
    trainer = module.trainer
    plugin = type(trainer.precision_plugin)
    return (
        _overrides(module, pl.LightningModule, _OF_MODULES)
        or any(_overrides(callback, pl.Callback, _OF_CALLBACKS) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        or plugin.__module__.split(".")[0] not in ("lightning", "pytorch_lightning")
    )


# What runs between a step of the optimizer and the next batch.
_OF_STEPS = ("optimizer_step", "lr_scheduler_step")


def runs_between_batches(module: pl.LightningModule, *, steps: bool) -> bool:
    """As :func:`runs_in_between`, up to the next training step.

    Args:
        steps: whether the optimizer steps in between.
    """
    names = [name for name in _OF_BATCHES if hasattr(pl.Callback, name)]
    return (
        runs_in_between(module)
        or _overrides(module, pl.LightningModule, _OF_BATCHES + (_OF_STEPS if steps else ()))
        or any(_overrides(c, pl.Callback, names) and not _is_of_lightning(c) for c in module.trainer.callbacks)  # type: ignore[attr-defined]
    )


def _is_of_lightning(callback: pl.Callback) -> bool:
    """Whether it is code of Lightning, and no functions of the user in a shell."""
    is_shell = isinstance(callback, LambdaCallback) or any(name in vars(callback) for name in _OF_BATCHES)
    return type(callback).__module__.split(".")[0] in ("lightning", "pytorch_lightning") and not is_shell


def _overrides(found: Any, base: type, names: Sequence[str]) -> bool:
    return any(name in vars(found) or getattr(type(found), name) is not getattr(base, name) for name in names)


def is_left_after_this_batch(trainer: pl.Trainer) -> bool:
    """Whether a validation comes between the batch that is being trained and the next one, or there is none."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    return trainer.should_stop or fetcher is None or loop.epoch_loop._should_check_val_fx(fetcher)
