"""Clipping of gradients by their norm in Lightning's steps; see [Note: clipping by norm] in :mod:`engine.clipping`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from ..engine.patches import attribute_set
from ..optimizer.clipping import clip_factor
from ..optimizer.updates import Updates

_OF_PLUGIN = ("clip_grad_by_norm", "_clip_gradients")
_CLIPPING = ("configure_gradient_clipping", "clip_gradients")


@contextlib.contextmanager
def clipped_by(updates: Updates, optimizer: Optimizer, module: pl.LightningModule) -> Iterator[None]:
    """While open, Lightning's clipping by norm leaves the multiplication of the gradients of ``optimizer`` to its
    update; unless code of the user could look at them in between."""
    plugin = module.trainer.precision_plugin
    if _may_be_watched(module, plugin):
        yield
        return

    def clip_grad_by_norm(clipped: Optimizer, clip_val: float) -> None:
        num_threads = torch.get_num_threads()
        if not updates.multiplies(clipped, lambda gradients: clip_factor(gradients, clip_val, num_threads)):
            type(plugin).clip_grad_by_norm(plugin, clipped, clip_val)

    def clip_gradients(*args: Any, **kwargs: Any) -> None:
        # Lightning's last act before the update. Who clips in a hook may look at the gradients afterwards.
        with attribute_set(plugin, "clip_grad_by_norm", clip_grad_by_norm):
            type(plugin)._clip_gradients(plugin, *args, **kwargs)

    with attribute_set(plugin, "_clip_gradients", clip_gradients):
        yield


def _may_be_watched(module: pl.LightningModule, plugin: Precision) -> bool:
    """Whether code that is not Lightning's own sees gradients that have been clipped, before the update begins."""
    overrides = any(getattr(type(module), n) is not getattr(pl.LightningModule, n) for n in _CLIPPING)
    patched = any(name in vars(module) for name in _CLIPPING) or any(name in vars(plugin) for name in _OF_PLUGIN)
    return overrides or patched or type(plugin).__module__.split(".")[0] not in ("lightning", "pytorch_lightning")
