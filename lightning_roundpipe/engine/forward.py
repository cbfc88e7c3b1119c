"""The forward of one call on a device: learn its facts, save its inputs, or keep its graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.randomness import ForeignRandomness
from ..autograd.recompute import Call, Cut, Entry, Facts, Slot
from ..autograd.unit_run import UnitResult, UnitRunner
from ..common.fingerprints import version_of
from ..common.graphs import graph_bytes
from ..common.sizes import num_bytes_of
from ..devices.offload import TravellingActivations
from ..devices.transfer import Edge
from ..usercode.loose_gradients import leaves_behind, node_of
from ..weights.casts import CastWatch
from ..weights.low_precision import WorkingCopies
from ..weights.parameters import Replica

_MAX_FACTS = 64
Snapshot = list[tuple[nn.Module, str, Tensor, int, Tensor]]


@dataclass
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
    outputs: dict[Slot, Tensor] = field(default_factory=dict)
    passed_through: dict[int, int] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)
    graph_bytes: int = 0


@dataclass
class ForwardRunner:
    """Forward runs of one micro-batch; see [Note: facts] in :mod:`autograd.recompute`.

    Attributes:
        saves_kept: whether inputs are saved for calls whose graph is kept, too: their backward may come too late.
    """

    runner: UnitRunner
    activations: TravellingActivations
    anchor: Tensor
    weights: WorkingCopies
    saves_kept: bool = False

    def run(
        self,
        call: Call,
        replica: Replica,
        leaves: list[Any],
        *,
        records: bool,
        key: Hashable,
        full: Callable[..., Replica],
    ) -> ForwardResult:
        """Runs the unit on ``leaves`` (tensors anywhere); must be called on the replica's device.

        A recorded call leaves in ``call`` what its backward needs. If the unit returns other tensors than the facts
        promise, or draws foreign random numbers for the first time, it is run once more.

        Args:
            full: called as ``full(call, learns=True)``, gives the unit's replica in its full form.
        """
        unit = call.unit
        facts: Facts | None = unit.facts.get(key)
        if facts is None and replica.is_low:
            replica = full(call, learns=True)
        before = _snapshot(replica) if facts is None or facts.buffers else []
        done = self._attempt(call, replica, leaves, records, facts)
        if facts is not None and records and done.unit.slots.keys() != facts.slots:
            _restore(before)
            replica = full(call, learns=True) if replica.is_low else replica
            facts, before = None, _snapshot(replica)
            done = self._attempt(call, replica, leaves, records, None)
        if facts is None:
            if done.unit.draws_foreign:
                _restore(before)
                done = self._attempt(call, replica, leaves, records, None, foreign=True)
            if len(unit.facts) >= _MAX_FACTS:  # arguments that differ in every call, such as strings
                unit.facts.clear()
            has_loose = records and self._has_loose(replica, done.unit.slots.values())
            facts = unit.facts[key] = _learn(replica, before, done, num_bytes_of(leaves), has_loose)
        call.facts = facts
        written = set(facts.buffers)
        homes = [(replica.master_of(copy), name, value) for copy, name, _, _, value in before]
        call.buffer_values = [(m, n, v) for m, n, v in homes if m is not None and (m, n) in written]
        if facts.buffers:
            replica.store_buffers()
        done.unit.written = [(replica.master_of(m) or m, name, value) for m, name, value in done.unit.written]
        self._settle(call, done, records)
        done.outputs = _without_weights(done.unit.slots, replica)
        return done

    def _has_loose(self, replica: Replica, results: Iterable[Tensor]) -> bool:
        """Whether the graph of results leads to leaves that are neither the replica's nor the anchor."""
        leaves = leaves_behind(node_of(result) for result in results if result.requires_grad)
        return not leaves.keys() <= {self.anchor, *replica.leaves}

    def _settle(self, call: Call, done: ForwardResult, records: bool) -> None:
        """Decides what requires a gradient; frees what is not needed any more."""
        assert call.facts is not None
        call.relayed = {}
        if not records:
            return
        slots = done.unit.slots
        if call.kept or len(slots) > 1:  # the graph was there to ask
            call.flagged = frozenset(slot for slot, tensor in slots.items() if tensor.requires_grad)
        else:
            call.flagged = call.facts.flagged
        if not call.kept:
            _drop_graph(done.unit)

    def _learning(self, call: Call, replica: Replica) -> contextlib.AbstractContextManager[CastWatch | None]:
        travels = not replica.device.aliases_host
        return self.weights.learning(call.autocast, call.unit, replica.module, replica.leaves, travels=travels)

    def _attempt(
        self,
        call: Call,
        replica: Replica,
        leaves: list[Any],
        records: bool,
        facts: Facts | None,
        *,
        foreign: bool = False,
    ) -> ForwardResult:
        foreign = foreign or (facts is not None and facts.foreign)
        call.facts = facts
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        label = f"inputs {call.unit.name}"
        before = torch.is_grad_enabled()
        given = self.activations.receive(leaves, Edge.INPUTS, label, keep_graph=before and not records)
        arrived = list(given)
        versions = [version_of(given[i]) for i in tensors]
        # Which of several outputs require a gradient may depend on the data: only the graph can tell.
        graph = records and (call.kept or facts is None or len(facts.slots) > 1)
        if records and (self.saves_kept or not call.kept):
            call.leaves = [self.activations.save(x, label) if isinstance(x, Tensor) else x for x in leaves]
        learning = ForeignRandomness() if facts is None and not foreign else None
        torch._C._set_grad_enabled(graph if records else before)
        try:
            if graph:
                enter(call, given, self.anchor)
            with self._learning(call, replica) if facts is None else contextlib.nullcontext() as casts:
                result = self.runner.run(call, replica, given, foreign=foreign)
                if casts is not None:
                    casts.note_results(result.slots.values())
        finally:
            torch._C._set_grad_enabled(before)
        done = ForwardResult(result, replica)
        done.unit.draws_foreign = foreign or (learning is not None and learning.has_moved())
        done.changed = [i for i, v in zip(tensors, versions, strict=True) if version_of(arrived[i]) != v]
        call.changed = done.changed
        for i in done.changed:
            if arrived[i] is not leaves[i]:  # user code has another tensor than the one that was changed
                with torch.no_grad():
                    leaves[i].copy_(arrived[i])
        add_changed(call, done.unit, given)
        if graph and facts is None:
            slots = done.unit.slots
            done.graph_bytes = graph_bytes(slots.values(), [*slots.values(), *given, *replica.leaves])
        identity = {id(given[i]): i for i in tensors}
        done.passed_through = {
            j: identity[id(x)] for j, x in enumerate(done.unit.leaves) if isinstance(x, Tensor) and id(x) in identity
        }
        return done

    def cut(self, call: Call, done: ForwardResult, leaves: list[Any]) -> None:
        """Cuts the graph of a recorded call off from user code; its outputs are what user code gets then."""
        flagged = call.flagged
        if not flagged:
            return
        call.set_receivers([leaves[i] for i in call.differentiable])
        if call.kept:
            call.local = {slot: t for slot, t in done.unit.slots.items() if slot in flagged}
        outputs = done.outputs
        inside = [s for s in outputs if s in flagged and s not in done.passed_through and not _is_named(s, "relay")]
        slots = [s for s in inside if not _is_named(s, "input")]
        changed = [i for i in done.changed if ("input", i) in flagged]
        if slots or changed:
            named = (*slots, *(("input", i) for i in changed))
            tensors, inputs = [outputs[slot] for slot in slots], [leaves[i] for i in changed]
            with _version_kept(inputs):
                cut = Cut.apply(call, named, self.anchor, tensors, *inputs)  # type: ignore[no-untyped-call]
            outputs.update(zip(slots, cut, strict=False))


def enter(call: Call, leaves: list[Any], anchor: Tensor) -> None:
    """Replaces leaves by aliases, in place: differentiable ones start the local graph, the others must not join it."""
    if call.differentiable:
        inputs = [leaves[i] for i in call.differentiable]
        aliases = Entry.apply(call, anchor, inputs)  # type: ignore[no-untyped-call]
        for i, alias in zip(call.differentiable, aliases, strict=True):
            leaves[i] = alias
    differentiable = set(call.differentiable)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and i not in differentiable and leaf.is_floating_point():
            leaves[i] = leaf.detach()


def add_changed(call: Call, result: UnitResult, given: list[Any]) -> None:
    """Arguments that the unit changed in place are outputs too."""
    for i in call.changed:
        result.slots["input", i] = given[i]


def _snapshot(replica: Replica) -> Snapshot:
    """All buffers as they are: (copy module, name, buffer, its version, its value)."""
    found = []
    for _, copy, name in replica.buffers:
        buffer = copy._buffers.get(name)
        if buffer is not None:
            found.append((copy, name, buffer, version_of(buffer), buffer.detach().clone()))
    return found


def _learn(replica: Replica, before: Snapshot, done: ForwardResult, input_bytes: int, has_loose: bool) -> Facts:
    slots = done.unit.slots
    flagged = frozenset(slot for slot, tensor in slots.items() if tensor.requires_grad)
    changed = []
    for copy, name, buffer, version, value in before:
        now = copy._buffers.get(name)
        # By value as well: batch norm updates its running statistics without raising their version.
        if now is not buffer or version_of(now) != version or not torch.equal(now, value):
            master = replica.master_of(copy)
            assert master is not None
            changed.append((master, name))
    draws, foreign, writes = done.unit.draws, done.unit.draws_foreign, bool(done.unit.written)
    sizes = done.graph_bytes, num_bytes_of(slots.values()), input_bytes
    return Facts(flagged, frozenset(slots), draws, foreign, tuple(changed), writes, *sizes, has_loose)


def _restore(before: Snapshot) -> None:
    with torch.no_grad():
        for copy, name, buffer, _, value in before:
            copy._buffers[name] = buffer
            buffer.copy_(value)


def _drop_graph(result: UnitResult) -> None:
    """What a run with graph returned keeps its values only."""
    values = {id(t): t.detach() for t in result.slots.values() if t.requires_grad}
    if values:
        result.slots = {slot: values.get(id(t), t) for slot, t in result.slots.items()}


def _without_weights(slots: dict[Slot, Tensor], replica: Replica) -> dict[Slot, Tensor]:
    """Views of device copies (a unit that returns its own weight) become copies."""
    if replica.device.aliases_host:
        return dict(slots)
    weights = {leaf.untyped_storage().data_ptr() for leaf in replica.leaves}
    return {slot: t.clone() if t.untyped_storage().data_ptr() in weights else t for slot, t in slots.items()}


def _version_kept(tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Marking a tensor dirty raises its version, which saved tensors of a kept graph check; its value stays."""
    if not tensors:
        return contextlib.nullcontext()
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors))


def _is_named(slot: Slot, kind: str) -> bool:
    return isinstance(slot, tuple) and slot[0] == kind
