"""The forward of one call on a device: learn its facts, save its inputs, or keep its graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .parameters import Replica
from .recompute import Call, Entry, Facts, SavedInputs, version_of
from .unit_run import UnitResult, UnitRunner


@dataclass
class ForwardResult:
    """What a call hands to glue.

    Attributes:
        unit: the unit's own result.
        passed_through: index of a result leaf -> index of the argument leaf that it is.
        changed: argument leaves that the unit changed in place.
    """

    unit: UnitResult
    passed_through: dict[int, int] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)


@dataclass
class ForwardRunner:
    """Forward runs of one micro-batch; see [Note: facts] in :mod:`recompute`."""

    runner: UnitRunner
    saved: SavedInputs
    anchor: Tensor

    def run(self, call: Call, replica: Replica, leaves: list[Any], *, records: bool, key: Hashable) -> ForwardResult:
        """Runs the unit on ``leaves`` (tensors anywhere); must be called on the replica's device.

        A recorded call leaves in ``call`` what its backward needs. If the unit returns other tensors than the facts
        promise, it is run once more to learn.
        """
        unit = call.unit
        facts: Facts | None = unit.facts.get(key)
        before = replica.snapshot_buffers() if facts is None or facts.buffers else []
        done = self._attempt(call, replica, leaves, records, facts)
        if facts is not None and records and done.unit.slots.keys() != facts.slots:
            _restore(before)
            facts = None
            before = replica.snapshot_buffers()
            done = self._attempt(call, replica, leaves, records, None)
        if facts is None:
            facts = unit.facts[key] = _learn(replica, before, done)
        call.facts = facts
        written = set(facts.buffers)
        homes = [(replica.master_of(copy), name, value) for copy, name, value in before]
        call.buffer_values = [(m, n, v) for m, n, v in homes if m is not None and (m, n) in written]
        if facts.buffers:
            replica.store_buffers()
        done.unit.written = [(replica.master_of(m) or m, name, value) for m, name, value in done.unit.written]
        call.relayed = {}
        if records and not call.kept:
            _drop_graph(done.unit)
        return done

    def _attempt(
        self, call: Call, replica: Replica, leaves: list[Any], records: bool, facts: Facts | None
    ) -> ForwardResult:
        watch = facts is None or facts.draws
        call.facts = facts
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = to_device(leaves, replica.device.torch_device)
        versions = [version_of(leaves[i]) for i in tensors]
        if not records:
            done = ForwardResult(self.runner.run(call, replica, given, watch_randomness=watch))
        else:
            if not call.kept:
                call.leaves = [self.saved.save(x) if isinstance(x, Tensor) else x for x in leaves]
            with torch.set_grad_enabled(call.kept or facts is None):
                if torch.is_grad_enabled():
                    enter(call, given, self.anchor)
                done = ForwardResult(self.runner.run(call, replica, given, watch_randomness=watch))
        done.changed = [i for i, v in zip(tensors, versions, strict=True) if version_of(leaves[i]) != v]
        call.changed = done.changed
        add_changed(call, done.unit, given)
        identity = {id(given[i]): i for i in tensors}
        done.passed_through = {
            j: identity[id(x)] for j, x in enumerate(done.unit.leaves) if isinstance(x, Tensor) and id(x) in identity
        }
        return done


def to_device(leaves: list[Any], device: torch.device) -> list[Any]:
    """A new list with tensors moved to ``device``."""
    return [x.to(device) if isinstance(x, Tensor) and x.device != device else x for x in leaves]


def enter(call: Call, leaves: list[Any], anchor: Tensor) -> None:
    """Replaces differentiable leaves by aliases at the start of a local graph, in place."""
    if call.differentiable:
        inputs = [leaves[i].detach() for i in call.differentiable]
        aliases = Entry.apply(call, anchor, *inputs)  # type: ignore[no-untyped-call]
        for i, alias in zip(call.differentiable, aliases, strict=True):
            leaves[i] = alias


def add_changed(call: Call, result: UnitResult, given: list[Any]) -> None:
    """Arguments that the unit changed in place are outputs too."""
    for i in call.changed:
        result.slots["input", i] = given[i]


def _learn(replica: Replica, before: list[tuple[nn.Module, str, Tensor]], done: ForwardResult) -> Facts:
    slots = done.unit.slots
    flagged = frozenset(slot for slot, tensor in slots.items() if tensor.requires_grad)
    changed = []
    for copy, name, value in before:
        # By value: batch norm updates its running statistics without raising their version.
        now = copy._buffers.get(name)
        master = replica.master_of(copy)
        if master is not None and (now is None or now.shape != value.shape or not torch.equal(now, value)):
            changed.append((master, name))
    return Facts(flagged, frozenset(slots), done.unit.num_draws > 0, tuple(changed))


def _restore(buffers: list[tuple[nn.Module, str, Tensor]]) -> None:
    with torch.no_grad():
        for copy, name, value in buffers:
            buffer = copy._buffers[name]
            assert buffer is not None
            buffer.copy_(value)


def _drop_graph(result: UnitResult) -> None:
    """What a learning run returned keeps its values only."""
    detached = {id(t): t.detach() for t in result.slots.values() if t.grad_fn is not None}
    if detached:
        result.slots = {slot: detached.get(id(t), t) for slot, t in result.slots.items()}
