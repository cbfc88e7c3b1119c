"""An operation that does nothing but to tell when it runs, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Tap(torch.autograd.Function):
    """Identity; ``Tap.apply(x, on_forward, on_backward)`` calls each on the thread that runs it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_forward: Callable[[], object], on_backward: Callable[[], object]) -> Tensor:
        ctx.on_backward = on_backward
        on_forward()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.on_backward()
        return gradient, None, None
