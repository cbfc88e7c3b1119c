"""The backward of a unit: recomputed if its graph was not kept, from the gradients of its results to its weights.

    saved arguments --enter--> aliases --run_unit--> slots, whose gradients came --backward--> arguments, weights

Everything here runs on the thread of the micro-batch, which holds the compute lane of the replica's device and not the
user-code lock.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..devices.device import Device
from ..usercode.loose_gradients import LooseGradients, run_backward
from ..usercode.moves import moved
from ..weights.parameters import Replica
from .recompute import Call, Slot, enter_graph
from .repeats import check_repeats
from .unit_context import UnitContext
from .unit_run import UnitResult, autocast_as, find_again, run_unit


def run_unit_backward(
    context: UnitContext,
    call: Call,
    replica: Replica,
    gradients: list[Tensor],
    leaves: list[Any] | None,
    loose: LooseGradients,
) -> None:
    """From the gradients of the call's results to those of its arguments and of the replica's weights.

    Args:
        gradients: as in ``call.gradients``, on the device.
        leaves: the saved arguments, on the device, if the graph was not kept.

    Raises:
        RuntimeError: if the unit does something else in the recomputation.
    """
    assert call.facts is not None
    if leaves is None:
        local = call.local
        assert local is not None
    else:
        local = _recompute(context, call, replica, list(leaves))
        check_repeats(context, call, replica, local)
    roots = [local[slot] for slot in call.gradients]
    inside = context.inside
    inside.is_recomputing = True
    with inside:  # also where autograd calls functions in Python
        if call.facts.has_loose:
            loose.run_unit_backward(roots, gradients, replica.leaves)
        else:
            run_backward(roots, gradients, on_host=replica.device.torch_device.type == "cpu")
    replica.add_up()


def _recompute(context: UnitContext, call: Call, replica: Replica, leaves: list[Any]) -> dict[Slot, Tensor]:
    """Runs the unit again with its graph, on what the forward saw; the slots of the result."""
    assert call.facts is not None
    if call.facts.draws.gpu:
        _check_draws(call, replica.device)
    find_again(call, context.state)
    target = replica.device.torch_device
    for i in call.changed:  # the saved copy may serve other calls
        leaves[i] = leaves[i].clone()
    swapped = []
    for master, name, value in call.buffer_values:
        copy = replica.copy_of(master)
        assert copy is not None
        swapped.append((copy, name, copy._buffers[name]))
        is_there = value.device == target
        copy._buffers[name] = value.clone() if is_there else moved(value, target, context.activations, f"buffer {name}")
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        with autocast_as(context.state.autocast_device, call.autocast):
            enter(call, leaves, context.anchor)
            result = run_unit(context, call, replica, leaves)
            if call.changed:
                add_changed(call, result, leaves)
            return result.slots
    finally:
        torch._C._set_grad_enabled(before)
        for copy, name, buffer in swapped:
            copy._buffers[name] = buffer


def _check_draws(call: Call, device: Device) -> None:
    """Raises:
    RuntimeError: if the recomputation would draw other numbers than the forward, on a GPU of another model.
    """
    assert call.ran is not None
    before = call.ran.device
    if before.draws_as != device.draws_as:
        raise RuntimeError(
            f"unit {call.unit.name!r} draws random numbers on GPUs (dropout), and is run again on another model than "
            f"before, where the same seed gives others: {before.name} is {before.draws_as}, {device.name} "
            f"{device.draws_as}. Use GPUs of one model (devices=[...]), or none of what draws."
        )


def enter(call: Call, leaves: list[Any], anchor: Tensor) -> None:
    """Replaces leaves by aliases, in place: differentiable ones start the local graph, the others must not join it."""
    differentiable = call.differentiable
    if differentiable:
        inputs = [leaves[i] for i in differentiable]
        aliases = enter_graph(call, anchor, inputs)
        for i, alias in zip(differentiable, aliases, strict=True):
            leaves[i] = alias
    if len(leaves) > len(differentiable):
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and i not in differentiable and leaf.dtype.is_floating_point:
                leaves[i] = leaf.detach()


def add_changed(call: Call, result: UnitResult, given: list[Any]) -> None:
    """Arguments that the unit changed in place are outputs too."""
    for i in call.changed:
        result.slots["input", i] = given[i]
