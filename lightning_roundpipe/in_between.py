"""Code of the user between the last gradient of a training step and the step of the optimizer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

_OF_MODULES = (
    "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
    "on_before_optimizer_step", "configure_gradient_clipping", "clip_gradients",
)  # fmt: skip
_OF_CALLBACKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")


def runs_in_between(module: pl.LightningModule) -> bool:
    """Whether there is any such code: in hooks of the module or of a callback, or in a precision plugin."""
    trainer = module.trainer
    plugin = type(trainer.precision_plugin)
    return (
        _overrides(module, pl.LightningModule, _OF_MODULES)
        or any(_overrides(callback, pl.Callback, _OF_CALLBACKS) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        or plugin.__module__.split(".")[0] not in ("lightning", "pytorch_lightning")
    )


def _overrides(found: Any, base: type, names: tuple[str, ...]) -> bool:
    return any(name in vars(found) or getattr(type(found), name) is not getattr(base, name) for name in names)
