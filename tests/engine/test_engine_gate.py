"""The gate alone: any valid schedule runs to its end, in order; any other one is reported."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.common.errors import StepAborted
from lightning_roundpipe.engine.gate import Gate, PipelineStalled
from lightning_roundpipe.planning import Action, Schedule, round_robin
from tests.support.engine.partitions import scheduled, two_calls_fused
from tests.support.engine.plain_loop import WIDTH, Chain, random_schedule
from tests.support.engine.steps import Steps

JOIN_S = 60.0


class Ride:
    """Threads that go through a gate as micro-batches do, and what they saw."""

    def __init__(self, schedule: Schedule, seed: int, skip_share: float = 0.0) -> None:
        self.schedule = schedule
        self.entered: list[list[Action]] = [[] for _ in schedule.devices]
        self.ended: list[int] = []
        self.most_inside = [0] * schedule.num_devices
        self.errors: list[BaseException] = []
        self._inside = [0] * schedule.num_devices
        self._lock = threading.Lock()
        self.gate = Gate(schedule, self._end_stage)
        self._approaches = seed % 2 == 0
        rng = random.Random(seed)
        self._routes = [
            [s for s in range(schedule.num_stages) if rng.random() >= skip_share]
            for _ in range(schedule.num_microbatches)
        ]
        # Delays in turns of a loop, not in time: they shuffle the threads and cost nothing.
        self._delays = [[rng.choice((0, 0, 50, 2000)) for _ in route] for route in self._routes]
        self.expected = [
            [a for a in actions if a.stage_index in self._routes[a.microbatch_index]] for actions in schedule.devices
        ]

    def _end_stage(self, device: int) -> None:
        with self._lock:
            assert self._inside[device] == 0, "a stage ended while a micro-batch was in it"
            self.ended.append(device)

    def _walk(self, microbatch: int) -> None:
        try:
            current = -1
            for stage, delay in zip(self._routes[microbatch], self._delays[microbatch], strict=True):
                for _ in range(delay):
                    pass
                for passed in range(max(current, 0), stage):
                    self.gate.leave(Action(passed, microbatch))
                current = stage
                self._pass(Action(stage, microbatch), delay)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.gate.retire(microbatch)

    def _pass(self, action: Action, delay: int) -> None:
        device = self.gate.device_of(action)
        if self._approaches:
            self.gate.approach(action)
            head = self.gate._head[device]
            assert action in self.schedule.devices[device][: head + 2], "let through too early"
        self.gate.enter(action)
        with self._lock:
            self._inside[device] += 1
            self.most_inside[device] = max(self.most_inside[device], self._inside[device])
            self.entered[device].append(action)
        for _ in range(delay):
            pass
        with self._lock:
            self._inside[device] -= 1

    def run(self) -> None:
        self.gate.join(self.schedule.num_microbatches)
        threads = [threading.Thread(target=self._walk, args=(m,)) for m in range(self.schedule.num_microbatches)]
        random.Random(len(threads)).shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        assert not any(thread.is_alive() for thread in threads), f"the schedule hangs:\n{self.gate.describe()}"


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32), st.sampled_from((0.0, 0.3, 0.9)))
def test_every_valid_schedule_runs_to_its_end(
    num_stages: int, num_microbatches: int, num_devices: int, seed: int, skip_share: float
) -> None:
    schedule = random_schedule(random.Random(seed), num_stages, num_microbatches, num_devices)
    ride = Ride(schedule, seed, skip_share)
    ride.run()
    assert ride.errors == []
    assert ride.entered == ride.expected
    assert max(ride.most_inside) <= 1
    changes = [
        sum(a.stage_index != b.stage_index for a, b in pairwise(actions)) + bool(actions)
        for actions in schedule.devices
    ]
    assert [ride.ended.count(device) for device in range(num_devices)] == changes


def can_progress(schedule: Schedule) -> bool:
    """Runs the schedule without time or threads."""
    heads = [0] * schedule.num_devices
    next_stage = [0] * schedule.num_microbatches
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(schedule.devices):
            while heads[device] < len(actions):
                action = actions[heads[device]]
                if next_stage[action.microbatch_index] != action.stage_index:
                    break
                heads[device] += 1
                next_stage[action.microbatch_index] += 1
                moved = True
    return all(head == len(actions) for head, actions in zip(heads, schedule.devices, strict=True))


def shuffled(schedule: Schedule, seed: int, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """The same cells in any order, forced past the validation."""
    rng = random.Random(seed)
    devices = [list(actions) for actions in schedule.devices]
    for actions in devices:
        rng.shuffle(actions)
    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "_validate_order", lambda self: None)
        return Schedule(schedule.num_stages, schedule.num_microbatches, tuple(map(tuple, devices)))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_a_schedule_that_cannot_progress_is_detected(
    num_stages: int, num_microbatches: int, num_devices: int, seed: int
) -> None:
    valid = random_schedule(random.Random(seed), num_stages, num_microbatches, num_devices)
    with pytest.MonkeyPatch.context() as monkeypatch:
        schedule = shuffled(valid, seed, monkeypatch)
    ride = Ride(schedule, seed)
    ride.run()
    if can_progress(schedule):
        assert ride.errors == []
        assert ride.entered == ride.expected
        return
    assert ride.errors
    assert all(isinstance(error, PipelineStalled) for error in ride.errors)
    message = str(ride.errors[0])
    assert all(f"device {device}:" in message for device in range(num_devices))
    assert "waits for its turn in stage" in message


def test_leaving_out_of_order_is_remembered() -> None:
    gate = Gate(round_robin(2, 2, 1))
    gate.join(2)
    gate.leave(Action(0, 1))
    gate.leave(Action(1, 1))
    gate.enter(Action(0, 0))
    gate.leave(Action(0, 0))
    gate.enter(Action(1, 0))  # would block for ever if the tickets of micro-batch 1 were still out


def test_the_next_in_line_may_approach_and_no_other() -> None:
    schedule = Schedule(1, 3, ((Action(0, 0), Action(0, 1), Action(0, 2)),))
    gate = Gate(schedule)
    gate.join(3)
    assert not gate.approach(Action(0, 0))
    assert not gate.approach(Action(0, 1))
    waited: list[bool] = []
    third = threading.Thread(target=lambda: waited.append(gate.approach(Action(0, 2))))
    third.start()
    while not gate._nearing:  # it is registered before it waits
        pass
    assert "micro-batch 2 waits for its turn in stage 0 on device 0" in gate.describe()
    gate.leave(Action(0, 0))
    third.join(JOIN_S)
    assert waited == [True]
    assert not gate.approach(Action(0, 0)), "what has been left is not waited for"


def test_threads_that_approach_count_when_none_can_make_progress() -> None:
    schedule = Schedule(1, 3, ((Action(0, 0), Action(0, 1), Action(0, 2)),))
    gate = Gate(schedule)
    gate.join(1)
    with pytest.raises(PipelineStalled, match="micro-batch 2 waits"):
        gate.approach(Action(0, 2))


def test_an_abort_reaches_threads_that_wait_and_that_come() -> None:
    schedule = round_robin(1, 3, 1)
    gate = Gate(schedule)
    gate.join(3)
    caught: list[BaseException] = []
    waits = threading.Event()

    def wait_in_vain() -> None:
        waits.set()
        try:
            gate.enter(Action(0, 1))
        except StepAborted as error:
            caught.append(error)

    thread = threading.Thread(target=wait_in_vain)
    thread.start()
    assert waits.wait(JOIN_S)
    gate.abort()
    thread.join(JOIN_S)
    assert len(caught) == 1
    with pytest.raises(StepAborted):
        gate.enter(Action(0, 0))
    with pytest.raises(StepAborted):
        gate.check()


def test_the_engine_reports_a_schedule_that_cannot_progress_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(3)
    is_reversed = False

    def make(num_stages: int, num_microbatches: int, num_devices: int, first: int) -> Schedule:
        schedule = round_robin(num_stages, num_microbatches, num_devices)
        if is_reversed:
            devices = tuple(actions[::-1] for actions in schedule.devices)
            schedule = Schedule(schedule.num_stages, schedule.num_microbatches, devices)
        return schedule

    steps = Steps(model, lambda *facts: scheduled(two_calls_fused(*facts), make), num_devices=2)
    parts = list(torch.randn(3, 4, WIDTH))
    steps.train(parts)
    expected = steps.train(parts)

    with monkeypatch.context() as patch:
        is_reversed = True
        patch.setattr(Schedule, "_validate_order", lambda self: None)
        with pytest.raises(PipelineStalled, match="cannot make progress") as caught:
            steps.train(parts)
    assert "device 0:" in str(caught.value)
    assert "micro-batch 0 waits for its turn in stage 0" in str(caught.value)
    is_reversed = False
    again = steps.train(parts)
    for parameter, gradient in expected.gradients.items():
        torch.testing.assert_close(again.gradients[parameter], gradient)
