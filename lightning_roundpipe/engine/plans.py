"""Plans and schedules of an engine: made from costs, and made anew when the costs are known better.

[Note: re-planning]
The first plan of a key comes from guessed times, and from the sizes of the micro-batch that has recorded its calls.
After steps 2, 4, 8, 16, ... with the key a new one is made from what was measured, and taken if the simulator says that
it saves more than 2 % of the step. That is between two steps, and only where calls run and in which order devices take
them changes, never what is computed: results stay the same. Ever rarer, because a plan costs time and estimates settle.
If a step makes calls that its plan does not foresee, the plan is made anew from the calls of its first micro-batch.

Steps that meet in a loop have a segment per round, all alike: as long as they are, they share a plan, and what is
measured.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..planning.builders import round_robin
from ..planning.costs import CostProfile, Machine
from ..planning.partition import Partition, StageKind, no_calls
from ..planning.plan import StepPlan
from ..planning.schedule import Schedule
from ..planning.simulate import simulate
from ..planning.stages import stage_costs
from ..weights.placement import StageRun
from ..weights.units import Unit
from .barrier import Segment
from .costs import CallEstimates, DeviceSpeeds
from .requests import SegmentRecord

# (costs of the calls, machine, num_microbatches, training) -> plan of a step; of a partition alone, every stage runs on
# one device at a time.
Planner = Callable[[CostProfile, Machine, int, bool], StepPlan | Partition]

# A new plan must shorten the simulated step by more than this fraction.
_MIN_GAIN = 0.02
# The first steps are all measured, then one of several: that takes time as well.
_ALL_MEASURED = 8
_MEASURED_EVERY = 4


@dataclass
class Plan:
    """Which unit calls are expected in which order, and the stages they were cut into.

    Attributes:
        step: how the stages run; None while the calls are recorded.
        costs, machine: what the plan was made from.
        carried: indices of calls of earlier segments whose backward runs in this one: the first positions.
        loose_bytes: what user code around the calls takes on a device, as far as it is known; or a little more, because
            the largest call may have taken the most.
        activation_bytes: per stage, those of the micro-batch that is in it, and those that wait for the next stage.
    """

    sequence: tuple[Unit, ...]
    partition: Partition
    recording: bool = False
    step: StepPlan | None = None
    costs: CostProfile | None = None
    machine: Machine | None = None
    carried: tuple[int, ...] = ()
    loose_bytes: int = 0
    activation_bytes: tuple[tuple[int, int], ...] = ()
    _schedules: dict[tuple[int, int], tuple[Schedule, int]] = field(default_factory=dict, compare=False, repr=False)
    _stage_runs: dict[int, tuple[Schedule, list[list[StageRun]]]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def stage_runs_in(self, schedule: Schedule) -> list[list[StageRun]]:
        """:func:`stage_runs_of`, once for each schedule object."""
        if id(schedule) not in self._stage_runs:
            self._stage_runs[id(schedule)] = schedule, stage_runs_of(self, schedule)
        return self._stage_runs[id(schedule)][1]

    def schedule(self, num_microbatches: int, first_device: int) -> tuple[Schedule, int]:
        """The schedule of a step that begins with a device, and the device with which the step after begins."""
        assert self.step is not None
        assert self.costs is not None
        assert self.machine is not None
        key = num_microbatches, first_device
        if key not in self._schedules:
            made = self.step.schedule(self.costs, self.machine, num_microbatches, first_device=first_device)
            following = self.step.next_first_device(made, first_device) if self.machine.is_uniform else 0
            self._schedules[key] = made, following
        return self._schedules[key]

    def microbatches_per_round(self, num_microbatches: int) -> int:
        """Of a step with so many."""
        assert self.step is not None
        return min(self.step.round_size or num_microbatches, num_microbatches)

    @functools.cached_property
    def stages_of(self) -> list[tuple[int, int | None]]:
        """For each position the stage of its forward and, in training, that of its backward."""
        forward, backward = self.partition.forward_stages, self.partition.backward_stages
        return list(zip(forward, backward or [None] * len(forward), strict=True))

    @functools.cached_property
    def keeps_graph(self) -> list[bool]:
        """For each stage whether the graphs of its calls are kept until the backward."""
        return [stage.kind is StageKind.FUSED and not self.recording for stage in self.partition.stages]


def stage_runs_of(plan: Plan, schedule: Schedule) -> list[list[StageRun]]:
    """The stage runs of each device, in order."""
    starts: dict[int, list[tuple[int, int, int]]] = {}  # stage -> (first micro-batch, device, place on the device)
    stages: list[list[list[int]]] = []  # per device and stage run: its stage, and how many micro-batches there are
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
    if stage.kind is not StageKind.BACKWARD:
        return tuple(dict.fromkeys(units))
    assert plan.costs is not None
    calls = plan.costs.calls[stage.start : stage.stop]
    returned = [unit for unit, call in zip(units, calls, strict=True) if call.backward_ms]
    return tuple(dict.fromkeys(reversed(returned)))


@dataclass
class _Known:
    """What is known about the steps with one key."""

    plan: Plan
    estimates: CallEstimates
    is_training: bool
    num_microbatches: int
    num_steps: int = 0


class Plans:
    """The plans of one engine, by key; see [Note: re-planning].

    Args:
        planner, round_size: as for :class:`runner.Engine`.
        speeds: of the devices, as they are measured; None where they are alike by construction.

    Attributes:
        machine: what the devices are like, as far as it is known: their speeds are measured in steps.
    """

    def __init__(
        self,
        planner: Planner,
        machine: Machine,
        *,
        round_size: int | None = None,
        speeds: DeviceSpeeds | None = None,
    ) -> None:
        self._planner = planner
        self._round_size = round_size
        self._num_devices = machine.num_devices
        self.machine = machine
        self._speeds = speeds
        self._known: dict[Hashable, _Known] = {}
        self._apart: set[Hashable] = set()  # segments that once went another way than other rounds of their loop
        self._presets: dict[Hashable, CostProfile] = {}
        self._first_device = 0

    def of(self, key: Hashable) -> Plan | None:
        """The plan of steps with this key, once one has run."""
        known = self._known.get(key)
        return None if known is None else known.plan

    def recording(self, is_training: bool) -> tuple[Plan, Schedule]:
        """What a first micro-batch runs to record its calls: one stage, one device, no call foreseen."""
        return Plan((), no_calls(is_training=is_training), recording=True), round_robin(1, 1, self._num_devices)

    def record(self, key: Hashable, recorded: SegmentRecord, num_microbatches: int, is_training: bool) -> Plan:
        """Makes the first plan of a key, from the micro-batch that has recorded its calls.

        Raises:
            ValueError: if the costs that were preset for the key are not those of the calls.
        """
        sequence = recorded.sequence
        twin = self._twin(key, sequence, recorded.carried, num_microbatches, is_training)
        if twin is not None:
            self._known[key] = twin
            return twin.plan
        estimates = CallEstimates(sequence, is_training, self._speeds)
        if key in self._presets:
            estimates.preset(self._presets[key])
        estimates.add_recorded(recorded.runs)
        costs = estimates.profile
        of_calls = max((call.activation_bytes(is_training=is_training) for call in costs.calls), default=0)
        loose = max(0, recorded.peak_bytes - of_calls)
        plan = self._make(sequence, recorded.carried, costs, num_microbatches, is_training, loose)
        # Only now: times would let the first plan differ from run to run.
        estimates.add([recorded.runs])
        self._known[key] = _Known(plan, estimates, is_training, num_microbatches)
        return plan

    def _twin(
        self, key: Hashable, sequence: tuple[Unit, ...], carried: tuple[int, ...], count: int, is_training: bool
    ) -> _Known | None:
        """What is known of the same segment in an earlier round of a loop: one plan is enough for all rounds."""
        if not isinstance(key, Segment) or key in self._apart:
            return None
        what = (sequence, carried, count, is_training)
        for other, known in self._known.items():
            if isinstance(other, Segment) and other.is_round_of_same_loop(key):
                plan = known.plan
                if (plan.sequence, plan.carried, known.num_microbatches, known.is_training) == what:
                    return known
        return None

    def measures(self, key: Hashable) -> bool:
        """Whether the next step with this key is measured."""
        known = self._known.get(key)
        return known is None or known.num_steps < _ALL_MEASURED or (known.num_steps + 1) % _MEASURED_EVERY == 0

    def note_step(self, key: Hashable, records: Sequence[SegmentRecord], num_microbatches: int) -> bool:
        """A step has ended: takes what was measured, and may make a new plan; whether it did.

        Args:
            records: of the micro-batches that ran by the plan.
            num_microbatches: all there were.
        """
        known = self._known[key]
        if self.measures(key):
            known.estimates.add([record.runs for record in records])
        known.num_steps += 1
        known.num_microbatches = max(known.num_microbatches, num_microbatches)
        if any(record.has_backward for record in records) and not known.is_training:
            self.forget(key)
            return True
        if any(record.num_off_plan for record in records):
            if any(other is known for place, other in self._known.items() if place != key):
                self._apart.add(key)
                del self._known[key]
                return True
            sequence, carried = records[0].sequence, records[0].carried
            known.estimates.rearrange(sequence)
            costs, loose = known.estimates.profile, known.plan.loose_bytes
            known.plan = self._make(sequence, carried, costs, known.num_microbatches, known.is_training, loose)
            return True
        if torch.are_deterministic_algorithms_enabled():
            return False
        is_due = known.num_steps >= 2 and known.num_steps.bit_count() == 1 and key not in self._presets
        return (self._note_speeds() or is_due) and self._improve(known)

    def _note_speeds(self) -> bool:
        """Whether devices have turned out to be faster or slower than the plans believe."""
        speeds = None if self._speeds is None else self._speeds.changed(self.machine)
        if speeds is None:
            return False
        pairs = zip(self.machine.traits, speeds, strict=True)
        self.machine = replace(self.machine, devices=tuple(replace(traits, speed=speed) for traits, speed in pairs))
        return True

    def _improve(self, known: _Known) -> bool:
        """Takes a better plan, if there is one; whether it did. One of smaller rounds is better: with larger ones,
        activations no longer have room. See [Note: sizes of rounds] in :mod:`planning.plan`."""
        costs = known.estimates.profile
        try:
            plan = self._make_again(known, costs)
        except ValueError as error:  # the present plan has proved that it runs
            warnings.warn(
                f"no new plan could be made from the measured costs, the present one stays: {error}", stacklevel=2
            )
            return False
        if plan.step == known.plan.step and self.machine.is_uniform:
            return False
        before_ms, after_ms = (self._simulated_ms(made, costs, known) for made in (known.plan, plan))
        before, after = (made.microbatches_per_round(known.num_microbatches) for made in (known.plan, plan))
        if after_ms >= (1 - _MIN_GAIN) * before_ms and after >= before:
            return False
        known.plan = plan
        return True

    def _simulated_ms(self, plan: Plan, costs: CostProfile, known: _Known) -> float:
        schedule, _ = plan.schedule(known.num_microbatches, 0)
        return simulate(schedule, stage_costs(plan.partition, costs), self.machine).step_ms

    def _make_again(self, known: _Known, costs: CostProfile) -> Plan:
        plan = known.plan
        count, training = known.num_microbatches, known.is_training
        return self._make(plan.sequence, plan.carried, costs, count, training, plan.loose_bytes)

    def _make(
        self,
        sequence: tuple[Unit, ...],
        carried: tuple[int, ...],
        costs: CostProfile,
        num_microbatches: int,
        is_training: bool,
        loose_bytes: int,
    ) -> Plan:
        if not sequence:  # a segment without units
            partition = no_calls(is_training=is_training)
            return Plan((), partition, step=StepPlan(partition, (1,)), costs=costs, machine=self.machine)
        made = self._planner(costs, self.machine, num_microbatches, is_training)
        step = made if isinstance(made, StepPlan) else StepPlan(made, (1,) * made.num_stages, self._round_size)
        written = [position for position, unit in enumerate(sequence) if unit.written]
        step = step.with_order(ordered_spans(sequence), written)
        needed = _activations(step.partition, costs, loose_bytes)
        return Plan(
            sequence,
            step.partition,
            step=step,
            costs=costs,
            machine=self.machine,
            carried=carried,
            loose_bytes=loose_bytes,
            activation_bytes=needed,
        )

    def costs(self, key: Hashable) -> CostProfile | None:
        """The costs of the calls of steps with this key, as they are known now; None if nothing is known."""
        known = self._known.get(key)
        return self._presets.get(key) if known is None else known.estimates.profile

    def preset(self, key: Hashable, profile: CostProfile) -> None:
        """Plans steps with this key from ``profile``, now and after :meth:`clear`, and never anew from measured costs.

        Raises:
            ValueError: if a step with this key has run and made other calls. (If none has, the first one will say so.)
        """
        known = self._known.get(key)
        if known is not None:
            known.estimates.preset(profile)
            known.plan = self._make_again(known, profile)
        self._presets[key] = profile

    def schedule(self, plan: Plan, num_microbatches: int) -> Schedule:
        """The schedule of the next step; devices take turns from step to step."""
        schedule, self._first_device = plan.schedule(num_microbatches, self._first_device)
        return schedule

    def forget(self, key: Hashable) -> None:
        """Forgets the plan of a key and what was measured for it; not costs that were preset. Of a step, the plans of
        all its segments."""
        for known in list(self._known):
            if known == key or (isinstance(known, Segment) and known.step == key):
                del self._known[known]

    def clear(self) -> None:
        """Forgets the plans and what was measured; the units are other ones from now on."""
        self._known.clear()
        self._apart.clear()
        if self._speeds is not None:
            self._speeds.clear()


def _activations(partition: Partition, costs: CostProfile, loose_bytes: int) -> tuple[tuple[int, int], ...]:
    """As :attr:`Plan.activation_bytes`; most of what user code takes is for the loss, behind the last forward."""
    last = partition.forward_stages[-1]
    return tuple(
        (cost.workspace_bytes + loose_bytes * (stage == last), cost.handover_bytes)
        for stage, cost in enumerate(stage_costs(partition, costs))
    )


def ordered_spans(sequence: Sequence[Unit]) -> list[tuple[int, int]]:
    """Positions from the first to the last call of a unit that writes buffers and is called several times.

    In one forward stage the micro-batches pass them one after the other; in several they would write at the same time.
    """
    spans = []
    for unit in dict.fromkeys(sequence):
        if unit.written:
            positions = [i for i, other in enumerate(sequence) if other is unit]
            if len(positions) > 1:
                spans.append((positions[0], positions[-1] + 1))
    return spans
