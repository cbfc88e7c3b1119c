"""How much of the time of transfers is hidden behind compute, with links as fast as PCIe 4.0 x16.

Eight virtual devices run the five models of the RoundPipe paper, arXiv 2604.27085, at the paper's batch sizes. Units
sleep for modelled times and have weights and activations of modelled sizes; what travels is really copied, by lanes
that take the modelled time for it.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks._report import Report, median, num_cores, parser, progress, rounded, spread
from benchmarks.bubble import SLEPT, Model, sharpen_timers
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import CHUNK_BYTES, Edge, Transfer
from lightning_roundpipe.devices.virtual import Link, TimedLink
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import (
    Action,
    CallCost,
    CostProfile,
    Machine,
    Partition,
    Simulation,
    Timeline,
    plan_training,
    simulate,
    stage_costs,
)
from lightning_roundpipe.weights.placement import Loader
from tests.planning.paper import MODELS, NUM_DEVICES, PaperModel

METHOD = """
Engine on N virtual devices, each with an upload and a download lane of bytes_per_ms and latency_ms in each direction,
none shared. Layers and heads of the paper's table of profiles (tests/planning/paper.py): a unit is a module whose
forward sleeps forward_ms and whose backward sleeps backward_ms, with a weight of weight_bytes (fp16: 2 bytes per
parameter), a gradient as large (none for LoRA, whose adapters are left out), and outputs of output_bytes. Workspace is
planned for, and not allocated. All times are multiplied by time_factor, the largest power of 1/2 with which every
device has at most max_work_ms to do; all sizes, memory and chunks among them, by size_factor; bandwidths by size_factor
/ time_factor, so that transfers take as long, in proportion to compute, as they would in life. Micro-batches of 4 x
2048 tokens in one round, as many as make up the paper's optimizer step. The planner is planning.plan_training for this
machine; the same plan for all variants. The optimizer takes no time. Variants, alternating from step to step: 'free':
lanes of infinite bandwidth without latency; 'priorities': the engine as it is, activations before bulk, bulk in chunks;
'fifo': the same lanes serve in the order of submission, bulk in one piece; 'no_prefetch': like 'priorities', but
weights of a slot are uploaded when it begins.
transfer_ms is the modelled time of all bytes that the step moved, over all lanes.
lost_ms is step_ms - the step of planning.simulate on the schedule that ran, with the times that units really took,
sleeps that end late among it, and transfers that take none. hidden = 1 - N (lost_ms - lost_ms of 'free') / transfer_ms,
of medians: everything that transfers cost, over the time that they take; negative if it is more. noise is half the
distance of the quartiles of lost_ms, of the variant and of 'free' together, in the same unit.
waited_over_transfer is how long threads waited for copies (Transfer.wait, by edge) over transfer_ms, over all devices;
hidden_from_waits is 1 minus the sum of those waits for which a compute lane was held (weights, buffers, inputs, saved
inputs, output gradients). It counts the ways of activations between devices whenever the next device is free, also if
it has to wait all the same because the stage before takes longer; it does not count that who comes later may be late
for that reason. waited_in_free are such waits of 'free' over transfer_ms of 'priorities': what threads take to wake
each other.
overlapped is from one more step of 'priorities', traced, not timed: the share of the time in which a lane is busy, in
which the same device computes. It counts as not hidden what a lane moves while its device has nothing to do, which
costs nothing.
simulated: planning.simulate on the schedule that ran, with the modelled times: hidden = 1 - N (step - step without
transfers) / transfer_ms, all its own figures, and the same without prefetch; late_upload is how long devices waited for
weights and nothing else, over transfer_ms.
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
# Waits of a device that holds its compute lane; the others are waits of the host.
ON_THE_DEVICE = (Edge.WEIGHTS, Edge.BUFFERS, Edge.INPUTS, Edge.RELOADED, Edge.OUTPUT_GRADIENTS)
VARIANTS = ("free", "priorities", "fifo", "no_prefetch")


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unit: Wait) -> Tensor:
        ctx.backward_ms, ctx.like = unit.backward_ms, x.new_empty(()).expand_as(x)
        ctx.weight_like = weight.new_empty(()).expand_as(weight) if weight.requires_grad else None
        SLEPT.sleep(unit.forward_ms)
        return x.clone() if unit.has_output else x[:1].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        SLEPT.sleep(ctx.backward_ms)
        like = ctx.weight_like
        return gradient.expand_as(ctx.like).contiguous(), None if like is None else torch.ones_like(like), None


class Wait(nn.Module):
    """A unit of a modelled duration and size."""

    def __init__(self, call: CallCost) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_elements(call.weight_bytes)), call.gradient_bytes > 0)
        self.forward_ms, self.backward_ms = call.forward_ms, call.backward_ms
        self.has_output = call.output_bytes > 0

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Waiting.apply(x, self.weight, self)
        return waited


def num_elements(num_bytes: int) -> int:
    """Elements of fp32 that take as many bytes, rounded; at least one."""
    return max(1, round(num_bytes / 4))


def scaled(profile: CostProfile, time_factor: float) -> CostProfile:
    """The profile with other times, and sizes smaller by `SIZE_FACTOR`."""
    sizes = ("weight_bytes", "gradient_bytes", "input_bytes", "output_bytes", "workspace_bytes")
    return CostProfile(
        tuple(
            replace(
                call,
                forward_ms=time_factor * call.forward_ms,
                backward_ms=time_factor * call.backward_ms,
                **{size: round(SIZE_FACTOR * getattr(call, size)) for size in sizes},
            )
            for call in profile.calls
        )
    )


def time_factor(model: PaperModel, max_work_ms: float) -> float:
    """The largest power of 1/2, or 1, with which a device has at most `max_work_ms` to do."""
    factor = 1.0
    work_ms = model.num_microbatches * sum(2 * c.forward_ms + c.backward_ms for c in model.profile().calls)
    while factor * work_ms / NUM_DEVICES > max_work_ms:
        factor /= 2
    return factor


class Exposed:
    """Adds up how long copies were waited for, by edge, over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited: Counter[Edge] = Counter()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes every wait meanwhile."""
        wait = Transfer.wait

        def timed(transfer: Transfer, edge: Edge) -> list[Tensor]:
            started = time.perf_counter()
            tensors = wait(transfer, edge)
            elapsed_ms = (time.perf_counter() - started) * 1e3
            with self._lock:
                self._waited[edge] += elapsed_ms
            return tensors

        with patch.object(Transfer, "wait", timed):
            yield

    def take(self) -> dict[Edge, float]:
        """The sums in ms; starts again at zero."""
        waited, self._waited = self._waited, Counter()
        return dict(waited)


@contextlib.contextmanager
def without_prefetch() -> Iterator[None]:
    """No weights come before their slot has begun."""
    with patch.object(Loader, "prefetch", lambda loader, device: None):
        yield


@dataclass(frozen=True)
class Step:
    """A measured step, times in ms."""

    step_ms: float
    lost_ms: float
    cpu_ms: float
    excess_ms: float
    num_bytes: int
    waited_ms: dict[Edge, float]

    @property
    def exposed_ms(self) -> float:
        """How long devices waited for copies, all together."""
        return sum(self.waited_ms.get(edge, 0.0) for edge in ON_THE_DEVICE)


class Variant:
    """One model on one kind of link."""

    def __init__(
        self, model: Model, case: Case, link: Link, around: Callable[[], Any] = contextlib.nullcontext
    ) -> None:
        self._case, self._around = case, around
        self._model = model
        pool = DevicePool([torch.device("cpu")] * NUM_DEVICES, link=link, memory_limit=case.machine.device_memory_bytes)
        self._engine = Engine(model, pool, case.plan, num_threads=1)
        self._engine.preset_costs(KEY, case.profile)
        self._num_steps = 0
        self.steps: list[Step] = []
        self.last: StepResult | None = None

    def run(self, *, store: bool) -> None:
        """One step."""
        started, cpu = time.perf_counter(), time.process_time()
        exposed = Exposed()
        SLEPT.take()
        with exposed.noting(), self._around():
            result = self._step()
        wall_ms, cpu_ms = (time.perf_counter() - started) * 1e3, (time.process_time() - cpu) * 1e3
        if store:
            num_bytes = sum(result.bytes_up) + sum(result.bytes_down)
            lost_ms = wall_ms - ideal_ms(result)
            self.steps.append(Step(wall_ms, lost_ms, cpu_ms, SLEPT.take(), num_bytes, exposed.take()))
            self.last = result

    def overlapped(self) -> float:
        """From one more step, traced."""
        self._engine.trace = True
        with self._around():
            timeline = self._step().timeline
        self._engine.trace = False
        return overlap(timeline)

    def _step(self) -> StepResult:
        self._num_steps += 1
        case = self._case
        inputs = [torch.zeros(case.num_inputs, requires_grad=True) for _ in range(case.num_microbatches)]
        weights = [1 / case.num_microbatches] * case.num_microbatches
        request = StepRequest(self._model, inputs, weights, KEY, self._num_steps, loss_of=lambda output: output)
        return self._engine.run(request)


def ideal_ms(result: StepResult) -> float:
    """The step if units took as long as they did, and nothing else took any time."""
    assert result.schedule is not None
    took: Counter[Action | None] = Counter()
    for span in result.timeline.spans:
        if span.kind == "compute":
            took[span.action] += span.end_ms - span.start_ms
    return simulate(result.schedule, took.__getitem__).step_ms


def overlap(timeline: Timeline) -> float:
    """Share of the time in which lanes are busy, in which the same device computes."""
    moving = covered = 0.0
    for device in range(timeline.num_devices):
        busy = timeline.intervals(device)
        for lane in ("h2d", "d2h"):
            spans = timeline.intervals(device, lane)
            moving += sum(end - start for start, end in spans)
            covered += common(spans, busy)
    return covered / moving


def common(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Time that is in both of two lists of disjoint, ascending intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


class Case:
    """One of the paper's models, in all variants."""

    def __init__(self, name: str, max_work_ms: float) -> None:
        self.name = name
        paper = MODELS[name]
        self.factor = time_factor(paper, max_work_ms)
        self.profile = scaled(paper.profile(), self.factor)
        self.num_microbatches = paper.num_microbatches
        self.num_inputs = num_elements(self.profile.calls[0].input_bytes)
        bytes_per_ms = GB_PER_S * 1e6 * SIZE_FACTOR / self.factor
        self.machine = Machine(
            NUM_DEVICES,
            round(SIZE_FACTOR * MEMORY_BYTES),
            h2d_bytes_per_ms=bytes_per_ms,
            d2h_bytes_per_ms=bytes_per_ms,
            transfer_latency_ms=self.factor * LATENCY_MS,
        )
        model = Model(self.profile, Wait)
        self.variants = {
            "free": Variant(model, self, self._link(bytes_per_ms=float("inf"), latency_ms=0.0)),
            "priorities": Variant(model, self, self._link()),
            "fifo": Variant(model, self, self._link(prioritised=False)),
            "no_prefetch": Variant(model, self, self._link(), without_prefetch),
        }

    def _link(self, **kwargs: Any) -> Link:
        machine = self.machine
        settings = {
            "bytes_per_ms": machine.h2d_bytes_per_ms,
            "latency_ms": machine.transfer_latency_ms,
            "chunk_bytes": round(SIZE_FACTOR * CHUNK_BYTES),
        }
        return TimedLink(**{**settings, **kwargs})

    def plan(self, costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        """What the engine asks for, for the real number of micro-batches."""
        return plan_training(self.profile, self.machine, num_microbatches=self.num_microbatches)

    def summary(self) -> dict[str, Any]:
        """Figures of this case."""
        free = self.variants["free"]
        assert free.last is not None
        assert free.last.partition is not None
        costs = stage_costs(free.last.partition, self.profile)
        work_ms = self.num_microbatches * sum(cost.duration_ms for cost in costs)
        priorities = self.variants["priorities"]
        transfer_ms = self._transfer_ms(priorities)
        return {
            "model": self.name,
            "time_factor": self.factor,
            "num_microbatches": self.num_microbatches,
            "stages": free.last.partition.num_stages,
            "partition": free.last.partition.format(),
            "step_ms_free": spread([step.step_ms for step in free.steps]),
            "lost_ms_free": spread([step.lost_ms for step in free.steps]),
            "waited_in_free": median([step.exposed_ms / transfer_ms for step in free.steps]),
            "sleep_excess": median([step.excess_ms / work_ms for step in free.steps]),
            **{name: self._variant_summary(name) for name in VARIANTS[1:]},
            "overlapped": rounded(priorities.overlapped()),
            "simulated": self._simulated(free.last),
        }

    def _transfer_ms(self, variant: Variant) -> float:
        return variant.steps[-1].num_bytes / self.machine.h2d_bytes_per_ms

    def _variant_summary(self, name: str) -> dict[str, Any]:
        steps, free = self.variants[name].steps, self.variants["free"].steps
        transfer_ms = self._transfer_ms(self.variants[name])
        lost, lost_in_free = [step.lost_ms for step in steps], [step.lost_ms for step in free]
        unit = transfer_ms / NUM_DEVICES
        return {
            "step_ms": spread([step.step_ms for step in steps]),
            "transfer_ms": rounded(transfer_ms),
            "lanes_busy": median([transfer_ms / (2 * NUM_DEVICES * step.step_ms) for step in steps]),
            "hidden": rounded(1 - (statistics.median(lost) - statistics.median(lost_in_free)) / unit),
            "noise": rounded((half_spread(lost) + half_spread(lost_in_free)) / unit),
            "hidden_from_waits": spread([1 - step.exposed_ms / transfer_ms for step in steps]),
            "waited_over_transfer": {
                edge.name: median([step.waited_ms.get(edge, 0.0) / transfer_ms for step in steps])
                for edge in Edge
                if any(edge in step.waited_ms for step in steps)
            },
            "cpu_share": median([step.cpu_ms / step.step_ms for step in steps]),
        }

    def _simulated(self, result: StepResult) -> dict[str, Any]:
        """The same schedule on paper."""
        assert result.schedule is not None
        assert result.partition is not None
        costs = stage_costs(result.partition, self.profile)
        free = simulate(result.schedule, costs, Machine(NUM_DEVICES))

        def hidden(simulation: Simulation) -> float:
            transfer_ms = moved(simulation) / self.machine.h2d_bytes_per_ms
            return 1 - NUM_DEVICES * (simulation.step_ms - free.step_ms) / transfer_ms

        def moved(simulation: Simulation) -> int:
            return sum(simulation.h2d_bytes) + sum(simulation.d2h_bytes)

        with_prefetch = simulate(result.schedule, costs, self.machine)
        transfer_ms = moved(with_prefetch) / self.machine.h2d_bytes_per_ms
        return {
            "step_ms_free": rounded(free.step_ms),
            "step_ms": rounded(with_prefetch.step_ms),
            "transfer_ms": rounded(transfer_ms),
            "hidden": rounded(hidden(with_prefetch)),
            "hidden_no_prefetch": rounded(
                hidden(simulate(result.schedule, costs, replace(self.machine, device_memory_bytes=0)))
            ),
            "late_upload": rounded(with_prefetch.late_upload_ms / transfer_ms),
        }


def half_spread(values: Sequence[float]) -> float:
    """Half the distance of the quartiles."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the documentation."""
    lines = [
        "| | micro-batches | stages | lanes busy | hidden | first come, first served | no prefetch "
        "| simulated | simulated, no prefetch | from waits | overlapped |",
        f"|---|{'--:|' * 10}",
    ]
    for row in rows:
        ours, simulated = row["priorities"], row["simulated"]
        cells = [row["model"], str(row["num_microbatches"]), str(row["stages"]), f"{100 * ours['lanes_busy']:.1f} %"]
        cells += [f"{100 * row[name]['hidden']:.1f} ± {100 * row[name]['noise']:.1f} %" for name in VARIANTS[1:]]
        shares = (simulated["hidden"], simulated["hidden_no_prefetch"], ours["hidden_from_waits"]["median"])
        cells += [f"{100 * share:.1f} %" for share in (*shares, row["overlapped"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
        "cores_used": num_cores(),
    }
    report = Report("transfers", METHOD, parameters)
    torch.set_num_threads(1)
    rows = []
    for name in names:
        case = Case(name, max_work_ms)
        for repetition in range(-1, repeats):
            for variant in case.variants.values():
                variant.run(store=repetition >= 0)
        row = case.summary()
        is_dense = MODELS[name].architecture.experts == 1
        goal = {"goal_hidden": GOAL, "goal_met": row["priorities"]["hidden"] >= GOAL}
        rows.append({**row, **(goal if is_dense else {})})
        progress(name)
    progress(markdown(rows))
    report.emit(rows)


if __name__ == "__main__":
    main()
