"""Steps whose tail runs with the next step, or alone: the same gradients and outputs as without, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_roundpipe.engine.pending import replaced
from lightning_roundpipe.engine.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.engine.virtual import LazyLink
from lightning_roundpipe.planning import Partition
from tests.engine.plain_loop import ALL, WIDTH, Network, each_call_its_stage

both_modes = pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
Named = dict[str, Tensor]


@pytest.fixture(autouse=True)
def one_thread_per_operator() -> None:
    torch.set_num_threads(1)


class Trained:
    """A network in an engine, whose steps may have tails."""

    def __init__(self, model: nn.Module, num_devices: int, *, copies: bool, round_size: int | None = None) -> None:
        self.model = model
        self.planner: Callable[[int, bool], Partition] = each_call_its_stage
        self.engine = Engine(
            model,
            DevicePool([torch.device("cpu")] * num_devices, link=LazyLink() if copies else None),
            lambda profile, num_microbatches, training: self.planner(len(profile.calls), training),
            round_size=round_size,
            num_threads=1,
        )
        self.gradients: list[Named] = []
        self.values: dict[nn.Parameter, Tensor] = {}
        self.names = {parameter: name for name, parameter in model.named_parameters()}

    def train(self, batches: list[Any], seed: int, *, may_trail: bool = True) -> StepResult:
        result = self.engine.run(
            StepRequest(
                self.model.step,  # type: ignore[arg-type]
                batches,
                [1 / len(batches)] * len(batches),
                "train",
                seed,
                loss_of=lambda loss: loss,
                values=self.values,
                on_gradients=self.take if may_trail else None,
            )
        )
        if not result.has_tail:
            self.take(result.gradients)
        return result

    def take(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        self.gradients.append({self.names[p]: gradient.clone() for p, gradient in gradients.items()})

    def evaluate(self, batches: list[Any]) -> list[Any]:
        with torch.no_grad():
            return self.engine.run(StepRequest(self.model.step, batches, [1.0] * len(batches), "eval", 0)).outputs  # type: ignore[arg-type]


def pair(model: nn.Module, num_devices: int, *, copies: bool, round_size: int | None = None) -> tuple[Trained, Trained]:
    one, other = (Trained(m, num_devices, copies=copies, round_size=round_size) for m in copied(model))
    return one, other


def copied(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)


def batches_of(count: int) -> list[Any]:
    return [(torch.randn(2, WIDTH, dtype=torch.float64), frozenset()) for _ in range(count)]


def assert_equal(one: Trained, other: Trained) -> None:
    assert len(one.gradients) == len(other.gradients)
    for step, (found, wanted) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        assert found.keys() == wanted.keys(), step
        for name, gradient in wanted.items():
            assert torch.equal(found[name], gradient), f"step {step}, {name}"
    buffers = dict(other.model.named_buffers())
    for name, buffer in one.model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@both_modes
def test_a_step_ends_before_its_backward(copies: bool) -> None:
    trailing, plain = pair(Network(range(4), ALL), 2, copies=copies)
    for seed in range(5):
        batches = batches_of(4)
        found, wanted = trailing.train(batches, seed), plain.train(batches, seed, may_trail=False)
        assert all(map(torch.equal, found.outputs, wanted.outputs))
        assert found.has_tail == (seed > 0), "the first step records, and waits"
        assert not wanted.has_tail
        assert len(trailing.gradients) == max(1, seed), "those of the last step are still to come"
    trailing.engine.finish_tail()
    assert_equal(trailing, plain)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    path=st.lists(st.integers(0, 3), min_size=2, max_size=6),
    features=st.frozensets(st.sampled_from(sorted(ALL))),
    num_devices=st.integers(2, 4),
    round_size=st.none() | st.integers(1, 4),
    copies=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_sequence_of_steps(
    path: list[int], features: frozenset[str], num_devices: int, round_size: int | None, copies: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    path = [sorted(set(path)).index(i) for i in path]
    trailing, plain = pair(Network(path, features), num_devices, copies=copies, round_size=round_size)
    for step in range(7):
        batches = batches_of(choose.randint(1, 6))
        what = choose.choice(["trail", "trail", "trail", "wait", "finish", "evaluate"])
        if what == "finish":
            trailing.engine.finish_tail()
        elif what == "evaluate":
            found, wanted = trailing.evaluate(batches), plain.evaluate(batches)
            assert all(map(torch.equal, found, wanted))
        else:
            result = trailing.train(batches, step, may_trail=what == "trail")
            wanted_result = plain.train(batches, step, may_trail=False)
            assert all(map(torch.equal, result.outputs, wanted_result.outputs))
    trailing.engine.finish_tail()
    assert_equal(trailing, plain)


class Shifting(Trained):
    """In every step the weights have other values, which belong to that step alone."""

    def train(self, batches: list[Any], seed: int, *, may_trail: bool = True) -> StepResult:
        generator = torch.Generator().manual_seed(seed)
        self.values = {
            p: p.detach() + torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in self.model.parameters()
        }
        with replaced(self.values):
            return super().train(batches, seed, may_trail=may_trail)


@both_modes
@pytest.mark.parametrize("features", [frozenset(), ALL - {"tied"}], ids=["units", "glue"])
def test_every_step_has_values_of_its_own(copies: bool, features: frozenset[str]) -> None:
    class Silent(Network):
        def step(self, batch: Any) -> Tensor:
            if features:
                return super().step(batch)
            x, _ = batch
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    trailing, plain = (Shifting(model, 2, copies=copies) for model in copied(Silent(range(4), features)))
    for seed in range(6):
        batches = batches_of(4)
        result = trailing.train(batches, seed)
        assert result.has_tail == (seed > 0 and (copies or not features)), seed
        wanted = plain.train(batches, seed, may_trail=False)
        assert all(map(torch.equal, result.outputs, wanted.outputs))
    trailing.engine.finish_tail()
    assert_equal(trailing, plain)


@both_modes
def test_what_glue_leaves_on_units_is_seen_by_the_next_step(copies: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * self.factor

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Scaled() for _ in range(4))

        def step(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            for layer in self.layers:
                layer.factor = float(x.detach().abs().max())
            return x.square().mean()

    trailing, plain = pair(Leaving(), 2, copies=copies)
    for seed in range(5):
        batches = [torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(4)]
        result, wanted = trailing.train(batches, seed), plain.train(batches, seed, may_trail=False)
        assert result.has_tail == (seed > 0)
        assert all(map(torch.equal, result.outputs, wanted.outputs))
        assert [x.factor for x in trailing.model.layers] == [x.factor for x in plain.model.layers]
    trailing.engine.finish_tail()
    assert_equal(trailing, plain)
