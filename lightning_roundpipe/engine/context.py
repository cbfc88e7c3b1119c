"""What the micro-batches of a step share: the plan, the devices, the lock, the gradients."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..autograd.compiling import UnitCompiler
from ..devices.pool import DevicePool
from ..planning.partition import Partition, StageKind
from ..planning.schedule import Schedule
from ..usercode.lock import UserCodeLock
from ..weights.gradients import GradientStore
from ..weights.placement import Loader, ReplicaCache, StageRun
from ..weights.units import Unit
from .gate import Gate


@dataclass
class Plan:
    """Which unit calls are expected in which order, and the stages they were cut into.

    Attributes:
        carried: indices of calls of earlier segments whose backward runs in this one: the first positions.
        activation_bytes: per stage, those of the micro-batch that is in it, and those that wait for the next stage.
    """

    sequence: tuple[Unit, ...]
    partition: Partition
    recording: bool = False
    carried: tuple[int, ...] = ()
    activation_bytes: tuple[tuple[int, int], ...] = ()


def slots_of(plan: Plan, schedule: Schedule) -> list[list[StageRun]]:
    """The slots of each device, in order."""
    starts: dict[int, list[tuple[int, int, int]]] = {}  # stage -> (first micro-batch, device, place on the device)
    stages: list[list[list[int]]] = []  # per device and slot: its stage, and how many micro-batches there are
    for device, actions in enumerate(schedule.devices):
        row: list[list[int]] = []
        for action in actions:
            if not row or row[-1][0] != action.stage_index:
                starts.setdefault(action.stage_index, []).append((action.microbatch_index, device, len(row)))
                row.append([action.stage_index, 0])
            row[-1][1] += 1
        stages.append(row)
    ordinals = {
        (device, place): ordinal
        for found in starts.values()
        for ordinal, (_, device, place) in enumerate(sorted(found))
    }
    units = [_units_of(plan, stage) for stage in range(schedule.num_stages)]
    backward = [plan.partition.stages[stage].kind is not StageKind.FORWARD for stage in range(schedule.num_stages)]
    needed = plan.activation_bytes or ((0, 0),) * schedule.num_stages
    return [
        [
            StageRun(s, units[s], backward[s], ordinals[device, place], needed[s][0] + count * needed[s][1])
            for place, (s, count) in enumerate(row)
        ]
        for device, row in enumerate(stages)
    ]


def _units_of(plan: Plan, stage_index: int) -> tuple[Unit, ...]:
    stage = plan.partition.stages[stage_index]
    units = plan.sequence[stage.start : stage.stop]
    return tuple(dict.fromkeys(reversed(units) if stage.kind is StageKind.BACKWARD else units))


@dataclass
class StepContext:
    """What the micro-batches of one run over a schedule share.

    Attributes:
        meets: whether there may be other runs in the same step, see [Note: barriers] in :mod:`engine.barrier`.
    """

    plan: Plan
    gate: Gate
    pool: DevicePool
    replicas: ReplicaCache
    loader: Loader
    lock: UserCodeLock
    training: bool
    is_measured: bool
    seed: int
    autocast_device: str
    gradients: GradientStore
    backward_runs_user_code: threading.Event
    compiler: UnitCompiler | None = None
    meets: bool = False
    _trained: dict[Unit, tuple[bool, ...]] = field(default_factory=dict)
    _members: dict[Unit, frozenset[int]] = field(default_factory=dict)

    def trained(self, unit: Unit) -> tuple[bool, ...]:
        """Which parameters of ``unit`` require a gradient, for the micro-batch that holds the user-code lock.

        Looks at the unit once per step, unless user code switches parameters.
        """
        known = self._trained.get(unit)
        if known is None:
            unit.look()
        if known is None or self.lock.switches_flags:
            known = self._trained[unit] = tuple([p.requires_grad for p in unit.parameters()])
        return known

    @functools.cached_property
    def _stage_orders(self) -> tuple[tuple[int, ...], ...]:
        num_forward = sum(stage.kind is not StageKind.BACKWARD for stage in self.plan.partition.stages)
        return self.gate.schedule.stage_orders(num_forward)

    def _before(self, stage: int, slot: int) -> tuple[int, ...]:
        """The micro-batches that write the buffers of units in ``stage`` before ``slot``.

        All of them: one that skips a unit does not wait for those before it.
        """
        order = self._stage_orders[stage]
        return order[: order.index(slot)]

    def await_buffers(self, unit: Unit, position: int, slot: int) -> None:
        """Waits until the micro-batches before this one have made their last call of ``unit`` in this stage.

        Also where it is not known yet whether the unit writes its buffers. See :meth:`Schedule.stage_orders`.
        """
        partition = self.plan.partition
        stage = partition.stages[partition.forward_stage(position)]
        before = self._before(stage.index, slot)
        if before:
            last = max(i for i in range(position, stage.stop) if self.plan.sequence[i] is unit)
            for other in before:
                self.gate.await_position(slot, other, last)

    @functools.cached_property
    def repeated(self) -> frozenset[Unit]:
        """Units with several positions in the plan."""
        return frozenset(unit for unit, n in Counter(self.plan.sequence).items() if n > 1)

    def members_of(self, unit: Unit) -> frozenset[int]:
        """Ids of the unit's modules."""
        known = self._members.get(unit)
        if known is None:
            known = self._members[unit] = frozenset(map(id, unit.members))
        return known


def ordered_spans(sequence: Sequence[Unit]) -> list[tuple[int, int]]:
    """Positions from the first to the last call of a unit that writes buffers and is called several times.

    In one forward stage the micro-batches pass them one after the other; in several they would write at the same time.
    """
    spans = []
    for unit in dict.fromkeys(sequence):
        if any(facts.buffers for facts in unit.facts.values()):
            positions = [i for i, other in enumerate(sequence) if other is unit]
            if len(positions) > 1:
                spans.append((positions[0], positions[-1] + 1))
    return spans
