"""How much of the time of transfers is hidden behind compute, with links as fast as PCIe 4.0 x16.

Eight virtual devices run the five models of the RoundPipe paper, arXiv 2604.27085, at the paper's batch sizes. Units
sleep for modelled times and have weights and activations of modelled sizes; what travels is really copied, by lanes
that take the modelled time for it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks._report import Report, median, parser, progress, rounded, spread
from benchmarks._waiting import SLEPT, Model, Wait, scaled, sharpen_timers, time_factor
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import CHUNK_BYTES
from lightning_roundpipe.devices.virtual import TimedLink
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import (
    Action,
    CallCost,
    CostProfile,
    Machine,
    StepPlan,
    plan_training,
    simulate,
    stage_costs,
)
from tests.planning.paper import MODELS, NUM_DEVICES

METHOD = """
Engine on N virtual devices, each with an upload and a download lane of bytes_per_ms and latency_ms in each direction,
none shared. Layers and heads of the paper's table of profiles (tests/planning/paper.py): a unit is a module whose
forward sleeps forward_ms and whose backward sleeps backward_ms, with a weight of weight_bytes (fp16: 2 bytes per
parameter), a gradient as large (none for LoRA, whose adapters are left out), and outputs of output_bytes. Workspace is
planned for, and not allocated. All times are multiplied by time_factor, the largest power of 1/2 with which every
device has at most max_work_ms to do; all sizes, memory and chunks among them, by size_factor; bandwidths by size_factor
/ time_factor, so that transfers take as long, in proportion to compute, as they would in life. Micro-batches of 4 x
2048 tokens in one round, as many as make up the paper's optimizer step. The planner is planning.plan_training for this
machine; the same plan for both. The optimizer takes no time. The engine runs it, step by step in turn, with these links
and with lanes of infinite bandwidth without latency (free).
transfer_ms is the modelled time of all bytes that the step moved, over all lanes.
lost_ms is step_ms - the step of planning.simulate on the schedule that ran, with the times that units really took,
sleeps that end late among it, and transfers that take none. hidden = 1 - N (lost_ms - lost_ms_free) / transfer_ms, of
medians: everything that transfers cost, over the time that they take; negative if it is more. noise is half the
distance of the quartiles of both lost_ms together, in the same unit.
simulated: planning.simulate on the schedule that ran, with the modelled times: hidden = 1 - N (step - step without
transfers) / transfer_ms, all its own figures; late_upload is how long devices waited for weights and nothing else, over
transfer_ms.
sleep_excess is how much longer the sleeps of units took than modelled, as a share of the work; cpu_share the CPU time
of the process over the wall-clock time. The first step, which records, is not counted; medians of the rest.
"""
GB_PER_S = 25.0
LATENCY_MS = 0.01
MEMORY_BYTES = 24 * 2**30
SIZE_FACTOR = 2.0**-14
MAX_WORK_MS = 12000.0
GOAL = 0.98
KEY = "train"


@dataclass(frozen=True)
class Step:
    """A measured step, times in ms."""

    step_ms: float
    lost_ms: float
    cpu_ms: float
    excess_ms: float
    num_bytes: int


class Variant:
    """One model on one kind of link."""

    def __init__(self, model: Model, case: Case, link: TimedLink) -> None:
        self._case, self._model = case, model
        pool = DevicePool([torch.device("cpu")] * NUM_DEVICES, link=link, memory_limit=case.machine.device_memory_bytes)
        self._engine = Engine(model, pool, case.plan, num_threads=1)
        self._engine.preset_costs(KEY, case.profile)
        self._num_steps = 0
        self.steps: list[Step] = []
        self.last: StepResult | None = None

    def run(self, *, store: bool) -> None:
        """One step."""
        self._num_steps += 1
        case = self._case
        inputs = [torch.zeros(case.num_inputs, requires_grad=True) for _ in range(case.num_microbatches)]
        weights = [1 / case.num_microbatches] * case.num_microbatches
        request = StepRequest(self._model, inputs, weights, KEY, self._num_steps, loss_of=lambda output: output)
        SLEPT.take()
        started, cpu = time.perf_counter(), time.process_time()
        result = self._engine.run(request)
        wall_ms, cpu_ms = (time.perf_counter() - started) * 1e3, (time.process_time() - cpu) * 1e3
        if store:
            num_bytes = sum(result.bytes_up) + sum(result.bytes_down)
            self.steps.append(Step(wall_ms, wall_ms - ideal_ms(result), cpu_ms, SLEPT.take(), num_bytes))
            self.last = result


def ideal_ms(result: StepResult) -> float:
    """The step if units took as long as they did, and nothing else took any time."""
    assert result.schedule is not None
    took: Counter[Action | None] = Counter()
    for span in result.timeline.spans:
        if span.kind == "compute":
            took[span.action] += span.end_ms - span.start_ms
    return simulate(result.schedule, took.__getitem__).step_ms


def num_elements(num_bytes: int) -> int:
    """Elements of fp32 that take as many bytes, rounded; at least one."""
    return max(1, round(num_bytes / 4))


def unit(call: CallCost) -> Wait:
    """Of the modelled duration and size."""
    is_trained, has_output = call.gradient_bytes > 0, call.output_bytes > 0
    return Wait(call, num_elements(call.weight_bytes), is_trained=is_trained, has_output=has_output)


class Case:
    """One of the paper's models, with links and without."""

    def __init__(self, name: str, max_work_ms: float) -> None:
        self.name = name
        paper = MODELS[name]
        self.num_microbatches = paper.num_microbatches
        self.factor = time_factor(paper.profile(), self.num_microbatches, max_work_ms)
        self.profile = scaled(paper.profile(), self.factor, SIZE_FACTOR)
        self.num_inputs = num_elements(self.profile.calls[0].input_bytes)
        bytes_per_ms = GB_PER_S * 1e6 * SIZE_FACTOR / self.factor
        self.machine = Machine(
            NUM_DEVICES,
            round(SIZE_FACTOR * MEMORY_BYTES),
            h2d_bytes_per_ms=bytes_per_ms,
            d2h_bytes_per_ms=bytes_per_ms,
            transfer_latency_ms=self.factor * LATENCY_MS,
        )
        model = Model(self.profile, unit)
        latency_ms, chunk_bytes = self.machine.transfer_latency_ms, round(SIZE_FACTOR * CHUNK_BYTES)
        self.free = Variant(model, self, TimedLink(chunk_bytes=chunk_bytes))
        self.linked = Variant(model, self, TimedLink(bytes_per_ms, latency_ms, chunk_bytes))

    def plan(self, costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> StepPlan:
        """What the engine asks for, for the real number of micro-batches."""
        return plan_training(self.profile, self.machine, num_microbatches=self.num_microbatches)

    def summary(self) -> dict[str, Any]:
        """Figures of this case."""
        last = self.free.last
        assert last is not None
        assert last.partition is not None
        work_ms = self.num_microbatches * sum(c.duration_ms for c in stage_costs(last.partition, self.profile))
        steps, free = self.linked.steps, self.free.steps
        transfer_ms = steps[-1].num_bytes / self.machine.h2d_bytes_per_ms
        lost, lost_in_free = [step.lost_ms for step in steps], [step.lost_ms for step in free]
        share_ms = transfer_ms / NUM_DEVICES
        return {
            "model": self.name,
            "time_factor": self.factor,
            "num_microbatches": self.num_microbatches,
            "stages": last.partition.num_stages,
            "partition": last.partition.format(),
            "step_ms_free": spread([step.step_ms for step in free]),
            "lost_ms_free": spread(lost_in_free),
            "step_ms": spread([step.step_ms for step in steps]),
            "transfer_ms": rounded(transfer_ms),
            "lanes_busy": median([transfer_ms / (2 * NUM_DEVICES * step.step_ms) for step in steps]),
            "hidden": rounded(1 - (statistics.median(lost) - statistics.median(lost_in_free)) / share_ms),
            "noise": rounded((half_spread(lost) + half_spread(lost_in_free)) / share_ms),
            "sleep_excess": median([step.excess_ms / work_ms for step in free]),
            "cpu_share": median([step.cpu_ms / step.step_ms for step in steps]),
            "simulated": self._simulated(last),
        }

    def _simulated(self, result: StepResult) -> dict[str, Any]:
        """The same schedule on paper."""
        assert result.schedule is not None
        assert result.partition is not None
        costs = stage_costs(result.partition, self.profile)
        free = simulate(result.schedule, costs, Machine(NUM_DEVICES))
        linked = simulate(result.schedule, costs, self.machine)
        transfer_ms = (sum(linked.h2d_bytes) + sum(linked.d2h_bytes)) / self.machine.h2d_bytes_per_ms
        return {
            "step_ms_free": rounded(free.step_ms),
            "step_ms": rounded(linked.step_ms),
            "transfer_ms": rounded(transfer_ms),
            "hidden": rounded(1 - NUM_DEVICES * (linked.step_ms - free.step_ms) / transfer_ms),
            "late_upload": rounded(linked.late_upload_ms / transfer_ms),
        }


def half_spread(values: Sequence[float]) -> float:
    """Half the distance of the quartiles."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__, repeats=2)
    options.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which of them")
    args = options.parse_args()
    if args.repeats < 2:
        options.error(f"--repeats {args.repeats}: at least 2, to tell how much repetitions differ")
    repeats = 2 if args.quick else args.repeats
    names = list(MODELS)[2:3] if args.quick else args.models
    max_work_ms = MAX_WORK_MS / 4 if args.quick else MAX_WORK_MS
    parameters = {
        "devices": NUM_DEVICES,
        "gb_per_s": GB_PER_S,
        "latency_ms": LATENCY_MS,
        "chunk_bytes": CHUNK_BYTES,
        "device_memory_bytes": MEMORY_BYTES,
        "size_factor": SIZE_FACTOR,
        "max_work_ms": max_work_ms,
        "repeats": repeats,
        "minimal_timer_slack": sharpen_timers(),
    }
    report = Report("transfers", METHOD, parameters)
    torch.set_num_threads(1)
    rows = []
    for name in names:
        case = Case(name, max_work_ms)
        for repetition in range(-1, repeats):
            for variant in (case.free, case.linked):
                variant.run(store=repetition >= 0)
        row = case.summary()
        is_dense = MODELS[name].architecture.experts == 1
        goal = {"goal_hidden": GOAL, "goal_met": row["hidden"] >= GOAL}
        rows.append({**row, **(goal if is_dense else {})})
        progress(name)
    report.emit(rows)


if __name__ == "__main__":
    main()
