"""Which gradients are told to be complete before the step is over: all that are, and none that are needed otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.engine import completion
from lightning_roundpipe.engine.cuda import CudaDevice
from lightning_roundpipe.engine.pool import DevicePool
from lightning_roundpipe.engine.requests import StepResult
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.engine.virtual import LazyLink
from tests.engine.cuda_stub import StubDriver
from tests.engine.plain_loop import each_call_its_stage

WIDTH = 6
COUNT = 4
POOLS = ["aliases", "copies", "gpus"]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Steps:
    """Steps of a model in an engine, and what was told in each.

    Attributes:
        told: names of weights, in order, of the last step.
        gradients: that were collected then, at once.
    """

    def __init__(self, model: Any, kind: str, driver: StubDriver) -> None:
        self.model = model
        self.driver = driver
        self.pool = pool = DevicePool([torch.device("cpu")] * 2, link=LazyLink() if kind == "copies" else None)
        if kind == "gpus":
            pool.devices = tuple(CudaDevice(i, i, driver=driver) for i in range(2))  # type: ignore[assignment]
        self.engine = Engine(
            model,
            pool,
            lambda profile, count, training: each_call_its_stage(len(profile.calls), training),
            num_threads=1,
        )
        self._lock = threading.Lock()
        self.told: list[str] = []
        self.gradients: dict[str, Tensor] = {}

    def run(self, number: int, width: int = WIDTH, count: int = COUNT) -> StepResult:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.told, self.gradients = [], {}

        def tell(masters: Sequence[nn.Parameter], collect: Callable[[], Mapping[nn.Parameter, Tensor]]) -> None:
            with self._lock:
                self.told += [names[master] for master in masters]
                self.gradients |= {names[master]: gradient for master, gradient in collect().items()}

        rows = torch.randn(2 * count, width, generator=torch.Generator().manual_seed(number))
        request = StepRequest(
            self.model.step,
            list(rows.chunk(count)),
            [1 / count] * count,
            "train",
            number,
            lambda loss: loss,
            completed=tell,
        )
        return self.engine.run(request)

    def close(self) -> None:
        self.engine.close()
        self.pool.dispose()
        assert self.driver.locked == {}, "children of this process would not get that memory"


@pytest.fixture
def make() -> Iterator[Callable[..., Steps]]:
    made: list[Steps] = []

    def steps(model: Any, kind: str = "aliases") -> Steps:
        made.append(Steps(model, kind, StubDriver()))
        return made[-1]

    yield steps
    for one in made:
        one.close()


def test_nothing_is_told_while_the_calls_are_not_known(make: Callable[..., Steps]) -> None:
    steps = make(Net())
    steps.run(0)
    assert steps.told == []


@pytest.mark.parametrize("width", [WIDTH, 520])  # the weights of the latter are page-locked
@pytest.mark.parametrize("kind", POOLS)
def test_every_weight_of_a_unit_is_told(make: Callable[..., Steps], kind: str, width: int) -> None:
    model = Net(width)
    steps = make(model, kind)
    for number in range(3):
        result = steps.run(number, width)
    expected = [f"blocks.{i}.linear.{name}" for i in (3, 2, 1, 0) for name in ("weight", "bias")]
    assert steps.told == expected, "the last layers come first"
    for name, parameter in model.named_parameters():
        # What was collected is the gradient itself, and nobody has written it since.
        assert steps.gradients[name].data_ptr() == result.gradients[parameter].data_ptr()
        assert torch.equal(steps.gradients[name], result.gradients[parameter])


def untold(model: nn.Module, steps: Steps) -> set[str]:
    for number in range(4):
        steps.run(number)
    assert len(steps.told) == len(set(steps.told))
    return {name for name, _ in model.named_parameters()} - set(steps.told)


WEIGHT = "blocks.3.linear.weight"


class InGlue(Net):
    """The weight of the last block is used before the second: its gradient comes later than that of the block."""

    def take(self) -> Tensor:
        return self.blocks[3].linear.weight  # type: ignore[return-value, union-attr]

    def step(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = x + 0.1 * nn.functional.linear(x, self.take())
        for block in self.blocks[1:]:
            x = block(x)
        return x.square().mean()


class DetachedInGlue(InGlue):
    def take(self) -> Tensor:
        return super().take().detach()


class DataInGlue(InGlue):
    def take(self) -> Tensor:
        return super().take().data


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].linear.weight = self.blocks[3].linear.weight  # type: ignore[union-attr]


class TiedByData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].linear.weight.data = self.blocks[3].linear.weight.data  # type: ignore[union-attr]


class Viewed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.views = [self.blocks[3].linear.weight.detach().numpy()]  # type: ignore[union-attr]


class Twice(Net):
    """The last block is called in two stages."""

    def step(self, x: Tensor) -> Tensor:
        for i in (3, 0, 1, 2, 3):
            x = self.blocks[i](x)
        return x.square().mean()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].linear.weight.requires_grad_(False)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (InGlue, {WEIGHT}),
        (DetachedInGlue, {WEIGHT}),
        (DataInGlue, {WEIGHT}),
        (Tied, {"blocks.0.linear.weight", "blocks.0.linear.bias", "blocks.3.linear.bias"}),
        (TiedByData, {"blocks.0.linear.weight", WEIGHT}),
        (Viewed, {WEIGHT}),
        (Twice, {WEIGHT, "blocks.3.linear.bias"}),
        (Frozen, {WEIGHT}),
    ],
)
def test_what_is_not_told(make: Callable[..., Steps], kind: str, model: Any, expected: set[str]) -> None:
    made = model()
    assert untold(made, make(made, kind)) == expected


def test_a_call_that_was_not_planned(make: Callable[..., Steps]) -> None:
    class Sometimes(Net):
        def step(self, x: Tensor) -> Tensor:
            loss: Tensor = super().step(self.blocks[0](x) if x.sum() > 1e3 else x)
            return loss

    steps = make(Sometimes())
    steps.run(0)
    steps.run(1)
    assert len(steps.told) == 8
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(2, WIDTH, generator=generator) + 1e3 * (i == 2) for i in range(COUNT)]
    told: list[Any] = []
    request = StepRequest(
        steps.model.step, rows, [1 / COUNT] * COUNT, "train", 2, lambda loss: loss, completed=lambda *a: told.append(a)
    )
    assert steps.engine.run(request).num_off_plan > 0
    assert told == []


def test_a_micro_batch_without_loss_does_not_hold_the_others_up(make: Callable[..., Steps]) -> None:
    class Skips(Net):
        def step(self, x: Tensor) -> Any:
            loss = super().step(x)
            return None if x[0, 0] > 0 else loss

    steps = make(Skips())
    for number in range(3):
        steps.run(number)
    assert len(steps.told) == 8


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_weight_that_glue_begins_to_use_later(make: Callable[..., Steps], is_summed: bool) -> None:
    """A graph may hold a leaf itself, which does not count as somebody who holds its memory."""

    class Later(Net):
        number = 0

        def step(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if self.number == 3:
                bias = self.blocks[3].linear.bias  # type: ignore[union-attr]
                x = x + bias if is_summed else x * bias  # type: ignore[operator]
            for block in self.blocks[1:]:
                x = block(x)
            return x.square().mean()

    model = Later()
    steps = make(model)
    for model.number in range(5):
        steps.run(model.number)
        assert ("blocks.3.linear.bias" in steps.told) == (model.number in (1, 2))
    assert len(steps.told) == 7


def test_glue_that_is_too_large_to_be_looked_at(make: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make(Net())
    steps.run(0)
    monkeypatch.setattr(completion, "_MAX_NODES", 3)
    steps.run(1)
    assert steps.told == []
    monkeypatch.setattr(completion, "_MAX_NODES", 20)
    steps.run(2)
    assert len(steps.told) == 8
