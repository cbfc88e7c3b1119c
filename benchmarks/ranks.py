"""Ranks: the step of two against that of one with the same batch, the share of the reduction that is hidden, bytes.
All of it also with an optimizer that is divided between the ranks.

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks._report import QUIET, Report, parser, progress, rounded, spread
from benchmarks._waiting import Wait
from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.planning import CallCost, plan_training, simulate, stage_costs
from lightning_roundpipe.ranks.buckets import buckets_of
from tests.planning.paper import MODELS, NUM_DEVICES, NUM_MICROBATCHES
from tests.support.rank_runs.hosts import Host, two_hosts, why_not
from tests.support.rank_runs.script import free_port, variables

METHOD = """
A model of equal layers, each a unit with a weight, whose forward and backward wait; SGD with a learning rate of 0, so
that ranks train and nothing changes; plans by sizes alone, so that all have the same one. Wall-clock time from the
beginning of a training step on rank 0 to that of the next one, with the update between them; the first steps of a fit,
in which the plan is made, do not count. one_rank: all micro-batches on one rank. half: half of them on one rank, with
nothing to add up. two_ranks: half of them on each of two. sharded: the same with shard_optimizer=True, where a rank
gets its part of the sums, updates its part of the weights, and sends them to the other. reduction_ms: the same
gradients added up with nothing else to do. hidden: 1 - (two_ranks - half) / reduction_ms. bytes_sent: what has left the
host of rank 0 per step, headers included, over the bytes of the gradients, of which each of two ranks must send as
many; with sharded, as many bytes of gradients and weights; from the difference of two runs. simulated:
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
    """Keeps when training steps began."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.began_at: list[float] = []
        self.reductions_ms: list[float] = []

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.began_at.append(time.perf_counter())
        return super().training_step(*args, **kwargs)

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


def train(num_microbatches: int, num_steps: int, is_sharded: bool) -> dict[str, list[float]]:
    """Trains on this rank."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    strategy = Timed(
        num_microbatches=num_microbatches,
        virtual_copies=True,
        device_memory_limit=DEVICE_MEMORY,
        shard_optimizer=is_sharded,
    )
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_DEVICES_OF_RANK * size,
        max_steps=num_steps,
        use_distributed_sampler=False,
        deterministic=True,
        **QUIET,
    )
    rows = torch.zeros(num_steps * num_microbatches, 1)
    trainer.fit(Model(), DataLoader(rows, batch_size=num_microbatches))
    steps_ms = [(later - earlier) * 1e3 for earlier, later in pairwise(strategy.began_at[WARM_UP:])]
    return {"steps_ms": steps_ms, "reductions_ms": strategy.reductions_ms}


def run(
    num_microbatches: int, num_steps: int, hosts: Sequence[Host], size: int = 1, *, is_sharded: bool = False
) -> dict[str, list[float]]:
    """Trains on ``size`` ranks, each on a host if there are any; what rank 0 says."""
    if size == 1:
        places, launcher = [{}], [[]]
    else:
        address = hosts[0].address if hosts else "127.0.0.1"
        port = free_port()
        places = [variables(rank, size, 1 if hosts else size, address, port) for rank in range(size)]
        launcher = [["ip", "netns", "exec", host.name] for host in hosts] or [[]] * size
    command = [sys.executable, "-m", "benchmarks.ranks", "--rank", f"{num_microbatches},{num_steps},{int(is_sharded)}"]
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
    steps: dict[str, list[float]] = {"one_rank": [], "half": [], "two_ranks": [], "sharded": []}
    reductions: list[float] = []
    sent: dict[bool, list[int]] = {False: [], True: []}
    num_steps = WARM_UP + 5
    for repetition in range(repeats):
        steps["one_rank"].append(statistics.median(run(num_microbatches, num_steps, ())["steps_ms"]))
        steps["half"].append(statistics.median(run(half, num_steps, ())["steps_ms"]))
        for name, is_sharded in (("two_ranks", False), ("sharded", True)):
            for count in (num_steps, num_steps + 4) if repetition == 0 and hosts else (num_steps,):
                before = hosts[0].num_bytes_sent if hosts else 0
                found = run(half, count, hosts, size=2, is_sharded=is_sharded)
                sent[is_sharded].append((hosts[0].num_bytes_sent if hosts else 0) - before)
            steps[name].append(statistics.median(found["steps_ms"]))
            reductions += found["reductions_ms"]
        progress(f"{repetition + 1} of {repeats} repetitions")
    medians = {name: statistics.median(values) for name, values in steps.items()}
    reduction_ms = statistics.median(reductions)
    num_bytes = NUM_LAYERS * WEIGHTS * 4
    per_step = {is_sharded: (counts[1] - counts[0]) / 4 if hosts else 0.0 for is_sharded, counts in sent.items()}
    return {
        **{f"{name}_ms": spread([*values, *values]) for name, values in steps.items()},
        **{
            f"{name}_over_one": rounded(medians[name] / medians["one_rank"])
            for name in ("two_ranks", "sharded", "half")
        },
        "reduction_ms": rounded(reduction_ms),
        **{
            f"hidden{suffix}": rounded(1 - (medians[name] - medians["half"]) / reduction_ms)
            for name, suffix in (("two_ranks", ""), ("sharded", "_sharded"))
        },
        "bytes_sent_over_gradients": rounded(per_step[False] / num_bytes) if hosts else None,
        "bytes_sent_over_gradients_sharded": rounded(per_step[True] / num_bytes) if hosts else None,
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
    made.add_argument("--rank", help="micro-batches, steps, 1 for a sharded optimizer: be a rank and print")
    made.add_argument("--gbit", type=float, default=1.0, help="Gbit/s of the cable in each direction")
    made.add_argument("--delay", type=float, default=1.0, help="ms of the cable in each direction")
    args = made.parse_args()
    if args.rank is not None:
        num_microbatches, num_steps, is_sharded = map(int, args.rank.split(","))
        print(json.dumps(train(num_microbatches, num_steps, bool(is_sharded))))
        return
    num_microbatches = 4 if args.quick else MICROBATCHES
    with contextlib.ExitStack() as stack:
        reason = why_not()
        hosts = stack.enter_context(two_hosts(args.gbit, args.delay)) if reason is None else ()
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
