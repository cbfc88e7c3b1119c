"""What the planner takes for possible within a memory limit, the books of the devices let pass."""

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
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.planning import CostProfile, Machine, Partition
from lightning_roundpipe.planning.plan import StageMemoryError, needed_bytes, plan_training
from tests.support.lazy_link import LazyLink

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


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    width=st.sampled_from([4, 16]),
    hidden=st.lists(st.sampled_from([4, 24, 64]), min_size=1, max_size=6),
    rows=st.sampled_from([1, 6, 40]),
    num_microbatches=st.integers(1, 6),
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

    def run(limit: int | None) -> CostProfile | None:
        """A few steps; the costs if they have succeeded."""

        def planner(costs: CostProfile, num_microbatches: int, is_training: bool) -> Partition:
            return plan_training(costs, machine, num_microbatches=num_microbatches, round_size=round_size)

        machine = Machine(num_devices, limit)
        link = LazyLink() if is_lazy else TimedLink()
        pool = DevicePool([torch.device("cpu")] * num_devices, link=link, memory_limit=limit)
        # As units: what is too large would be divided.
        units = [Block, nn.Linear]
        engine = Engine(net, pool, planner, machine=machine, round_size=round_size, unit_classes=units, num_threads=1)
        weights = [1.0 / num_microbatches] * num_microbatches
        try:
            for seed in range(NUM_STEPS):
                result = engine.run(StepRequest(net, microbatches, weights, "train", seed, loss_of=lambda loss: loss))
                gradients = {name: result.gradients[parameter] for name, parameter in net.named_parameters()}
                torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
            return engine.costs("train")
        except (StageMemoryError, DeviceOutOfMemoryError):
            return None
        finally:
            engine.close()
            assert limit is None or all(device.memory.peak <= limit for device in pool.devices)
            assert [device.memory.used for device in pool.devices] == [0] * num_devices
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("roundpipe")]

    costs = run(None)
    assert costs is not None
    calls = costs.calls
    # Between two stages waits what the calls but the last gave, for each micro-batch of a round.
    waiting = max(call.output_bytes for call in calls[:-1]) * min(num_microbatches, round_size or num_microbatches)
    least = waiting + max(needed_bytes(call, is_training=True) for call in calls)
    assert run(least - 1) is None
    # The micro-batch that records has all its calls on one device, and so its own input beside them.
    assert run(least + calls[0].input_bytes + int(room * least)) is not None


def _plain_gradients(net: nn.Module, microbatches: list[Tensor]) -> dict[str, Tensor]:
    plain = copy.deepcopy(net)
    torch.stack([plain(x) for x in microbatches]).mean().backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}
