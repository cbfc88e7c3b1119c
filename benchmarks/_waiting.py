"""Models whose units only wait: nothing competes for the cores, and what is left is the engine."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.planning import CallCost, CostProfile
from tests.planning.paper import NUM_DEVICES


class Slept:
    """Adds up how long sleeps took beyond what was asked for, over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.excess_s = 0.0

    def sleep(self, ms: float) -> None:
        """Waits without holding the interpreter lock."""
        started = time.perf_counter()
        time.sleep(ms / 1e3)
        excess = time.perf_counter() - started - ms / 1e3
        with self._lock:
            self.excess_s += excess

    def take(self) -> float:
        """The sum, in ms; starts again at zero."""
        excess, self.excess_s = self.excess_s, 0.0
        return excess * 1e3


SLEPT = Slept()


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unit: Wait) -> Tensor:
        ctx.wait, ctx.backward_ms, ctx.shape = unit.wait, unit.backward_ms, x.shape
        ctx.weight = (weight.shape, weight.dtype) if weight.requires_grad else None
        unit.wait(x, unit.forward_ms)
        return x.clone() if unit.has_output else x[:1].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        ctx.wait(gradient, ctx.backward_ms)
        for_weight = None if ctx.weight is None else gradient.new_ones(ctx.weight[0], dtype=ctx.weight[1])
        return gradient if gradient.shape == ctx.shape else gradient.expand(ctx.shape).contiguous(), for_weight, None


class Wait(nn.Module):
    """A unit of a modelled duration; it has a weight, as units have.

    Args:
        is_trained: whether the weight has a gradient.
        has_output: whether the output is as large as the input, and not one number.
    """

    def __init__(
        self, call: CallCost, num_weights: int = 1, *, is_trained: bool = True, has_output: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_weights), is_trained)
        self.forward_ms, self.backward_ms, self.has_output = call.forward_ms, call.backward_ms, has_output

    @staticmethod
    def wait(x: Tensor, ms: float) -> None:
        """What the unit does."""
        SLEPT.sleep(ms)

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Waiting.apply(x, self.weight, self)
        return waited


class Model(nn.Module):
    """Layers and a head that are as a profile says; its calls have the profile's names.

    Args:
        unit: makes a unit from what its call costs.
    """

    def __init__(self, profile: CostProfile, unit: Callable[[CallCost], nn.Module] = Wait) -> None:
        super().__init__()
        *layers, head = profile.calls
        self.layers = nn.ModuleList(map(unit, layers))
        self.lm_head = unit(head)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.lm_head(x).sum()
        return loss


def scaled(profile: CostProfile, time_factor: float, size_factor: float = 1.0) -> CostProfile:
    """The profile with other times and sizes."""
    sizes = ("weight_bytes", "gradient_bytes", "input_bytes", "output_bytes", "workspace_bytes")
    return CostProfile(
        tuple(
            replace(
                call,
                forward_ms=time_factor * call.forward_ms,
                backward_ms=time_factor * call.backward_ms,
                **{size: round(size_factor * getattr(call, size)) for size in sizes},
            )
            for call in profile.calls
        )
    )


def time_factor(profile: CostProfile, num_microbatches: int, max_work_ms: float) -> float:
    """The largest power of 1/2, or 1, with which each of the paper's devices has at most ``max_work_ms`` to do."""
    factor = 1.0
    work_ms = num_microbatches * sum(2 * call.forward_ms + call.backward_ms for call in profile.calls)
    while factor * work_ms / NUM_DEVICES > max_work_ms:
        factor /= 2
    return factor


def sharpen_timers() -> bool:
    """Asks Linux to wake sleeping threads of this process in time; whether it did. New threads inherit it."""
    if not sys.platform.startswith("linux"):
        return False
    set_timer_slack, nanoseconds = 29, 1
    return bool(ctypes.CDLL(None).prctl(set_timer_slack, ctypes.c_ulong(nanoseconds), 0, 0, 0) == 0)
