"""The engine runs any valid schedule: whatever lies where, in whatever order, the results are those of a plain loop."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
from tests.support.engine.schedule_text import parse_schedule

# Turns of a loop in which other threads come in: with the fixture below they take turns all the time.
TURNS = 5000
both_modes = pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])


@pytest.fixture(autouse=True)
def one_thread_per_operator() -> None:
    torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------------------------------
# Written by hand: three units in five stages, F0 F1 fused2 B3 B4

BY_HAND = {
    "each stage dealt out to three devices": """
        schedule stages=5 microbatches=4 devices=3
        device 0: 0:0 0:3 1:2 2:1 3:0 3:3 4:2
        device 1: 0:1 1:0 1:3 2:2 3:1 4:0 4:3
        device 2: 0:2 1:1 2:0 2:3 3:2 4:1""",
    "an idle device": """
        schedule stages=5 microbatches=3 devices=3
        device 0: 0:0 0:1 0:2 2:0 2:1 2:2 4:0 4:1 4:2
        device 1:
        device 2: 1:0 1:1 1:2 3:0 3:1 3:2""",
    "stages entered, left and entered again": """
        schedule stages=5 microbatches=4 devices=2
        device 0: 0:0 0:1 2:0 0:2 2:1 4:0 0:3 2:2 4:1 2:3 4:2 4:3
        device 1: 1:0 1:1 3:0 1:2 3:1 1:3 3:2 3:3""",
}
OUT_OF_ORDER = {
    "a later micro-batch all the way first": """
        schedule stages=5 microbatches=3 devices=2
        device 0: 0:2 1:2 2:2 3:2 4:2 0:0 1:0 2:0 3:0 4:0
        device 1: 0:1 1:1 2:1 3:1 4:1""",
}


def cases(schedules: dict[str, str]) -> Any:
    return pytest.mark.parametrize("text", schedules.values(), ids=schedules.keys())


def by_hand(text: str, path: Sequence[int], features: frozenset[str], *, copies: bool) -> tuple[Case, Schedule]:
    """A case that has recorded its plan and runs the schedule from now on."""
    schedule = parse_schedule(text)
    case = Case(path, features, schedule.num_devices, copies=copies, scheduler=lambda *_: schedule)
    case.train(1)  # records, and runs no schedule
    return case, schedule


@both_modes
@cases(BY_HAND)
def test_a_schedule_by_hand(text: str, copies: bool) -> None:
    case, schedule = by_hand(text, range(3), ALL, copies=copies)
    for _ in range(3):
        result = case.train(schedule.num_microbatches)
        assert result.schedule == schedule
        assert_order(result)


@both_modes
@cases(OUT_OF_ORDER)
def test_micro_batches_in_another_order(text: str, copies: bool) -> None:
    case, schedule = by_hand(text, range(3), ALL - {"buffers"}, copies=copies)
    for _ in range(2):
        assert_order(case.train(schedule.num_microbatches))


@both_modes
@pytest.mark.parametrize("num_devices", [1, 2])
def test_buffers_are_written_in_the_order_of_the_schedule(num_devices: int, copies: bool) -> None:
    """Where the micro-batches cannot come in their own order, no micro-batch waits for that."""
    lists: list[list[Action]] = [[] for _ in range(num_devices)]
    for stage in range(5):
        lists[stage % num_devices].extend(Action(stage, m) for m in (2, 0, 1))
    schedule = Schedule(5, 3, tuple(map(tuple, lists)))
    case, _ = by_hand(schedule.format(), range(3), ALL, copies=copies)
    for _ in range(3):
        assert_order(case.train(3, order=(2, 0, 1)))


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
    torch.manual_seed(0)
    case = random_case(rng, features, num_devices, copies)
    case.train(1)
    for _ in range(2):  # while it is learned what the units do, and afterwards
        assert_order(case.train(num_microbatches))


@at_random(max_examples=15)
def test_any_schedule_of_an_evaluation(
    rng: random.Random, num_devices: int, num_microbatches: int, copies: bool
) -> None:
    torch.manual_seed(0)
    case = random_case(rng, ALL, num_devices, copies)
    case.train(1)
    case.evaluate(1)
    for _ in range(2):
        assert_order(case.evaluate(num_microbatches))
        case.train(2)  # changes the buffers; what is known of the units is forgotten


@at_random(max_examples=15)
def test_the_first_step_runs_the_rest_of_its_micro_batches(
    rng: random.Random, num_devices: int, num_microbatches: int, copies: bool
) -> None:
    torch.manual_seed(0)
    case = random_case(rng, ALL, num_devices, copies)
    case.train(num_microbatches + 1)
    case.train(num_microbatches)


@at_random(max_examples=40)
def test_micro_batches_that_skip_units(
    rng: random.Random, num_devices: int, num_microbatches: int, copies: bool
) -> None:
    """Their tickets are released, no micro-batch waits for buffers that they do not write, and the others keep the
    order."""
    torch.manual_seed(0)
    case = random_case(rng, ALL, num_devices, copies)
    places = range(len(case.model.path))
    case.train(1)
    for _ in range(2):
        skipped = [frozenset(rng.sample(places, rng.choice(places))) for _ in range(num_microbatches)]
        result = case.train(num_microbatches, skipped=skipped)
        assert result.schedule is not None
        assert result.num_off_plan == 0
        for device, actions in enumerate(result.schedule.devices):
            ran = result.timeline.actions(device)
            assert ran == [action for action in actions if action in set(ran)]


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


SPLIT = """
    schedule stages=1 microbatches=3 devices=3
    device 0: 0:0
    device 1: 0:1
    device 2: 0:2"""


@pytest.fixture
def eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@both_modes
@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("skips", [False, True], ids=["all", "one skips it"])
@pytest.mark.parametrize("path", [(0,), (0, 0), (0, 1, 0)], ids=str)
def test_one_micro_batch_at_a_time_writes_buffers(path: tuple[int, ...], skips: bool, copies: bool) -> None:
    """Neither while it is learned that the unit writes, nor afterwards; what a kept graph has saved stays as it is."""
    schedule = parse_schedule(SPLIT)
    case = Case(path, frozenset({"buffers"}), 3, copies=copies, scheduler=lambda *_: schedule)
    case.planner = lambda count, training: cut_at(count, training, (), (), 0)
    case.train(1)
    for _ in range(2):
        meetings = [Meeting() for _ in case.model.layers]
        for layer, meeting in zip(case.model.layers, meetings, strict=True):
            layer.watch = [meeting]
        case.train(3, skipped=[frozenset(), frozenset(range(len(path)) if skips else ()), frozenset()])
        assert not any(meeting.happened for meeting in meetings)
