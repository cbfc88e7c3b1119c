"""What compile_units does to the step of a small Llama on two virtual devices."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from benchmarks._report import Report, parser, progress, rounded, spread
from benchmarks.cpu_throughput import Llama
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.planning import CallCost, CostProfile, Machine, Partition, partition

METHOD = """
Training steps (forward and backward, no optimizer) of a Llama-like model in fp32 on 2 virtual devices with 1 thread
each, a micro-batch per row: by an engine that runs units as they are, and by one that compiles them with torch.compile
and its default backend. After a warm-up, in which everything is compiled, the two take turns, and the ratio is that of
a compiled step to the step before it. first_steps_s: the first two steps, with the compilation, as it is on a machine
where torch has no compiled kernels in its cache on disk, unless something has filled it. graphs: what torch compiled.
"""
SIZES = {
    "full": {"layers": 8, "width": 256, "heads": 4, "hidden": 688, "vocabulary": 2048, "context": 256},
    "quick": {"layers": 2, "width": 32, "heads": 2, "hidden": 64, "vocabulary": 64, "context": 16},
}
ROWS = 8
WARMUP = 2


def make_engine(model: Llama, compile_units: dict[str, Any] | None) -> Engine:
    """Two virtual devices, and a plan that does not depend on measured times: the same for both engines."""

    def plan(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
        alike = CostProfile(tuple(CallCost(call.name, forward_ms=1.0, backward_ms=2.0) for call in costs.calls))
        return partition(alike, num_devices=2, num_microbatches=num_microbatches)

    pool = DevicePool([torch.device("cpu")] * 2)
    return Engine(model, pool, plan, num_threads=1, compile_units=compile_units)


def seconds(engine: Engine, model: Llama, rows: list[Tensor]) -> float:
    """Of one training step."""
    shares = [1 / len(rows)] * len(rows)
    started = time.perf_counter()
    engine.run(
        StepRequest(lambda row: model.training_step(row, 0), rows, shares, "train", 0, loss_of=lambda loss: loss)
    )
    return time.perf_counter() - started


def main() -> None:
    """Measures, and prints the result."""
    arguments = parser(__doc__, repeats=15).parse_args()
    size = SIZES["quick" if arguments.quick else "full"]
    report = Report("compiling", METHOD, {**size, "rows": ROWS, "repeats": arguments.repeats})
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model = Llama(**size, checkpointed=False)
    rows = [torch.randint(size["vocabulary"], (1, size["context"] + 1)) for _ in range(ROWS)]
    engines = {"eager": make_engine(model, None), "compiled": make_engine(model, {})}
    first = {}
    for name, engine in engines.items():
        first[name] = rounded(sum(seconds(engine, model, rows) for _ in range(WARMUP)))
        progress(f"{name}: first steps {first[name]} s")
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(arguments.repeats):
        for name, engine in engines.items():
            taken[name].append(seconds(engine, model, rows))
        progress(f"{repeat}: " + ", ".join(f"{name} {times[-1]:.3f} s" for name, times in taken.items()))
    ratios = [c / e for c, e in zip(taken["compiled"], taken["eager"], strict=True)]
    report.emit(
        {
            "step_s": {name: spread(times) for name, times in taken.items()},
            "compiled_over_eager": spread(ratios),
            "fastest_compiled_over_fastest_eager": rounded(min(taken["compiled"]) / min(taken["eager"])),
            "first_steps_s": first,
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        }
    )


if __name__ == "__main__":
    main()
