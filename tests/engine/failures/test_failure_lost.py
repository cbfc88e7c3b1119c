"""A device that is lost at any point of a step: nothing is left of the step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.device import DeviceLostError
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import TimedLink
from lightning_roundpipe.engine.runner import StepResult
from tests.support.engine.faults import MESSAGE, Fault
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.steps import Steps

NUM_MICROBATCHES = 3
LINKS: dict[str, Callable[[], Any]] = {"shared": lambda: None, "lazy": LazyLink, "timed": TimedLink}
KINDS = ("run", "h2d", "d2h", "h2d bulk", "d2h bulk")


class Model(nn.Module):
    """Blocks with statistics and random numbers, and a parameter beside them; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 1)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.scale
        self.last = float(x.detach().sum())
        return self.head(x).square().mean()


class Training:
    """Steps of the model on devices of which one may be lost."""

    def __init__(self, link: str) -> None:
        self.model = Model()
        self.pool = DevicePool([torch.device("cpu")] * 2, link=LINKS[link]())
        self.steps = Steps(self.model, pool=self.pool)

    def step(self, function: Callable[[Any], Any] | None = None) -> StepResult:
        parts = torch.randn(12, 4, generator=torch.Generator().manual_seed(5)).chunk(NUM_MICROBATCHES)
        return self.steps.train(parts, 3, function)

    def state(self) -> list[Any]:
        """What a step that fails must leave as it was. Not the buffers: the strategy puts those back."""
        return [
            {name: value.detach().clone() for name, value in self.model.named_parameters()},
            [p.grad for p in self.model.parameters()],
            self.model.last,
        ]


def points(link: str) -> Iterator[Training]:
    """Trainings whose next step loses a device at one of its uses of each kind: the first device at every fifth, the
    second one, which has seven times as many, at every ninth. Where lanes have threads, the same code comes to the same
    uses, so that half of them are enough."""
    counted = Training(link)
    counted.step()
    counters = [Fault(device) for device in counted.pool.devices]
    counted.step()
    for number, each in enumerate((11, 19) if link == "timed" else (5, 9)):
        counts = Counter(counters[number].uses)
        assert counts.keys() == set(KINDS[:1] if link == "shared" else KINDS)
        for kind, count in counts.items():
            for at in range(0, count, each):
                training = Training(link)
                training.step()
                is_late = kind != "run" and (at + number) % 2 == 1
                Fault(training.pool[number], at, kind=kind, is_late=is_late)
                yield training


@pytest.mark.parametrize("link", LINKS)
def test_step_that_loses_a_device_leaves_nothing(link: str) -> None:
    for training in points(link):
        before, threads = training.state(), threading.active_count()
        with pytest.raises(DeviceLostError):
            training.step()
        torch.testing.assert_close(training.state(), before, rtol=0.0, atol=0.0)
        assert threading.active_count() == threads
        training.steps.engine.close()
        assert [device.memory.used for device in training.pool.devices] == [0, 0]


def test_error_of_a_lost_device_that_user_code_catches_fails_the_step() -> None:
    training = Training("shared")
    training.step()
    Fault(training.pool[1], at=0)

    def careless(x: Tensor) -> Tensor:
        try:
            return training.model(x)
        except RuntimeError:
            return x.mean() * torch.ones((), requires_grad=True)

    with pytest.raises(DeviceLostError, match=f"virtual device 1 is lost: {MESSAGE}"):
        training.step(careless)


def test_error_of_the_user_is_raised_as_it_is() -> None:
    training = Training("lazy")
    error = ValueError("mine")

    def wrong(x: Tensor) -> Tensor:
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        training.step(wrong)
    assert caught.value is error
    assert training.pool.find_lost() == []
