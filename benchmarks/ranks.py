"""Ranks: the step of two against that of one with the same batch, the share of the reduction that is hidden, bytes.

Two processes with two virtual devices each, joined by a cable of 1 Gbit/s between two network namespaces where they can
be made (as root, on Linux), else by loopback. Their units only wait, so that nothing competes for the cores. Beside it
the simulator tells what to expect of faster networks for two models of the RoundPipe paper.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks._report import Report, parser, progress, rounded, spread
from benchmarks.bubble import Wait
from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import CallCost, plan_training, simulate, stage_costs
from lightning_roundpipe.ranks.buckets import buckets_of
from tests.planning.paper import MODELS, NUM_DEVICES, NUM_MICROBATCHES
from tests.support.rank_runs.hosts import Host, two_hosts, why_not
from tests.support.rank_runs.script import free_port, variables

METHOD = """
A model of equal layers, each a unit with a weight, whose forward and backward wait; SGD with a learning rate of 0, so
that ranks train and nothing changes; plans by sizes alone, so that all have the same one. Wall-clock time of
strategy.training_step on rank 0, which ends when all gradients are there; the first steps of a fit, in which the plan
is made, do not count. one_rank: all micro-batches on one rank. half: half of them on one rank, with nothing to add
up. two_ranks: half of them on each of two. reduction_ms: the same gradients added up with nothing else to do. hidden:
1 - (two_ranks - half) / reduction_ms. bytes_sent: what has left the host of rank 0 per step, headers included, over
the bytes of the gradients, of which each of two ranks must send as many; from the difference of two runs. simulated:
the paper's models on 8 devices per rank with its links, 16 micro-batches per rank, 200 GB/s of host memory, 50
microseconds from rank to rank; step_over_alone: the step of ranks that add up over that of a rank alone, which does a
batch smaller by their number; hidden: as above.
"""
NUM_LAYERS = 8
WEIGHTS = 2**20
LAYER = CallCost("layer", forward_ms=10.0, backward_ms=20.0)
MICROBATCHES = 16
NUM_DEVICES_OF_RANK = 2
DEVICE_MEMORY = "40MiB"  # for two layers and the next two
WARM_UP = 6
GBIT = (10, 25, 100)
BYTES_PER_MS = 1.25e5  # of 1 Gbit/s
HOST_BYTES_PER_MS, LATENCY_MS = 200e6, 0.05


class Model(L.LightningModule):
    """Layers that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Wait(LAYER, WEIGHTS) for _ in range(NUM_LAYERS)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch.requires_grad_()).mean()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Timed(RoundPipeStrategy):
    """Keeps how long training steps take."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps_ms: list[float] = []
        self.reductions_ms: list[float] = []

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = super().training_step(*args, **kwargs)
        self.steps_ms.append((time.perf_counter() - started) * 1e3)
        return output

    @override
    def teardown(self) -> None:
        for _ in range(3 if self.world_size > 1 else 0):
            parts = [torch.ones(sum(p.stop - p.start for p in b)) for b in buckets_of(self._module.parameters())]
            self._group.barrier("reduction")
            started = time.perf_counter()
            for part in parts:
                self._group.add_up(part, "reduction")
            self.reductions_ms.append((time.perf_counter() - started) * 1e3)
        super().teardown()


def train(num_microbatches: int, num_steps: int) -> dict[str, list[float]]:
    """Trains on this rank."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    strategy = Timed(num_microbatches=num_microbatches, virtual_copies=True, device_memory_limit=DEVICE_MEMORY)
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_DEVICES_OF_RANK * size,
        max_steps=num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        deterministic=True,
    )
    rows = torch.zeros(num_steps * num_microbatches, 1)
    trainer.fit(Model(), DataLoader(rows, batch_size=num_microbatches))
    return {"steps_ms": strategy.steps_ms[WARM_UP:], "reductions_ms": strategy.reductions_ms}


def run(num_microbatches: int, num_steps: int, hosts: Sequence[Host], size: int = 1) -> dict[str, list[float]]:
    """Trains on ``size`` ranks, each on a host if there are any; what rank 0 says."""
    if size == 1:
        places, launcher = [{}], [[]]
    else:
        address = hosts[0].address if hosts else "127.0.0.1"
        port = free_port()
        places = [variables(rank, size, 1 if hosts else size, address, port) for rank in range(size)]
        launcher = [["ip", "netns", "exec", host.name] for host in hosts] or [[]] * size
    command = [sys.executable, "-m", "benchmarks.ranks", "--rank", f"{num_microbatches},{num_steps}"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = []
        for rank, (place, prefix) in enumerate(zip(places, launcher, strict=True)):
            output = stack.enter_context(open(Path(folder, f"{rank}"), "w+"))
            running.append(
                subprocess.Popen(
                    [*prefix, *command], env={**os.environ, **place}, stdout=output, stderr=subprocess.PIPE
                )
            )
        errors = [process.communicate()[1].decode() for process in running]
        if any(process.returncode for process in running):
            raise RuntimeError("a rank has failed:\n" + "\n".join(errors))
        found: dict[str, list[float]] = json.loads(Path(folder, "0").read_text().splitlines()[-1])
    return found


def measured(hosts: Sequence[Host], repeats: int, num_microbatches: int) -> dict[str, Any]:
    """The figures of ranks on this machine."""
    half = num_microbatches // 2
    steps: dict[str, list[float]] = {"one_rank": [], "half": [], "two_ranks": []}
    reductions: list[float] = []
    sent = []
    num_steps = WARM_UP + 4
    for repetition in range(repeats):
        steps["one_rank"].append(statistics.median(run(num_microbatches, num_steps, ())["steps_ms"]))
        steps["half"].append(statistics.median(run(half, num_steps, ())["steps_ms"]))
        for count in (num_steps, num_steps + 4) if repetition == 0 and hosts else (num_steps,):
            before = hosts[0].num_bytes_sent if hosts else 0
            found = run(half, count, hosts, size=2)
            sent.append((hosts[0].num_bytes_sent if hosts else 0) - before)
        steps["two_ranks"].append(statistics.median(found["steps_ms"]))
        reductions.append(statistics.median(found["reductions_ms"]))
        progress(f"{repetition + 1} of {repeats} repetitions")
    medians = {name: statistics.median(values) for name, values in steps.items()}
    reduction_ms = statistics.median(reductions)
    num_bytes = NUM_LAYERS * WEIGHTS * 4
    return {
        **{f"{name}_ms": spread([*values, *values]) for name, values in steps.items()},
        "two_ranks_over_one": rounded(medians["two_ranks"] / medians["one_rank"]),
        "half_over_one": rounded(medians["half"] / medians["one_rank"]),
        "reduction_ms": rounded(reduction_ms),
        "hidden": rounded(1 - (medians["two_ranks"] - medians["half"]) / reduction_ms),
        "bytes_sent_over_gradients": rounded((sent[1] - sent[0]) / 4 / num_bytes) if hosts else None,
    }


def simulated(name: str, num_ranks: int, gbit: int) -> dict[str, Any]:
    """What the simulator expects of a model of the paper."""
    model = MODELS[name]
    profile, alone = model.profile(), replace(model.machine(NUM_DEVICES), host_bytes_per_ms=HOST_BYTES_PER_MS)
    ranks = replace(alone, num_ranks=num_ranks, network_bytes_per_ms=gbit * BYTES_PER_MS, network_latency_ms=LATENCY_MS)
    plan = plan_training(profile, ranks, num_microbatches=NUM_MICROBATCHES)
    costs = stage_costs(plan.partition, profile)
    schedule = plan.schedule(profile, ranks, NUM_MICROBATCHES)
    together, single = simulate(schedule, costs, ranks), simulate(schedule, costs, alone)
    network_ms = together.lower_bounds_ms["network"]
    return {
        "model": name,
        "ranks": num_ranks,
        "gbit_per_s": gbit,
        "step_ms": rounded(together.step_ms),
        "network_ms": rounded(network_ms),
        "step_over_alone": rounded(together.step_ms / single.step_ms),
        "hidden": rounded(1 - (together.step_ms - single.step_ms) / network_ms),
        "bound_by": together.bound_by,
    }


def main() -> None:
    """Measures and prints; or is a rank."""
    made = parser(__doc__, repeats=3)
    made.add_argument("--rank", help="micro-batches and steps: be a rank and print how long steps took")
    made.add_argument("--rate", default="1gbit", help="of the cable, as tc reads it")
    args = made.parse_args()
    if args.rank is not None:
        print(json.dumps(train(*map(int, args.rank.split(",")))))
        return
    num_microbatches = 4 if args.quick else MICROBATCHES
    with contextlib.ExitStack() as stack:
        reason = why_not()
        hosts = stack.enter_context(two_hosts(args.rate)) if reason is None else ()
        parameters = {
            "layers": NUM_LAYERS,
            "weights_per_layer": WEIGHTS,
            "forward_ms": LAYER.forward_ms,
            "backward_ms": LAYER.backward_ms,
            "microbatches": num_microbatches,
            "devices_per_rank": NUM_DEVICES_OF_RANK,
            "device_memory": DEVICE_MEMORY,
            "network": hosts[0].cable if hosts else f"loopback: {reason}",
        }
        report = Report("ranks", METHOD, parameters)
        figures = measured(hosts, 1 if args.quick else args.repeats, num_microbatches)
    names = ("Llama-3.1-8B",) if args.quick else ("Llama-3.1-8B", "Qwen3-32B")
    expected = [simulated(name, count, gbit) for name in names for count in (2, 4) for gbit in GBIT]
    report.emit({"measured": figures, "simulated": expected})


if __name__ == "__main__":
    main()
