"""One execution of a unit between its entry and its cut, and what the first execution teaches.

A forward takes its arguments to the device, saves them if it will be run again, and runs the unit: under ``no_grad``
where the call is recomputed, with the local graph where that is kept, and always with it where the unit's facts are not
known yet; see [Note: cutting autograd] and [Note: facts] in :mod:`autograd.recompute`. Everything here runs on the
thread of the micro-batch, which holds the compute lane of the replica's device and not the user-code lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..autograd.compiling import without_flags
from ..autograd.recompute import Call, Facts, Receiver, Slot, flagged_of, leave_graph
from ..autograd.repeats import weights_behind
from ..autograd.undo import Buffers, buffers_of, put_back, written_buffers
from ..autograd.unit_backward import add_changed, enter
from ..autograd.unit_context import UnitContext
from ..autograd.unit_run import UnitResult, drop_graph, run_unit, without_weights
from ..common.errors import UnpreparedError
from ..common.fingerprints import version_of
from ..common.graphs import graph_bytes
from ..common.sizes import num_bytes_of
from ..devices.device import Device
from ..devices.offload import as_reloaded
from ..devices.transfer import Edge
from ..usercode.loose_gradients import leaves_behind, node_of
from ..usercode.moves import moved
from ..weights.parameters import Replica

_MAX_FACTS = 64


class LateWriteError(UnpreparedError):
    """A unit has written a buffer that its calls so far did not write. From then on it is known to write it."""

    remedy = (
        "write the buffer in the first step as well, or keep what decides about it as an attribute of the module (a "
        "bool), which is noticed in time"
    )


@dataclass(slots=True)
class ForwardResult:
    """What a call hands to user code.

    Attributes:
        unit: the unit's own result.
        replica: on which it was made: the one given, or one of the unit's full form, if there was something to learn.
        passed_through: index of a result leaf -> index of the argument leaf that it is.
        changed: argument leaves that the unit changed in place.
        outputs: tensors for user code, by slot; never views of device copies, which are freed when the stage ends.
        graph_bytes: what the local graph held besides parameters, arguments and results; looked at to learn facts.
    """

    unit: UnitResult
    replica: Replica
    passed_through: dict[int, int]
    changed: list[int]
    outputs: dict[Slot, Tensor] = field(default_factory=dict)
    graph_bytes: int = 0


def run_forward(
    context: UnitContext,
    call: Call,
    replica: Replica,
    leaves: list[Any],
    *,
    key: tuple[int | None, Hashable],
    full: Callable[[Call], Replica],
) -> ForwardResult:
    """Runs the unit on ``leaves`` (tensors anywhere). A recorded call keeps in ``call`` what its backward needs.

    If the unit returns other tensors than its facts promise, or a graph where they promise none, it is run once more.

    Args:
        key: of the facts about this call, which are ``call.facts`` if they are known: its position, and its kind.
        full: gives the unit's replica in its full form.

    Raises:
        LateWriteError: if the unit has written buffers, and it was not known to.
    """
    facts, unit = call.facts, call.unit
    similar = None
    if facts is None:
        # Of a unit that is called elsewhere it is known, mostly from the recording, where nothing else runs.
        similar = unit.facts_of_kind(key[1])
        call.draws = replace(call.draws, foreign=similar is None or similar.draws.foreign)
    is_prepared = facts is None or bool(unit.written)
    before = buffers_of(replica, copies=is_prepared)
    done = _run(context, call, replica, leaves)
    if before and not is_prepared:
        _check_written(replica, before)
        before = []
    if facts is not None and _breaks_facts(call, facts, done.unit.slots):
        put_back(before)
        replica = full(call) if replica.is_low else replica
        facts = None
        call.rely_on(None)
        before = buffers_of(replica)
        done = _run(context, call, replica, leaves)
    if facts is None:
        if len(unit.facts) >= _MAX_FACTS:  # arguments that differ in every call, such as strings
            unit.facts.clear()
        has_loose = call.may_be_flagged and _has_loose(context, call, replica, done.unit.slots)
        facts = unit.facts[key] = _learn(replica, before, done, num_bytes_of(leaves), has_loose, similar)
        unit.written.update(facts.buffers)
        call.rely_on(facts)
        if not call.is_recorded:
            call.leaves = ()
    if before and unit.written:
        written = {*facts.buffers, *written_buffers(replica, before)}
        unit.written |= written
        homes = [(replica.master_of(copy), name, value) for copy, name, _, _, value in before]
        call.buffer_values = [(m, n, v) for m, n, v in homes if m is not None and (m, n) in unit.written]
        replica.store_buffers(written)
    call.relayed = {}
    _take_flags(call, facts, done.unit)
    done.outputs = without_weights(done.unit.slots, replica)
    return done


def _check_written(replica: Replica, before: Buffers) -> None:
    """After a call of a unit that has written no buffers so far.

    Raises:
        LateWriteError: if it has now.
    """
    unit, written = replica.unit, set(written_buffers(replica, before))
    if written:
        unit.written |= written
        paths = {id(module): path for path, module in unit.module.named_modules(prefix=unit.name)}
        names = sorted(f"{paths[id(module)]}.{name}".lstrip(".") for module, name in written)
        raise LateWriteError(f"unit {unit.name!r} has begun to write {', '.join(names)}, a buffer that it only read")


def _take_flags(call: Call, facts: Facts, result: UnitResult) -> None:
    """Notes which slots require a gradient; what is not kept of the graph goes."""
    if call.is_recorded:
        asks = call.kept or _shows_flags(facts)
        call.flagged = flagged_of(result.slots) if asks else facts.flagged
        if not call.kept:
            drop_graph(result)
    elif call.may_be_flagged:  # in an evaluation: there will be no backward, and the cut says so
        call.flagged = flagged_of(result.slots)
        drop_graph(result)
    elif not (call.differentiable or any(call.trained)):
        drop_graph(result, keeps_flags=True)


def _run(context: UnitContext, call: Call, replica: Replica, leaves: list[Any]) -> ForwardResult:
    """Runs the unit once; what it changes outside itself is found, and not yet undone or brought home."""
    facts, activations = call.facts, context.activations
    label = f"inputs {call.unit.name}"
    before = call.grad_mode
    if replica.device.aliases_host:
        given = list(leaves)
    else:
        given = as_reloaded(activations.receive(leaves, Edge.INPUTS, label))
    arrived = list(given)
    versions = {i: version_of(arrived[i]) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    # Without the graph another kernel may be chosen than for the recomputation (fused attention looks at the mode), or
    # another function compiled: they might draw in another order. Gradients that it takes itself need one as well.
    needs_graph = call.unit.differentiates or (facts is not None and facts.draws.gpu)
    is_asked = not call.is_recorded or call.kept or facts is None or _shows_flags(facts) or needs_graph
    graph = is_asked and call.may_be_flagged
    if call.is_recorded and (context.saves_kept or not call.kept):
        call.leaves = [activations.save(x, label) if isinstance(x, Tensor) else x for x in leaves]
    grad_mode = graph if call.is_recorded else before
    if grad_mode is not before:
        torch._C._set_grad_enabled(grad_mode)
    try:
        if graph:
            enter(call, given, context.anchor)
        elif context.compiler is not None and facts is not None:
            given = without_flags(given)
        run = _run_watched if facts is None and not replica.device.aliases_host else run_unit
        result = run(context, call, replica, given)
    finally:
        torch._C._set_grad_enabled(before)
    call.changed = [i for i, version in versions.items() if version_of(arrived[i]) != version]
    if call.changed:
        _hand_back(call, leaves, arrived)
        add_changed(call, result, given)
    slots = result.slots
    identity = {id(given[i]): i for i in versions}
    passed = {j: identity[id(x)] for j, x in enumerate(result.leaves) if id(x) in identity}
    done = ForwardResult(result, replica, passed, call.changed)
    if graph and facts is None:
        done.graph_bytes = graph_bytes(slots.values(), [*slots.values(), *given, *replica.leaves])
        call.reached = weights_behind(slots, replica)
    return done


def _shows_flags(facts: Facts) -> bool:
    """Whether calls run with their graph to show which outputs require a gradient. Which of several do may depend on
    the data. So may whether there is one at all; where there was none, there is little of a graph."""
    return len(facts.slots) > 1 or not facts.flagged


def _hand_back(call: Call, leaves: list[Any], arrived: list[Any]) -> None:
    """User code has other tensors than those that the unit changed in place, where they were brought to the device."""
    for i in call.changed:
        if arrived[i] is not leaves[i]:
            with torch.no_grad():
                leaves[i].copy_(arrived[i])


def _run_watched(context: UnitContext, call: Call, replica: Replica, given: list[Any]) -> UnitResult:
    """A run from which it is also learned in which dtypes the unit uses its weights."""
    with context.weights.learning(call.autocast, call.unit, replica.module, replica.leaves) as casts:
        result = run_unit(context, call, replica, given)
        if casts is not None:
            casts.note_results(result.slots.values())
    return result


def _all_at(target: torch.device, leaves: list[Any], context: UnitContext) -> list[Any]:
    """``leaves`` with their tensors on a device, as part of the graph."""
    return [
        moved(x, target, context.activations, "run again") if isinstance(x, Tensor) and x.device != target else x
        for x in leaves
    ]


def run_replayed(
    context: UnitContext, call: Call, replica: Replica, leaves: list[Any], homes: list[Device]
) -> UnitResult:
    """Runs a unit that user code calls again in its backward, on the thread of autograd that does so, with the graph.

    Args:
        homes: where its calls by the micro-batch have run, and their results are; one at least.

    Raises:
        RuntimeError: if it draws, and there were several.
    """
    here = replica.device.torch_device
    if here.type == "cpu":
        result = run_unit(context, call, replica, leaves)
    else:
        with torch.get_device_module(here).device(here):
            result = run_unit(context, call, replica, _all_at(here, leaves, context))
        result.leaves = _all_at(homes[-1].torch_device, result.leaves, context)
    if len(homes) > 1 and result.draws:
        raise RuntimeError(
            f"unit {call.unit.name!r} draws random numbers, is called {len(homes)} times, and sits in an activation "
            "checkpoint of the user code, so it cannot be told which call is run again. Remove the checkpoint: "
            "RoundPipe recomputes units by itself."
        )
    return result


def cut(context: UnitContext, call: Call, done: ForwardResult, leaves: list[Any]) -> None:
    """Cuts the graph of a call off from user code; its outputs are what user code gets then."""
    flagged = call.flagged
    if not flagged:
        return
    call.receivers = [Receiver(leaves[i]) for i in call.differentiable]
    if call.kept:
        call.local = {slot: t for slot, t in done.unit.slots.items() if slot in flagged}
    outputs, passed = done.outputs, done.passed_through
    for slot, output in outputs.items():
        if slot in flagged and slot not in passed and (type(slot) is int or not _is_cut_elsewhere(slot)):
            outputs[slot] = leave_graph(call, slot, context.anchor, [output])
    for i in done.changed:
        if ("input", i) in flagged:
            # Marking a tensor dirty raises its version, which saved tensors of a kept graph check; its value stays.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(leaves[i]):
                leave_graph(call, ("input", i), context.anchor, leaves[i])


def _breaks_facts(call: Call, facts: Facts, slots: Mapping[Slot, Tensor]) -> bool:
    if not call.may_be_flagged:
        return call.grad_mode and any([tensor.requires_grad for tensor in slots.values()])
    return call.is_recorded and slots.keys() != facts.slots


def _has_loose(context: UnitContext, call: Call, replica: Replica, slots: Mapping[Slot, Tensor]) -> bool:
    """Whether the graph of results leads to leaves that are neither the replica's nor the anchor."""
    flagged = [tensor for tensor in slots.values() if tensor.requires_grad]
    if not (call.differentiable or any(call.trained)):
        return bool(flagged)
    leaves = leaves_behind(map(node_of, flagged))
    return not leaves.keys() <= {context.anchor, *replica.leaves}


def _learn(
    replica: Replica,
    before: Buffers,
    done: ForwardResult,
    input_bytes: int,
    has_loose: bool,
    similar: Facts | None,
) -> Facts:
    slots, draws = done.unit.slots, done.unit.draws
    if similar is not None:  # a call may draw or not, by chance
        draws = replace(draws, foreign=similar.draws.foreign)
    flagged = flagged_of(slots)
    changed = tuple(written_buffers(replica, before, by_value=True))
    writes = bool(done.unit.written or done.unit.given)
    sizes = done.graph_bytes, num_bytes_of(slots.values()), input_bytes
    return Facts(flagged, frozenset(slots), draws, changed, writes, *sizes, has_loose)


def _is_cut_elsewhere(slot: Slot) -> bool:
    """Whether it is an output of a relay, which has cut it, or an argument that the unit has changed."""
    return isinstance(slot, tuple) and slot[0] in ("relay", "input")
