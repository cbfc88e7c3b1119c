"""How close the engine comes to the ideal of its own schedule, with units that only wait.

Eight virtual devices run a model whose units sleep for a modelled time, so that nothing competes for the cores and
what is left is the engine: threads, locks, autograd, dispatch.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._report import Report, median, num_cores, parser, progress, rounded, spread
from lightning_roundpipe.engine.devices import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.engine.units import Unit
from lightning_roundpipe.planning import CallCost, CostProfile, Partition, partition, simulate, stage_durations

METHOD = """
Engine on N virtual devices. A unit is a module whose forward sleeps forward_ms and whose backward sleeps backward_ms,
so that a recomputed backward takes their sum: the '6 ms' of a layer and the '18 ms' of the head hold their recompute
(2 and 6 ms), as in the tables of the RoundPipe paper, where a backward with recompute is about three forwards. The
head lies in the fused stage, which runs forward and backward once: 6 + 12 = 18 ms. The partition is
planning.partition on these times; ideal_ms is planning.simulate on the schedule that ran, with stages of
planning.stage_durations and hops that take no time. step_ms is the wall-clock time of the whole step, from before the
threads start until they have been joined; over_ideal is step_ms / ideal_ms - 1 and bubble the idle share of N devices
over the whole step, the modelled work taken as work. Waits are plain time.sleep calls, which release the interpreter
lock, without spinning; the timer slack of the process is set to its minimum where the system allows. sleep_excess is
how much longer the waits of a step took than modelled, as a share of the work: it is not the engine's, and is part of
over_ideal all the same. The first step, which records, and one more are not counted; medians of the steps after.
Configurations alternate from step to step.
"""
NUM_DEVICES = 8
NUM_LAYERS = 28
LAYER_MS = (2.0, 4.0)
HEAD_MS = (6.0, 12.0)
SPEEDS = {"fast": 1.0, "slow": 4.0}
GOALS = {"fast": 0.08, "slow": 0.03}
CONFIGURATIONS = ((8, 8), (16, 8), (16, 16), (32, 8), (32, 16))  # (micro-batches, round size)


class Slept:
    """Adds up how long sleeps took beyond what was asked for, over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.excess_s = 0.0

    def sleep(self, ms: float) -> None:
        """Waits without holding the interpreter lock."""
        started = time.perf_counter()
        time.sleep(ms / 1e3)
        excess = time.perf_counter() - started - ms / 1e3
        with self._lock:
            self.excess_s += excess

    def take(self) -> float:
        """The sum, in ms; starts again at zero."""
        excess, self.excess_s = self.excess_s, 0.0
        return excess * 1e3


SLEPT = Slept()


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.backward_ms = backward_ms
        SLEPT.sleep(forward_ms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        SLEPT.sleep(ctx.backward_ms)
        return gradient, gradient, None, None


class Wait(nn.Module):
    """A unit of a modelled duration; it has a weight, as units have."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms

    def forward(self, x: Tensor) -> Tensor:
        return _Waiting.apply(x, self.weight, self.forward_ms, self.backward_ms)


class Model(nn.Module):
    """Layers and a head that wait."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wait(*(scale * ms for ms in LAYER_MS)) for _ in range(NUM_LAYERS))
        self.head = Wait(*(scale * ms for ms in HEAD_MS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


class Case:
    """One model with one number of micro-batches and one round size."""

    def __init__(self, speed: str, num_microbatches: int, round_size: int) -> None:
        self.speed = speed
        self.num_microbatches = num_microbatches
        self.round_size = round_size
        self._model = Model(SPEEDS[speed])
        self._profile: CostProfile | None = None
        pool = DevicePool([torch.device("cpu")] * NUM_DEVICES)
        self._engine = Engine(self._model, pool, self._plan, round_size=round_size, num_threads=1)
        self._weights = [1 / num_microbatches] * num_microbatches
        self._steps = 0
        self.partition = ""
        self.num_stages = 0
        self.ideal_ms = 0.0
        self.work_ms = 0.0
        self.ideal_bubble = 0.0
        self.step_ms: list[float] = []
        self.excess_ms: list[float] = []

    def _plan(self, units: Sequence[Unit], num_microbatches: int, training: bool) -> Partition:
        times = [(unit.module.forward_ms, unit.module.backward_ms) for unit in units]
        self._profile = CostProfile(tuple(CallCost(u.name, *ms) for u, ms in zip(units, times, strict=True)))
        return partition(self._profile, num_devices=NUM_DEVICES, num_microbatches=num_microbatches)

    def run(self, *, store: bool) -> None:
        """One step."""
        self._steps += 1
        inputs = [torch.zeros(1, requires_grad=True) for _ in range(self.num_microbatches)]
        request = StepRequest(self._model, inputs, self._weights, "train", self._steps, loss_of=lambda output: output)
        SLEPT.take()
        started = time.perf_counter()
        result = self._engine.run(request)
        elapsed = (time.perf_counter() - started) * 1e3
        if store:
            self.step_ms.append(elapsed)
            self.excess_ms.append(SLEPT.take())
            self._note_ideal(result)

    def _note_ideal(self, result: StepResult) -> None:
        assert result.partition is not None
        assert result.schedule is not None
        assert self._profile is not None
        durations = stage_durations(result.partition, self._profile)
        ideal = simulate(result.schedule, lambda action: durations[action.stage_index])
        if self.ideal_ms and abs(ideal.makespan_ms - self.ideal_ms) > 1e-6:
            raise RuntimeError("the ideal must not depend on the device with which a step begins")
        self.ideal_ms = ideal.makespan_ms
        self.ideal_bubble = ideal.bubble_ratio
        self.work_ms = sum(durations) * self.num_microbatches
        self.partition = result.partition.format()
        self.num_stages = result.partition.num_stages

    def summary(self) -> dict[str, object]:
        """Figures of this case."""
        over = [ms / self.ideal_ms - 1 for ms in self.step_ms]
        return {
            "speed": self.speed,
            "num_microbatches": self.num_microbatches,
            "round_size": self.round_size,
            "stages": self.num_stages,
            "partition": self.partition,
            "ideal_ms": rounded(self.ideal_ms),
            "step_ms": spread(self.step_ms),
            "over_ideal": spread(over),
            "goal_over_ideal": GOALS[self.speed],
            "goal_met": statistics.median(over) <= GOALS[self.speed],
            "ideal_bubble": rounded(self.ideal_bubble),
            "bubble": median([1 - self.work_ms / (NUM_DEVICES * ms) for ms in self.step_ms]),
            "sleep_excess": median([ms / self.work_ms for ms in self.excess_ms]),
        }


def sharpen_timers() -> bool:
    """Asks Linux to wake sleeping threads of this process in time; whether it did. New threads inherit it."""
    if not sys.platform.startswith("linux"):
        return False
    set_timer_slack, nanoseconds = 29, 1
    return ctypes.CDLL(None).prctl(set_timer_slack, ctypes.c_ulong(nanoseconds), 0, 0, 0) == 0


def main() -> None:
    """Measures and prints."""
    args = parser(__doc__, repeats=5).parse_args()
    repeats = 2 if args.quick else args.repeats
    speeds = ["fast"] if args.quick else list(SPEEDS)
    configurations = CONFIGURATIONS[:1] if args.quick else CONFIGURATIONS
    parameters = {
        "devices": NUM_DEVICES,
        "layers": NUM_LAYERS,
        "layer_ms": {"forward": LAYER_MS[0], "backward_without_recompute": LAYER_MS[1]},
        "head_ms": {"forward": HEAD_MS[0], "backward_without_recompute": HEAD_MS[1]},
        "time_factors": {speed: SPEEDS[speed] for speed in speeds},
        "repeats": repeats,
        "minimal_timer_slack": sharpen_timers(),
        "cores_used": num_cores(),
    }
    report = Report("bubble", METHOD, parameters)
    torch.set_num_threads(1)
    cases = [Case(speed, *configuration) for speed in speeds for configuration in configurations]
    for repetition in range(-2, repeats):
        for case in cases:
            case.run(store=repetition >= 0)
        progress(f"{max(0, repetition + 1)} of {repeats} repetitions")
    report.emit([case.summary() for case in cases])


if __name__ == "__main__":
    main()
