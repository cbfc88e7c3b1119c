"""What a step reports: its timeline, with waits and transfers on request, bytes, time, memory."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine import gate as dispatch
from lightning_roundpipe.engine import runner, step, tracing
from lightning_roundpipe.engine.gate import Gate
from lightning_roundpipe.engine.runner import StepResult
from lightning_roundpipe.engine.tracing import Clock, Trace, TracedGate, TracedUserCodeLock
from lightning_roundpipe.planning import Action, Span, round_robin, simulate, stage_costs
from lightning_roundpipe.usercode.lock import UserCodeLock, UserCodeState, entered
from tests.support.engine.lazy_link import cpu_pool
from tests.support.engine.partitions import everything_recomputed
from tests.support.engine.steps import Steps

WIDTH = 4
NUM_BLOCKS = 4
WAIT_S = 60.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.failing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.failing:
            raise ValueError("a unit failed")
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def step(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


PARTS = torch.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH).chunk(3)


def make_steps(model: Model, *, num_devices: int = 2, copies: bool = True, trace: bool = False) -> Steps:
    return Steps(model, everything_recomputed, num_devices=num_devices, copies=copies, trace=trace)


def of_kind(result: StepResult, kind: str) -> list[Span]:
    return [span for span in result.timeline.spans if span.kind == kind]


# ---------------------------------------------------------------------------------------------------------------------
# What a step reports


class Interrupted:
    """A device in a thread that is interrupted for 5 ms while it takes its first stamps; the time in ms."""

    index = 0

    def __init__(self, times: int) -> None:
        self.now_ms = 0.0
        self._times = times

    def stamp(self) -> float:
        if self._times:
            self._times -= 1
            self.now_ms += 5.0
        return self.now_ms

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.parametrize("times", [0, 1, 4])
def test_times_of_devices_and_of_the_host_agree_though_the_thread_was_interrupted(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Interrupted(times)
    monkeypatch.setattr(tracing, "perf_counter", lambda: device.now_ms / 1e3)
    clock = Clock(SimpleNamespace(devices=[device]))
    begun_ms = device.now_ms
    assert clock.between(device, begun_ms, begun_ms + 1.0) == pytest.approx((begun_ms, begun_ms + 1.0))
    assert clock.host_ms(begun_ms / 1e3) == pytest.approx(begun_ms)


def test_a_step_is_as_long_as_what_it_did_though_its_thread_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 50 ms, when it had an origin of its times and nothing else."""

    class Interrupted(Clock):
        def __init__(self, pool: DevicePool) -> None:
            super().__init__(pool)
            until = time.perf_counter() + 0.05
            while time.perf_counter() < until:
                pass

    monkeypatch.setattr(step, "Clock", Interrupted)
    steps = make_steps(Model())
    steps.train(PARTS)
    result = steps.train(PARTS)
    assert 50 <= max(span.end_ms for span in result.timeline.spans) <= result.step_ms


def test_a_step_reports_what_the_simulator_says_will_travel() -> None:
    """Two implementations of one rule: activations per action, gradients once per stage run with a backward, weights
    once per stage run; except that in the engine they stay where there is room and the same step needs them again."""
    steps = make_steps(Model())
    steps.train(PARTS)
    result = steps.train(PARTS)
    measured = steps.engine.costs("train")
    assert measured is not None
    assert result.partition is not None
    assert result.schedule is not None
    simulated = simulate(result.schedule, stage_costs(result.partition, measured))
    weight_bytes = (WIDTH * WIDTH + WIDTH) * 4
    stages = [sorted({action.stage_index for action in row}) for row in result.schedule.devices]
    assert sorted(stages) == [[0, 2, 4, 6], [1, 3, 5]]
    stayed = tuple({4: 2, 3: 1}[len(row)] for row in stages)  # the blocks of stages 0 and 2, or of stage 1
    assert result.bytes_up == tuple(n - k * weight_bytes for n, k in zip(simulated.h2d_bytes, stayed, strict=True))
    losses = tuple(3 * 4 * (3 in row) for row in stages)
    assert result.bytes_down == tuple(n + k for n, k in zip(simulated.d2h_bytes, losses, strict=True))
    assert all(result.timeline.actions(d) == list(result.schedule.devices[d]) for d in range(2))


def test_nothing_travels_where_devices_share_the_memory_of_the_host() -> None:
    steps = make_steps(Model(), copies=False, trace=True)
    for _ in range(2):
        result = steps.train(PARTS)
        assert result.bytes_up == result.bytes_down == (0, 0)
        assert of_kind(result, "h2d") == of_kind(result, "d2h") == []
    assert result.peak_memory_bytes == (None, None), "the host's memory is not divided among virtual devices"


# ---------------------------------------------------------------------------------------------------------------------
# Tracing


def test_without_tracing_nothing_of_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for name in ("Gate", "UserCodeLock"):
        original = getattr(step, name)
        monkeypatch.setattr(step, name, lambda *args, original=original: made.append(original(*args)) or made[-1])
    for name in ("TracedGate", "TracedUserCodeLock"):
        monkeypatch.setattr(step, name, None)
    monkeypatch.setattr(runner, "Trace", None)
    steps = make_steps(Model())
    assert not steps.engine.trace
    for _ in range(2):
        result = steps.train(PARTS)
    assert {type(thing) for thing in made} == {Gate, UserCodeLock}
    assert {span.kind for span in result.timeline.spans} == {"compute"}
    assert all(device.moved is None for device in steps.pool.devices)


def test_runs_and_transfers_are_on_the_timeline_by_unit_and_what_moved() -> None:
    model = Model()
    model.blocks[1].register_buffer("unused", torch.zeros(3))
    steps = make_steps(model, trace=True)
    steps.train(PARTS)
    result = steps.train(PARTS)
    uploads = Counter(span.label for span in of_kind(result, "h2d"))
    names = [f"blocks.{i}" for i in range(NUM_BLOCKS)]
    assert uploads == {
        **{f"weights {name}": 1 for name in names},
        **{f"inputs {name}": 3 for name in names},
        **{f"saved {name}": 6 for name in names[:-1]},  # inputs and the gradient of the output
        "buffers blocks.1": 2,  # in both of its stage runs
    }
    downloads = Counter(span.label for span in of_kind(result, "d2h"))
    assert downloads == {
        **{f"gradients {name}": 1 for name in names},
        **{f"inputs {name}": 3 for name in names[1:]},
        **{f"saved {name}": 3 for name in names[:-1]},
        "results": 3,
    }
    computed = [span for span in of_kind(result, "compute") if span.microbatch_index == 1]
    forward, backward = [f"F {name}" for name in names], [f"B {name}" for name in reversed(names)]
    assert [span.label for span in computed] == [*forward, "B loss", *backward]
    assert [span.stage_index for span in computed] == [0, 1, 2, 3, 3, 3, 4, 5, 6]
    assert result.step_ms >= result.timeline.makespan_ms > 0
    assert min(span.start_ms for span in result.timeline.spans) >= 0
    result.gradients = {}
    assert pickle.loads(pickle.dumps(result)).timeline == result.timeline


def test_tracing_changes_no_result() -> None:
    model = Model()
    plain, traced = make_steps(model), make_steps(model, trace=True)
    for seed in range(3):
        one, other = plain.train(PARTS, seed), traced.train(PARTS, seed)
        assert torch.equal(torch.stack(one.outputs), torch.stack(other.outputs))
        assert all(torch.equal(gradient, other.gradients[p]) for p, gradient in one.gradients.items())
        assert {span.kind for span in one.timeline.spans} == {"compute"}


def test_a_failed_step_leaves_no_trace_behind() -> None:
    model = Model()
    steps = make_steps(model, trace=True)
    steps.train(PARTS)
    model.blocks[2].failing = True
    with pytest.raises(ValueError, match="a unit failed"):
        steps.train(PARTS)
    assert all(device.moved is None for device in steps.pool.devices)
    model.blocks[2].failing = False
    assert of_kind(steps.train(PARTS), "h2d")


# ---------------------------------------------------------------------------------------------------------------------
# Waits, forced one by one

# Micro-batches 1 and 2 of a step, at places 0 and 1 of the schedule; three stages on two devices.
SCHEDULE = round_robin(3, 2, 2)
INDICES = range(1, 3)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a thread begins to wait at a gate or at a user-code lock."""
    event = threading.Event()

    class Noted(dispatch._Signal):
        def __init__(self) -> None:
            super().__init__()
            event.set()

    wait = UserCodeLock._wait

    def noted_wait(self: UserCodeLock) -> None:
        event.set()
        wait(self)

    monkeypatch.setattr(dispatch, "_Signal", Noted)
    monkeypatch.setattr(UserCodeLock, "_wait", noted_wait)
    return event


def waits_of(waiting: Callable[[], None], begun: threading.Event, end: Callable[[], None], trace: Trace) -> list[Span]:
    """What is on the timeline after ``waiting`` had to wait for ``end``."""
    begun.clear()
    thread = threading.Thread(target=waiting)
    thread.start()
    assert begun.wait(WAIT_S)
    end()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    return list(trace.spans(CLOCK))


CLOCK = Clock(cpu_pool(2))


def make_trace() -> tuple[Trace, TracedGate]:
    trace = Trace(cpu_pool(2))
    trace.begin(SCHEDULE, INDICES)
    gate = TracedGate(trace, SCHEDULE, lambda device: None)
    gate.join(2)
    return trace, gate


def test_waits_at_the_gate_are_on_the_timeline(begun: threading.Event) -> None:
    trace, gate = make_trace()
    gate.enter(Action(0, 0))
    assert list(trace.spans(CLOCK)) == [], "nothing had to wait"
    before_ms = CLOCK.host_ms(0.0)
    (turn,) = waits_of(lambda: gate.enter(Action(0, 1)) and None, begun, lambda: gate.leave(Action(0, 0)), trace)
    assert (turn.kind, turn.device, turn.stage_index, turn.microbatch_index) == ("wait", 0, 0, 2)
    assert turn.label == "its turn on the device"
    assert before_ms < turn.start_ms < turn.end_ms
    gate.enter(Action(1, 0))
    _, wait = waits_of(lambda: gate.await_position(1, 0, 3) and None, begun, lambda: gate.pass_position(0, 4), trace)
    assert (wait.device, wait.stage_index, wait.microbatch_index) == (0, 0, 2)
    assert wait.label == "the buffers of micro-batch 1"
    gate.await_position(1, 0, 3)
    assert len(list(trace.spans(CLOCK))) == 2, "the second time nothing had to wait"


def test_a_wait_for_the_user_code_lock(begun: threading.Event) -> None:
    trace, gate = make_trace()
    lock = TracedUserCodeLock(trace, (), lambda: False)
    one, other = UserCodeState(1, 0), UserCodeState(2, 0)
    lock.acquire(one)
    gate.leave(Action(0, 0))
    gate.leave(Action(0, 1))
    gate.leave(Action(1, 0))

    def waiting() -> None:
        with entered(other):
            gate.enter(Action(1, 1))
            lock.acquire(other)
            lock.release(other)

    (wait,) = waits_of(waiting, begun, lambda: lock.release(one), trace)
    assert (wait.device, wait.stage_index, wait.microbatch_index) == (1, 1, 2)
    assert wait.label == "the user-code lock"
    lock.close([one, other], keep_writes=False)


def test_waits_of_a_step_are_on_its_timeline(begun: threading.Event) -> None:
    """A micro-batch computes until another one waits for it."""
    model = Model()
    steps = make_steps(model, num_devices=1, trace=True)
    steps.train(PARTS)
    begun.clear()
    original, first = Block.forward, threading.Lock()

    def patient(self: Block, x: Tensor) -> Tensor:
        if first.acquire(blocking=False):
            assert begun.wait(WAIT_S)
        return original(self, x)

    model.blocks[0].forward = patient.__get__(model.blocks[0])  # type: ignore[method-assign]
    result = steps.train(PARTS)
    waits = of_kind(result, "wait")
    assert waits
    assert {span.label for span in waits} <= {"its turn on the device", "the user-code lock"}
    assert {span.device for span in waits} == {0}
    assert {span.stage_index for span in waits} <= set(range(7))
