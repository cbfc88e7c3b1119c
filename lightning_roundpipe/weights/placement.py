"""Which weights are on which device, and when they travel.

[Note: stage runs]
A *stage run* is a device's run of consecutive actions of one stage. When it begins, its weights are on the device or on
their way, unit by unit in the order in which they are needed, up to those whose update still runs. These follow, and
those of the next stage run, as far as there is room (prefetch). When it ends, its gradients go home. Weights that this
step does not need there again are given up; others stay until their place is needed, the one that is needed last goes
first. Frozen weights stay from step to step that way. A call loads what is not on its way.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..devices.device import Device
from ..devices.pool import DevicePool
from .buffers import ComingBuffers
from .futures import is_pending
from .gradients import Foreseen, GradientStore, Source
from .low_precision import WorkingCopies
from .parameters import Harvest, Relay, Replica
from .units import Unit, Written

_NEVER = 1 << 60


@dataclass(frozen=True)
class StageRun:
    """Consecutive actions of one stage on a device; see [Note: stage runs].

    Attributes:
        units: in the order in which they are needed.
        has_gradients: whether their backward runs in it.
        ordinal: which of the runs of its stage it is, on any device, by their first micro-batches.
        activation_bytes: what the activations of a micro-batch take on the device, and those that wait there for the
            next stage, as far as it is known.
    """

    stage: int
    units: tuple[Unit, ...]
    has_gradients: bool
    ordinal: int
    activation_bytes: int


class ReplicaCache:
    """Replicas of units on devices, kept across steps (building one costs more than refreshing it).

    Replicas of a device are only touched by the thread that holds its compute lane, or occupies it.
    """

    def __init__(self, relay: Relay, pool: DevicePool) -> None:
        self._relay = relay
        self._num_hooks = self.num_writes = 0
        self._written: dict[nn.Parameter, int] = {}  # by user code in this step, and the number of the write
        self._num_uses = 0
        self._replicas: list[dict[tuple[Unit, bool], Replica]] = [{} for _ in pool.devices]  # by form
        self._next_use: list[dict[Unit, int]] = [{} for _ in pool.devices]
        self.weights = WorkingCopies()
        self.coming_buffers = ComingBuffers()
        for device in pool.devices:
            device.memory.evict = functools.partial(self.evict, device.index)

    def note_hook(self) -> None:
        """A forward hook was registered during the step: active replicas are out of date."""
        self._num_hooks += 1

    def note_write(self, masters: Iterable[nn.Parameter]) -> None:
        """User code has changed masters in the middle of the step: active replicas may be out of date."""
        self.num_writes += 1
        self._written.update(dict.fromkeys(masters, self.num_writes))

    def has_changed(self, unit: Unit, since: int) -> bool:
        """Whether user code has changed weights of a unit in this step since there were so many writes."""
        return bool(self._written) and any(self._written.get(master, 0) > since for master in unit.parameters())

    def expect(self, device: Device, next_use: dict[Unit, int]) -> None:
        """Tells when units are needed next on a device: 0 for now, 1 for the next stage run, and so on."""
        self._next_use[device.index] = next_use

    def load(self, unit: Unit, device: Device) -> None:
        """Brings the weights of ``unit`` to ``device``, or on their way, and makes room for them.

        Raises:
            DeviceOutOfMemoryError: if there is no room to be made.
        """
        self._make_loaded(self._find(unit, device, self.weights.is_low(unit)))

    def _make_loaded(self, replica: Replica) -> None:
        if not replica.device.aliases_host and not self._is_there(replica):
            replica.load(self.weights, must=True)

    def prefetch(self, unit: Unit, device: Device) -> bool:
        """As :meth:`load`, but only as far as there is room, or room is taken by what is needed later; whether it is
        on its way."""
        replica = self._find(unit, device, self.weights.is_low(unit))
        if is_pending(unit.parameters()):  # a wait would hold up the unit that runs now
            return False
        needed = self._next_use[device.index].get(unit, _NEVER)
        while not self._is_there(replica) and not replica.load(self.weights, must=False):
            if not self.evict(device.index, later_than=needed):
                return False
        return True

    def _is_there(self, replica: Replica) -> bool:
        if not replica.is_active:
            replica.drop_stale(self.weights)
        return replica.is_loaded

    def get(
        self,
        unit: Unit,
        device: Device,
        baseline: Callable[[], Iterable[Written]],
        *,
        is_low: bool,
        trained: tuple[bool, ...],
    ) -> Replica:
        """The replica of ``unit`` on ``device``, active.

        Args:
            baseline: gives attributes that belong to some micro-batch at the moment, with their values for all others.
            is_low: in which form.
            trained: for each parameter of the unit whether it requires a gradient.
        """
        replica = self._replicas[device.index].get((unit, is_low))
        if replica is None or not replica.is_active:
            replica = self._activated(unit, device, is_low, baseline)
        else:
            if replica.num_hooks != self._num_hooks:
                self._look_again(replica, baseline)
                replica.refresh(baseline)
                replica.load_state()
            if device.aliases_host or replica.num_writes != self.num_writes:
                replica.renew(self.weights)
        replica.num_writes = self.num_writes
        self._num_uses += 1
        replica.last_use = self._num_uses
        if replica.trained != trained:
            replica.switch(trained)
        return replica

    def _activated(
        self, unit: Unit, device: Device, is_low: bool, baseline: Callable[[], Iterable[Written]]
    ) -> Replica:
        replica = self._find(unit, device, is_low)
        if replica.num_hooks != self._num_hooks:
            self._look_again(replica, baseline)
        if not replica.refresh(baseline):
            replica.unload()
            del self._replicas[device.index][unit, is_low]
            replica = self._find(unit, device, is_low)
            replica.refresh(baseline)
        self._make_loaded(replica)
        replica.activate()
        return replica

    def _look_again(self, replica: Replica, baseline: Callable[[], Iterable[Written]]) -> None:
        """Hooks were registered since the replica was used, perhaps after the unit was looked at in this segment."""
        replica.unit.look(baseline())
        replica.num_hooks = self._num_hooks

    def _find(self, unit: Unit, device: Device, is_low: bool) -> Replica:
        replicas = self._replicas[device.index]
        other = replicas.get((unit, not is_low))
        if other is not None and not other.is_active:
            other.unload()
        if (unit, is_low) not in replicas:
            replicas[unit, is_low] = Replica(unit, device, self._relay, self.coming_buffers, is_low=is_low)
        return replicas[unit, is_low]

    def _all(self) -> Iterator[Replica]:
        return (replica for replicas in self._replicas for replica in list(replicas.values()))

    def active_on(self, device: Device) -> Iterator[Replica]:
        """Active replicas on ``device``."""
        return (replica for replica in list(self._replicas[device.index].values()) if replica.is_active)

    def give_up(self, device: Device) -> None:
        """Ends the use of what is active on ``device``. Copies that cannot be used again are freed, others may stay."""
        for replica in self.active_on(device):
            replica.kept.check(replica.unit.name)
            replica.deactivate()
            if replica.unit not in self._next_use[device.index]:
                replica.unload(unless=self.weights.outlast_step)

    def evict(self, device_index: int, *, later_than: int = 0) -> bool:
        """Frees the copies of that unit on a device that is needed last, and not in use; whether there was any.

        Args:
            later_than: units that are needed in this stage run or before stay; see :meth:`expect`.
        """
        next_use = self._next_use[device_index]
        idle = [replica for replica in self._replicas[device_index].values() if replica.is_evictable]
        idle = [r for r in idle if next_use.get(r.unit, _NEVER) > later_than]
        if not idle:
            return False
        # Of those that no stage run of this step needs, the last one used: the next step uses the others before it.
        max(idle, key=lambda replica: (next_use.get(replica.unit, _NEVER), replica.last_use)).unload()
        return True

    def leaf_names(self) -> dict[int, str]:
        """Id of every replica parameter -> name of its unit."""
        return {id(leaf): replica.unit.name for replica in self._all() for leaf in replica.leaves}

    def end_step(self) -> None:
        """Ends a step: gradients that were not harvested are lost; only weights that do not change stay anywhere."""
        self.coming_buffers.end_step()
        self._written.clear()
        for replica in self._all():
            replica.unload(unless=self.weights.outlast_step)

    def clear(self) -> None:
        """Forgets all replicas, also on a GPU that raises whatever it is asked for."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.weights.clear)
            for replica in self._all():
                stack.callback(replica.unload)
            for replicas in self._replicas:
                replicas.clear()


class Loader:
    """Moves the weights of one run over a schedule; see [Note: stage runs].

    Args:
        stage_runs: of each device, in order.
        is_recording: no stage run is known yet: calls load what they need.
    """

    def __init__(
        self,
        stage_runs: list[list[StageRun]],
        pool: DevicePool,
        replicas: ReplicaCache,
        gradients: GradientStore,
        *,
        is_recording: bool,
    ) -> None:
        self._pool = pool
        self._replicas = replicas
        self._gradients = gradients
        self._is_recording = is_recording
        self._stage_runs = stage_runs
        self._now = [0] * len(pool)
        self._has_begun = [False] * len(pool)
        self._coming: list[list[Unit]] = [[] for _ in pool.devices]

    def send_ahead(self, device: Device) -> None:
        """Weights of the first stage run begin to travel before a micro-batch needs them there: as far as there is
        room, and not those whose update is still running. On any thread; does nothing once :meth:`begin` was called."""
        if device.aliases_host or self._is_recording or self._has_begun[device.index]:
            return
        with device.occupied():
            if not self._has_begun[device.index]:
                self._fetch_ahead(device, [unit for run in self._expect(device)[:1] for unit in run.units])

    def begin(self, device: Device) -> None:
        """A micro-batch was admitted to ``device``: loads the first stage run, unless that has been done."""
        if not device.aliases_host and not self._has_begun[device.index]:
            with device.occupied():
                self._load_stage_run(device)

    def free_recorded(self, replica: Replica) -> None:
        """The recording runs all units on one device: what they take there goes at once, and from a GPU before the next
        one comes, so that what user code takes is seen. The calling thread holds the compute lane."""
        device = replica.device
        if device.aliases_host:
            return
        if found := replica.harvest():
            self._gradients.add(*found, (replica.unit.order,))
        replica.unload()
        if not device.counts_activations:
            device.memory.evict_all()

    def end_stage_run(self, device_index: int) -> None:
        """The last micro-batch of a stage run has left it, and none has been let into the next one yet."""
        device = self._pool[device_index]
        run = self._stage_runs[device_index][self._now[device_index]]
        self._now[device_index] += 1
        if device.aliases_host:
            self._harvest(device, run)
            return
        with device.occupied():
            self._harvest(device, run)
            self._expect(device)
            self._replicas.give_up(device)
            self._load_stage_run(device)

    def _harvest(self, device: Device, run: StageRun) -> None:
        """Gradients go home, unit by unit, in the order of the runs of their stage."""
        harvested: dict[Unit, list[Harvest]] = {}
        for replica in self._replicas.active_on(device):
            if found := replica.harvest():
                harvested.setdefault(replica.unit, []).append(found)
        if self._is_recording:
            for unit, parts in harvested.items():
                for found in parts:
                    self._gradients.add(*found, (unit.order,))
            return
        for unit in run.units if run.has_gradients else ():
            masters, arriving = harvested[unit].pop(0) if harvested.get(unit) else ((), None)
            self._gradients.add_later(masters, arriving, (unit.order, run.stage, 0), run.ordinal)
        for unit, parts in harvested.items():  # calls off the plan, and those in the other form of the unit
            for i, found in enumerate(parts):
                ordinal = self._now[device.index]
                self._gradients.add_later(*found, (unit.order, _NEVER, i, device.index), ordinal)

    def foreseen(self) -> Foreseen:
        """The gradients that :meth:`_harvest` brings home if all calls are made by the plan."""
        num_parts: dict[Unit, Counter[Source]] = {}
        for run in (run for row in self._stage_runs for run in row if run.has_gradients):
            for unit in run.units:
                num_parts.setdefault(unit, Counter())[unit.order, run.stage, 0] += 1
        foreseen: dict[nn.Parameter, Counter[Source]] = {}
        for unit, counts in num_parts.items():
            for master in unit.parameters():
                foreseen.setdefault(master, Counter()).update(counts)
        return foreseen

    def _load_stage_run(self, device: Device) -> None:
        """The weights of the stage run that begins must come, up to those whose update still runs: these, and those of
        the next one, as far as there is room, or with their calls."""
        self._has_begun[device.index] = True
        if self._is_recording:
            return
        missing = [list(run.units) for run in self._expect(device)]
        while missing and missing[0] and not is_pending(missing[0][0].parameters()):
            self._replicas.load(missing[0].pop(0), device)
        self._fetch_ahead(device, [unit for units in missing for unit in units])

    def _fetch_ahead(self, device: Device, units: list[Unit]) -> None:
        """Weights of ``units`` begin to travel, in this order, as far as there is room."""
        self._coming[device.index] = units[::-1]
        self.prefetch(device)

    def _expect(self, device: Device) -> list[StageRun]:
        """Notes what the device needs from now on; the stage run that begins, and the next one."""
        following = self._stage_runs[device.index][self._now[device.index] :]
        next_uses = {unit: i for i, run in reversed(list(enumerate(following))) for unit in run.units}
        self._replicas.expect(device, next_uses)
        device.memory.headroom = max((run.activation_bytes for run in following[:2]), default=0)
        return following[:2]

    def prefetch(self, device: Device) -> None:
        """Weights that are needed next begin to travel, as far as there is room; asked again while a stage run runs."""
        coming = self._coming[device.index]
        try:
            while coming and self._replicas.prefetch(coming[-1], device):
                coming.pop()
        except torch.OutOfMemoryError:  # what the books do not know of takes the room: no more in this stage run
            coming.clear()
