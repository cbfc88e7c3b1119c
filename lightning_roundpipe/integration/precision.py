"""What the strategy has to know about precision plugins."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn


def checked_precision(plugin: Precision, autocast_device: str) -> Precision:
    """``plugin``, for these devices: Lightning takes every accelerator but its own CPU one for CUDA.

    Args:
        autocast_device: ``"cpu"`` or ``"cuda"``.

    Raises:
        MisconfigurationException: if it is a class of the user's own for other devices.
    """
    if isinstance(plugin, MixedPrecision) and autocast_device == "cpu" and plugin.device != "cpu":
        if type(plugin) is not MixedPrecision:
            raise MisconfigurationException(
                f"{type(plugin).__name__} is autocast for {plugin.device!r}, but all devices are CPU devices, on which "
                "it would do nothing: make it with device='cpu'"
            )
        if plugin.precision == "16-mixed":
            rank_zero_warn("precision='16-mixed' is not supported on CPU devices: using 'bf16-mixed'")
        return MixedPrecision("bf16-mixed", "cpu")
    return plugin


def expected_scale(plugin: Precision, accumulate_grad_batches: int) -> float:
    """What the loss of a training step is going to be multiplied by before its backward, as far as it should be
    anticipated; see [Note: loss scaling] in :mod:`loss`. 1 where nothing is scaled against underflow.
    """
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    if scaler is None or not scaler.is_enabled():
        return 1.0
    # As a tensor, like the gradient that autograd will bring: equal to the last bit.
    return (torch.tensor(scaler.get_scale()) / accumulate_grad_batches).item() or 1.0
