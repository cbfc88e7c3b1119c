"""Run a schedule on paper: when would each action start and end, and what would it take.

```
h2d      [weights 0][weights 2     ]             [weights 4 ]        the next stage run's, if both fit
compute             [0:0][0:1][0:2][2:0][2:1][2:2]            ...
d2h                                [gradients 0  ]                   then the memory is free
```

[Note: the simulated machine]
Actions are processed in the order in which they start. An action starts when its device is free, its micro-batch has
arrived and the weights of its stage are there.

- Activations stream: while an action computes, the inputs of the next one come up and the outputs of the last one go
  down, so that an action takes at least as long as its activations on either lane. Between stages on different devices
  a micro-batch is under way for ``hop_ms``, two latencies, and its boundary tensor's time down and up.
- Weights go up once per stage run (see [Note: stage runs]). The upload for the next stage run begins when the one
  before it starts to compute, if both fit into the device's memory beside the activations, else when that one has left
  the device. It shares the lane with the activations of the stage run before, which go first.
- Gradients come down after the stage run, and its memory is free when they have arrived.
- The host memory is one server for all weights and gradients under way, in the order in which they set off, and so is
  each link that devices share, in each direction. Where a stage has several stage runs in a step, the host adds their
  gradients up one by one: from the second one on, that reads the sum and the part, and writes the sum.
- Ranks, each on a machine like this one, add up the gradients of one stage after the other over the network: those of
  a stage when all of its stage runs have been added up here, and those of the stage before over the network.
- The optimizer runs on the host after the last gradient of a step. A synchronous one holds up the next step. Behind an
  asynchronous one, step t waits for the update after step t - 2 only (staleness 1; RoundPipe paper, arXiv 2604.27085,
  section on the consistency protocol).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, product
from typing import Literal, get_args

from .costs import DeviceTraits, Machine
from .schedule import Action, Schedule
from .spans import Span
from .stages import ADDITION_PASSES, StageCost
from .timeline import Simulation, Timeline

Optimizer = Literal["synchronous", "asynchronous"]
Costs = Sequence[StageCost] | Callable[[Action], float]


def simulate(
    schedule: Schedule,
    costs: Costs,
    machine: Machine | None = None,
    *,
    recompute_ahead: bool = False,
    microbatches_per_step: int | None = None,
    optimizer: Optimizer = "synchronous",
) -> Simulation:
    """Run the schedule as discrete events; see [Note: the simulated machine].

    Args:
        schedule: What runs where, in which order.
        costs: One cost per stage, for instance from `stage_costs`; or a function that gives the time of an action in
            ms, if nothing has to travel.
        machine: Memory and links; None for devices that share the host's memory. A device's memory is not enforced
            here, only avoided: compare `Simulation.memory_bytes` with it.
        recompute_ahead: Whether the recompute of a B stage may run before the gradient has arrived.
        microbatches_per_step: Where the next step begins, if the schedule holds several; None for one step.
        optimizer: How steps depend on each other.

    Raises:
        ValueError: If a duration is not a finite number >= 0, or counts do not match.
    """
    machine = machine or Machine(schedule.num_devices)
    per_step = schedule.num_microbatches if microbatches_per_step is None else microbatches_per_step
    if machine.num_devices != schedule.num_devices:
        raise ValueError(
            f"The schedule has {schedule.num_devices} devices and the machine {machine.num_devices}: make one for "
            "the other."
        )
    if not callable(costs) and len(costs) != schedule.num_stages:
        raise ValueError(
            f"The schedule has {schedule.num_stages} stages and costs has {len(costs)} entries: make the costs from "
            "the same partition."
        )
    if per_step < 1 or schedule.num_microbatches % per_step:
        raise ValueError(
            f"microbatches_per_step={per_step} must divide the schedule's {schedule.num_microbatches} micro-batches."
        )
    if optimizer not in get_args(Optimizer):
        raise ValueError(f"optimizer must be one of {get_args(Optimizer)}, got {optimizer!r}: pass one of them.")
    return _Run(schedule, costs, machine, recompute_ahead, per_step, optimizer).run()


@dataclass
class _StageRun:
    """Consecutive actions of one stage and step on a device, and when things happened to them."""

    stage: int
    step: int
    cost: StageCost
    actions: list[Action] = field(default_factory=list)
    weights_at: float | None = None
    starts_at: float = 0.0
    freed_at: float = 0.0


class _Server:
    """Bandwidth that several devices share: it serves them in the order in which they ask."""

    def __init__(self, bytes_per_ms: float) -> None:
        self.bytes_per_ms = bytes_per_ms
        self.free = 0.0

    def serve(self, now: float, num_bytes: int) -> float:
        """Take bytes, behind those before; returns when they are through."""
        self.free = max(self.free, now) + num_bytes / self.bytes_per_ms
        return self.free


@dataclass
class _Device:
    """A device: its stage runs, how far it has come, when it and its lanes are free, and what it took."""

    index: int
    runs: list[_StageRun]
    traits: DeviceTraits
    servers: dict[str, list[_Server]]  # of each lane, what others use as well
    run_index: int = 0
    position: int = 0  # of the next action in its stage run
    free: float = 0.0
    lane_free: dict[str, float] = field(default_factory=lambda: {"h2d": 0.0, "d2h": 0.0})
    peak_bytes: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    spans: list[Span] = field(default_factory=list)
    is_queued: bool = False


@dataclass
class _Run:
    """The state of a simulation. The fields are the arguments of `simulate`."""

    schedule: Schedule
    costs: Costs
    machine: Machine
    recompute_ahead: bool
    per_step: int
    optimizer: Optimizer

    def __post_init__(self) -> None:
        schedule, num_microbatches = self.schedule, self.schedule.num_microbatches
        self.num_steps = num_microbatches // self.per_step
        self.cost_of = self._cost_by_action()
        # Gradients come down once per stage run, but every parameter is updated, and added up over ranks, once a step.
        gradient_bytes = [] if callable(self.costs) else [cost.gradient_bytes for cost in self.costs]
        self.optimizer_ms = sum(gradient_bytes) / self.machine.optimizer_bytes_per_ms
        self.network_ms = [self.machine.all_reduce_ms(size) if size else 0.0 for size in gradient_bytes]
        self.host = _Server(self.machine.host_bytes_per_ms)
        shared = [self.host] if math.isfinite(self.machine.host_bytes_per_ms) else []
        lanes = [{"h2d": [*shared], "d2h": [*shared]} for _ in schedule.devices]
        for link, lane in product(self.machine.shared_links, ("h2d", "d2h")):
            server = _Server(link.bytes_per_ms)
            for device in link.devices:
                lanes[device][lane].append(server)
        self.devices = [
            _Device(index, self._stage_runs(actions), self.machine.traits[index], lanes[index])
            for index, actions in enumerate(schedule.devices)
        ]
        self.sum_at: dict[tuple[int, int], float] = {}  # when the last gradients of a stage and step were added up
        self.added_bytes = 0
        self.network_free = 0.0
        self.now, self.late_ms = 0.0, 0.0
        self.transfers: list[Span] = []
        # Per micro-batch: the end of its last action, the end of its last forward, its next stage.
        self.ends, self.forward_ends = [0.0] * num_microbatches, [0.0] * num_microbatches
        self.next_stage = [0] * num_microbatches
        # Per step: actions that are left, the last gradient's arrival, the end of the update.
        self.left = [self.per_step * schedule.num_stages] * self.num_steps
        self.done, self.updated = [0.0] * self.num_steps, [0.0] * self.num_steps

    def _cost_by_action(self) -> dict[Action, StageCost]:
        known, costs = {}, self.costs
        for action in chain.from_iterable(self.schedule.devices):
            cost = StageCost(costs(action)) if callable(costs) else costs[action.stage_index]
            if not (math.isfinite(cost.duration_ms) and cost.duration_ms >= 0):
                raise ValueError(
                    f"the duration of action {action.format()} must be a finite number of ms >= 0, got "
                    f"{cost.duration_ms!r}: measure it again."
                )
            known[action] = cost
        return known

    def _stage_runs(self, actions: Sequence[Action]) -> list[_StageRun]:
        runs: list[_StageRun] = []
        for action in actions:
            stage, step = action.stage_index, action.microbatch_index // self.per_step
            if not runs or (runs[-1].stage, runs[-1].step) != (stage, step):
                runs.append(_StageRun(stage, step, self.cost_of[action]))
            runs[-1].actions.append(action)
        return runs

    def run(self) -> Simulation:
        """Process the actions in the order in which they start."""
        queue: list[tuple[float, int]] = []
        woken: Iterable[int] = range(len(self.devices))
        while True:
            for device in map(self.devices.__getitem__, woken):
                if not device.is_queued and (start := self._start_of_next(device)) is not None:
                    heappush(queue, (start, device.index))
                    device.is_queued = True
            if not queue:
                return self._result()
            start, index = heappop(queue)
            self.devices[index].is_queued = False
            woken = self._process(self.devices[index], start)

    def _start_of_next(self, device: _Device) -> float | None:
        """When the next action of the device can start; None if that is not known yet."""
        if device.run_index == len(device.runs):
            return None
        action = device.runs[device.run_index].actions[device.position]
        microbatch = action.microbatch_index
        if action.stage_index != self.next_stage[microbatch]:
            return None
        weights_at = self._weights_at(device, device.run_index)
        if weights_at is None:
            return None
        cost = self.cost_of[action]
        arrival = self._arrival(action, device)
        if self.recompute_ahead and cost.recompute_ms:
            arrival = max(arrival - cost.recompute_ms / device.traits.speed, self.forward_ends[microbatch])
        return max(device.free, weights_at, arrival)

    def _arrival(self, action: Action, device: _Device) -> float:
        end = self.ends[action.microbatch_index]
        if action.stage_index == 0:
            return end
        before = Action(action.stage_index - 1, action.microbatch_index)
        if self.schedule.device_of(before) == device.index:
            return end
        source = self.devices[self.schedule.device_of(before)].traits
        way_ms = self.cost_of[before].handover_ms(self.machine.transfer_latency_ms, source, device.traits)
        return end + self.machine.hop_ms + way_ms

    def _weights_at(self, device: _Device, index: int) -> float | None:
        """When the weights of a stage run are on the device; books the upload when it is asked for the first time.

        None if the step's weights are not known to be updated yet.
        """
        run, cost = device.runs[index], device.runs[index].cost
        if run.weights_at is not None:
            return run.weights_at
        needed = run.step - (2 if self.optimizer == "asynchronous" else 1)
        if needed >= 0 and self.left[needed]:
            return None
        gate = self.updated[needed] if needed >= 0 else 0.0
        travelling, resident, workspace = cost.weight_bytes, cost.resident_bytes, cost.workspace_bytes
        previous = device.runs[index - 1] if index else None
        if previous is not None and previous.cost.fits_beside(cost, device.traits.memory_bytes):
            gate = max(gate, previous.starts_at, device.runs[index - 2].freed_at if index > 1 else 0.0)
            travelling += len(previous.actions) * previous.cost.input_bytes
            resident += previous.cost.resident_bytes
            workspace = max(workspace, previous.cost.workspace_bytes)
        elif previous is not None:
            gate = max(gate, previous.freed_at)
        device.peak_bytes = max(device.peak_bytes, resident + workspace)
        lane_ms = travelling / device.traits.h2d_bytes_per_ms
        run.weights_at = self._move(device, "h2d", gate, run, cost.weight_bytes, lane_ms)
        return run.weights_at

    def _move(self, device: _Device, lane: str, begin: float, run: _StageRun, num_bytes: int, lane_ms: float) -> float:
        """Book weights or gradients on a lane and on the host memory; returns when they have arrived."""
        if not num_bytes:
            return begin
        begin = max(begin, device.lane_free[lane])
        end = begin + self.machine.transfer_latency_ms + lane_ms
        end = max([end, *(server.serve(self.now, num_bytes) for server in device.servers[lane])])
        device.lane_free[lane] = end
        if end > begin:
            what = "weights" if lane == "h2d" else "gradients"
            label = f"{what} {run.cost.label or run.stage}"
            self.transfers.append(Span(device.index, lane, begin, end, run.stage, label=label))
        return end

    def _process(self, device: _Device, start: float) -> Iterable[int]:
        """Run the next action of the device; returns the devices whose next action may be known now."""
        run = device.runs[device.run_index]
        action = run.actions[device.position]
        cost, microbatch = self.cost_of[action], action.microbatch_index
        self.now = start
        if device.position == 0:
            self._begin(device, run, start)
        speed = device.traits.speed
        duration = cost.duration_ms / speed
        if self.recompute_ahead and cost.recompute_ms:
            # Held back by the forward instead of the gradient, the recompute may end before the gradient is there.
            arrival = self._arrival(action, device)
            recomputed = max(start + cost.recompute_ms / speed, arrival)
            duration = max(duration, recomputed + cost.compute_ms / speed - start)
        end = start + max(duration, cost.streamed_ms(device.traits))
        span = Span(device.index, "compute", start, start + duration, run.stage, microbatch, cost.label)
        device.spans.append(span)
        device.free = self.ends[microbatch] = end
        if not cost.recompute_ms:
            self.forward_ends[microbatch] = start  # of the fused stage: what the B stages need is older
        device.up_bytes += cost.input_bytes
        device.down_bytes += cost.output_bytes
        for lane, num_bytes in (("h2d", cost.input_bytes), ("d2h", cost.output_bytes)):
            for server in device.servers[lane]:
                server.free += num_bytes / server.bytes_per_ms
        self.next_stage[microbatch] += 1
        device.position += 1
        if device.position == len(run.actions):
            self._end(device, run, end)
        return self._woken(device, action, run.step)

    def _begin(self, device: _Device, run: _StageRun, start: float) -> None:
        run.starts_at, following = start, device.run_index + 1
        if device.run_index:
            self.late_ms += max(0.0, start - max(device.free, self._arrival(run.actions[0], device)))
        if following < len(device.runs) and run.cost.fits_beside(
            device.runs[following].cost, device.traits.memory_bytes
        ):
            # Booked as soon as it can begin, so that the host memory serves it in its turn.
            self._weights_at(device, following)

    def _end(self, device: _Device, run: _StageRun, end: float) -> None:
        num_bytes = run.cost.gradient_bytes
        run.freed_at = self._move(device, "d2h", end, run, num_bytes, num_bytes / device.traits.d2h_bytes_per_ms)
        device.up_bytes += run.cost.weight_bytes
        device.down_bytes += num_bytes
        self.done[run.step] = max(self.done[run.step], self._added_at(run))
        device.run_index, device.position = device.run_index + 1, 0

    def _added_at(self, run: _StageRun) -> float:
        """When the gradients of a stage run are in the sum on the host."""
        key, added_at = (run.stage, run.step), run.freed_at
        if key in self.sum_at:
            num_bytes = ADDITION_PASSES * run.cost.gradient_bytes
            self.added_bytes += num_bytes
            added_at = max(added_at, self.sum_at[key]) + num_bytes / self.machine.host_bytes_per_ms
            added_at = max(added_at, self.host.serve(self.now, num_bytes))
        self.sum_at[key] = added_at
        return added_at

    def _reduced_at(self, step: int) -> float:
        """When the gradients of a step have been added up over all ranks."""
        for stage, ms in enumerate(self.network_ms):
            if ms:
                self.network_free = max(self.network_free, self.sum_at[stage, step]) + ms
        return self.network_free

    def _woken(self, device: _Device, action: Action, step: int) -> Iterable[int]:
        self.left[step] -= 1
        if self.left[step] == 0:
            before = self.updated[step - 1] if step else 0.0
            self.done[step] = max(self.done[step], self._reduced_at(step))
            self.updated[step] = max(before, self.done[step]) + self.optimizer_ms
            return range(len(self.devices))
        if action.stage_index + 1 == self.schedule.num_stages:
            return (device.index,)
        return device.index, self.schedule.device_of(Action(action.stage_index + 1, action.microbatch_index))

    def _result(self) -> Simulation:
        if any(self.left):
            raise ValueError(
                "The schedule runs a step before one whose weights it needs: order the steps on every device, or "
                "leave microbatches_per_step out."
            )
        spans = chain.from_iterable(device.spans for device in self.devices)
        bounds = self._lower_bounds()
        return Simulation(
            timeline=Timeline((*spans, *self.transfers), self.schedule.num_devices),
            step_ms=max(self._step_ms(), *bounds.values()),
            optimizer_ms=self.optimizer_ms,
            memory_bytes=tuple(device.peak_bytes for device in self.devices),
            h2d_bytes=tuple(device.up_bytes for device in self.devices),
            d2h_bytes=tuple(device.down_bytes for device in self.devices),
            late_upload_ms=self.late_ms,
            lower_bounds_ms=bounds,
        )

    def _step_ms(self) -> float:
        """Of few steps that overlap the mean may lie below a bound, which the many of a run keep; so may one step in
        which activations find the host memory busy."""
        if self.optimizer == "synchronous":
            return self.updated[-1] / self.num_steps
        if self.num_steps == 1:
            return self.done[0]
        return (self.done[-1] - self.done[0]) / (self.num_steps - 1)

    def _lower_bounds(self) -> dict[str, float]:
        machine, steps, devices = self.machine, self.num_steps, self.devices
        work_ms = math.fsum(self.cost_of[action].duration_ms for row in self.schedule.devices for action in row)
        moved = sum(device.up_bytes + device.down_bytes for device in devices)
        network = {"network": math.fsum(self.network_ms)} if machine.num_ranks > 1 else {}
        return {
            "compute": work_ms / math.fsum(device.traits.speed for device in devices) / steps,
            "h2d": max(device.up_bytes / device.traits.h2d_bytes_per_ms for device in devices) / steps,
            "d2h": max(device.down_bytes / device.traits.d2h_bytes_per_ms for device in devices) / steps,
            "host memory": (moved + self.added_bytes) / machine.host_bytes_per_ms / steps,
            "optimizer": self.optimizer_ms,
            **network,
        }
