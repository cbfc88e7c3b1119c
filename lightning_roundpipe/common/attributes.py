"""Attributes of modules and objects, read and written past ``__setattr__``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

MISSING: Any = object()  # value of an attribute or entry that is not there
_FLAG: Any = torch._C.TensorBase.requires_grad


def assign(module: nn.Module | nn.Parameter, name: str, value: Any) -> None:
    """Sets or (``MISSING``) removes an attribute or a buffer, unnoticed."""
    if isinstance(module, Tensor):
        _FLAG.__set__(module, value)
        return
    state = module.__dict__
    if name in state.get("_buffers", ()):
        state = state["_buffers"]
    if value is MISSING:
        state.pop(name, None)
    else:
        state[name] = value


def read(module: nn.Module | nn.Parameter, name: str) -> Any:
    """A plain attribute or buffer, ``MISSING`` if there is none; ``requires_grad`` of a parameter."""
    if isinstance(module, Tensor):
        return _FLAG.__get__(module)
    state = module.__dict__
    buffers = state.get("_buffers", ())
    return buffers[name] if name in buffers else state.get(name, MISSING)


@contextlib.contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of an object or module itself, not of its class, for a while."""
    missing = object()
    before = vars(owner).get(name, missing)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is missing:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = before
