"""Devices and units of modelled times: a clock that only the units move."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import VirtualDevice
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import CostProfile, Machine, Partition
from tests.support.engine.partitions import cut_at, everything_kept
from tests.support.engine.taps import Tap

WIDTH = 4


class _Now(threading.local):
    """Each thread has its own time: a micro-batch's units run on its thread, forward and backward."""

    ms = 0.0


NOW = _Now()


class ModelledDevice(VirtualDevice):
    """Its time is that of the units; it has reached everything, or nothing."""

    is_behind = False

    def stamp(self) -> float:
        return NOW.ms

    def elapsed_ms(self, start: float, end: float) -> float | None:
        return None if self.is_behind else end - start


def spend(ms: float) -> None:
    """Moves the time of the calling thread."""
    NOW.ms += ms


class Work(nn.Module):
    """Takes a modelled time per row, and more when it runs for the first time."""

    def __init__(self, forward_ms: float, backward_ms: float, *, first_ms: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.times = (forward_ms, backward_ms)  # tuples and lists are not looked at for changed settings
        self.first_ms = deque([first_ms])  # shared by all runs, unlike a list

    def forward(self, x: Tensor) -> Tensor:
        NOW.ms += self.first_ms[0]
        self.first_ms[0] = 0.0
        forward, backward = (partial(spend, len(x) * ms) for ms in self.times)
        y: Tensor = Tap.apply(self.linear(x), forward, backward)
        return y


class Model(nn.Module):
    """Units in a row, run in the order of ``path``."""

    def __init__(self, works: Sequence[nn.Module]) -> None:
        super().__init__()
        self.works = nn.ModuleList(works)
        self.path = list(range(len(works)))

    def step(self, x: Tensor) -> Tensor:
        for index in self.path:
            x = self.works[index](x)
        return x.mean()


def modelled_pool(num_devices: int) -> DevicePool:
    pool = DevicePool([torch.device("cpu")] * num_devices)
    pool.devices = tuple(ModelledDevice(i) for i in range(num_devices))
    return pool


def run(engine: Engine, model: Model, rows: int, num_microbatches: int, **kwargs: Any) -> StepResult:
    parts = torch.ones(rows, WIDTH).tensor_split(num_microbatches)
    settings = {"key": "train", "seed": 0, "loss_of": lambda loss: loss, **kwargs}
    return engine.run(StepRequest(model.step, parts, [len(p) / rows for p in parts], **settings))


kept = everything_kept


def recomputed(
    costs: CostProfile, machine: Machine | None = None, num_microbatches: int = 1, training: bool = True
) -> Partition:
    """Everything but the last call is recomputed, in one stage."""
    count = len(costs.calls)
    return cut_at(count, training, (), (), count - 1)


def times_of(profile: CostProfile | None) -> list[tuple[float, float]]:
    assert profile is not None
    return [(call.forward_ms, call.backward_ms) for call in profile.calls]
