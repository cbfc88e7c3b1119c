"""What Hugging Face and PEFT models have that contradicts recomputation, changed while a training step runs.

[Note: prefix caches]
Prefix tuning hands its trained keys and values to the model in a cache of ``transformers``. Every attention layer
appends its own keys and values to the cache before it reads it. In a training step that fails twice: the recomputation
appends once more, and the engine does not know that the unit reads trained tensors, since it does not open
objects of unknown kind. So while a training step runs, the cache gets a class of its own, which is registered as a
pytree with the tensors of the prefix as its leaves. These become arguments of the unit like any others, and every run
of a unit gets a fresh cache made of them, to which it may append. What was appended is never read: the cache of a
training step is not used for a second forward. Where no gradient is recorded (``generate`` in a ``training_step``) the
cache stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..common.attributes import attribute_set
from ..lightning_packages import PossibleUserWarning
from .batches.packed import packs_sequences
from .steps.modules import ModuleScan
from .steps.notices import Notices

_CACHE = (
    "rows of the batch hold several sequences each, and config.use_cache of {name} is on. Models of Hugging Face keep "
    "such sequences apart only where it is off, as it is here in training steps: losses are not those of plain "
    "Lightning, where tokens attend to the sequences before theirs. Set model.config.use_cache = False to get the same "
    "everywhere, also in evaluations"
)
_opened_classes: dict[type, type] = {}


def _flatten(opened: Any) -> Any:
    """The tensors of a cache, each once; the cache with a hole in the place of each, and the holes in their order."""
    if "_opened" in vars(opened):
        return opened._opened
    names = ("self_attention_cache", "cross_attention_cache")  # what an encoder-decoder cache is made of
    parts = [getattr(opened, name) for name in names if hasattr(opened, name)]
    layers = [layer for part in parts or [opened] for layer in part.layers]
    found = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    tensors = list({id(tensor): tensor for tensor in found}.values())
    holes = [object() for _ in tensors]
    shell = copy.deepcopy(opened, {id(tensor): hole for tensor, hole in zip(tensors, holes, strict=True)})
    return tensors, (shell, holes)


def _unflatten(entries: Any, context: Any) -> Any:
    """A new cache that holds these tensors."""
    tensors = list(entries)
    shell, holes = context
    made = copy.deepcopy(shell, {id(hole): tensor for hole, tensor in zip(holes, tensors, strict=True)})
    # What it was made of is all that others may see: what a unit appends is its own.
    made._opened = (tensors, context)
    return made


def _opening(get_prompt: Callable[..., Any]) -> Callable[..., Any]:
    """``get_prompt`` of a PEFT model: a cache gets a class that is opened, where gradients are recorded."""

    def get_opened(*args: Any, **kwargs: Any) -> Any:
        prompt = get_prompt(*args, **kwargs)
        kind = type(prompt)
        is_cache = any(base.__name__ == "Cache" for base in kind.__mro__)  # else embeddings
        if is_cache and torch.is_grad_enabled():
            if kind not in _opened_classes:
                _opened_classes[kind] = type(kind.__name__, (kind,), {})
                pytree.register_pytree_node(_opened_classes[kind], _flatten, _unflatten)
            prompt.__class__ = _opened_classes[kind]
        return prompt

    return get_opened


@contextlib.contextmanager
def training_settings(scan: ModuleScan, batch: Any, notices: Notices) -> Iterator[None]:
    """Key-value caches would be appended to twice, and activation checkpointing would recompute twice.

    Works on the attributes that ``transformers`` models share (``config.use_cache``, ``gradient_checkpointing``), and
    on the prompts of PEFT models ([Note: prefix caches]); restores them on every exit. Warns where a cache that
    is on would make another result of ``batch``.
    """
    with contextlib.ExitStack() as stack:
        for module in scan.checkpointed:
            if vars(module).get("gradient_checkpointing") is True:
                stack.enter_context(attribute_set(module, "gradient_checkpointing", False))
        for module in scan.cached:
            config = getattr(vars(module).get("config"), "__dict__", {})
            if config.get("use_cache") is True:
                if "cache" not in notices.given and packs_sequences(batch):
                    notices.warn("cache", _CACHE.format(name=type(module).__name__), category=PossibleUserWarning)
                stack.enter_context(attribute_set(module.config, "use_cache", False))
        for module in scan.prompted:
            stack.enter_context(attribute_set(module, "get_prompt", _opening(module.get_prompt)))
        yield
