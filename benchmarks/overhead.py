"""Host time that the engine adds to a unit call and to a step.

The step of a chain of K small units on M micro-batches is run by the engine, on one virtual device, and by plain torch,
micro-batch by micro-batch; the difference is the engine's. Both run in turn in every repetition.
"""

from __future__ import annotations

import cProfile
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._report import Report, median, parser, progress, rounded, spread
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.planning import CostProfile, Machine, Partition, Stage, StageKind

METHOD = """
Difference of wall-clock time between a step of the engine (one virtual device, torch on one thread) and the same
operations in plain torch on the same micro-batches: forward and backward where graphs are kept (one fused stage with
all units), forward under no_grad, forward and backward where they are recomputed (F, fused and B stage; the fused
stage holds one unit). us_per_call is that difference over the K*M calls at the largest K and M, all costs per step and
per micro-batch included. The fit splits the differences of all (K, M), by least squares, into per_call * K * M +
per_microbatch * M + per_step. Engine and plain torch alternate in every repetition; medians of the repetitions. The
engine is open, as in a fit. torch_by_unit_us_per_call is what plain torch takes longer itself if its graph is cut at
every unit, and each unit has a backward of its own: the engine cannot take less. cpu_us_per_call is the same from the
CPU time of the process, which other processes disturb less. A 'linear' unit is one module with two parameters; a
'block' has the 13 modules of a Transformer layer.
"""
WIDTH = 16
ROWS = 4


class Block(nn.Module):
    """A pre-norm layer, as small as it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixing = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "out")})
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        mixed = self.mixing["query"](normed) * self.mixing["key"](normed) + self.mixing["value"](normed)
        x = x + self.mixing["out"](mixed)
        return x + self.mlp(self.norms[1](x))


class Chain(nn.Module):
    """Units one after the other; the user's step in miniature."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x.mean()


UNITS: dict[str, Callable[[], nn.Module]] = {"linear": lambda: nn.Linear(WIDTH, WIDTH), "block": Block}


def kept_planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
    """Everything in the fused stage."""
    return Partition(len(costs.calls), (Stage(0, StageKind.FUSED, 0, len(costs.calls)),))


def recomputed_planner(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
    """Everything but the last call is recomputed."""
    count, last = len(costs.calls), len(costs.calls) - 1
    fused = Stage(1, StageKind.FUSED, last, count)
    return Partition(count, (Stage(0, StageKind.FORWARD, 0, last), fused, Stage(2, StageKind.BACKWARD, 0, last)))


@dataclass
class Case:
    """One model under one planner, ready to run with and without the engine."""

    kind: str
    kept: bool
    num_units: int
    num_microbatches: int

    def __post_init__(self) -> None:
        self._model = Chain([UNITS[self.kind]() for _ in range(self.num_units)])
        self._microbatches = [torch.randn(ROWS, WIDTH) for _ in range(self.num_microbatches)]
        self._engine = Engine(
            self._model,
            DevicePool([torch.device("cpu")]),
            kept_planner if self.kept else recomputed_planner,
            num_threads=1,
        )
        self._engine.open()  # as a Trainer does for a fit
        self._step = 0
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.plain_wall: list[float] = []
        self.by_unit_wall: list[float] = []

    @property
    def num_calls(self) -> int:
        """Unit calls of a step."""
        return self.num_units * self.num_microbatches

    def run_engine(self) -> None:
        """One step."""
        self._step += 1
        weights = [1 / self.num_microbatches] * self.num_microbatches
        request = StepRequest(
            self._model, self._microbatches, weights, "train", self._step, loss_of=lambda output: output
        )
        self._engine.run(request)

    def run_plain(self) -> None:
        """The same operations without the engine."""
        for x in self._microbatches:
            if not self.kept:
                with torch.no_grad():
                    self._model(x)
            loss = self._model(x)
            loss.backward(torch.full_like(loss, 1 / self.num_microbatches))
        for parameter in self._model.parameters():
            parameter.grad = None

    def run_by_unit(self) -> None:
        """The same once more, with a graph and a backward for each unit."""
        for x in self._microbatches:
            inputs: list[Tensor] = []
            outputs: list[Tensor] = []
            for unit in self._model.units:
                inputs.append(x.detach().requires_grad_())
                with torch.set_grad_enabled(self.kept):
                    outputs.append(unit(inputs[-1]))
                x = outputs[-1].detach()
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(x.mean() / self.num_microbatches, x)
            for unit in reversed(self._model.units):  # type: ignore[call-overload]
                start, output = inputs.pop(), outputs.pop()
                torch.autograd.backward([output if self.kept else unit(start)], [gradient])
                assert start.grad is not None
                gradient = start.grad
        for parameter in self._model.parameters():
            parameter.grad = None

    def profile(self, num_steps: int) -> dict[str, float]:
        """Microseconds of CPU time per call by part of the code, its own without what it calls; see METHOD."""
        profiles: dict[int, cProfile.Profile] = {}
        model = self._model

        def profiled(x: Tensor) -> Tensor:
            if threading.get_ident() not in profiles:  # the thread stays under its profile from step to step
                profiles[threading.get_ident()] = started = cProfile.Profile(time.thread_time)
                started.enable()
            return model(x)

        self._model = profiled  # type: ignore[assignment]
        profiles[threading.get_ident()] = of_caller = cProfile.Profile(time.thread_time)
        of_caller.enable()
        for _ in range(num_steps):
            self.run_engine()
        of_caller.disable()
        self._model = model
        spent: Counter[str] = Counter()
        for one in profiles.values():
            for entry in one.getstats():
                spent[_part_of(entry.code)] += entry.inlinetime * 1e6 / (num_steps * self.num_calls)
        return {part: rounded(value) for part, value in spent.most_common() if value >= 0.5}

    def measure(self, *, store: bool) -> None:
        """One repetition: engine, plain torch, and plain torch unit by unit, in turn."""
        engine_wall, engine_cpu = _timed(self.run_engine)
        plain_wall, plain_cpu = _timed(self.run_plain)
        by_unit_wall, _ = _timed(self.run_by_unit)
        if store:
            self.wall.append(engine_wall - plain_wall)
            self.cpu.append(engine_cpu - plain_cpu)
            self.plain_wall.append(plain_wall)
            self.by_unit_wall.append(by_unit_wall - plain_wall)


def _part_of(code: Any) -> str:
    """Which row of the profile a function (or the name of a built-in one) belongs to."""
    if isinstance(code, str):
        if "run_backward" in code or "apply" in code:
            return "torch: backward" if "run_backward" in code else "torch: cuts"
        return "torch: other" if "torch" in code else "locks" if "_thread" in code else "built-in functions"
    name = code.co_filename
    if "lightning_roundpipe" in name:
        return name.rpartition("lightning_roundpipe/")[2]
    return "torch: other" if "/torch/" in name else "other Python"


def _timed(function: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and CPU time of the process, in microseconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return (time.perf_counter() - wall) * 1e6, (time.process_time() - cpu) * 1e6


def summarise(cases: list[Case]) -> dict[str, object]:
    """Figures of the cases of one kind of unit and one way of running it."""
    largest = max(cases, key=lambda case: case.num_calls)
    return {
        "us_per_call": spread([wall / largest.num_calls for wall in largest.wall]),
        "cpu_us_per_call": spread([cpu / largest.num_calls for cpu in largest.cpu]),
        "plain_torch_us_per_call": median([wall / largest.num_calls for wall in largest.plain_wall]),
        "torch_by_unit_us_per_call": median([wall / largest.num_calls for wall in largest.by_unit_wall]),
        "fit_us": _fit(cases, [median(case.wall) for case in cases]),
        "cpu_fit_us": _fit(cases, [median(case.cpu) for case in cases]),
    }


def _fit(cases: list[Case], seen: list[float]) -> dict[str, float]:
    design = torch.tensor([[case.num_calls, case.num_microbatches, 1.0] for case in cases], dtype=torch.float64)
    solved = torch.linalg.lstsq(design, torch.tensor(seen, dtype=torch.float64)[:, None]).solution
    names = ("per_call", "per_microbatch", "per_step")
    return dict(zip(names, map(rounded, solved.flatten().tolist()), strict=True))


def main() -> None:
    """Measures and prints."""
    args = parser(__doc__, repeats=40).parse_args()
    repeats = 2 if args.quick else args.repeats
    num_units, num_microbatches = ([2, 4], [1, 2]) if args.quick else ([8, 32], [2, 8])
    parameters = {
        "units": {"K": num_units, "width": WIDTH, "kinds": list(UNITS)},
        "microbatches": {"M": num_microbatches, "rows": ROWS},
        "repeats": repeats,
        "goal_us_per_call": 150,
    }
    report = Report("overhead", METHOD, parameters)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    grids: dict[tuple[str, bool], list[Case]] = {
        (kind, kept): [Case(kind, kept, k, m) for k, m in itertools.product(num_units, num_microbatches)]
        for kind, kept in itertools.product(UNITS, (True, False))
    }
    for repetition in range(-3, repeats):
        for cases in grids.values():
            for case in cases:
                case.measure(store=repetition >= 0)
        if repetition % 10 == 9:
            progress(f"{repetition + 1} of {repeats} repetitions")
    results: dict[str, dict[str, object]] = {}
    for (kind, kept), cases in grids.items():
        largest = max(cases, key=lambda case: case.num_calls)
        profile = {"profile_us_per_call": largest.profile(max(2, repeats // 4))}
        results.setdefault(kind, {})["kept" if kept else "recomputed"] = summarise(cases) | profile
    report.emit(results)


if __name__ == "__main__":
    main()
