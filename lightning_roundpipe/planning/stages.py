"""What one stage costs: the calls of a partition added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .costs import CallCost, CostProfile
from .partition import Partition, Stage, StageKind


@dataclass(frozen=True)
class StageCost:
    """One stage on one micro-batch.

    [Note: slots]
    A device's run of consecutive actions of one stage is a *slot*: the weights go up once before its first action, the
    gradients come down once after its last one, activations travel for every action.

    Attributes:
        compute_ms: Time in ms of what has to wait for the stage before.
        recompute_ms: Time in ms of the forwards that a B stage repeats; they come first and need no gradient.
        weight_bytes: Bytes uploaded per slot.
        gradient_bytes: Bytes of gradients that add up on the device and are downloaded per slot.
        input_bytes: Bytes of activations (and their gradients) uploaded per micro-batch.
        output_bytes: Bytes of activations (and their gradients) downloaded per micro-batch.
        handover_bytes: The part of `output_bytes` for which the next stage waits.
        workspace_bytes: Bytes on the device while one micro-batch is in the stage, besides weights and gradients.
        label: Text for pictures.
    """

    compute_ms: float
    recompute_ms: float = 0.0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    handover_bytes: int = 0
    workspace_bytes: int = 0
    label: str = ""

    @property
    def duration_ms(self) -> float:
        """Time in ms of the whole stage on one micro-batch."""
        return self.recompute_ms + self.compute_ms

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay on the device for a slot: weights and gradients."""
        return self.weight_bytes + self.gradient_bytes


def stage_costs(partition: Partition, profile: CostProfile) -> tuple[StageCost, ...]:
    """Return the cost of each stage of a RoundPipe partition, in execution order.

    The inputs of all calls are kept for the backward (RoundPipe paper, arXiv 2604.27085, full recompute): an F stage
    sends them down, a B stage gets them back. A B stage runs and forgets its calls one after the other; the fused stage
    keeps the graphs of all its calls, and needs no recompute.

    Raises:
        ValueError: If the partition was made for another number of calls.
    """
    _check_match(partition, profile)
    table = StageTable(profile, is_training=partition.is_training)
    return tuple(table.cost(stage.kind, stage.start, stage.stop) for stage in partition.stages)


class StageTable:
    """The costs of stages over the calls of one profile, each worked out once: see `stage_costs`."""

    def __init__(self, profile: CostProfile, *, is_training: bool) -> None:
        self._calls = profile.calls
        self._is_training = is_training
        self._known: dict[tuple[StageKind, int, int], StageCost] = {}

    def cost(self, kind: StageKind, start: int, stop: int) -> StageCost:
        """Return the cost of a stage over the calls ``[start, stop)``."""
        key = (kind, start, stop)
        known = self._known.get(key)
        if known is None:
            calls = self._calls[start:stop]
            label = Stage(0, *key).format()
            if kind is StageKind.FORWARD:
                known = _forward_stage(calls, label, is_training=self._is_training)
            else:
                known = _backward_stage(calls, label, is_fused=kind is StageKind.FUSED, start=start)
            self._known[key] = known
        return known


def stage_durations(partition: Partition, profile: CostProfile) -> tuple[float, ...]:
    """Return the time of each stage on one micro-batch, in ms.

    The forwards of the calls for an F stage; forwards and backwards for the fused stage; the same for a B stage, which
    recomputes the forwards.

    Raises:
        ValueError: If the partition was made for another number of calls.
    """
    _check_match(partition, profile)
    durations = []
    for stage in partition.stages:
        calls = profile.calls[stage.start : stage.stop]
        is_forward = stage.kind is StageKind.FORWARD
        # Compensated summation, so that equal stages get equal times.
        durations.append(math.fsum(call.forward_ms if is_forward else call.recompute_backward_ms for call in calls))
    return tuple(durations)


def bound_stage_costs(
    calls_per_stage: Sequence[int], profile: CostProfile, *, recompute: bool = True
) -> tuple[StageCost, ...]:
    """Return the costs of a pipeline whose stages are bound to devices (GPipe, 1F1B, ...): S forwards, S backwards.

    Entry i < S is the forward of stage i, entry S + i the backward of stage S - 1 - i. Weights and gradients stay on
    the devices, so that only boundary activations travel.

    Args:
        calls_per_stage: Number of calls of each of the S stages, in order; 0 is allowed.
        profile: The costs of the calls.
        recompute: Whether the backward repeats the forwards; the last call of the model (the head) never does.

    Raises:
        ValueError: If the stages do not add up to the calls of the profile.
    """
    if any(count < 0 for count in calls_per_stage) or sum(calls_per_stage) != len(profile.calls):
        raise ValueError(
            f"calls_per_stage={list(calls_per_stage)} must be numbers >= 0 that add up to the {len(profile.calls)} "
            "calls of the profile: correct one of the two."
        )
    forward, backward, start = [], [], 0
    for index, count in enumerate(calls_per_stage):
        calls = profile.calls[start : start + count]
        start += count
        repeated = calls[:-1] if start == len(profile.calls) and count else calls
        inward, outward = (calls[0].input_bytes, calls[-1].output_bytes) if calls else (0, 0)
        workspace = max((call.workspace_bytes for call in calls), default=0)  # one call after the other is recomputed
        forward.append(
            StageCost(
                math.fsum(call.forward_ms for call in calls),
                input_bytes=inward,
                output_bytes=outward,
                handover_bytes=outward,
                workspace_bytes=workspace,
                label=f"F {index}",
            )
        )
        backward.append(
            StageCost(
                math.fsum(call.backward_ms for call in calls),
                math.fsum(call.forward_ms for call in repeated) if recompute else 0.0,
                input_bytes=outward,
                output_bytes=inward,
                handover_bytes=inward,
                workspace_bytes=workspace,
                label=f"B {index}",
            )
        )
    return (*forward, *reversed(backward))


def backward_bytes(call: CallCost) -> int:
    """Return the bytes of activations on a device during the backward of a call: its inputs and outputs, the gradients
    of both, and its graph."""
    return 2 * (call.input_bytes + call.output_bytes) + call.workspace_bytes


def _check_match(partition: Partition, profile: CostProfile) -> None:
    if partition.num_calls != len(profile.calls):
        raise ValueError(
            f"The partition has {partition.num_calls} calls and the profile {len(profile.calls)}: "
            "make the partition from this profile."
        )


def _forward_stage(calls: Sequence[CallCost], label: str, *, is_training: bool) -> StageCost:
    if not calls:
        return StageCost(0.0, label=label)
    handover = calls[-1].output_bytes
    saved = sum(call.input_bytes for call in calls[1:]) if is_training else 0  # the first one comes from the host
    return StageCost(
        math.fsum(call.forward_ms for call in calls),
        weight_bytes=sum(call.weight_bytes for call in calls),
        input_bytes=calls[0].input_bytes,
        output_bytes=handover + saved,
        handover_bytes=handover,
        workspace_bytes=max(call.input_bytes + call.output_bytes + call.workspace_bytes for call in calls),
        label=label,
    )


def _backward_stage(calls: Sequence[CallCost], label: str, *, is_fused: bool, start: int) -> StageCost:
    if not calls:
        return StageCost(0.0, label=label)
    forward_ms = math.fsum(call.forward_ms for call in calls)
    backward_ms = math.fsum(call.backward_ms for call in calls)
    handover = calls[0].input_bytes if start else 0
    inputs = calls[0].input_bytes if is_fused else sum(call.input_bytes for call in calls) + calls[-1].output_bytes
    # The fused stage keeps what each call gave, which is what the next one has in its graph.
    kept = sum(call.output_bytes + call.workspace_bytes for call in calls)
    backward = max(call.input_bytes + call.output_bytes for call in calls)
    return StageCost(
        forward_ms + backward_ms if is_fused else backward_ms,
        0.0 if is_fused else forward_ms,
        weight_bytes=sum(call.weight_bytes for call in calls),
        gradient_bytes=sum(call.gradient_bytes for call in calls),
        input_bytes=inputs,
        output_bytes=handover,
        handover_bytes=handover,
        workspace_bytes=calls[0].input_bytes + kept + backward
        if is_fused
        else max(backward_bytes(call) for call in calls),
        label=label,
    )
