"""Draws that are no draws, in all variants alike.

Random numbers of a step are other ones with several micro-batches (docs/explanation/limits.md), so that steps that
draw them cannot be compared. Projects have options for dropout; here it does nothing besides, and a normal distribution
gives its mean. Other functions that a step draws from are named by the entry, and give a constant.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributions import Normal

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def _as_it_is(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _mean(self: Normal, sample_shape: Any = ()) -> Tensor:
    return self.loc.expand(self._extended_shape(torch.Size(sample_shape)))


@contextlib.contextmanager
def without_draws() -> Iterator[None]:
    """Dropout does nothing, and normal distributions give their mean."""
    functional = torch.nn.functional
    attend = functional.scaled_dot_product_attention

    def attend_to_all(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = (*args[:1], 0.0, *args[2:]) if len(args) > 1 else args
        return attend(query, key, value, *args, **{**kwargs, **({"dropout_p": 0.0} if len(args) < 2 else {})})

    with contextlib.ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(mock.patch.object(functional, name, _as_it_is))
        stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attend_to_all))
        for method in ("sample", "rsample"):
            stack.enter_context(mock.patch.object(Normal, method, _mean))
        yield


@contextlib.contextmanager
def constant(value: float, *functions: str) -> Iterator[None]:
    """``torch.randn_like`` and others, by name, give tensors of this value."""
    with contextlib.ExitStack() as stack:
        for name in functions:
            module, _, attribute = name.rpartition(".")
            owner = importlib.import_module(module)
            stack.enter_context(mock.patch.object(owner, attribute, _filled(getattr(owner, attribute), value)))
        yield


def _filled(function: Callable[..., Tensor], value: float) -> Callable[..., Tensor]:
    def fill(*args: Any, **kwargs: Any) -> Tensor:
        return torch.full_like(function(*args, **kwargs), value)

    return fill


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Permutations change nothing."""

    def permute(n: int, *, generator: Any = None, **kwargs: Any) -> Tensor:
        return torch.arange(n, **kwargs)

    with mock.patch.object(torch, "randperm", permute):
        yield
