"""What one stage costs: its calls added up, for RoundPipe's stages and for those of pipelines that bind them.

```
stage of calls 4-6    up once      weights 4-6                    [Note: stage runs]
                      per action   inputs -> compute -> outputs   one micro-batch
                      down once    gradients 4-6
```

[Note: stage runs]
A stage run is a device's run of consecutive actions of one stage: the weights go up once before its first action, the
gradients come down once after its last one, activations travel for every action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .costs import CallCost, CostProfile, DeviceTraits
from .partition import Partition, Stage, StageKind

# An addition of gradients on the host reads the sum and the part, and writes the sum.
ADDITION_PASSES = 3


@dataclass(frozen=True)
class StageCost:
    """One stage on one micro-batch.

    Attributes:
        compute_ms: Time in ms of what has to wait for the stage before.
        recompute_ms: Time in ms of the forwards that a B stage repeats; they come first and need no gradient.
        weight_bytes: Bytes uploaded per stage run.
        gradient_bytes: Bytes of gradients that add up on the device and are downloaded per stage run.
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
        """Bytes that stay on the device for a stage run: weights and gradients."""
        return self.weight_bytes + self.gradient_bytes

    def streamed_ms(self, device: DeviceTraits) -> float:
        """Return the time in ms on one micro-batch: compute, or activations on a lane if they take longer."""
        up_ms, down_ms = self.input_bytes / device.h2d_bytes_per_ms, self.output_bytes / device.d2h_bytes_per_ms
        return max(self.duration_ms / device.speed, up_ms, down_ms)

    def handover_ms(self, latency_ms: float, before: DeviceTraits, after: DeviceTraits) -> float:
        """Return the time in ms from the end of the stage on one device until its boundary tensor is on another one."""
        num_bytes = self.handover_bytes
        return num_bytes / before.d2h_bytes_per_ms + num_bytes / after.h2d_bytes_per_ms + 2 * latency_ms

    def fits_beside(self, other: StageCost, memory_bytes: int | None) -> bool:
        """Return whether both stages can be on a device with this limit at the same time, one of them computing."""
        workspace = max(self.workspace_bytes, other.workspace_bytes)
        return memory_bytes is None or self.resident_bytes + other.resident_bytes + workspace <= memory_bytes


def stage_costs(partition: Partition, profile: CostProfile) -> tuple[StageCost, ...]:
    """Return the cost of each stage of a RoundPipe partition, in execution order.

    The inputs of all calls are kept for the backward (RoundPipe paper, arXiv 2604.27085, full recompute): an F stage
    sends them down, a B stage gets them back. A B stage runs and forgets its calls one after the other, without those
    that have no backward; the fused stage keeps the graphs of all its calls, and needs no recompute.

    Raises:
        ValueError: If the partition was made for another number of calls.
    """
    if partition.num_calls != len(profile.calls):
        raise ValueError(
            f"The partition has {partition.num_calls} calls and the profile {len(profile.calls)}: "
            "make the partition from this profile."
        )
    table = StageTable(profile, is_training=partition.is_training)
    return tuple(table.cost(stage.kind, stage.start, stage.stop) for stage in partition.stages)


class StageTable:
    """The costs of stages over the calls of one profile, each worked out once: see `stage_costs`."""

    def __init__(self, profile: CostProfile, *, is_training: bool) -> None:
        self._calls = profile.calls
        self._is_training = is_training
        self._known: dict[tuple[str, int, int], StageCost] = {}

    def cost(self, kind: StageKind, start: int, stop: int) -> StageCost:
        """Return the cost of a stage over the calls ``[start, stop)``."""
        key = (kind.value, start, stop)  # the hash of a member of an enum is slow
        cost = self._known.get(key)
        if cost is None:
            stage, calls = Stage(0, kind, start, stop), self._calls[start:stop]
            if kind is StageKind.FORWARD:
                cost = _forward_cost(stage, calls, is_training=self._is_training)
            else:
                cost = _backward_cost(stage, calls)
            self._known[key] = cost
        return cost


def bound_stage_costs(calls_per_stage: Sequence[int], profile: CostProfile) -> tuple[StageCost, ...]:
    """Return the costs of a pipeline whose stages are bound to devices (GPipe, 1F1B, ...): S forwards, S backwards.

    Entry i < S is the forward of stage i, entry S + i the backward of stage S - 1 - i, which repeats the forwards of
    all calls but the last one of the model (the head). Weights and gradients stay on the devices, so that only boundary
    activations travel.

    Args:
        calls_per_stage: Number of calls of each of the S stages, in order; 0 is allowed.
        profile: The costs of the calls.

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
        repeated = calls[:-1] if start == len(profile.calls) else calls
        inward, outward = (calls[0].input_bytes, calls[-1].output_bytes) if calls else (0, 0)
        workspace = max((call.workspace_bytes for call in calls), default=0)  # one call after the other is recomputed
        forward_ms = math.fsum(call.forward_ms for call in calls)
        backward_ms = math.fsum(call.backward_ms for call in calls)
        recompute_ms = math.fsum(call.forward_ms for call in repeated)
        forward.append(StageCost(forward_ms, 0.0, 0, 0, inward, outward, outward, workspace, f"F {index}"))
        backward.append(StageCost(backward_ms, recompute_ms, 0, 0, outward, inward, inward, workspace, f"B {index}"))
    return (*forward, *reversed(backward))


def _forward_cost(stage: Stage, calls: Sequence[CallCost], *, is_training: bool) -> StageCost:
    if not calls:
        return StageCost(0.0, label=stage.format())
    handover = calls[-1].output_bytes
    saved = sum(call.input_bytes for call in calls[1:]) if is_training else 0  # the first one comes from the host
    return StageCost(
        math.fsum(call.forward_ms for call in calls),
        weight_bytes=sum(call.weight_bytes for call in calls),
        input_bytes=calls[0].input_bytes,
        output_bytes=handover + saved,
        handover_bytes=handover,
        workspace_bytes=max(call.activation_bytes(is_training=False) for call in calls),
        label=stage.format(),
    )


def _backward_cost(stage: Stage, calls: Sequence[CallCost]) -> StageCost:
    """The cost of the fused stage or of a B stage, which skips calls without a backward."""
    if stage.kind is StageKind.BACKWARD:
        calls = [call for call in calls if call.backward_ms]
    if not calls:
        return StageCost(0.0, label=stage.format())
    forward_ms = math.fsum(call.forward_ms for call in calls)
    compute_ms, recompute_ms = math.fsum(call.backward_ms for call in calls), forward_ms
    inputs = sum(call.input_bytes for call in calls) + calls[-1].output_bytes
    workspace = max(call.activation_bytes(is_training=True) for call in calls)
    if stage.kind is StageKind.FUSED:
        compute_ms, recompute_ms = forward_ms + compute_ms, 0.0
        inputs = calls[0].input_bytes
        # It keeps what each call gave, which is what the next one has in its graph.
        kept = sum(call.output_bytes + call.workspace_bytes for call in calls)
        workspace = inputs + kept + max(call.input_bytes + call.output_bytes for call in calls)
    handover = calls[0].input_bytes if stage.start else 0
    return StageCost(
        compute_ms,
        recompute_ms,
        weight_bytes=sum(call.weight_bytes for call in calls),
        gradient_bytes=sum(call.gradient_bytes for call in calls),
        input_bytes=inputs,
        output_bytes=handover,
        handover_bytes=handover,
        workspace_bytes=workspace,
        label=stage.format(),
    )
