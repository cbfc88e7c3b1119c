"""Dispatch: which device gets which stage run, and how long a step takes then.

```
splits = 1, 1, 1                        splits = 4, 2, 1                     8 micro-batches, 4 devices
device 0: 0:0 ... 0:7 ............      device 0: 0:0 0:1 | 1:4 ... 1:7
device 1: ... 1:0 ... 1:7 ........      device 1: 0:2 0:3 | 2:0 ... 2:7
device 2: ...... 2:0 ... 2:7 .....      device 2: 0:4 0:5 |
device 3: ........................      device 3: 0:6 0:7 | 1:0 ... 1:3
```

[Note: dispatch]
The micro-batches of a round go through the stages together. Stage s cuts them into ``splits[s]`` neighbouring groups,
as equal as they can be, and each group is a stage run of its own: its weights travel to its device, its gradients come
home, and the host adds those of all groups. With r = 1 that is the ring of the RoundPipe paper; with r everywhere it is
r rings of N / r devices, in which the pipeline fills and drains r times as fast; with r = N nothing waits for another
device. r may differ from stage to stage, and need not divide anything.

- *Devices that are alike* get the stage runs in turn, in the order of the stages and of the groups.
- *Devices that differ* get micro-batches one by one, in the order in which they arrive: each goes to the device that
  would end it first, upload of the weights included (list scheduling). A stage is on ``splits[s]`` devices at most.

Either way the stage runs have one order that the lists of all devices are parts of, so that no schedule made here can
deadlock, and the clock below can process them one after the other: [Note: the simulated machine] in ``simulate``, as
long as the host's memory has no limit. That is fast enough for a search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .builders import neighbours, round_robin, rounds_of
from .costs import Machine
from .schedule import Action, Schedule
from .stages import ADDITION_PASSES, StageCost


def dispatch(
    costs: Sequence[StageCost],
    machine: Machine,
    *,
    num_microbatches: int,
    splits: Sequence[int],
    round_size: int | None = None,
    first_device: int = 0,
    num_steps: int = 1,
) -> Schedule:
    """Build the schedule of a step, or of several alike; see [Note: dispatch].

    Args:
        costs: One cost per stage. Where all devices are alike they have no influence.
        machine: As for `simulate`.
        num_microbatches, round_size, num_steps: As for `round_robin`.
        splits: For each stage the most devices that it is on at a time, at least 1. More than there are mean all.
        first_device: Where devices that are alike begin to take turns.

    Raises:
        ValueError: If a count is below 1, or `splits` has not one entry per stage.
    """
    splits = within(splits, machine)
    if machine.is_uniform:
        return round_robin(
            len(costs),
            num_microbatches,
            machine.num_devices,
            round_size=round_size,
            splits=splits,
            first_device=first_device,
            num_steps=num_steps,
        )
    clock = _ListClock(costs, machine, num_microbatches)
    clock.run(splits, rounds_of(range(num_microbatches), round_size))
    begins = range(0, num_steps * num_microbatches, num_microbatches)
    devices = [
        [Action(a.stage_index, begin + a.microbatch_index) for begin in begins for a in r] for r in clock.actions
    ]
    return Schedule(len(costs), num_steps * num_microbatches, tuple(map(tuple, devices)))


def dispatch_ms(
    costs: Sequence[StageCost],
    machine: Machine,
    *,
    num_microbatches: int,
    splits: Sequence[int],
    round_size: int | None = None,
) -> float:
    """Return the time in ms of one step of `dispatch`, with a synchronous optimizer.

    It is the `step_ms` of `simulate`, as long as nothing is shared by the ways of several devices, in the time that it
    takes to add up the actions. Of a host with a limit it knows how long the last additions of gradients take, but not
    that copies slow each other down.

    Args:
        costs, machine, num_microbatches, splits, round_size: As for `dispatch`.
    """
    rounds = rounds_of(range(num_microbatches), round_size)
    num_devices, num_copies, splits = machine.num_devices, 1, within(splits, machine)
    clock: _Clock
    if not machine.is_uniform:
        clock = _ListClock(costs, machine, num_microbatches)
    else:
        clock = _TurnClock(costs, machine, num_microbatches)
        if min(splits) == num_devices and all(len(microbatches) >= num_devices for microbatches in rounds):
            # Every device has micro-batches of its own, and waits for none of another one: the last has the most.
            rounds = [range(m.start + len(m) * (num_devices - 1) // num_devices, m.stop) for m in rounds]
            clock.devices, splits, num_copies = clock.devices[:1], [1] * len(costs), num_devices
    clock.run(splits, rounds)
    done = max(clock.leave(device) for device in clock.devices)
    if math.isfinite(machine.host_bytes_per_ms):
        done = max(done, clock.added_at(machine.host_bytes_per_ms, num_copies))
    done += sum(cost.gradient_bytes for cost in costs) / machine.optimizer_bytes_per_ms
    return max(done, clock.lanes_ms())


def within(splits: Sequence[int], machine: Machine) -> tuple[int, ...]:
    """Return splits over no more devices than the machine has."""
    return tuple(min(count, machine.num_devices) for count in splits)


class _Device:
    """What the next stage run on a device has to know about those before."""

    __slots__ = (
        *("cost", "down_bytes", "down_free", "free", "freed_before", "index", "num_actions", "stage", "starts_at"),
        *("up_bytes", "up_free"),
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.free = self.up_free = self.down_free = self.starts_at = self.freed_before = 0.0
        self.stage = -1
        self.num_actions = self.up_bytes = self.down_bytes = 0
        self.cost = StageCost(0.0)

    def count_bytes(self) -> None:
        """Count what the current stage run has moved."""
        cost, count = self.cost, self.num_actions
        self.up_bytes += cost.weight_bytes + count * cost.input_bytes
        self.down_bytes += cost.gradient_bytes + count * cost.output_bytes


class _Clock:
    """Devices and micro-batches, and how far they have come."""

    def __init__(self, costs: Sequence[StageCost], machine: Machine, num_microbatches: int) -> None:
        self.devices = [_Device(index) for index in range(machine.num_devices)]
        self.costs = costs
        self.ends = [0.0] * num_microbatches
        self.at = [-1] * num_microbatches  # the device on which a micro-batch is
        self.latency_ms = machine.transfer_latency_ms
        self.traits = machine.traits
        self.hop_ms = machine.hop_ms
        self._home: list[list[float]] = [[] for _ in costs]  # when gradients of a stage have come home

    def run(self, splits: Sequence[int], rounds: Sequence[range]) -> None:
        """Let all micro-batches of these rounds go through all stages."""
        for microbatches in rounds:
            for stage, most in enumerate(splits):
                self.run_stage(stage, microbatches, min(most, len(microbatches)))

    def run_stage(self, stage: int, microbatches: range, num_devices: int) -> None:
        """Let the micro-batches of a round go through a stage."""
        raise NotImplementedError

    def leave(self, device: _Device) -> float:
        """The time at which the device's current stage run has left it, and whatever it brought home before."""
        num_bytes = device.cost.gradient_bytes
        if not num_bytes:
            return max(device.free, device.down_free)
        begin = max(device.free, device.down_free)
        return begin + self.latency_ms + num_bytes / self.traits[device.index].d2h_bytes_per_ms

    def added_at(self, host_bytes_per_ms: float, num_copies: int) -> float:
        """The time at which the gradients of all stage runs have been added up, each as often as there are copies."""
        for device in self.devices:
            if device.cost.gradient_bytes:
                self._home[device.stage].append(self.leave(device))
        last = 0.0
        for cost, times in zip(self.costs, self._home, strict=True):
            adding_ms = ADDITION_PASSES * cost.gradient_bytes / host_bytes_per_ms
            added = 0.0
            for index, home in enumerate(sorted(times)):
                added = max(home, added) + (num_copies - (index == 0)) * adding_ms
            last = max(last, added)
        return last

    def lanes_ms(self) -> float:
        """The least time in ms that the busiest lane needs."""
        lanes = []
        for device, traits in zip(self.devices, self.traits, strict=False):
            device.count_bytes()
            lanes += [device.up_bytes / traits.h2d_bytes_per_ms, device.down_bytes / traits.d2h_bytes_per_ms]
        return max(lanes)

    def weights_at(self, device: _Device, cost: StageCost) -> float:
        """The time at which the weights of another stage can be on the device."""
        last, traits = device.cost, self.traits[device.index]
        travelling = cost.weight_bytes
        if device.stage < 0:
            gate = 0.0
        elif last.fits_beside(cost, traits.memory_bytes):
            gate = max(device.starts_at, device.freed_before)
            travelling += device.num_actions * last.input_bytes
        else:
            gate = self.leave(device) if last.gradient_bytes else device.free
        if not cost.weight_bytes:
            return gate
        return max(gate, device.up_free) + self.latency_ms + travelling / traits.h2d_bytes_per_ms

    def change_stage(self, device: _Device, stage: int, weights_at: float) -> None:
        """Let the device go on with another stage, whose weights are there at `weights_at`."""
        freed = device.free
        device.count_bytes()
        if device.cost.gradient_bytes:
            freed = device.down_free = self.leave(device)
            self._home[device.stage].append(freed)
        cost = self.costs[stage]
        if cost.weight_bytes:
            device.up_free = weights_at
        device.free, device.freed_before = max(device.free, weights_at), freed
        device.stage, device.cost, device.num_actions = stage, cost, 0


class _TurnClock(_Clock):
    """Devices that are alike get stage runs in turn."""

    def __init__(self, costs: Sequence[StageCost], machine: Machine, num_microbatches: int) -> None:
        super().__init__(costs, machine, num_microbatches)
        self._turn = 0
        traits = self.traits[0]
        self._durations = [cost.streamed_ms(traits) for cost in costs]
        self._hops = [0.0, *(self.hop_ms + cost.handover_ms(self.latency_ms, traits, traits) for cost in costs[:-1])]

    def run_stage(self, stage: int, microbatches: range, num_devices: int) -> None:
        ends, at, hop, duration = self.ends, self.at, self._hops[stage], self._durations[stage]
        for index in range(num_devices):
            part = microbatches if num_devices == 1 else neighbours(microbatches, num_devices, index)
            device = self.devices[self._turn]
            self._turn = (self._turn + 1) % len(self.devices)
            if device.stage != stage:
                self.change_stage(device, stage, self.weights_at(device, self.costs[stage]))
            here, first, free = device.index, part.start, device.free
            if not device.num_actions:
                device.starts_at = max(free, ends[first] if at[first] == here else ends[first] + hop)
            for microbatch in part:
                arrival = ends[microbatch] if at[microbatch] == here else ends[microbatch] + hop
                if arrival > free:
                    free = arrival
                free += duration
                ends[microbatch] = free
                at[microbatch] = here
            device.num_actions += len(part)
            device.free = free


class _ListClock(_Clock):
    """Devices that differ get micro-batches one by one: each goes to the device that ends it first."""

    def __init__(self, costs: Sequence[StageCost], machine: Machine, num_microbatches: int) -> None:
        super().__init__(costs, machine, num_microbatches)
        self.actions: list[list[Action]] = [[] for _ in self.devices]
        self._durations = [[cost.streamed_ms(traits) for cost in costs] for traits in self.traits]
        self._fitting = [[device for device in self.devices if self._fits(device, cost)] for cost in costs]

    def run_stage(self, stage: int, microbatches: range, num_devices: int) -> None:
        used: list[_Device] = []
        weights_at: dict[int, float] = {}
        for microbatch in sorted(microbatches, key=self.ends.__getitem__):
            best: tuple[float, bool, int] | None = None
            for device in used if len(used) >= num_devices else self._fitting[stage]:
                index = device.index
                begin = self._arrival(microbatch, stage, device)
                if device.stage == stage:
                    begin = max(begin, device.free)
                else:
                    if index not in weights_at:
                        weights_at[index] = max(device.free, self.weights_at(device, self.costs[stage]))
                    begin = max(begin, weights_at[index])
                found = (begin + self._durations[index][stage], device.stage != stage, index)
                if best is None or found < best:
                    best = found
            assert best is not None
            end, _, index = best
            device = self.devices[index]
            if device.stage != stage:
                self.change_stage(device, stage, self.weights_at(device, self.costs[stage]))
            if device not in used:
                used.append(device)
            if not device.num_actions:
                device.starts_at = end - self._durations[index][stage]
            device.num_actions += 1
            device.free = self.ends[microbatch] = end
            self.at[microbatch] = index
            self.actions[index].append(Action(stage, microbatch))

    def _arrival(self, microbatch: int, stage: int, device: _Device) -> float:
        before = self.at[microbatch]
        if before in (-1, device.index):
            return self.ends[microbatch]
        way_ms = self.costs[stage - 1].handover_ms(self.latency_ms, self.traits[before], self.traits[device.index])
        return self.ends[microbatch] + self.hop_ms + way_ms

    def _fits(self, device: _Device, cost: StageCost) -> bool:
        """Whether a stage, which fits on the largest device, fits on this one."""
        limits = [math.inf if traits.memory_bytes is None else traits.memory_bytes for traits in self.traits]
        limit = limits[device.index]
        return limit == max(limits) or cost.resident_bytes + cost.workspace_bytes <= limit
