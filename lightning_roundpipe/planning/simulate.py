"""Run a schedule on paper: when would each action start and end, and what would it take.

[Note: the simulated machine]
Actions are processed in the order in which they start. An action starts when its device is free, its micro-batch has
arrived and the weights of its stage are there.

- Activations stream: while an action computes, the inputs of the next one come up and the outputs of the last one go
  down, so that an action takes at least as long as its activations on either lane. Between stages on different devices
  a micro-batch is under way for ``hop_ms``, two latencies, and its boundary tensor's time down and up.
- Weights go up once per slot (see [Note: slots]). The upload of the next slot begins when the slot before it starts to
  compute, if both fit into the device's memory beside the activations, else when that slot has left the device. It
  shares the lane with the activations of that slot, which go first.
- Gradients come down after the slot, and its memory is free when they have arrived.
- The host memory is one server for all weights and gradients under way, in the order in which they set off.
- The optimizer runs on the host after the last gradient of a step. A synchronous one holds up the next step. Behind an
  asynchronous one, step t waits for the update after step t - 2 only (staleness 1; RoundPipe paper, arXiv 2604.27085,
  section on the consistency protocol).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, get_args

from .machine import Machine
from .schedule import Action, Schedule
from .stages import StageCost
from .timeline import Span, Timeline

Optimizer = Literal["synchronous", "asynchronous"]
Costs = Sequence[StageCost] | Callable[[Action], float]


@dataclass(frozen=True)
class Simulation:
    """What came out.

    Attributes:
        timeline: One "compute" span per action, device by device in list order, and "h2d" and "d2h" spans for weights
            and gradients; times in ms from the begin.
        step_ms: Time of a step in ms. Synchronous optimizer: with the optimizer. Asynchronous: the mean distance from
            the end of one step to the end of the next; the makespan if only one step was simulated. Never less than one
            of `lower_bounds_ms`.
        optimizer_ms: Time of the optimizer for one step, in ms.
        memory_bytes: Peak per device: weights and gradients of the slots that are there, and the activations.
        h2d_bytes, d2h_bytes: Bytes that travelled per device, all steps together.
        late_upload_ms: How long devices waited for weights and for nothing else, all together, after their first slot.
        lower_bounds_ms: What each resource alone would need for a step, in ms: "compute", "h2d", "d2h",
            "host memory", "optimizer".
    """

    timeline: Timeline
    step_ms: float
    optimizer_ms: float
    memory_bytes: tuple[int, ...]
    h2d_bytes: tuple[int, ...]
    d2h_bytes: tuple[int, ...]
    late_upload_ms: float
    lower_bounds_ms: dict[str, float]

    @property
    def bound_by(self) -> str:
        """What to improve first, in words: a resource that is busy nearly all the time, or where most time is lost."""
        bounds = self.lower_bounds_ms
        name = max(bounds, key=bounds.__getitem__)
        if bounds[name] >= 0.9 * self.step_ms or bounds[name] > bounds["compute"]:
            return name
        parts = self.timeline.bubble_parts
        if self.step_ms - self.timeline.makespan_ms > self.timeline.bubble_ratio * self.timeline.makespan_ms:
            return "optimizer"
        if parts["fill"] + parts["drain"] >= parts["inside"]:
            return "fill and drain of the pipeline"
        inside_ms = parts["inside"] * self.timeline.makespan_ms * self.timeline.num_devices
        return "uploads that come late" if self.late_upload_ms > 0.5 * inside_ms else "waiting inside the step"


def simulate(
    schedule: Schedule,
    costs: Costs,
    machine: Machine | None = None,
    *,
    hop_ms: float = 0.0,
    prefetch: bool = True,
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
        hop_ms: Additional time in ms for which a micro-batch is under way between stages on different devices.
        prefetch: Whether weights are uploaded during the slot before.
        recompute_ahead: Whether the recompute of a B stage may run before the gradient has arrived.
        microbatches_per_step: Where the next step begins, if the schedule holds several; None for one step.
        optimizer: How steps depend on each other.

    Raises:
        ValueError: If a duration or `hop_ms` is not a finite number >= 0, or counts do not match.
    """
    machine = machine or Machine(schedule.num_devices)
    _check(schedule, costs, machine, hop_ms, microbatches_per_step)
    if optimizer not in get_args(Optimizer):
        raise ValueError(f"optimizer must be one of {get_args(Optimizer)}, got {optimizer!r}: pass one of them.")
    run = _Run(schedule, costs, machine, hop_ms, prefetch, recompute_ahead, microbatches_per_step, optimizer)
    return run.run()


def _check(schedule: Schedule, costs: Costs, machine: Machine, hop_ms: float, per_step: int | None) -> None:
    check_time("hop_ms", hop_ms)
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
    if per_step is not None and (per_step < 1 or schedule.num_microbatches % per_step):
        raise ValueError(
            f"microbatches_per_step={per_step} must divide the schedule's {schedule.num_microbatches} micro-batches."
        )


def check_time(name: str, value: float) -> None:
    """Raise a ValueError unless the value is a finite number of ms >= 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of ms >= 0, got {value!r}: measure it again.")


@dataclass
class _Slot:
    """A run of consecutive actions of one stage and step on a device, and when things happened to it."""

    stage: int
    step: int
    cost: StageCost
    num_actions: int = 0
    weights_at: float | None = None
    starts_at: float = 0.0
    freed_at: float = 0.0


class _Run:
    """The state of a simulation."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        machine: Machine,
        hop_ms: float,
        prefetch: bool,
        recompute_ahead: bool,
        per_step: int | None,
        optimizer: Optimizer,
    ) -> None:
        self.schedule, self.machine, self.hop_ms, self.prefetch = schedule, machine, hop_ms, prefetch
        self.recompute_ahead, self.asynchronous = recompute_ahead, optimizer == "asynchronous"
        self.per_step = per_step or schedule.num_microbatches
        self.num_steps = schedule.num_microbatches // self.per_step
        self.cost_of = self._costs_by_action(costs)
        n = schedule.num_devices
        self.slots, self.slot_of = self._make_slots()
        self.column, self.free, self.up_free, self.down_free = [0] * n, [0.0] * n, [0.0] * n, [0.0] * n
        self.peak, self.up_bytes, self.down_bytes = [0] * n, [0] * n, [0] * n
        self.now, self.host_free, self.late_ms = 0.0, 0.0, 0.0
        self.spans: list[list[Span]] = [[] for _ in range(n)]
        self.transfers: list[Span] = []
        self.ends = [0.0] * schedule.num_microbatches
        self.forward_ends = [0.0] * schedule.num_microbatches
        self.next_stage = [0] * schedule.num_microbatches
        self.left = [self.per_step * schedule.num_stages] * self.num_steps
        self.done, self.updated = [0.0] * self.num_steps, [0.0] * self.num_steps
        self.optimizer_ms = self._optimizer_ms(costs)

    def _costs_by_action(self, costs: Costs) -> Callable[[Action], StageCost]:
        if not callable(costs):
            for stage, cost in enumerate(costs):
                check_time(f"the duration of stage {stage}", cost.duration_ms)
            return lambda action: costs[action.stage_index]
        made: dict[Action, StageCost] = {}
        for actions in self.schedule.devices:
            for action in actions:
                duration = costs(action)
                check_time(f"the duration of action {action.format()}", duration)
                made[action] = StageCost(duration)
        return made.__getitem__

    def _optimizer_ms(self, costs: Costs) -> float:
        """The gradients of a slot are downloaded once per slot, but every parameter is updated once per step."""
        if callable(costs):
            return 0.0
        return sum(cost.gradient_bytes for cost in costs) / self.machine.optimizer_bytes_per_ms

    def _make_slots(self) -> tuple[list[list[_Slot]], list[list[int]]]:
        slots: list[list[_Slot]] = []
        slot_of: list[list[int]] = []
        for actions in self.schedule.devices:
            row: list[_Slot] = []
            indices = []
            for action in actions:
                key = (action.stage_index, action.microbatch_index // self.per_step)
                if not row or (row[-1].stage, row[-1].step) != key:
                    row.append(_Slot(*key, self.cost_of(action)))
                row[-1].num_actions += 1
                indices.append(len(row) - 1)
            slots.append(row)
            slot_of.append(indices)
        return slots, slot_of

    def run(self) -> Simulation:
        """Process the actions in the order in which they start."""
        queue: list[tuple[float, int]] = []
        is_queued = [False] * self.schedule.num_devices
        woken: Sequence[int] = range(self.schedule.num_devices)
        while True:
            for device in woken:
                if not is_queued[device] and (start := self._start_of_next(device)) is not None:
                    heappush(queue, (start, device))
                    is_queued[device] = True
            if not queue:
                return self._result()
            start, device = heappop(queue)
            is_queued[device] = False
            woken = self._process(device, start)

    def _start_of_next(self, device: int) -> float | None:
        """When the next action of the device can start; None if that is not known yet."""
        column = self.column[device]
        actions = self.schedule.devices[device]
        if column == len(actions):
            return None
        action = actions[column]
        microbatch = action.microbatch_index
        if action.stage_index != self.next_stage[microbatch]:
            return None
        slot_index = self.slot_of[device][column]
        weights_at = self._weights_at(device, slot_index)
        if weights_at is None:
            return None
        cost = self.cost_of(action)
        arrival = self._arrival(action, device, cost)
        if self.recompute_ahead and cost.recompute_ms:
            arrival = max(arrival - cost.recompute_ms, self.forward_ends[microbatch])
        return max(self.free[device], weights_at, arrival)

    def _arrival(self, action: Action, device: int, cost: StageCost) -> float:
        end = self.ends[action.microbatch_index]
        if action.stage_index == 0:
            return end
        before = Action(action.stage_index - 1, action.microbatch_index)
        if self.schedule.device_of(before) == device:
            return end
        return end + self.hop_ms + handover_ms(self.cost_of(before), self.machine)

    def _weights_at(self, device: int, index: int) -> float | None:
        """When the weights of a slot are on the device; books the upload when it is asked for the first time."""
        slot = self.slots[device][index]
        if slot.weights_at is not None:
            return slot.weights_at
        gate = self._released_at(slot.step)
        if gate is None:
            return None
        previous = self.slots[device][index - 1] if index else None
        travelling = slot.cost.weight_bytes
        resident = slot.cost.resident_bytes
        if previous is not None:
            if self._overlap(previous, slot):
                gate = max(gate, previous.starts_at, self.slots[device][index - 2].freed_at if index > 1 else 0.0)
                travelling += previous.num_actions * previous.cost.input_bytes
                resident += previous.cost.resident_bytes
                workspace = max(previous.cost.workspace_bytes, slot.cost.workspace_bytes)
            else:
                gate = max(gate, previous.freed_at)
                workspace = slot.cost.workspace_bytes
        else:
            workspace = slot.cost.workspace_bytes
        self.peak[device] = max(self.peak[device], resident + workspace)
        machine = self.machine
        slot.weights_at = self._move(
            device, "h2d", gate, slot, slot.cost.weight_bytes, travelling / machine.h2d_bytes_per_ms, self.up_free
        )
        return slot.weights_at

    def _prefetch(self, device: int, index: int) -> None:
        """Book the upload of a slot as soon as it can begin, so that the host memory serves it in its turn."""
        slots = self.slots[device]
        if index < len(slots) and self._overlap(slots[index - 1], slots[index]):
            self._weights_at(device, index)

    def _overlap(self, previous: _Slot, slot: _Slot) -> bool:
        """Whether the weights of a slot are uploaded while the one before it is on the device."""
        limit = self.machine.device_memory_bytes
        return self.prefetch and (limit is None or fit_together(previous.cost, slot.cost, limit))

    def _released_at(self, step: int) -> float | None:
        """When the weights of a step are ready; None if that is not known yet."""
        needed = step - (2 if self.asynchronous else 1)
        if needed < 0:
            return 0.0
        return None if self.left[needed] else self.updated[needed]

    def _move(
        self, device: int, lane: str, begin: float, slot: _Slot, num_bytes: int, lane_ms: float, free: list[float]
    ) -> float:
        """Book weights or gradients on a lane and on the host memory; returns when they have arrived."""
        if not num_bytes:
            return begin
        machine = self.machine
        begin = max(begin, free[device])
        end = begin + machine.transfer_latency_ms + lane_ms
        if machine.host_bytes_per_ms < math.inf:
            self.host_free = max(self.host_free, self.now) + num_bytes / machine.host_bytes_per_ms
            end = max(end, self.host_free)
        free[device] = end
        if end == begin:
            return end
        what = "weights" if lane == "h2d" else "gradients"
        label = f"{what} {slot.cost.label or slot.stage}"
        self.transfers.append(Span(device, lane, begin, end, slot.stage, label=label))
        return end

    def _process(self, device: int, start: float) -> Sequence[int]:
        """Run the next action of the device; returns the devices whose next action may be known now."""
        column = self.column[device]
        action = self.schedule.devices[device][column]
        slot_index = self.slot_of[device][column]
        slot, cost = self.slots[device][slot_index], self.cost_of(action)
        microbatch = action.microbatch_index
        self.now = start
        if column == 0 or self.slot_of[device][column - 1] != slot_index:
            slot.starts_at = start
            if column:
                self.late_ms += max(0.0, start - max(self.free[device], self._arrival(action, device, cost)))
            self._prefetch(device, slot_index + 1)
        duration = cost.duration_ms
        if self.recompute_ahead and cost.recompute_ms:
            # Held back by the forward instead of the gradient, the recompute may end before the gradient is there.
            arrival = self._arrival(action, device, cost)
            duration = max(duration, max(start + cost.recompute_ms, arrival) + cost.compute_ms - start)
        end = start + max(duration, effective_ms(cost, self.machine))
        computed = start + duration
        self.spans[device].append(Span(device, "compute", start, computed, action.stage_index, microbatch, cost.label))
        self.free[device] = self.ends[microbatch] = end
        if not cost.recompute_ms:
            self.forward_ends[microbatch] = start  # of the fused stage: what the B stages need is older
        self.up_bytes[device] += cost.input_bytes
        self.down_bytes[device] += cost.output_bytes
        self.host_free += (cost.input_bytes + cost.output_bytes) / self.machine.host_bytes_per_ms
        self.column[device] += 1
        self.next_stage[microbatch] += 1
        if column + 1 == len(self.slot_of[device]) or self.slot_of[device][column + 1] != slot_index:
            self._end_slot(device, slot, end)
        return self._wake(device, action, slot.step)

    def _end_slot(self, device: int, slot: _Slot, end: float) -> None:
        num_bytes = slot.cost.gradient_bytes
        lane_ms = num_bytes / self.machine.d2h_bytes_per_ms
        slot.freed_at = self._move(device, "d2h", end, slot, num_bytes, lane_ms, self.down_free)
        self.up_bytes[device] += slot.cost.weight_bytes
        self.down_bytes[device] += num_bytes
        self.done[slot.step] = max(self.done[slot.step], slot.freed_at)

    def _wake(self, device: int, action: Action, step: int) -> Sequence[int]:
        self.left[step] -= 1
        if self.left[step] == 0:
            before = self.updated[step - 1] if step else 0.0
            self.updated[step] = max(before, self.done[step]) + self.optimizer_ms
            return range(self.schedule.num_devices)
        if action.stage_index + 1 == self.schedule.num_stages:
            return (device,)
        return device, self.schedule.device_of(Action(action.stage_index + 1, action.microbatch_index))

    def _result(self) -> Simulation:
        if any(self.left):
            raise ValueError(
                "The schedule runs a step before one whose weights it needs: order the steps on every device, or "
                "leave microbatches_per_step out."
            )
        spans = [span for row in self.spans for span in row]
        timeline = Timeline((*spans, *self.transfers), self.schedule.num_devices)
        bounds = self._lower_bounds()
        return Simulation(
            timeline,
            max(self._step_ms(), *bounds.values()),
            self.optimizer_ms,
            tuple(self.peak),
            tuple(self.up_bytes),
            tuple(self.down_bytes),
            self.late_ms,
            bounds,
        )

    def _step_ms(self) -> float:
        """Of few steps that overlap the mean may lie below a bound, which the many of a run keep; so may one step in
        which activations find the host memory busy."""
        if not self.asynchronous:
            return self.updated[-1] / self.num_steps
        if self.num_steps == 1:
            return self.done[0]
        return (self.done[-1] - self.done[0]) / (self.num_steps - 1)

    def _lower_bounds(self) -> dict[str, float]:
        machine, steps = self.machine, self.num_steps
        work_ms = math.fsum(self.cost_of(action).duration_ms for row in self.schedule.devices for action in row)
        total_bytes = sum(self.up_bytes) + sum(self.down_bytes)
        return {
            "compute": work_ms / machine.num_devices / steps,
            "h2d": max(self.up_bytes) / machine.h2d_bytes_per_ms / steps,
            "d2h": max(self.down_bytes) / machine.d2h_bytes_per_ms / steps,
            "host memory": total_bytes / machine.host_bytes_per_ms / steps,
            "optimizer": self.optimizer_ms,
        }


def effective_ms(cost: StageCost, machine: Machine) -> float:
    """Time in ms of a stage on one micro-batch: compute, or its activations on a lane if they take longer."""
    return max(
        cost.duration_ms, cost.input_bytes / machine.h2d_bytes_per_ms, cost.output_bytes / machine.d2h_bytes_per_ms
    )


def handover_ms(cost: StageCost, machine: Machine) -> float:
    """Time in ms from the end of a stage to the arrival of its boundary tensor on another device."""
    num_bytes = cost.handover_bytes
    travel_ms = num_bytes / machine.d2h_bytes_per_ms + num_bytes / machine.h2d_bytes_per_ms
    return travel_ms + 2 * machine.transfer_latency_ms


def fit_together(one: StageCost, other: StageCost, limit: int) -> bool:
    """Whether two stages can be on a device at the same time, one of them computing."""
    return one.resident_bytes + other.resident_bytes + max(one.workspace_bytes, other.workspace_bytes) <= limit
