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

from .steps.modules import ModuleScan

_Opened = tuple[list[Tensor], "_Shell"]
_opened_classes: dict[type, type] = {}


class _Hole:
    """Where a tensor was."""


class _Shell:
    """A cache without its tensors.

    Attributes:
        cache: with a hole in the place of each tensor.
        holes: in the order of the tensors.
    """

    def __init__(self, full: Any, tensors: list[Tensor]) -> None:
        self.holes = [_Hole() for _ in tensors]
        self.cache = copy.deepcopy(full, {id(tensor): hole for tensor, hole in zip(tensors, self.holes, strict=True)})

    def fill(self, tensors: list[Tensor]) -> Any:
        """A new cache that holds ``tensors``."""
        made = copy.deepcopy(self.cache, {id(hole): tensor for hole, tensor in zip(self.holes, tensors, strict=True)})
        # What it was made of is all that others may see: what a unit appends is its own.
        made._opened = (tensors, self)
        return made


def open_prefix(prompt: Any) -> Any:
    """What PEFT puts in front of the text; if it is a cache, of a kind that units can be given in training.

    Args:
        prompt: the result of ``PeftModel.get_prompt``: a cache, or embeddings, which are returned as they are.
    """
    kind = type(prompt)
    if not any(base.__name__ == "Cache" for base in kind.__mro__):
        return prompt
    if kind not in _opened_classes:
        _opened_classes[kind] = type(kind.__name__, (kind,), {})
        pytree.register_pytree_node(_opened_classes[kind], _flatten, _unflatten)
    prompt.__class__ = _opened_classes[kind]
    return prompt


def _flatten(opened: Any) -> _Opened:
    known: _Opened | None = vars(opened).get("_opened")
    if known is not None:
        return known
    tensors = _tensors_of(opened)
    return tensors, _Shell(opened, tensors)


def _unflatten(tensors: Any, shell: Any) -> Any:
    return shell.fill(list(tensors))


def _parts_of(found: Any) -> list[Any]:
    """The caches that an encoder-decoder cache is made of."""
    names = ("self_attention_cache", "cross_attention_cache")
    return [getattr(found, name) for name in names if hasattr(found, name)]


def _tensors_of(found: Any) -> list[Tensor]:
    """All tensors in the layers of a cache, each once."""
    layers = [layer for part in _parts_of(found) or [found] for layer in part.layers]
    tensors = [value for layer in layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def opening(get_prompt: Callable[..., Any]) -> Callable[..., Any]:
    """``get_prompt`` of a PEFT model, whose caches are opened where gradients are recorded."""

    def get_opened(*args: Any, **kwargs: Any) -> Any:
        prompt = get_prompt(*args, **kwargs)
        return open_prefix(prompt) if torch.is_grad_enabled() else prompt

    return get_opened


_ABSENT = object()


@contextlib.contextmanager
def training_settings(scan: ModuleScan) -> Iterator[None]:
    """Key-value caches would be appended to twice, and activation checkpointing would recompute twice.

    Works on the attributes that ``transformers`` models share (``config.use_cache``, ``gradient_checkpointing``), and
    on the prompts of PEFT models ([Note: prefix caches]); restores them on every exit.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in scan.checkpointed:
            if vars(module).get("gradient_checkpointing") is True:
                _change(vars(module), "gradient_checkpointing", False, changed)
        for module in scan.cached:
            config = getattr(vars(module).get("config"), "__dict__", {})
            if config.get("use_cache") is True:
                _change(config, "use_cache", False, changed)
        for module in scan.prompted:
            _change(vars(module), "get_prompt", opening(module.get_prompt), changed)
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
