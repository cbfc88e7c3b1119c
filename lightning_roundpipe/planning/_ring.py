"""The simulator for one special case, fast enough to sit in a search: one step of a round-robin schedule.

`ring_ms` gives exactly the `step_ms` of `simulate` on the schedule of `round_robin`, as long as the host memory's
bandwidth has no limit (otherwise a lower one), in the time that it takes to add up the actions. Slots can be processed
one after the other because the ring is a common order of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from .machine import Machine
from .simulate import effective_ms, fit_together, handover_ms
from .stages import StageCost


class _Device:
    """What the next slot on a device has to know about the slots before."""

    __slots__ = ("cost", "down_free", "free", "freed_before", "num_actions", "stage", "starts_at", "up_free")

    def __init__(self) -> None:
        self.free = self.up_free = self.down_free = self.starts_at = self.freed_before = 0.0
        self.stage = -1
        self.num_actions = 0
        self.cost = StageCost(0.0)


def ring_ms(
    costs: Sequence[StageCost],
    machine: Machine,
    *,
    num_microbatches: int,
    round_size: int | None = None,
    hop_ms: float = 0.0,
) -> float:
    """Return the time in ms of a step with a synchronous optimizer; arguments as for `simulate` and `round_robin`."""
    devices = [_Device() for _ in range(machine.num_devices)]
    size = round_size or num_microbatches
    durations = [effective_ms(cost, machine) for cost in costs]
    hops = [0.0, *(hop_ms + handover_ms(cost, machine) for cost in costs[:-1])]
    if machine.num_devices == 1:
        hops = [0.0] * len(costs)
    ends = [0.0] * num_microbatches
    index = 0
    for first in range(0, num_microbatches, size):
        microbatches = range(first, min(first + size, num_microbatches))
        for stage, duration in enumerate(durations):
            device = devices[index]
            if device.stage != stage:
                _change_stage(device, stage, costs[stage], machine)
            device.num_actions += len(microbatches)
            hop = hops[stage]
            free = start = max(device.free, ends[first] + hop)
            for microbatch in microbatches:
                arrival = ends[microbatch] + hop
                if arrival > free:
                    free = arrival
                free += duration
                ends[microbatch] = free
            if device.num_actions == len(microbatches):
                device.starts_at = start
            device.free = free
            index += 1
            if index == machine.num_devices:
                index = 0
    done = max(max(_leave(device, machine), device.down_free) for device in devices)
    return done + sum(cost.gradient_bytes for cost in costs) / machine.optimizer_bytes_per_ms


def _leave(device: _Device, machine: Machine) -> float:
    """The time at which the device's current slot has left it."""
    num_bytes = device.cost.gradient_bytes
    if not num_bytes:
        return device.free
    begin = max(device.free, device.down_free)
    device.down_free = begin + machine.transfer_latency_ms + num_bytes / machine.d2h_bytes_per_ms
    return device.down_free


def _change_stage(device: _Device, stage: int, cost: StageCost, machine: Machine) -> None:
    """Let the weights of the next slot arrive before it can start."""
    last = device.cost
    freed = _leave(device, machine)
    limit = machine.device_memory_bytes
    travelling = cost.weight_bytes
    if device.stage < 0:
        gate = 0.0
    elif limit is None or fit_together(last, cost, limit):
        gate = max(device.starts_at, device.freed_before)
        travelling += device.num_actions * last.input_bytes
    else:
        gate = freed
    if cost.weight_bytes:
        gate = max(gate, device.up_free) + machine.transfer_latency_ms + travelling / machine.h2d_bytes_per_ms
        device.up_free = gate
    device.free = max(device.free, gate)
    device.freed_before = freed
    device.stage, device.cost, device.num_actions = stage, cost, 0
