"""What a micro-batch has on the books: before a unit runs, while it waits, and for a graph that is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe.autograd.recompute import Call
from lightning_roundpipe.devices.memory import DeviceMemory
from lightning_roundpipe.engine.barrier import Barrier, Collective, meet
from lightning_roundpipe.engine.books import ActivationBooks
from tests.support.engine.partitions import everything_recomputed
from tests.support.engine.steps import Steps

INPUTS, OUTPUTS, GRAPH = 100, 30, 7
BROUGHT = 60  # of the inputs: on the books already, by what has brought them
RUNNING = INPUTS - BROUGHT + OUTPUTS


class Booked:
    """The books of one micro-batch on a device without a limit.

    Args:
        kept: whether the graph of its call is kept.
        is_known: whether the sizes of the call are known before it runs for the first time.
        is_trained: whether anything in it requires a gradient.
    """

    def __init__(self, *, kept: bool, is_known: bool = True, is_trained: bool = True) -> None:
        self.memory = DeviceMemory("device")
        self.device: Any = SimpleNamespace(memory=self.memory)
        self.books = ActivationBooks(SimpleNamespace(booked_bytes=BROUGHT))  # type: ignore[arg-type]
        facts: Any = SimpleNamespace(bytes_for=lambda input_bytes: (OUTPUTS, GRAPH))
        call: Any = Call(None, 0, (), None)  # type: ignore[arg-type]
        call.kept, call.flagged = kept, frozenset([("output", 0)] * is_trained)
        call.facts = facts if is_known else None
        call.ran = SimpleNamespace(input_bytes=INPUTS, output_bytes=OUTPUTS, graph_bytes=GRAPH)
        self.call: Call = call
        booked = self.books.begin_forward(self.device, call, INPUTS)
        self.before = self.memory.used
        call.facts = facts
        self.books.end_forward(self.device, call, INPUTS, booked, has_learned=not is_known)
        self.after = self.memory.used


def test_a_forward_books_both_ends_and_its_output_waits() -> None:
    found = Booked(kept=False)
    assert (found.before, found.memory.peak, found.after) == (RUNNING, RUNNING, OUTPUTS)
    found.books.wait_with(found.device, 0)
    assert found.memory.used == 0


def test_the_first_forward_of_its_kind_books_the_graph_that_it_had_once_all_is_known() -> None:
    found = Booked(kept=False, is_known=False)
    assert (found.before, found.memory.peak, found.after) == (INPUTS - BROUGHT, RUNNING + GRAPH, OUTPUTS)


def test_a_graph_that_is_kept_is_booked_before_and_until_it_goes() -> None:
    found = Booked(kept=True)
    assert (found.before, found.memory.peak, found.after) == (RUNNING + GRAPH, RUNNING + GRAPH, OUTPUTS + GRAPH)
    for _ in range(2):  # as a call that is given up after its segment
        found.books.release(found.call)
        assert found.memory.used == 0


def test_nothing_is_kept_of_a_call_that_needs_no_gradient() -> None:
    found = Booked(kept=True, is_trained=False)
    assert found.after == OUTPUTS
    found.books.wait_with(found.device, 0)
    assert found.memory.used == 0


@pytest.mark.parametrize(("kept", "needed"), [(False, 2 * (INPUTS + OUTPUTS) + GRAPH), (True, INPUTS + OUTPUTS)])
def test_a_backward_books_both_ends_with_their_gradients_and_those_of_the_inputs_wait(kept: bool, needed: int) -> None:
    found = Booked(kept=kept)
    booked = found.books.begin_backward(found.device, found.call)
    assert found.memory.used - found.after == booked == needed
    found.books.end_backward(found.device, booked, INPUTS)
    found.books.release(found.call)
    assert found.memory.used == INPUTS, "the output of the forward waits no longer"
    found.books.wait_with(found.device, 0)
    assert found.memory.used == 0


def test_a_graph_that_a_backward_retains_leaves_the_books_of_the_device_that_made_it() -> None:
    """The micro-batch ends its segment on another device, where its last backward has run."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    steps = Steps(net, everything_recomputed, num_devices=3, copies=True)
    found = []

    def look(barrier: Barrier) -> None:
        for device in steps.pool.devices:
            assert device.memory.try_reserve("weights", 0)  # takes off what has left
            found.append(device.memory.used)

    def step(x: torch.Tensor) -> None:
        meet(Collective("backward", "backward", look), [(net(x).square().mean(), 1.0)], retain_graph=True)

    for _ in range(2):
        steps.train([torch.ones(4, 8)] * 2, function=step, loss_of=None, meets=True)
    steps.engine.close()
    assert found == [0] * 3 * 2
