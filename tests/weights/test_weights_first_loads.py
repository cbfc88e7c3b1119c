"""The weights of the first stage runs of a step: who loads them, and that no device waits for those of another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.planning import CostProfile, Machine, Partition, Stage, StageKind
from lightning_roundpipe.weights import placement
from lightning_roundpipe.weights.parameters import Replica
from tests.support.engine.lazy_link import LazyLink

WIDTH = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.is_first_done = threading.Event()

    def step(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.is_first_done.set()  # user code after the first unit: device 0 has run it
        return self.blocks[1](x).square().mean()


def one_forward_stage(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
    kinds = [(StageKind.FORWARD, 0, 1), (StageKind.FUSED, 1, 2), (StageKind.BACKWARD, 0, 1)]
    return Partition(2, tuple(Stage(i, *kind) for i, kind in enumerate(kinds)))


def run(engine: Engine, model: Model, num_microbatches: int) -> None:
    parts = torch.linspace(-1, 1, 2 * num_microbatches * WIDTH).reshape(-1, WIDTH).chunk(num_microbatches)
    weights = [1 / num_microbatches] * num_microbatches
    engine.run(StepRequest(model.step, parts, weights, "train", 0, loss_of=lambda loss: loss))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def engine(model: Model) -> Engine:
    engine = Engine(model, DevicePool([torch.device("cpu")] * 2, link=LazyLink()), one_forward_stage, num_threads=1)
    run(engine, model, 2)  # records and plans
    return engine


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_the_thread_that_runs_the_step_loads_nothing(
    engine: Engine, model: Model, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders: list[str] = []
    load = Replica.load

    def noting(replica: Replica, *args: Any, **kwargs: Any) -> bool:
        loaders.append(threading.current_thread().name)
        return load(replica, *args, **kwargs)

    monkeypatch.setattr(Replica, "load", noting)
    run(engine, model, num_microbatches)
    assert loaders
    assert all(name.startswith("roundpipe-microbatch-") for name in loaders)


def test_a_device_does_not_wait_for_an_update_of_weights_of_another(
    engine: Engine, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = model.blocks[1].weight
    is_pending, load = placement.is_pending, Replica.load
    in_time: list[bool] = []

    def seems_pending(parameters: Any) -> bool:
        found = list(parameters)
        is_waited_for = any(p is waiting for p in found) and not model.is_first_done.is_set()
        return is_waited_for or is_pending(found)

    def load_when_updated(replica: Replica, *args: Any, **kwargs: Any) -> bool:
        if replica.unit.module is model.blocks[1] and not in_time:
            in_time.append(model.is_first_done.wait(20))  # as an upload that waits for an update
        return load(replica, *args, **kwargs)

    model.is_first_done.clear()
    monkeypatch.setattr(placement, "is_pending", seems_pending)
    monkeypatch.setattr(Replica, "load", load_when_updated)
    run(engine, model, 2)
    assert in_time == [True]
