"""A model of training steps small enough to try everything: all orders in which its lanes can do their work.

[Note: the model]
A few *lanes* (threads, copy engines) each do a fixed row of *operations*. An operation reads and writes *cells* of
memory from its begin to its end, and begins when those that it waits for have ended. Each such wait has a name, and can
be left out. :func:`explore` visits every state that the lanes can reach, by any interleaving of begins and ends, and
raises :class:`Violation` where

- a cell is written while another operation reads or writes it (torn weights or gradients),
- an operation finds other weights or gradients than the mode promises,
- nobody can go on and work is left (deadlock), or an update is missing in the end.

Units are updated one by one, so an optimizer step is in several parts with everything else between them. Weights are
the row of gradients that they were made with, so that a lost or doubled gradient shows.

Four modes. ``off``, ``exact`` and ``stale`` have the waits of this package: there a step begins on the main thread when
the one before has ended, which makes most of the paper's orderings hold without a wait. In ``paper`` steps do not wait
for each other, and there is one working copy: it has all five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.engine.protocol_checker import Ordering

Cell = tuple[str, int]  # what, of which unit
Name = tuple[str, int, int]  # what, for which unit, in which step
Values = tuple[object, ...]
# The values that an operation reads -> those that it writes.
Effect = Callable[[Values], Values]

UNITS = (0, 1)
NOBODY = -1  # stands for all units
CLIPPED = "clipped"

REFRESH_1 = Ordering.UPLOADED_BEFORE_REFRESHED.name
UPLOAD_2 = Ordering.REFRESHED_BEFORE_UPLOADED.name
UPDATE_2 = Ordering.REFRESHED_BEFORE_UPLOADED.name + ", and updated before that"
TAKE_3 = Ordering.DOWNLOADED_BEFORE_TAKEN.name
DOWNLOAD_4 = Ordering.TAKEN_BEFORE_DOWNLOADED.name
HAND_OUT_4 = Ordering.TAKEN_BEFORE_DOWNLOADED.name + ", and used before the next ones are added"
UPDATE_5 = Ordering.COPIED_BETWEEN_UPDATES.name + ": the update waits"
COPY_5 = Ordering.COPIED_BETWEEN_UPDATES.name + ": the copy waits"
WEIGHTS = "a unit runs after the upload of its weights"
GRADIENTS = "gradients are downloaded after the backward"
START = "an update begins when all gradients are known"
WEIGHTS_FREED = "the next weights come to a device when nobody computes with the last ones"
GRADIENTS_FREED = "the next gradients are made on a device when the last ones have left it"


class Violation(Exception):
    """What must not happen."""


@dataclass(frozen=True)
class Operation:
    """See [Note: the model].

    Attributes:
        waits: (name of the wait, operation that must have ended); a name of None is the program's own order.
    """

    name: Name
    waits: tuple[tuple[str | None, Name], ...] = ()
    reads: tuple[Cell, ...] = ()
    writes: tuple[Cell, ...] = ()
    effect: Effect = lambda values: ()


@dataclass(frozen=True)
class Settings:
    """What is modelled.

    Attributes:
        mode: see [Note: the model].
        clips: whether gradients are clipped by the norm of all of them.
        accumulated: steps whose gradients are added up for an update.
    """

    mode: str
    num_steps: int = 3
    clips: bool = False
    accumulated: int = 1

    @property
    def is_stale(self) -> bool:
        """Whether steps compute with weights that lack an update."""
        return self.mode in ("stale", "paper")

    def version(self, step: int) -> int:
        """The number of updates in the weights that this step is to compute with."""
        done = step // self.accumulated
        return max(done - 1, 0) if self.is_stale else done

    def is_updating(self, step: int) -> bool:
        """Whether an update follows this step."""
        return (step + 1) % self.accumulated == 0

    def gradients(self, step: int) -> Values:
        """What the update after this step is to use."""
        found: Values = tuple(range(step + 1 - self.accumulated, step + 1))
        return (*found, CLIPPED) if self.clips else found

    def waits_of(self) -> tuple[str, ...]:
        """The names of all waits."""
        found = (name for lane in lanes_of(self).values() for op in lane for name, _ in op.waits if name is not None)
        return tuple(dict.fromkeys(found))


def lanes_of(settings: Settings) -> dict[str, list[Operation]]:
    """What each lane does, in order."""
    build = _Builder(settings)
    for step in range(settings.num_steps):
        build.load(step)
        build.compute(step)
        build.take(step)
        if settings.is_updating(step):
            build.update(step)
    return build.lanes


@dataclass
class _Builder:
    settings: Settings
    lanes: dict[str, list[Operation]] = field(default_factory=dict)

    def _add(
        self,
        lane: str,
        name: Name,
        waits: Sequence[tuple[str | None, Name]] = (),
        reads: Sequence[Cell] = (),
        writes: Sequence[Cell] = (),
        effect: Effect = lambda values: (),
    ) -> None:
        known = tuple((label, other) for label, other in waits if 0 <= other[2] < self.settings.num_steps)
        self.lanes.setdefault(lane, []).append(Operation(name, known, tuple(reads), tuple(writes), effect))

    def _last_update(self, step: int) -> int:
        """The step whose update is the last one before ``step``; -1 for none."""
        return step // self.settings.accumulated * self.settings.accumulated - 1

    def load(self, step: int) -> None:
        """Working copies are made, and travel to the device."""
        mode = self.settings.mode
        if mode != "paper":
            self._add("main", ("begin", NOBODY, step))
        for unit in UNITS:
            begun: tuple[str | None, Name] = (None, ("begin", NOBODY, step))
            device = ("device", unit)
            if mode in ("off", "exact"):
                waits = [begun]
                if mode == "exact":
                    waits.append((UPDATE_2, ("update", unit, self._last_update(step))))
                copy = ("copy", unit)
                self._add("loader", ("refresh", unit, step), waits, [("master", unit)], [copy], _version)
                waits = [begun, (UPLOAD_2, ("refresh", unit, step))]
                self._add("h2d", ("upload", unit, step), waits, [copy], [device], _same)
            elif mode == "stale":
                copy = (f"snapshot {self.settings.version(step) % 2}", unit)
                self._add("h2d", ("upload", unit, step), [begun], [copy], [device], _same)
            else:
                waits = [(UPLOAD_2, ("refresh", unit, step - 2)), (WEIGHTS_FREED, ("backward", unit, step - 1))]
                self._add("h2d", ("upload", unit, step), waits, [("copy", unit)], [device], _same)

    def compute(self, step: int) -> None:
        """Forward and backward, and gradients travel home."""
        is_paper = self.settings.mode == "paper"
        for unit in UNITS:
            waits = [(WEIGHTS, ("upload", unit, step))]
            self._add("compute", ("forward", unit, step), waits, [("device", unit)], effect=self._computing(step))
        for unit in reversed(UNITS):
            made, home = ("device gradient", unit), ("gradient at home", unit)
            freed = [(GRADIENTS_FREED, ("download", unit, step - 1))] if is_paper else []
            self._add("compute", ("backward", unit, step), freed, [("device", unit)], [made], self._computing(step))
            waits = [(GRADIENTS, ("backward", unit, step))]
            if is_paper:
                waits.append((DOWNLOAD_4, ("take", unit, step - 1)))
            self._add("d2h", ("download", unit, step), waits, [made], [home], _same)

    def take(self, step: int) -> None:
        """Gradients are added to what the optimizer is going to read, or take its place; and are clipped."""
        mode, window = self.settings.mode, self.settings.accumulated
        lane = "taker" if mode == "paper" else "main"
        for unit in reversed(UNITS):
            waits: list[tuple[str | None, Name]] = [(TAKE_3, ("download", unit, step))]
            if mode == "paper":
                waits.append((COPY_5, ("update", unit, step - 1)))
            elif mode == "stale":  # for all of the last update, snapshots included
                waits += [(HAND_OUT_4, ("refresh", other, step - 1)) for other in UNITS]

            def add(values: Values) -> Values:
                (arrived, known) = values
                _expect("the gradient taken", arrived, step)
                assert isinstance(known, tuple)
                return ((step,) if step % window == 0 else (*known, step),)

            grad = ("gradient", unit)
            self._add(lane, ("take", unit, step), waits, [("gradient at home", unit), grad], [grad], add)
        if self.settings.clips and self.settings.is_updating(step):
            everything = [("gradient", unit) for unit in UNITS]
            self._add(lane, ("clip", NOBODY, step), (), everything, everything, self._clipping(step))
        self._add(lane, ("start", NOBODY, step))

    def update(self, step: int) -> None:
        """The units are updated one by one, and working copies or snapshots made of them."""
        mode = self.settings.mode
        for unit in UNITS:
            waits = [] if mode == "off" else [(START, ("start", NOBODY, step))]
            if mode == "paper":
                waits.append((UPDATE_5, ("refresh", unit, step - 1)))
            master, lane = ("master", unit), "main" if mode == "off" else "updater"
            read = [("gradient", unit), master]
            self._add(lane, ("update", unit, step), waits, read, [master], self._updating(step))
            if mode == "stale":
                snapshot = (f"snapshot {(step + 1) % 2}", unit)
                self._add("updater", ("refresh", unit, step), (), [master], [snapshot], _version)
            elif mode == "paper":
                copying = [(COPY_5, ("update", unit, step)), (REFRESH_1, ("upload", unit, step + 1))]
                self._add("refresher", ("refresh", unit, step), copying, [master], [("copy", unit)], _version)

    def _computing(self, step: int) -> Effect:
        def compute(values: Values) -> Values:
            _expect("the weights on the device", values[0], self.settings.version(step))
            return (step,)

        return compute

    def _clipping(self, step: int) -> Effect:
        def clip(values: Values) -> Values:
            wanted = self.settings.gradients(step)
            for value in values:
                assert isinstance(value, tuple)
                _expect("what is clipped", (*value, CLIPPED), wanted)
            return (wanted,) * len(values)

        return clip

    def _updating(self, step: int) -> Effect:
        def update(values: Values) -> Values:
            gradient, master = values
            _expect("the gradient of an update", gradient, self.settings.gradients(step))
            assert isinstance(master, tuple)
            return ((*master, gradient),)

        return update


def _same(values: Values) -> Values:
    return values


def _version(values: Values) -> Values:
    (master,) = values
    assert isinstance(master, tuple)
    return (len(master),)


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise Violation(f"{what}: {found}, not {wanted}")


@dataclass(frozen=True)
class _State:
    """Where the lanes are: twice the number of operations done, and one more while one is going on."""

    lanes: tuple[int, ...]
    memory: Values


def _initial(cell: Cell) -> object:
    what = cell[0]
    if what in ("master", "gradient"):
        return ()
    return 0 if what == "copy" or what.startswith("snapshot") else None


def explore(
    settings: Settings, *, without: str | None = None, lanes: Mapping[str, Sequence[Operation]] | None = None
) -> int:
    """Visits every state that can be reached; how many there are.

    Args:
        without: a wait to leave out.
        lanes: other lanes than those of the settings.

    Raises:
        Violation: where something happens that must not.
    """
    rows = [list(lane) for lane in (lanes or lanes_of(settings)).values()]
    place = {op.name: (lane, 2 * index + 2) for lane, row in enumerate(rows) for index, op in enumerate(row)}
    cells = sorted({cell for row in rows for op in row for cell in (*op.reads, *op.writes)})
    search = _Search(rows, place, {cell: i for i, cell in enumerate(cells)}, without)
    first = _State((0,) * len(rows), tuple(map(_initial, cells)))
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        following = list(search.following(state))
        if not following:
            search.check_end(state, settings)
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return len(seen)


@dataclass
class _Search:
    rows: list[list[Operation]]
    place: dict[Name, tuple[int, int]]
    index: dict[Cell, int]
    without: str | None

    def following(self, state: _State) -> Iterator[_State]:
        """States one begin or end later."""
        for lane, position in enumerate(state.lanes):
            if position == 2 * len(self.rows[lane]):
                continue
            operation = self.rows[lane][position // 2]
            memory = state.memory
            if position % 2:
                # Nothing that it reads has changed since its begin.
                values = operation.effect(tuple(memory[self.index[cell]] for cell in operation.reads))
                changed = list(memory)
                for cell, value in zip(operation.writes, values, strict=False):
                    changed[self.index[cell]] = value
                memory = tuple(changed)
            elif not self._may_begin(operation, state):
                continue
            else:
                self._check_alone(operation, lane, state)
            yield _State((*state.lanes[:lane], position + 1, *state.lanes[lane + 1 :]), memory)

    def _may_begin(self, operation: Operation, state: _State) -> bool:
        for label, other in operation.waits:
            lane, end = self.place[other]
            if state.lanes[lane] < end and (label is None or label != self.without):
                return False
        return True

    def _check_alone(self, operation: Operation, own_lane: int, state: _State) -> None:
        """Nobody writes what it touches, and nobody touches what it writes."""
        for lane, position in enumerate(state.lanes):
            if lane == own_lane or position % 2 == 0:
                continue
            other = self.rows[lane][position // 2]
            torn = {*operation.reads, *operation.writes} & {*other.writes} | {*operation.writes} & {*other.reads}
            if torn:
                raise Violation(f"{operation.name} during {other.name}: {sorted(torn)} is torn")

    def check_end(self, state: _State, settings: Settings) -> None:
        """Nobody can go on: everything must be done, with every gradient in its weights, once."""
        for lane, position in enumerate(state.lanes):
            if position < 2 * len(self.rows[lane]):
                raise Violation(f"deadlock: {self.rows[lane][position // 2].name} cannot begin")
        updates = tuple(settings.gradients(step) for step in range(settings.num_steps) if settings.is_updating(step))
        for unit in UNITS:
            _expect(f"the updates of unit {unit}", state.memory[self.index["master", unit]], updates)
