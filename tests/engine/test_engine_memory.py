"""Devices whose memory is short: what the planner takes for possible fits, and a limit changes no result."""

from __future__ import annotations

import copy
import threading

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import TimedLink
from lightning_roundpipe.planning import CostProfile, Machine, Partition
from lightning_roundpipe.planning.plan import StageMemoryError, needed_bytes, plan_training
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.partitions import planner
from tests.support.engine.random_graphs import (
    WIDTH,
    Graph,
    Instruction,
    make_steps,
    names,
    plain_gradients,
    programs,
    some_units,
)
from tests.support.engine.steps import Steps

NUM_STEPS = 3  # the second one ends with a plan from measured costs


class Block(nn.Module):
    """Two layers, with a graph of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks of different sizes one after the other, and a head."""

    def __init__(self, width: int, hidden: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, size) for size in hidden)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@settings(derandomize=True, deadline=None, max_examples=18)
@given(
    width=st.sampled_from([4, 16]),
    hidden=st.lists(st.sampled_from([4, 24, 64]), min_size=1, max_size=4),
    rows=st.sampled_from([1, 6, 40]),
    num_microbatches=st.integers(1, 4),
    num_devices=st.integers(1, 3),
    round_size=st.sampled_from([None, 2]),
    is_lazy=st.booleans(),
    room=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_what_is_planned_fits(
    width: int,
    hidden: list[int],
    rows: int,
    num_microbatches: int,
    num_devices: int,
    round_size: int | None,
    is_lazy: bool,
    room: float,
) -> None:
    """With the least memory that the planner asks for; with a byte less there is an error."""
    torch.manual_seed(0)
    net = Chain(width, hidden)
    microbatches = [torch.randn(rows, width) for _ in range(num_microbatches)]
    expected = _plain_gradients(net, microbatches)

    def run_within(limit: int | None, num_steps: int = NUM_STEPS) -> CostProfile | None:
        """A few steps; the costs if they have succeeded."""

        def plan(costs: CostProfile, machine: Machine, num_microbatches: int, is_training: bool) -> Partition:
            return plan_training(costs, machine, num_microbatches=num_microbatches, round_size=round_size)

        machine = Machine(num_devices, limit)
        link = LazyLink() if is_lazy else TimedLink()
        pool = DevicePool([torch.device("cpu")] * num_devices, link=link, memory_limit=limit)
        # As units: what is too large would be divided.
        units = [Block, nn.Linear]
        steps = Steps(net, plan, pool=pool, machine=machine, round_size=round_size, unit_classes=units)
        try:
            for seed in range(num_steps):
                gradients = steps.gradients(microbatches, seed)
                torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
            return steps.engine.costs("train")
        except (StageMemoryError, DeviceOutOfMemoryError):
            return None
        finally:
            steps.engine.close()
            assert limit is None or all(device.memory.peak <= limit for device in pool.devices)
            assert [device.memory.used for device in pool.devices] == [0] * num_devices
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("roundpipe")]

    costs = run_within(None, num_steps=1)
    assert costs is not None
    calls = costs.calls
    # Between two stages waits what the calls but the last gave, for each micro-batch of a round.
    waiting = max(call.output_bytes for call in calls[:-1]) * min(num_microbatches, round_size or num_microbatches)
    least = waiting + max(needed_bytes(call, is_training=True) for call in calls)
    assert run_within(least - 1) is None
    # The micro-batch that records has all its calls on one device, and so its own input beside them.
    assert run_within(least + calls[0].input_bytes + int(room * least)) is not None


def _plain_gradients(net: nn.Module, microbatches: list[Tensor]) -> list[Tensor | None]:
    plain = copy.deepcopy(net)
    torch.stack([plain(x) for x in microbatches]).mean().backward()
    return [parameter.grad for parameter in plain.parameters()]


def limited(graph: Graph, seed: int, devices: int, link: TimedLink, limit: int | None) -> Steps:
    pool = DevicePool([torch.device("cpu")] * devices, link=link, memory_limit=limit)
    return make_steps(graph, planner(seed), pool=pool, round_size=2)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    program=programs,
    frozen=some_units,
    devices=st.integers(1, 3),
    num_microbatches=st.integers(1, 4),
    share=st.floats(0.3, 1.0),
    lazy=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_limit_is_kept_and_changes_no_result(
    program: list[Instruction],
    frozen: frozenset[int],
    devices: int,
    num_microbatches: int,
    share: float,
    lazy: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    graph = Graph(program, frozen, dropout=0.0).double()
    rows = torch.randn(5, WIDTH, dtype=torch.float64)
    expected = plain_gradients(graph, rows, num_microbatches)
    parts = rows.tensor_split(num_microbatches)
    free = limited(graph, seed, devices, LazyLink(), None)
    for step in range(2):  # the second one has the plan of all that follow
        free.train(parts, step)
    # What micro-batches wait with on devices that they leave depends on timing.
    limit = int(share * (max(device.memory.peak for device in free.pool.devices) + num_microbatches * rows.nbytes))
    steps = limited(graph, seed, devices, LazyLink() if lazy else TimedLink(), limit)
    for step in range(2):
        try:
            result = steps.train(parts, step)
        except DeviceOutOfMemoryError:
            assert share < 1.0
            continue
        finally:
            assert all(device.memory.peak <= limit for device in steps.pool.devices)
        assert names(graph, result.gradients) == names(graph, expected)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(result.gradients[parameter], gradient, rtol=1e-9, atol=1e-12)
    steps.engine.close()
    assert [device.memory.used for device in steps.pool.devices] == [0] * devices
