"""Settings of Hugging Face and PEFT models that contradict recomputation, changed while a training step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from .prefix_caches import opening

_ABSENT = object()


@contextlib.contextmanager
def training_settings(root: nn.Module) -> Iterator[None]:
    """Key-value caches would be appended to twice, and activation checkpointing would recompute twice.

    Works on the attributes that ``transformers`` models share (``config.use_cache``, ``gradient_checkpointing``), and
    on the prompts of PEFT models ([Note: prefix caches]); restores them on every exit.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
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
        yield
    finally:
        for state, name, value in reversed(changed):
            if value is _ABSENT:
                del state[name]
            else:
                state[name] = value


def _change(state: dict[str, Any], name: str, value: Any, changed: list[tuple[dict[str, Any], str, Any]]) -> None:
    changed.append((state, name, state.get(name, _ABSENT)))
    state[name] = value
