"""A simulated accelerator: the device type ``sim`` of torch, on a machine without a GPU."""

from __future__ import annotations

import types

from tests.support.accelerator.build import why_not

__all__ = ["install", "why_not"]


def install() -> types.ModuleType:
    """Registers the device type, once per process and before its first backward, and returns ``torch.sim``."""
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    from tests.support.accelerator import device_module  # it registers itself

    return device_module
