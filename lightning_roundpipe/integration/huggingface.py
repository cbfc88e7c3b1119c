"""What Hugging Face models have that contradicts recomputation, changed while a training step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..common.attributes import attribute_set
from .steps.modules import ModuleScan


@contextlib.contextmanager
def training_settings(scan: ModuleScan) -> Iterator[None]:
    """Key-value caches would be appended to twice, and activation checkpointing would recompute twice.

    Works on the attributes that ``transformers`` models share (``config.use_cache``, ``gradient_checkpointing``), and
    restores them on every exit.
    """
    with contextlib.ExitStack() as changes:
        for module in scan.checkpointed:
            _switch_off(changes, module, "gradient_checkpointing")
        for module in scan.cached:
            _switch_off(changes, vars(module).get("config"), "use_cache")
        yield


def _switch_off(changes: contextlib.ExitStack, owner: Any, flag: str) -> None:
    if getattr(owner, "__dict__", {}).get(flag) is True:
        changes.enter_context(attribute_set(owner, flag, False))
