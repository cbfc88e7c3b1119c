"""A network in an engine beside a copy of it in a plain loop over the micro-batches; stages and schedules for it."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.common.seeds import derive_seed
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import Action, Partition, Schedule, StageKind
from tests.support.engine.lazy_link import cpu_pool
from tests.support.engine.partitions import cut_at, scheduled

WIDTH = 3
ROWS = 2
ALL = frozenset({"buffers", "dropout", "tied", "skip"})
# (num_stages, num_microbatches) -> schedule of a step.
Scheduler = Callable[[int, int], Schedule]


class Layer(nn.Module):
    """A unit with what makes the order and the place of its runs show."""

    level: Tensor
    previous: Tensor

    def __init__(self, features: frozenset[str]) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5 if "dropout" in features else 0.0)
        self.watch: list[Callable[[Tensor], None]] = []  # in a list: shared by the replicas
        if "buffers" in features:
            self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
            self.register_buffer("level", torch.zeros(WIDTH, dtype=torch.float64))
            self.register_buffer("previous", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if "buffers" in self.features:
            level, previous = self.level * 0.7 + x.detach().mean(0), self.previous * 0.5 + x.detach().amax(0)
        for watch in self.watch:
            watch(x)
        if "buffers" in self.features:
            if self.training:
                self.level.copy_(level)  # changed in place,
                self.previous = previous  # and assigned anew
            y = self.norm(x)
            # The graph saves what it multiplies by, which a second call would change: plain autograd refuses that.
            y = y + self.level + self.previous if "shared" in self.features else y * self.level * self.previous
        return x + self.dropout(torch.tanh(self.linear(y)))


class Network(nn.Module):
    """Layers called along a path; a layer that comes twice is shared."""

    def __init__(self, path: Sequence[int], features: frozenset[str]) -> None:
        super().__init__()
        self.path = tuple(path)
        self.features = features
        self.layers = nn.ModuleList(
            Layer(features | {"shared"} if self.path.count(index) > 1 else features) for index in range(max(path) + 1)
        )
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))
        if "tied" in features:
            self.layers[-1].linear.weight = self.layers[0].linear.weight

    def step(self, batch: tuple[Tensor, frozenset[int]]) -> Tensor:
        """The loss on (rows, places of the path that this micro-batch skips)."""
        x, skipped = batch
        first: Tensor | None = None
        for place, index in enumerate(self.path):
            if place not in skipped:
                x = self.layers[index](x)
            if "skip" in self.features:
                first = x if first is None else first
                x = x + first * self.scale
        return (x * self.scale).square().mean()


class Chain(nn.Module):
    """Linear units in a row, and nothing else."""

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_units))

    def step(self, x: Tensor) -> Tensor:
        """The loss."""
        for unit in self.units:
            x = unit(x)
        return x.square().mean()


class Case:
    """A network in an engine beside a copy of it in a plain loop over the micro-batches."""

    def __init__(
        self, path: Sequence[int], features: frozenset[str], num_devices: int, *, copies: bool, scheduler: Scheduler
    ) -> None:
        self.model = Network(path, features)
        self.plain = copy.deepcopy(self.model)
        self.planner: Callable[[int, bool], Partition] = each_call_its_stage
        self.engine = Engine(
            self.model,
            cpu_pool(num_devices, copies=copies),
            lambda profile, machine, num_microbatches, training: scheduled(
                self.planner(len(profile.calls), training), lambda *counts: scheduler(*counts[:2])
            ),
            num_threads=1,
        )
        self.key = "train"
        self._steps = 0

    def train(
        self, count: int, *, skipped: Sequence[frozenset[int]] = (), order: Sequence[int] | None = None
    ) -> StepResult:
        """One step of both on ``count`` micro-batches; compares losses, gradients and buffers.

        Args:
            skipped: per micro-batch, the places of the path that it leaves out.
            order: in which the plain loop takes the micro-batches; None for 0, 1, 2, ...
        """
        self.key = "train"
        self._steps += 1
        seed = self._steps
        batches = self._batches(count, skipped)
        weights = [(i + 1) / (count * (count + 1) / 2) for i in range(count)]
        request = StepRequest(self.model.step, batches, weights, self.key, seed, loss_of=lambda loss: loss)
        result = self.engine.run(request)
        losses = plain_losses(self.plain, batches, weights, seed, order or range(count))
        torch.testing.assert_close(result.outputs, losses, rtol=1e-9, atol=1e-12)
        wanted = dict(self.plain.named_parameters())
        for name, parameter in self.model.named_parameters():
            found, gradient = result.gradients.get(parameter), wanted[name].grad
            assert (found is None) == (gradient is None), name
            if gradient is not None:
                torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        self.assert_buffers_equal()
        return result

    def evaluate(self, count: int) -> StepResult:
        """One step without gradients, in eval mode; compares the losses."""
        self.key = "validate"
        batches = self._batches(count, ())
        self.model.eval()
        self.plain.eval()
        with torch.no_grad():
            result = self.engine.run(StepRequest(self.model.step, batches, [1 / count] * count, self.key, 0))
            losses = [self.plain.step(batch) for batch in batches]
        self.model.train()
        self.plain.train()
        torch.testing.assert_close(result.outputs, losses, rtol=1e-9, atol=1e-12)
        self.assert_buffers_equal()
        return result

    def assert_buffers_equal(self) -> None:
        wanted = dict(self.plain.named_buffers())
        for name, buffer in self.model.named_buffers():
            torch.testing.assert_close(
                buffer, wanted[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"step {self._steps}, {n}: {m}"
            )

    @staticmethod
    def _batches(count: int, skipped: Sequence[frozenset[int]]) -> list[tuple[Tensor, frozenset[int]]]:
        rows = torch.randn(ROWS * count, WIDTH, dtype=torch.float64).chunk(count)
        return list(zip(rows, skipped or [frozenset()] * count, strict=True))


def plain_losses(
    model: Network, batches: Sequence[Any], weights: Sequence[float], seed: int, order: Sequence[int]
) -> list[Tensor]:
    """Forward and backward of one micro-batch after the other, each call with the random numbers of its seed.

    Returns the losses; the weighted sum of the gradients is in the parameters' ``.grad``.
    """
    calls: list[int] = []
    losses = [torch.zeros(())] * len(batches)

    def seeded(*_: Any) -> None:
        torch.manual_seed(derive_seed(derive_seed(seed, index), len(calls)))
        calls.append(index)

    model.zero_grad()
    hooks = [layer.register_forward_pre_hook(seeded) for layer in model.layers]
    with torch.random.fork_rng(devices=[]):
        for index in order:
            calls.clear()
            loss = model.step(batches[index])
            (loss * weights[index]).backward()
            losses[index] = loss.detach()
    for hook in hooks:
        hook.remove()
    return losses


def each_call_its_stage(count: int, training: bool) -> Partition:
    return cut_at(count, training, range(1, count), range(1, count), count - 1)


def assert_order(result: StepResult, *, skips: bool = False) -> None:
    """Every device ran exactly its list, in this order and one action after the other; where micro-batches skip units,
    it may leave actions out."""
    assert result.schedule is not None
    assert result.num_off_plan == 0
    found = [result.timeline.actions(device) for device in range(result.schedule.num_devices)]
    lists = zip(result.schedule.devices, map(set, found), strict=True)
    assert found == [[action for action in actions if action in ran or not skips] for actions, ran in lists]
    spans = sorted(result.timeline.spans, key=lambda span: (span.device, span.start_ms))
    for one, other in pairwise(spans):
        assert one.device != other.device or one.end_ms <= other.start_ms, (one, other)


def random_schedule(
    rng: random.Random, num_stages: int, num_microbatches: int, num_devices: int, num_ordered: int = 0
) -> Schedule:
    """Any order that respects the chains, dealt out to any devices: valid by construction.

    The micro-batches pass the first ``num_ordered`` stages in their own order, on whatever devices.
    """
    reached = [0] * num_microbatches
    devices: list[list[Action]] = [[] for _ in range(num_devices)]
    for _ in range(num_stages * num_microbatches):
        ready = [
            m
            for m, stage in enumerate(reached)
            if stage < num_stages and (stage >= num_ordered or m == 0 or reached[m - 1] > stage)
        ]
        microbatch = rng.choice(ready)
        rng.choice(devices).append(Action(reached[microbatch], microbatch))
        reached[microbatch] += 1
    return Schedule(num_stages, num_microbatches, tuple(map(tuple, devices)))


def random_case(rng: random.Random, features: frozenset[str], num_devices: int, copies: bool) -> Case:
    """Some path, cut into some stages; in every step another schedule."""

    @functools.cache  # the same in every step: the engine asks again when it knows the costs
    def planner(count: int, training: bool) -> Partition:
        forward, backward = [sorted(rng.sample(range(1, count), rng.randrange(count))) for _ in range(2)]
        return cut_at(count, training, forward, backward, rng.randrange(count))

    def scheduler(num_stages: int, num_microbatches: int) -> Schedule:
        plan = case.engine.plan_of(case.key)
        assert plan is not None
        kinds = [stage.kind for stage in plan.partition.stages]
        writes = "buffers" in features and plan.partition.is_training
        num_ordered = kinds.index(StageKind.FUSED) + 1 if writes else 0
        return random_schedule(rng, num_stages, num_microbatches, num_devices, num_ordered)

    path = [rng.randrange(3) for _ in range(rng.choice((1, 3, 4, 5)))]
    case = Case(path, features, num_devices, copies=copies, scheduler=scheduler)
    case.planner = planner
    return case
