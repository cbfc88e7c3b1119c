"""What stays from step to step while an engine is open, and that nothing of it is left when it is closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from tests.support.engine.partitions import everything_kept
from tests.support.engine.steps import Steps

NUM_MICROBATCHES = 3
WIDTH = 4


class Net(nn.Module):
    """A chain of layers whose step calls ``inside`` between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inside: Any = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.inside(x)
        for layer in self.layers[1:]:
            x = layer(torch.tanh(x))
        return x.square().mean()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.fixture
def steps(net: Net) -> Iterator[Steps]:
    made = Steps(net, everything_kept, num_devices=2)
    yield made
    made.engine.close()


def run(steps: Steps, seed: int = 0) -> list[Tensor | None]:
    """The gradients of a step."""
    rows = torch.randn(2 * NUM_MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(seed))
    return steps.gradients(rows.chunk(NUM_MICROBATCHES), seed)


def kept_threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name.startswith("roundpipe-microbatch")}


def replaced() -> tuple[Any, ...]:
    """What the engine replaces for the whole process while it is open."""
    return (
        nn.Module.__setattr__,
        nn.Module.__delattr__,
        nn.Module.register_forward_hook,
        nn.Parameter.__dict__.get("__setattr__"),
        nn.Parameter.__dict__.get("requires_grad_"),
        Tensor.register_hook,
        Tensor.retain_grad,
        torch_checkpoint.CheckpointFunction,
    )


def test_threads_stay_as_long_as_the_engine_is_open(steps: Steps, net: Net) -> None:
    originals, used = replaced(), []
    net.inside = lambda x: used.append(threading.get_ident())
    steps.engine.open()
    for seed in range(3):
        run(steps, seed)
    assert len(set(used)) == NUM_MICROBATCHES
    assert kept_threads() == set(used)
    steps.engine.close()
    assert not kept_threads()
    assert replaced() == originals


def test_without_open_nothing_is_left_between_steps(steps: Steps, net: Net) -> None:
    originals = replaced()
    for seed in range(2):
        run(steps, seed)
        assert not kept_threads()
        assert replaced() == originals


@pytest.mark.parametrize("closed_first", [0, 1])
def test_of_two_open_engines_the_last_puts_replacements_back(net: Net, closed_first: int) -> None:
    originals = replaced()
    both = [Steps(net, everything_kept) for _ in range(2)]
    for one in both:
        one.engine.open()
    installed = replaced()
    assert not set(map(id, installed)) & set(map(id, originals)) - {id(None)}
    both[closed_first].engine.close()
    assert replaced() == installed
    run(both[1 - closed_first])
    both[1 - closed_first].engine.close()
    assert replaced() == originals
    assert not kept_threads()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_open_engine_goes_on_after_an_error(steps: Steps, net: Net, error: type[BaseException]) -> None:
    def fails(x: Tensor) -> None:
        raise error("from user code")

    expected = run(steps)
    steps.engine.open()
    run(steps)
    net.inside = fails
    with pytest.raises(error, match="from user code"):
        run(steps)
    net.inside = lambda x: None
    torch.testing.assert_close(run(steps), expected)
    assert len(kept_threads()) == NUM_MICROBATCHES


@pytest.mark.usefixtures("without_collector")
def test_waiting_threads_keep_nothing_of_a_step(steps: Steps, net: Net) -> None:
    seen: list[weakref.ref[Tensor]] = []
    net.inside = lambda x: seen.append(weakref.ref(x))
    steps.engine.open()
    for seed in range(2):
        run(steps, seed)
        assert not [tensor for tensor in seen if tensor() is not None]
    assert len(seen) == 2 * NUM_MICROBATCHES


def test_threads_are_made_anew_for_another_number_of_intra_op_threads(net: Net) -> None:
    steps = Steps(net, everything_kept, num_threads=None)
    steps.engine.open()
    run(steps)
    before = kept_threads()
    counts: list[int] = []
    net.inside = lambda x: counts.append(torch.get_num_threads())
    torch.set_num_threads(2)
    try:
        run(steps)
        assert counts == [2] * NUM_MICROBATCHES
        assert len(kept_threads()) == len(before) == NUM_MICROBATCHES
    finally:
        torch.set_num_threads(1)
        steps.engine.close()
    assert not kept_threads()
