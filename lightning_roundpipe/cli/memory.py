"""Memory beside the simulated one: what the host holds for RoundPipe, and a device for schedules that bind stages.

[Note: bytes per weight]
A profile gives bytes, in the type that travels (``--dtype``). The rest follows from it and is stated with every result:
as many weights are trained as have gradients; their masters, gradients and the two moments of AdamW are fp32, 4 bytes
each. Frozen weights are kept as they travel, once. A unit that is called several times is counted once, by its name.
In a step of several rounds two sets of gradients are there: those of the step before go when the user's code has run
for all micro-batches, and by then the first round has brought new ones home. Where gradients accumulate over steps, the
old ones stay, and there are two sets as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_roundpipe.planning import CallCost, CostProfile, Schedule, StepPlan

BYTES_PER_WEIGHT = {"bf16": 2, "fp16": 2, "fp32": 4}
HOST_ASSUMPTION = (
    "trained weights: fp32 masters and gradients (two sets where a step has several rounds), AdamW with 8 bytes each; "
    "frozen ones as they travel; at most the inputs of all calls that are recomputed"
)
BOUND_ASSUMPTION = (
    "weights, gradients, fp32 masters and AdamW state on the devices, inputs of all calls kept for recompute, the "
    "graph of the last call for its backward"
)
_FP32 = 4
_ADAMW = 8


def host_memory(plan: StepPlan, profile: CostProfile, num_microbatches: int, dtype: str) -> dict[str, int]:
    """Return what RoundPipe keeps in host memory for one step, in bytes, by purpose; "total" is the sum.

    Args:
        plan: How the step runs, for training.
        profile: The costs of the calls.
        num_microbatches: Micro-batches of the step.
        dtype: Type of the weights in the profile, one of `BYTES_PER_WEIGHT`.
    """
    weight_bytes, gradient_bytes = _state_bytes(profile.calls)
    num_sets = 1 if num_microbatches <= (plan.round_size or num_microbatches) else 2
    frozen_bytes = max(0, weight_bytes - gradient_bytes)
    states = host_states(gradient_bytes, frozen_bytes, BYTES_PER_WEIGHT[dtype], num_sets)
    memory = {**states, "activations": plan.host_activation_bytes(profile, num_microbatches)}
    return {**memory, "total": sum(memory.values())}


def host_states(trained_bytes: int, frozen_bytes: int, size: int, num_sets: int) -> dict[str, int]:
    """Return what stays in host memory, in bytes by purpose; see [Note: bytes per weight].

    Args:
        trained_bytes, frozen_bytes: Bytes of the trained and of the frozen weights, as they travel.
        size: Bytes of a weight as it travels.
        num_sets: Of gradients.
    """
    return {
        "frozen weights": frozen_bytes,
        "master weights": trained_bytes * _FP32 // size,
        # fp32 masters travel themselves.
        "working copy": trained_bytes if size < _FP32 else 0,
        "gradients": trained_bytes * _FP32 // size * num_sets,
        "optimizer state": trained_bytes * _ADAMW // size,
    }


def bound_memory(
    calls_per_stage: Sequence[int], profile: CostProfile, schedule: Schedule, dtype: str
) -> tuple[int, ...]:
    """Return the peak memory of each device under a schedule that binds stages, without any offloading, in bytes.

    From its forward to its backward a micro-batch keeps the inputs of the stage's calls, and the graph of the model's
    last call, which is not recomputed. While a stage runs, one call at a time has inputs, outputs and graph on top.

    Args:
        calls_per_stage: Number of calls of each model stage, at least 1.
        profile: The costs of the calls.
        schedule: Twice as many stages: forwards, then backwards in reverse.
        dtype: Type of the weights in the profile, one of `BYTES_PER_WEIGHT`.
    """
    stops = list(accumulate(calls_per_stage))
    pieces = [profile.calls[stop - count : stop] for count, stop in zip(calls_per_stage, stops, strict=True)]
    head = profile.calls[-1]
    kept = [sum(call.input_bytes for call in calls) for calls in pieces]
    kept[-1] += head.workspace_bytes
    last = [*pieces[-1][:-1], replace(head, workspace_bytes=0)]
    running = [max(call.activation_bytes(is_training=False) for call in calls) for calls in (*pieces[:-1], last)]
    num_stages, size = len(pieces), BYTES_PER_WEIGHT[dtype]
    peaks = []
    for actions in schedule.devices:
        bound = {action.stage_index for action in actions if action.stage_index < num_stages}
        weight_bytes, gradient_bytes = _state_bytes(call for stage in bound for call in pieces[stage])
        masters = gradient_bytes * _FP32 // size if size < _FP32 else 0
        held = states = weight_bytes + gradient_bytes + masters + gradient_bytes * _ADAMW // size
        peak = states
        for index in (action.stage_index for action in actions):
            stage = min(index, 2 * num_stages - 1 - index)
            if stage == index:
                held += kept[stage]
            peak = max(peak, held + running[stage])
            if stage != index:
                held -= kept[stage]
        peaks.append(peak)
    return tuple(peaks)


def _state_bytes(calls: Iterable[CallCost]) -> tuple[int, int]:
    """Bytes of the weights and of the gradients of the units behind the calls, each unit once."""
    units = {call.name: call for call in calls}.values()
    return sum(unit.weight_bytes for unit in units), sum(unit.gradient_bytes for unit in units)
