"""Whether a workload fits on devices and host, how fast it would be, and how long its sequences may become.

[Note: memory of the host]
What was measured (docs/measurements/gpu/full.json: 3.37 billion weights, bf16-mixed, 8 micro-batches, in GB), and what
is counted for it here: ::

    rounds of           2     8    of the file                                       here
    masters          13.5  13.5    4 bytes per weight                                the same
    moments          27.0  27.0    8 bytes                                           the same
    working copies    6.5   6.5    page_locked_in_place_bytes, without fp32 tables   2 bytes, tables included
    gradients        27.0  13.5    2 sets, or 1: see [Note: bytes per weight]        the same
    activations       9.6  18.7    page_locked_own_bytes without gradients           inputs of all calls, two rounds
    runtime           2.4   2.4    the rest of peak_host_bytes                       the same
    sum              85.9  81.6    peak_host_bytes

The fused stage keeps the inputs of its last layers on the device, which is why less than all calls wait: how many, only
a plan can tell. Buffers that are page-locked hold what they held at their peak; so two rounds have room in them even
where one device works them off one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_roundpipe.planning import CallCost, Machine, plan_training, simulate, stage_costs
from lightning_roundpipe.planning.plan import needed_bytes, waiting_bytes

from .workload import FAST, SLOW, Pace, Workload, cost_profile

_LATENCY_MS = 0.02
_ASYNCHRONOUS_STEPS = 4
# Python, torch with CUDA, Lightning and transformers, with one GPU; see [Note: memory of the host].
_RUNTIME_BYTES = 2_400_000_000
_LONGEST = 2**24
_SHORT = 256


@dataclass(frozen=True)
class Cluster:
    """The machine, and how a batch is worked off on it.

    Attributes:
        device_bytes: Memory of a device that is there for weights and activations.
        host_bytes: The same of the host; None where the user did not say.
        batch_size: Sequences per step.
        round_size: Micro-batches that walk through the stages together.
        optimizer: Whether the next step waits for the optimizer.
        paces: What real code reaches, at worst and at best.
        accumulates: Whether gradients add up over several steps before an update.
    """

    num_devices: int
    device_bytes: int
    host_bytes: int | None
    batch_size: int
    round_size: int
    optimizer: Literal["synchronous", "asynchronous"] = "synchronous"
    may_split: bool = True
    paces: tuple[Pace, Pace] = (SLOW, FAST)
    accumulates: bool = False

    def num_microbatches(self, microbatch_size: int) -> int:
        """Micro-batches of a step."""
        return -(-self.batch_size // microbatch_size)

    def num_gradient_sets(self, microbatch_size: int) -> int:
        """Sets of gradients on the host; see [Note: bytes per weight]."""
        is_one_round = self.num_microbatches(microbatch_size) <= self.round_size
        return 1 if is_one_round and not self.accumulates else 2


def device_needs(workload: Workload, cluster: Cluster, microbatch_size: int) -> tuple[CallCost, int]:
    """The call that needs the most device memory, and the bytes that a device has to hold during its backward: weights,
    gradients, the activations of one micro-batch, and those of others that wait there for their next stage."""
    profile = cost_profile(workload, microbatch_size, SLOW)
    call = max(profile.calls, key=lambda call: needed_bytes(call, is_training=True))
    waiting = waiting_bytes(profile, cluster.num_microbatches(microbatch_size), cluster.round_size)
    return call, needed_bytes(call, is_training=True) + waiting


def host_bytes(workload: Workload, cluster: Cluster, microbatch_size: int) -> dict[str, int]:
    """Bytes in host memory by purpose; see [Note: memory of the host]."""
    # Of a round that drains and one that fills.
    in_flight = min(cluster.batch_size, 2 * cluster.round_size * microbatch_size)
    states = workload.host_state(cluster.num_gradient_sets(microbatch_size))
    return {**states, "activations": in_flight * workload.host_bytes_per_sequence(), "runtime": _RUNTIME_BYTES}


def fits_device(workload: Workload, cluster: Cluster, microbatch_size: int) -> bool:
    """Whether every call fits on a device, on its own."""
    _, needed = device_needs(workload, cluster, microbatch_size)
    return needed <= cluster.device_bytes


def fits_host(workload: Workload, cluster: Cluster, microbatch_size: int) -> bool:
    """Whether the host holds everything; True where its size is not known."""
    needed = sum(host_bytes(workload, cluster, microbatch_size).values())
    return cluster.host_bytes is None or needed <= cluster.host_bytes


def choose_microbatch_size(workload: Workload, cluster: Cluster) -> int:
    """Sequences per micro-batch: as many as leave two micro-batches per device, and fit.

    "Fit" means beside the weights of another layer, so that uploads can hide; where not one sequence does, it is 1. It
    is less where the devices then get an equal number of micro-batches: a last round of a single one would leave the
    others idle.
    """
    useful = max(1, cluster.batch_size // (2 * cluster.num_devices))

    def fits(size: int) -> bool:
        call, needed = device_needs(workload, cluster, size)
        has_room = needed + call.weight_bytes + call.gradient_bytes <= cluster.device_bytes
        return has_room and fits_host(workload, cluster, size)

    # A size that leaves one round has one set of gradients, and may fit where smaller ones do not.
    size = useful if fits(useful) else max(1, largest_that(fits, useful))
    per_device = -(-cluster.num_microbatches(size) // cluster.num_devices)
    return min(size, -(-cluster.batch_size // (per_device * cluster.num_devices)))


def largest_seq_len(workload: Workload, cluster: Cluster) -> tuple[int, str]:
    """Longest sequence that fits with one sequence per micro-batch, and what runs short beyond it.

    A round has two micro-batches per device, or the batch if it is smaller. Long ones are rounded down to 256 tokens; 0
    if none fits.
    """
    small = replace(cluster, batch_size=min(cluster.batch_size, 2 * cluster.num_devices))

    def fits(seq_len: int) -> bool:
        candidate = replace(workload, seq_len=seq_len)
        return fits_device(candidate, small, 1) and fits_host(candidate, small, 1)

    longest = largest_that(fits, _LONGEST)
    is_device = not fits_device(replace(workload, seq_len=longest + 1), small, 1)
    return longest if longest < _SHORT else longest - longest % _SHORT, "device memory" if is_device else "host memory"


def largest_that(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` that fits, 0 if none does; what fits, fits for all smaller numbers."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def speed(workload: Workload, cluster: Cluster, microbatch_size: int, pace: Pace) -> dict[str, Any]:
    """Plan and simulate a step at one end of the range."""
    profile = cost_profile(workload, microbatch_size, pace)
    link = workload.gpu.pcie_bytes_per_ms * pace.pcie
    machine = Machine(
        cluster.num_devices,
        device_memory_bytes=cluster.device_bytes,
        h2d_bytes_per_ms=link,
        d2h_bytes_per_ms=link,
        transfer_latency_ms=_LATENCY_MS,
        host_bytes_per_ms=pace.copies_bytes_per_ms,
    )
    count = cluster.num_microbatches(microbatch_size)
    size = min(cluster.round_size, count)
    plan = plan_training(profile, machine, num_microbatches=count, round_size=size, may_split=cluster.may_split)
    costs = stage_costs(plan.partition, profile)
    # Every weight is updated once, also where a tied table counts in two stages.
    optimizer_ms = workload.num_trained * pace.optimizer_bytes / pace.host_bytes_per_ms
    num_gradient_bytes = sum(cost.gradient_bytes for cost in costs)
    machine = replace(machine, optimizer_bytes_per_ms=num_gradient_bytes / optimizer_ms)
    num_steps = _ASYNCHRONOUS_STEPS if cluster.optimizer == "asynchronous" else 1
    schedule = plan.schedule(profile, machine, count, num_steps=num_steps)
    simulation = simulate(schedule, costs, machine, microbatches_per_step=count, optimizer=cluster.optimizer)
    return {
        "tokens_per_s": cluster.batch_size * workload.seq_len / simulation.step_ms * 1e3,
        "step_ms": simulation.step_ms,
        "bubble_ratio": simulation.timeline.bubble_ratio,
        "bound_by": simulation.bound_by,
        "lower_bounds_ms": simulation.lower_bounds_ms,
        "device_memory_bytes": max(simulation.memory_bytes),
        "num_microbatches": count,
        "partition": plan.partition.format(),
    }
