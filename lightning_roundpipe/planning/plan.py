"""The plan of a run: what runs in which stage, on how many devices at a time, in the shortest simulated step.

```
profile + machine -> memory for a stage -> search: stages, splits, rounds -> StepPlan -> a schedule for any batch
```

Memory: the weights and gradients of a stage may take half of what the activations leave of a device, so that the next
stage can be uploaded meanwhile. A single call may take all of it, at the price of that overlap. Activations are those
of the micro-batch that is in the stage, and what the last calls of a stage gave: until a micro-batch has its turn in
the next stage, that waits on the device that made it, for as many micro-batches as are in a round. Where devices have
unequal memory, stages are made for the smallest one; if a call does not fit there, for the smallest one on which all
calls fit, and devices with less get the stages that fit on them.

[Note: sizes of rounds]
Weights and gradients travel once per round, and the host adds up the gradients of all rounds. But inputs of calls wait
on the host for two rounds. And on devices wait outputs of a stage, and what code between the calls has made for the
next one, such as a mask: for one round. Two micro-batches per device keep all devices busy. Where weights travel, more
of them share a round as far as there is memory, and until allocators run out of it: few rounds move less.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .costs import CallCost, CostProfile, Machine
from .cuts import StageSearch
from .dispatch import dispatch
from .partition import Partition, StageKind, assemble, keep_together, no_calls
from .quantities import format_bytes, format_ms, format_share
from .schedule import Action, Schedule
from .search import Score, explore
from .stages import stage_costs

# Of a device, for outputs that wait there in rounds of more than two micro-batches per device.
_WAITING_PART = 8


@dataclass(frozen=True)
class StepPlan:
    """How a step runs.

    Attributes:
        partition: The stages.
        splits: For each stage, on how many devices at a time it runs, on micro-batches of their own.
        round_size: Micro-batches that walk through the stages together; None for all.
        reason: Why `splits` are what they are, in words.
    """

    partition: Partition
    splits: tuple[int, ...]
    round_size: int | None = None
    reason: str = ""

    def schedule(
        self,
        profile: CostProfile,
        machine: Machine,
        num_microbatches: int,
        *,
        first_device: int = 0,
        num_steps: int = 1,
    ) -> Schedule:
        """Return the schedule of a step, or of several alike; see [Note: dispatch] in ``dispatch``.

        Args:
            profile: The costs of the calls, which decide where devices are not all alike.
            machine: What it runs on.
            num_microbatches: Micro-batches of this step, which may be others than those planned for.
            first_device: Where devices that are alike begin to take turns.
            num_steps: As for `round_robin`.
        """
        return dispatch(
            stage_costs(self.partition, profile),
            machine,
            num_microbatches=num_microbatches,
            splits=self.splits,
            round_size=self.round_size,
            first_device=first_device,
            num_steps=num_steps,
        )

    def next_first_device(self, schedule: Schedule, first_device: int) -> int:
        """Return the device with which the step after one that began with `first_device` goes on with the turns.

        That is the one behind the last stage run, which holds the last micro-batch of the last stage.
        """
        last = schedule.device_of(Action(schedule.num_stages - 1, schedule.num_microbatches - 1))
        return (last + 1) % schedule.num_devices

    def host_activation_bytes(self, profile: CostProfile, num_microbatches: int) -> int:
        """Return the most that inputs of calls take on the host while they wait for the backward.

        An upper bound: they are counted for every micro-batch and call, as if all were there together and none was
        shared. Two rounds of micro-batches may be under way at a time: one ends while the next one begins.
        """
        waiting: set[int] = set()
        for stage in self.partition.stages:
            if stage.kind is StageKind.BACKWARD:
                waiting.update(range(stage.start, stage.stop))
            elif stage.kind is StageKind.FUSED and stage.start < stage.stop:
                waiting.add(stage.start)  # comes from another device
        num_in_flight = min(num_microbatches, 2 * (self.round_size or num_microbatches))
        return num_in_flight * sum(profile.calls[position].input_bytes for position in waiting)

    def with_order(self, spans: Sequence[tuple[int, int]], single: Collection[int]) -> StepPlan:
        """Return the plan with what micro-batches must pass one after the other on one device at a time.

        Args:
            spans: Call positions ``[start, stop)`` that one forward stage must run.
            single: Call positions whose forward must run on one device at a time.
        """
        partition = keep_together(self.partition, spans)
        splits = []
        for stage in partition.stages:
            is_backward = stage.kind is StageKind.BACKWARD
            over = [
                count
                for old, count in zip(self.partition.stages, self.splits, strict=True)
                if (old.kind is not (StageKind.FORWARD if is_backward else StageKind.BACKWARD))
                and old.start < stage.stop
                and old.stop > stage.start
            ]
            has_single = not is_backward and any(stage.start <= position < stage.stop for position in single)
            splits.append(1 if has_single else min(over, default=1))
        return replace(self, partition=partition, splits=tuple(splits))

    def format(self) -> str:
        """Return the stages, with ``x4`` behind those that run on up to four devices at a time."""
        stages = zip(self.partition.stages, self.splits, strict=True)
        return " | ".join(stage.format() + (f" x{count}" if count > 1 else "") for stage, count in stages)


class StageMemoryError(ValueError):
    """A call that does not fit on a device, whatever the plan.

    Attributes:
        fits_if_split: Whether its weights and gradients alone would fit, so that smaller micro-batches help.
    """

    def __init__(self, message: str, *, fits_if_split: bool = True) -> None:
        super().__init__(message)
        self.fits_if_split = fits_if_split


def plan_training(
    profile: CostProfile,
    machine: Machine,
    *,
    num_microbatches: int,
    round_size: int | Sequence[int] | None = None,
    may_split: bool = True,
) -> StepPlan:
    """Return the plan with the shortest simulated step; see [Note: how the plan is found] in ``search``.

    Deterministic. Takes a fraction of a millisecond per call of the model.

    Args:
        profile: The costs of the calls of one micro-batch, in call order.
        machine: What it runs on.
        num_microbatches: M, the micro-batches of a step, at least 1.
        round_size: Micro-batches that walk through the stages together; None for all. Of several numbers, the first
            one is planned for as far as the memory allows, and the others are tried.
        may_split: Whether a stage may run on several devices at a time.

    Raises:
        ValueError: If a number is out of range.
        StageMemoryError: If a call needs more memory than a device has; the message says how much, and what helps.
    """
    return _plan(profile, machine, num_microbatches, round_size, may_split, is_training=True)


def plan_evaluation(
    profile: CostProfile,
    machine: Machine,
    *,
    num_microbatches: int,
    round_size: int | Sequence[int] | None = None,
    may_split: bool = True,
) -> StepPlan:
    """Return the forward-only plan with the shortest simulated step; arguments and errors as `plan_training`."""
    return _plan(profile, machine, num_microbatches, round_size, may_split, is_training=False)


def _plan(
    profile: CostProfile,
    machine: Machine,
    num_microbatches: int,
    round_size: int | Sequence[int] | None,
    may_split: bool,
    *,
    is_training: bool,
) -> StepPlan:
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be >= 1, got {num_microbatches}: pass how many there are.")
    sizes = [round_size] if isinstance(round_size, int | None) else list(round_size)
    if any(size is not None and size < 1 for size in sizes):
        raise ValueError(f"round_size must be >= 1, got {round_size}: pass None for one round.")
    if not profile.calls:
        return StepPlan(no_calls(is_training=is_training), (1,), sizes[0])
    rounds = list(dict.fromkeys(min(size or num_microbatches, num_microbatches) for size in sizes))
    most = max(needed_bytes(call, is_training=is_training) for call in profile.calls)
    largest = max(machine.memories, default=math.inf)
    while len(rounds) > 1 and most + waiting_bytes(profile, num_microbatches, rounds[0]) > largest:
        del rounds[0]
    waiting = waiting_bytes(profile, num_microbatches, rounds[0])
    limit = _stage_memory_limit(profile, machine, waiting, is_training=is_training)
    left = _without_waiting(machine, waiting)
    search = StageSearch(profile.calls, is_training=is_training, memory_limit=limit, counts_graphs=is_training)
    score = Score(profile, left, num_microbatches, is_training, may_split)
    best, best_ms, single_ms = explore(search, score, rounds)
    partition, splits = assemble(len(profile.calls), best.forward, best.backward), score.splits(best)
    return StepPlan(partition, splits, best.round_size, _reason(splits, best_ms, single_ms, may_split))


def round_sizes(
    profile: CostProfile, machine: Machine, num_microbatches: int, *, waiting_on_host: int | None, is_training: bool
) -> list[int]:
    """Return what `round_size` may be, the most first; see [Note: sizes of rounds].

    Two per device, also in rounds that are as equal as they can be, or one per device. Before these the most that has
    room, if that is more and weights travel.

    Args:
        profile, machine, num_microbatches: As for `plan_training`.
        waiting_on_host: Bytes that inputs of calls may take on the host in rounds of more than two per device; None
            if there are to be no such rounds.
        is_training: Whether there is a backward.
    """
    usual = 2 * machine.num_devices
    num_usual = -(-num_microbatches // usual)
    sizes = [usual, -(-num_microbatches // num_usual), machine.num_devices]
    inputs = sum(call.input_bytes for call in profile.calls) if is_training else 0
    between = max((max(one.output_bytes, other.input_bytes) for one, other in pairwise(profile.calls)), default=0)
    waiting_on_device = min(machine.memories, default=math.inf) / _WAITING_PART

    def has_room(size: int) -> bool:
        on_host = min(num_microbatches, 2 * size) * inputs
        return on_host <= (waiting_on_host or 0) and size * between <= waiting_on_device

    if waiting_on_host is not None and any(math.isfinite(traits.h2d_bytes_per_ms) for traits in machine.traits):
        larger = (-(-num_microbatches // num_rounds) for num_rounds in range(1, num_usual))
        sizes[:0] = [size for size in larger if has_room(size)][:1]
    return list(dict.fromkeys(sizes))


def _reason(splits: tuple[int, ...], step_ms: float, single_ms: float, may_split: bool) -> str:
    """Why the stages are split as they are."""
    most = max(splits)
    if most == 1:
        return f"r=1: every stage on one device at a time {'is fastest' if may_split else 'was asked for'}"
    which = f"r={most}" if min(splits) == most else f"r={min(splits)} to {most}"
    saved = format_share(1 - step_ms / single_ms) if single_ms else "0.0%"
    text = f"{which}: {format_ms(step_ms)} a step, {saved} less than with every stage on one device at a time"
    if min(splits) < most:
        text += "; stages whose weights travel longer than they compute are on fewer devices"
    return text


def _stage_memory_limit(profile: CostProfile, machine: Machine, waiting: int, *, is_training: bool) -> int | None:
    """Bytes that the weights and gradients of a stage should take at most on a device; None for no limit.

    Args:
        profile, machine, is_training: As for `round_sizes`.
        waiting: Bytes of activations on a device that wait for their next stage.

    Raises:
        StageMemoryError: If a single call does not fit on any device.
    """
    if not machine.memories:
        return None
    needed = [needed_bytes(call, is_training=is_training) + waiting for call in profile.calls]
    memory = next((limit for limit in machine.memories if max(needed) <= limit), None)
    if memory is not None:
        activations = max(call.activation_bytes(is_training=is_training) for call in profile.calls)
        return (memory - waiting - activations) // 2
    memory = machine.memories[-1]
    position = next(index for index, size in enumerate(needed) if size > memory)
    call = profile.calls[position]
    beside = f", beside {format_bytes(waiting)} of activations that wait for their next stage" if waiting else ""
    raise StageMemoryError(
        f"Call {position}, {describe_need(call, is_training=is_training)}{beside}. "
        f"That is {format_bytes(needed[position] - memory)} over the {format_bytes(memory)} that a device has for it. "
        "Smaller micro-batches (more of them) take less for activations, finer units less for weights and "
        "gradients: RoundPipeStrategy(num_microbatches=..., units=[...]).",
        fits_if_split=call.state_bytes(is_training=is_training) <= memory,
    )


def _without_waiting(machine: Machine, waiting: int) -> Machine:
    """The machine without what waits on its devices."""

    def left(memory_bytes: int | None) -> int | None:
        return None if memory_bytes is None else max(0, memory_bytes - waiting)

    devices = tuple(replace(traits, memory_bytes=left(traits.memory_bytes)) for traits in machine.devices)
    return replace(machine, device_memory_bytes=left(machine.device_memory_bytes), devices=devices)


def waiting_bytes(profile: CostProfile, num_microbatches: int, round_size: int | None) -> int:
    """Return the bytes of activations on a device that wait for their next stage; see the top of this file."""
    largest = max((call.output_bytes for call in profile.calls[:-1]), default=0)  # the loss follows the last one
    return largest * min(num_microbatches, round_size or num_microbatches)


def needed_bytes(call: CallCost, *, is_training: bool) -> int:
    """Return what a device has to hold while the call runs for one micro-batch, in bytes."""
    return call.state_bytes(is_training=is_training) + call.activation_bytes(is_training=is_training)


def describe_need(call: CallCost, *, is_training: bool) -> str:
    """Return what a call needs on a device, for people."""
    gradients = f"gradients {format_bytes(call.gradient_bytes)}, " if is_training else ""
    return (
        f"{call.name!r} needs {format_bytes(needed_bytes(call, is_training=is_training))} on a device: weights "
        f"{format_bytes(call.weight_bytes)}, {gradients}activations of one micro-batch "
        f"{format_bytes(call.activation_bytes(is_training=is_training))}"
    )
