"""What may happen to the weights of a unit, and when; a checker that follows them through a run.

[Note: consistency protocol]
Weights, their working copies, device copies and gradients are read and written by several threads. A weight of a unit
is in several :class:`UnitState` at once: in one as a master on the host, in one more for device copies, and in one for
its gradient. (Kept per weight, because units share weights, and frozen weights travel apart.) ::

    master     master updated -> [working copy refreshed] -> updating -> master updated
    on devices uploading -> on device, and again, on any number of devices
    gradient   gradients downloading -> gradients ready, until the next update

The paper's five orderings (:class:`Ordering`) say which of these exclude each other. Most need no wait here, because a
step ends when nothing is on its way any more, and ``optimizer.step`` comes after that. They are kept by

1. *a working copy is refreshed after its previous upload*: the end of the step.
2. *an upload comes after the refresh, and that after the update*: **a wait** for a pending weight ([Note: parameter
   futures]) in ``WorkingCopies.source`` and ``Replica.activate``; the update refreshes before it lets go. Stale steps
   upload snapshots: the wait of 4 comes one step earlier.
3. *gradients are taken after their download*: **a wait**, ``Edge.GRADIENTS`` in ``GradientStore``, on the accumulation
   thread.
4. *the next gradients come when the last ones were taken and used*: 2, as a unit runs after its update. Stale: **a
   wait** in ``RoundPipeStrategy.backward``, for the whole update.
5. *copies are made between updates*: the end of the step, and 2. Stale: snapshots.

Stale steps compute with snapshots, which no thread writes meanwhile: there an update excludes nothing but another one
of the same weights.

:func:`following` sets the engine's hook (``weight_events.observer``) to a checker, which compares every :class:`Event`
with :data:`RULES`.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_roundpipe.devices.transfer import Transfer
from lightning_roundpipe.weights import events as weight_events


class UnitState(enum.Enum):
    """What is going on with the weights of a unit; see [Note: consistency protocol]."""

    MASTER_UPDATED = "master updated"  # nothing is; also before the first update
    COPY_REFRESHED = "working copy refreshed"
    UPDATING = "updating"
    UPLOADING = "uploading"
    ON_DEVICE = "on device"  # ready to run there
    GRADIENTS_DOWNLOADING = "gradients downloading"
    GRADIENTS_READY = "gradients ready"


class Event(enum.Enum):
    """What happens to the weights of a unit."""

    REFRESH = "refreshing its working copy"
    UPLOAD = "uploading it"
    ACTIVATE = "running it on a device"
    DEACTIVATE = "ending its use on a device"
    DOWNLOAD = "downloading its gradients"
    TAKE = "taking its gradients"
    UPDATE = "updating it"
    UPDATED = "the end of its update"
    NOT_UPDATED = "the end of its update, which was not made"


class Ordering(enum.Enum):
    """The five orderings of the paper; see [Note: consistency protocol] for where each is kept."""

    UPLOADED_BEFORE_REFRESHED = "refreshing a working copy waits for the previous upload of it"
    REFRESHED_BEFORE_UPLOADED = "an upload waits for the refresh of what it reads, and that for the update"
    DOWNLOADED_BEFORE_TAKEN = "taking gradients waits for their download"
    TAKEN_BEFORE_DOWNLOADED = "the next gradients wait until the last ones were taken and used"
    COPIED_BETWEEN_UPDATES = "copies are made between updates"


@dataclass(frozen=True)
class Rule:
    """When an event is legal, and what it leads to.

    Attributes:
        to: the state that begins; None if one ends.
        during: a state that the weight must be in.
        never_during: states that it must not be in, with the ordering that keeps the event and the state apart.
    """

    to: UnitState | None
    during: UnitState | None = None
    never_during: Mapping[UnitState, Ordering] = field(default_factory=dict)


RULES: Mapping[Event, Rule] = {
    Event.REFRESH: Rule(
        UnitState.COPY_REFRESHED,
        never_during={
            UnitState.UPLOADING: Ordering.UPLOADED_BEFORE_REFRESHED,
            UnitState.UPDATING: Ordering.COPIED_BETWEEN_UPDATES,
        },
    ),
    Event.UPLOAD: Rule(UnitState.UPLOADING, never_during={UnitState.UPDATING: Ordering.REFRESHED_BEFORE_UPLOADED}),
    Event.ACTIVATE: Rule(UnitState.ON_DEVICE, never_during={UnitState.UPDATING: Ordering.REFRESHED_BEFORE_UPLOADED}),
    Event.DEACTIVATE: Rule(None, during=UnitState.ON_DEVICE),
    Event.DOWNLOAD: Rule(
        UnitState.GRADIENTS_DOWNLOADING,
        during=UnitState.ON_DEVICE,
        never_during={UnitState.UPDATING: Ordering.TAKEN_BEFORE_DOWNLOADED},
    ),
    Event.TAKE: Rule(
        UnitState.GRADIENTS_READY,
        during=UnitState.GRADIENTS_DOWNLOADING,
        never_during={UnitState.UPDATING: Ordering.TAKEN_BEFORE_DOWNLOADED},
    ),
    Event.UPDATE: Rule(
        UnitState.UPDATING,
        never_during={
            UnitState.GRADIENTS_DOWNLOADING: Ordering.DOWNLOADED_BEFORE_TAKEN,
            UnitState.UPLOADING: Ordering.COPIED_BETWEEN_UPDATES,
            UnitState.ON_DEVICE: Ordering.COPIED_BETWEEN_UPDATES,
            UnitState.UPDATING: Ordering.COPIED_BETWEEN_UPDATES,
        },
    ),
    Event.UPDATED: Rule(UnitState.MASTER_UPDATED, during=UnitState.UPDATING),
    Event.NOT_UPDATED: Rule(UnitState.MASTER_UPDATED, during=UnitState.UPDATING),
}
_MASTER_STATES = (UnitState.MASTER_UPDATED, UnitState.COPY_REFRESHED, UnitState.UPDATING)
# Where an exception would leave those who wait for an update waiting for ever.
_UNRAISED = (Event.UPDATE, Event.UPDATED, Event.NOT_UPDATED)


class ProtocolError(RuntimeError):
    """Something happened to weights while it must not."""


@dataclass(eq=False)
class _Record:
    """What is known about one weight.

    Attributes:
        master: as it is on the host; one of three states.
        version: number of updates.
        copy_versions: of working copies, by dtype; None for one of a snapshot.
        device_versions: of what was uploaded last, by replica; likewise.
        uploads, downloads: that may be under way.
        active: replicas in use.
        address: of what the last update has written; None before it.
    """

    name: str
    master: UnitState = UnitState.MASTER_UPDATED
    version: int = 0
    copy_versions: dict[object, int | None] = field(default_factory=dict)
    device_versions: dict[object, int | None] = field(default_factory=dict)
    uploads: list[Transfer] = field(default_factory=list)
    downloads: list[Transfer] = field(default_factory=list)
    active: set[object] = field(default_factory=set)
    has_gradient: bool = False
    address: int | None = None

    def is_read_apart(self, weight: nn.Parameter) -> bool:
        """Whether who reads ``weight`` now gets a snapshot, and not what updates write."""
        return self.address is not None and weight.data_ptr() != self.address

    @property
    def states(self) -> frozenset[UnitState]:
        """All states that it is in."""
        self.uploads = [upload for upload in self.uploads if not upload.is_done()]
        found = {self.master}
        if self.uploads:
            found.add(UnitState.UPLOADING)
        if self.active:
            found.add(UnitState.ON_DEVICE)
        if self.downloads:
            found.add(UnitState.GRADIENTS_DOWNLOADING)
        elif self.has_gradient:
            found.add(UnitState.GRADIENTS_READY)
        return frozenset(found)


class Protocol:
    """Follows weights from event to event; see [Note: consistency protocol]. May be told from any thread.

    Attributes:
        counts: how often each event was seen, per weight.
        violations: what was illegal, in the order seen.
    """

    def __init__(self) -> None:
        self.counts: Counter[Event] = Counter()
        self.violations: list[ProtocolError] = []
        self._lock = threading.Lock()
        self._records: dict[nn.Parameter, _Record] = {}

    def states_of(self, weight: nn.Parameter) -> frozenset[UnitState]:
        """The states that ``weight`` is in."""
        with self._lock:
            return self._record(weight, "").states

    def observe(
        self,
        event: weight_events.Event,
        weights: Iterable[nn.Parameter],
        unit: str,
        place: object,
        transfer: Transfer | None,
    ) -> None:
        """The engine's hook; see ``weight_events.observer``."""
        if event in ("step_ended", "step_failed"):
            self.end_step(succeeded=event == "step_ended")
        else:
            self.see(Event[event.upper()], weights, unit, place, transfer)

    def see(
        self, event: Event, weights: Iterable[nn.Parameter], unit: str, place: object, transfer: Transfer | None
    ) -> None:
        """Something happens to weights.

        Args:
            unit: its name, where it is known.
            place: the replica, or the dtype of a working copy.
            transfer: that brings them, or their gradients, one tensor per weight.

        Raises:
            ProtocolError: if the event is illegal now, and raising does no harm.
        """
        with self._lock:
            known = len(self.violations)
            for index, weight in enumerate(weights):
                record = self._record(weight, unit)
                self.counts[event] += 1
                is_apart = record.is_read_apart(weight)
                self._check(event, record, place, transfer, is_apart)
                version = None if is_apart else record.version
                if event is Event.UPDATE:
                    record.address = weight.data_ptr()
                elif event is Event.UPLOAD and transfer is not None:
                    dtype = transfer.tensors[index].dtype
                    version = version if dtype == weight.dtype else record.copy_versions.get(dtype, version)
                self._follow(event, record, place, transfer, version)
            if len(self.violations) > known and event not in _UNRAISED:
                raise self.violations[known]

    def end_step(self, succeeded: bool) -> None:
        """A step has ended: nothing is under way, and no gradient is left behind. A failed step leaves some.

        Raises:
            ProtocolError: if that is not so.
        """
        with self._lock:
            known = len(self.violations)
            for record in self._records.values():
                if not succeeded:
                    record.downloads.clear()
                for state in record.states & {UnitState.UPLOADING, UnitState.GRADIENTS_DOWNLOADING}:
                    self._violated(record, "the end of a step", f"during {state.value!r}")
            if len(self.violations) > known:
                raise self.violations[known]

    def _record(self, weight: nn.Parameter, unit: str) -> _Record:
        record = self._records.setdefault(weight, _Record(unit))
        record.name = record.name or unit
        return record

    def _violated(self, record: _Record, what: str, why: str) -> None:
        states = ", ".join(sorted(state.value for state in record.states))
        unit = f"unit {record.name!r}" if record.name else "a weight of no unit"
        self.violations.append(ProtocolError(f"{unit}: {what}, {why}; it is: {states}"))

    def _check(self, event: Event, record: _Record, place: object, transfer: Transfer | None, is_apart: bool) -> None:
        rule, states = RULES[event], record.states
        if is_apart and event not in _UNRAISED:
            states -= {UnitState.UPDATING}
        for state in sorted(states & rule.never_during.keys(), key=lambda state: state.value):
            self._violated(record, event.value, f"during {state.value!r}: {rule.never_during[state].value}")
        if rule.during is not None and rule.during not in states:
            self._violated(record, event.value, f"not during {rule.during.value!r}")
        if event is Event.ACTIVATE:
            version = record.device_versions.get(place, record.version)
            if version not in (None, record.version):
                self._violated(record, event.value, f"with weights of update {version} after update {record.version}")
        if event is Event.TAKE and transfer is not None and not transfer.is_done():
            self._violated(record, event.value, Ordering.DOWNLOADED_BEFORE_TAKEN.value)

    @staticmethod
    def _follow(event: Event, record: _Record, place: object, transfer: Transfer | None, version: int | None) -> None:
        """Notes what a legal event leads to; ``version`` is that of what it reads, None for a snapshot."""
        state = RULES[event].to
        if state in _MASTER_STATES and not (event is Event.REFRESH and version is None):
            record.master = state
        if event is Event.REFRESH:
            record.copy_versions[place] = version
        elif event is Event.UPLOAD and transfer is not None:
            record.uploads.append(transfer)
            record.device_versions[place] = version
        elif event is Event.ACTIVATE:
            record.active.add(place)
        elif event is Event.DEACTIVATE:
            record.active.discard(place)
        elif event is Event.DOWNLOAD and transfer is not None:
            record.downloads.append(transfer)
        elif event is Event.TAKE:
            record.downloads = [download for download in record.downloads if download is not transfer]
            record.has_gradient = True
        elif event is Event.UPDATE:
            record.has_gradient = False
        elif event is Event.UPDATED:
            record.version += 1
        elif event is Event.NOT_UPDATED:
            record.has_gradient = True


@contextlib.contextmanager
def following() -> Iterator[Protocol]:
    """While open, a new checker is told what happens to weights in this process.

    Raises:
        ProtocolError: when it is closed, the first violation, also if it was raised before.
    """
    previous, checker = weight_events.observer, Protocol()
    weight_events.observer = checker.observe
    try:
        yield checker
    finally:
        weight_events.observer = previous
    if checker.violations:
        raise checker.violations[0]
