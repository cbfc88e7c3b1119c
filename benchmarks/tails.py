"""What it is worth that the pipeline does not drain between steps: the paper's models with and without tails."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks._report import Report, num_cores, parser, progress, rounded, spread
from benchmarks.bubble import KEY, SLEPT, Model, scaled, sharpen_timers
from lightning_roundpipe.engine.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import CostProfile, Machine, Partition, plan_training, stage_costs
from tests.planning.paper import MODELS, NUM_DEVICES, NUM_MICROBATCHES, PaperModel

METHOD = """
Engine on N virtual devices; units that sleep for the modelled times of the RoundPipe paper's layer profiles, as in the
benchmark bubble, scaled by the largest power of 1/2 with which every device has at most max_work_ms to do per step. All
steps of a model run by one plan, M micro-batches in one round. A run is some steps one after the other: 'without' each
ends when its backward is over, 'with' each but the last leaves the rest of its backward to the next one, as batches do
whose gradients are accumulated, and stale steps. Both begin with an idle pool and end when all gradients are there, so
that a run of K steps fills and drains once with tails, K times without. step_ms is the time of a run over K; the two
kinds of runs take turns. bubble is the idle share of N devices, the modelled work taken as work; gain is the time
without over the time with, less 1. published are the bubbles of the paper for RoundPipe with a synchronous and an
asynchronous optimizer, whose partitions differ from those here. The first two steps are not counted.
"""
STEPS = 5  # of a run


class Case:
    """One of the paper's models."""

    def __init__(self, name: str, max_work_ms: float) -> None:
        self._paper: PaperModel = MODELS[name]
        self._name = name
        self.profile, self._factor = _fitted(self._paper.profile(), max_work_ms)
        self._model = Model(self.profile)
        pool = DevicePool([torch.device("cpu")] * NUM_DEVICES)
        self._engine = Engine(self._model, pool, self._plan, round_size=NUM_MICROBATCHES, num_threads=1)
        self._engine.preset_costs(KEY, self.profile)
        self._num_steps = 0
        self._last: StepResult | None = None
        self.taken_ms: dict[str, list[float]] = {"without": [], "with": []}
        self.num_tails = 0

    def _plan(self, costs: CostProfile, num_microbatches: int, training: bool) -> Partition:
        return plan_training(
            costs, Machine(NUM_DEVICES), num_microbatches=num_microbatches, round_size=NUM_MICROBATCHES
        )

    def step(self, *, may_trail: bool) -> None:
        """One step."""
        self._num_steps += 1
        inputs = [torch.zeros(1, requires_grad=True) for _ in range(NUM_MICROBATCHES)]
        request = StepRequest(
            self._model,
            inputs,
            [1 / NUM_MICROBATCHES] * NUM_MICROBATCHES,
            KEY,
            self._num_steps,
            loss_of=lambda output: output,
            on_gradients=(lambda gradients: None) if may_trail else None,
        )
        self._last = self._engine.run(request)
        self.num_tails += self._last.has_tail

    def run(self, kind: str, num_steps: int) -> None:
        """Some steps; notes what each has taken."""
        SLEPT.take()
        started = time.perf_counter()
        for index in range(num_steps):
            self.step(may_trail=kind == "with" and index < num_steps - 1)
        self.taken_ms[kind].append((time.perf_counter() - started) * 1e3 / num_steps)

    def summary(self) -> dict[str, Any]:
        """Figures of this model."""
        assert self._last is not None
        assert self._last.partition is not None
        partition = self._last.partition
        work_ms = NUM_MICROBATCHES * sum(cost.duration_ms for cost in stage_costs(partition, self.profile))
        without, with_tails = self.taken_ms["without"], self.taken_ms["with"]
        return {
            "model": self._name,
            "time_factor": self._factor,
            "stages": partition.num_stages,
            "steps_with_tails": self.num_tails,
            "step_ms": {kind: spread(values) for kind, values in self.taken_ms.items()},
            "bubble": {
                kind: spread([1 - work_ms / (NUM_DEVICES * taken) for taken in values])
                for kind, values in self.taken_ms.items()
            },
            "gain": spread([a / b - 1 for a, b in zip(without, with_tails, strict=True)]),
            "published": {
                kind: rounded(self._paper.bubbles[f"RoundPipe, {kind}"] / 100)
                for kind in ("synchronous", "asynchronous")
            },
        }


def _fitted(profile: CostProfile, max_work_ms: float) -> tuple[CostProfile, float]:
    """The profile in smaller times, and by which factor."""
    work_ms = sum(call.forward_ms + call.recompute_backward_ms for call in profile.calls)
    factor = 1.0
    while factor * work_ms * NUM_MICROBATCHES / NUM_DEVICES > max_work_ms:
        factor /= 2
    return scaled(profile, factor), factor


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of the documentation."""
    lines = [
        "| | bubble without | bubble with | gain | paper, synchronous | paper, asynchronous |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        shares = (
            row["bubble"]["without"]["median"],
            row["bubble"]["with"]["median"],
            row["gain"]["median"],
            row["published"]["synchronous"],
            row["published"]["asynchronous"],
        )
        lines.append(f"| {row['model']} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints."""
    args = parser(__doc__, repeats=3).parse_args()
    repeats = 2 if args.quick else args.repeats
    names = list(MODELS)[:1] if args.quick else list(MODELS)
    num_steps, max_work_ms = (2, 300.0) if args.quick else (STEPS, 1500.0)
    parameters = {
        "devices": NUM_DEVICES,
        "microbatches": NUM_MICROBATCHES,
        "max_work_ms": max_work_ms,
        "steps_of_a_run": num_steps,
        "repeats": repeats,
        "minimal_timer_slack": sharpen_timers(),
        "cores_used": num_cores(),
    }
    report = Report("tails", METHOD, parameters)
    torch.set_num_threads(1)
    rows = []
    for name in names:
        case = Case(name, max_work_ms)
        for _ in range(2):
            case.step(may_trail=False)
        for repetition in range(repeats):
            for kind in ("without", "with"):
                case.run(kind, num_steps)
                progress(f"{name}, {repetition + 1} of {repeats}, {kind}: {case.taken_ms[kind][-1]:.0f} ms per step")
        rows.append(case.summary())
    progress(markdown(rows))
    report.emit({"paper_models": rows})


if __name__ == "__main__":
    main()
