"""The engine runs any valid schedule: whatever lies where, in whatever order, the results are those of a plain loop."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_roundpipe.planning import Action, Schedule
from tests.support.engine.plain_loop import ALL, Case, assert_order, cut_at, random_case, random_schedule

# Turns of a loop in which other threads come in: with `eager_switches` they take turns all the time.
TURNS = 5000
both_modes = pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])


@both_modes
def test_buffers_are_written_in_the_order_of_the_schedule(copies: bool) -> None:
    """Where the micro-batches cannot come in their own order, no micro-batch waits for that."""
    lists: list[list[Action]] = [[], []]
    for stage in range(5):
        lists[stage % 2].extend(Action(stage, m) for m in (2, 0, 1))
    schedule = Schedule(5, 3, tuple(map(tuple, lists)))
    case = Case(range(3), ALL, 2, copies=copies, scheduler=lambda *_: schedule)
    case.train(1)  # records, and runs no schedule
    for _ in range(2):
        result = case.train(3, order=(2, 0, 1))
        assert result.schedule == schedule
        assert_order(result)


# ---------------------------------------------------------------------------------------------------------------------
# Drawn at random


def at_random(max_examples: int) -> Callable[[Any], Any]:
    """Decorates a test of (random number generator, devices, micro-batches, copies)."""

    def decorate(test: Any) -> Any:
        strategies = {
            "rng": st.integers(0, 2**32).map(random.Random),
            "num_devices": st.integers(1, 4),
            "num_microbatches": st.integers(1, 5),
            "copies": st.booleans(),
        }
        return settings(derandomize=True, deadline=None, max_examples=max_examples)(given(**strategies)(test))

    return decorate


@pytest.mark.parametrize("features", [ALL - {"buffers"}, ALL], ids=["no buffers", "all"])
@at_random(max_examples=20)
def test_any_schedule(
    features: frozenset[str], rng: random.Random, num_devices: int, num_microbatches: int, copies: bool
) -> None:
    """Also while the first micro-batch is recorded, and where micro-batches skip units: their tickets are released, no
    micro-batch waits for buffers that they do not write, and the others keep the order."""
    torch.manual_seed(0)
    case = random_case(rng, features, num_devices, copies)
    places = range(len(case.model.path))
    case.train(rng.choice((1, num_microbatches + 1)))
    for skips in rng.sample((False, True), 2):  # while it is learned what the units do, and afterwards
        most = len(places) - 1 if skips else 0
        skipped = [frozenset(rng.sample(places, rng.randint(0, most))) for _ in range(num_microbatches)]
        assert_order(case.train(num_microbatches, skipped=skipped), skips=skips)


@at_random(max_examples=10)
def test_any_schedule_of_an_evaluation(
    rng: random.Random, num_devices: int, num_microbatches: int, copies: bool
) -> None:
    torch.manual_seed(0)
    case = random_case(rng, ALL, num_devices, copies)
    case.train(1)
    case.evaluate(1)
    assert_order(case.evaluate(num_microbatches))
    case.train(2)  # changes the buffers; what is known of the units is forgotten
    assert_order(case.evaluate(num_microbatches))


# ---------------------------------------------------------------------------------------------------------------------
# Buffers, at the moments that matter


class Meeting:
    """Stays in a unit as long as another thread takes to come in, were it let in; knows whether one did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self.happened = False

    def __call__(self, x: Tensor) -> None:
        with self._lock:
            self._inside += 1
        for _ in range(TURNS):
            self.happened |= self._inside > 1
        with self._lock:
            self._inside -= 1


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.integers(0, 2**32))
def test_the_order_in_which_buffers_are_written(
    num_stages: int, num_microbatches: int, num_devices: int, num_ordered: int, seed: int
) -> None:
    """Waiting for it cannot block a schedule, and it is that of the micro-batches wherever they come in their order."""
    schedule = random_schedule(random.Random(seed), num_stages, num_microbatches, num_devices, num_ordered)
    orders = schedule.stage_orders(num_stages)
    assert [sorted(order) for order in orders] == [list(range(num_microbatches))] * num_stages
    after = [(Action(s, m), Action(s + 1, m)) for s in range(num_stages - 1) for m in range(num_microbatches)]
    for actions in schedule.devices:
        after += pairwise(actions)
    for stage, order in enumerate(orders):
        after += pairwise(Action(stage, m) for m in order)
    sorter: TopologicalSorter[Action] = TopologicalSorter()
    for before, action in after:
        sorter.add(action, before)
    sorter.prepare()  # raises CycleError if one would wait for ever
    in_order = min(num_ordered, num_stages)
    assert schedule.stage_orders(in_order) == (tuple(range(num_microbatches)),) * in_order


@both_modes
@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("skips", [False, True], ids=["all", "one skips it"])
def test_one_micro_batch_at_a_time_writes_buffers(skips: bool, copies: bool) -> None:
    """Neither while it is learned that the unit writes, nor afterwards; what a kept graph has saved stays as it is.
    One unit is called twice, with the other one in between."""
    schedule = Schedule(1, 3, tuple((Action(0, m),) for m in range(3)))
    path = (0, 1, 0)
    case = Case(path, frozenset({"buffers"}), 3, copies=copies, scheduler=lambda *_: schedule)
    case.planner = lambda count, training: cut_at(count, training, (), (), 0)
    case.train(1)
    for _ in range(2):
        meetings = [Meeting() for _ in case.model.layers]
        for layer, meeting in zip(case.model.layers, meetings, strict=True):
            layer.watch = [meeting]
        case.train(3, skipped=[frozenset(), frozenset(range(len(path)) if skips else ()), frozenset()])
        assert not any(meeting.happened for meeting in meetings)
