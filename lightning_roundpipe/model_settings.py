"""Settings of Hugging Face and PEFT models that contradict recomputation, changed while a training step runs.

[Note: adapters that are switched in a step]
PEFT freezes the weights of adapters that are switched off, in place: in ``with model.disable_adapter()``, around the
forward of a reference model, and in ``model.set_adapter(...)``. All micro-batches share the weights, and the backward,
which comes later, recomputes units that ran before the switch. Which adapter computes is an attribute, and so it is
each micro-batch's own; only the flags must not follow. So during a step weights of adapters can be unfrozen, and those
that were frozen are so when it is over: as the last call says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .prefix_caches import opening

_ABSENT = object()


@contextlib.contextmanager
def training_settings(root: nn.Module) -> Iterator[None]:
    """Key-value caches would be appended to twice, and activation checkpointing would recompute twice.

    Works on the attributes that ``transformers`` models share (``config.use_cache``, ``gradient_checkpointing``), on
    the prompts of PEFT models ([Note: prefix caches]) and on the weights of adapters ([Note: adapters that are switched
    in a step]); restores them on every exit.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    flags: dict[nn.Parameter, bool] = {}
    try:
        for module in root.modules():
            state = vars(module)
            if state.get("gradient_checkpointing") is True:
                _change(state, "gradient_checkpointing", False, changed)
            config = vars(state["config"]) if hasattr(state.get("config"), "__dict__") else {}
            if config.get("use_cache") is True:
                _change(config, "use_cache", False, changed)
            if hasattr(type(module), "get_prompt"):
                _change(state, "get_prompt", opening(module.get_prompt), changed)  # type: ignore[arg-type]
            if hasattr(type(module), "adapter_layer_names"):
                for parameter in module.parameters():
                    if "requires_grad_" not in vars(parameter):
                        _change(vars(parameter), "requires_grad_", _frozen_later(parameter, flags), changed)
        yield
    finally:
        for state, name, value in reversed(changed):
            if value is _ABSENT:
                del state[name]
            else:
                state[name] = value
        for parameter, is_trained in flags.items():
            parameter.requires_grad_(is_trained)


def _change(state: dict[str, Any], name: str, value: Any, changed: list[tuple[dict[str, Any], str, Any]]) -> None:
    changed.append((state, name, state.get(name, _ABSENT)))
    state[name] = value


def _frozen_later(parameter: nn.Parameter, flags: dict[nn.Parameter, bool]) -> Callable[..., nn.Parameter]:
    """Takes the place of ``parameter.requires_grad_``; what it was called with last is in ``flags``."""
    unfreeze = parameter.requires_grad_

    def set_flag(requires_grad: bool = True) -> nn.Parameter:
        flags[parameter] = requires_grad
        if requires_grad:
            unfreeze()
        return parameter

    return set_flag
