"""Settings of Hugging Face models that contradict recomputation, switched off while a training step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def training_settings(root: nn.Module) -> Iterator[None]:
    """Key-value caches would be appended to twice, and activation checkpointing would recompute twice.

    Works on the attributes that ``transformers`` models share (``config.use_cache``, ``gradient_checkpointing``) and
    restores them on every exit.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in root.modules():
            _switch_off(vars(module), "gradient_checkpointing", changed)
            config = vars(module).get("config")
            if config is not None and hasattr(config, "__dict__"):
                _switch_off(vars(config), "use_cache", changed)
        yield
    finally:
        for state, name, value in changed:
            state[name] = value


def _switch_off(state: dict[str, Any], name: str, changed: list[tuple[dict[str, Any], str, Any]]) -> None:
    if state.get(name) is True:
        changed.append((state, name, True))
        state[name] = False
