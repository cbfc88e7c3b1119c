"""Lists and dicts in attributes of units that the units fill: ``self.skips.append(x)``, ``self.store["h"] = h``.

[Note: fills]
All replicas share the lists and dicts of the master. Those that a unit fills are found when facts about it are learned;
a run has copies of all of them then, and later of those. What is in a copy when the run ends is put into that of the
micro-batch (:func:`fill`), which all attributes have that held the original, also those of user code and of other
units. User code of the micro-batch sees it, later calls are given it, and the step merges it into the original (see
[Note: collected lists] in :mod:`usercode.collected_lists`)::

    first call     master.skips []   copied to -->  copy.skips []  -- forward -->  [x]   found, and written
                   master.table {}   copied to -->  copy.table {}                  {}    as before
    later calls    master.skips []   copied to -->  copy.skips []  -- forward -->  [x]   written

Lists of metrics stay shared by all replicas.

Lists and dicts that a unit was given as arguments are filled in the same way (``names.append("pool")``): a run has new
ones with the same entries, and what is in them in the end is put into those of user code (:func:`fill_given`).

Used by the thread that holds the compute lane of the replica's device.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..common import trees
from ..common.attributes import assign, is_container, read
from ..usercode.collected_lists import Attribute, containers_of, is_unchanged, nested_copy, refill, without_metrics
from ..usercode.lock import UserCodeLock, UserCodeState
from ..weights.parameters import Replica
from ..weights.units import Unit
from .recompute import Call

Place = tuple[nn.Module, str]  # module, name of an attribute

_learning = threading.Lock()


def _noting(base: type, names: tuple[str, ...]) -> Any:
    """A class of lists or dicts that note whether they were changed, also if they hold the same in the end. Copies of
    them, such as those in what a unit returns, are plain ones."""

    def noted(name: str) -> Any:
        method = getattr(base, name)

        def change(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.was_changed = True
            return method(self, *args, **kwargs)

        return change

    def reduced(self: Any) -> tuple[Any, ...]:
        return base, (base(self),)

    changes = {name: noted(name) for name in names}
    return type(f"Noting{base.__name__}", (base,), {"was_changed": False, "__reduce__": reduced, **changes})


_OF_BOTH = ("pop", "clear", "__setitem__", "__delitem__")
_List = _noting(list, (*_OF_BOTH, "append", "extend", "__iadd__", "insert", "remove", "sort", "reverse"))
_Dict = _noting(dict, (*_OF_BOTH, "update", "setdefault", "popitem", "__ior__"))
_NOTING: dict[type, Any] = {list: _List, dict: _Dict}
_PLAIN: dict[type, Any] = {_List: list, _Dict: dict}


def plain(value: Any) -> Any:
    """A value for user code, which sees lists and dicts as they were made."""
    base = _PLAIN.get(type(value))
    return value if base is None else base(value)


def settled(call: Call, leaves: list[Any]) -> list[Any]:
    """What a call is given, besides what is in the lists that its unit fills, of which there may be more in each step.

    Args:
        leaves: all that it is given.
    """
    unit = call.unit
    if not (unit.fills and call.side):
        return leaves
    arguments, side = trees.unflatten_call(call.structure, leaves)
    return trees.leaves_of(
        (arguments, [v for places, v in zip(call.side, side, strict=True) if places[0] not in unit.fills])
    )


class Fills:
    """Of one run of a unit; see [Note: fills].

    Args:
        replica: has what user code has written on it.
        learns: whether it may turn out that the unit fills something.
    """

    def __init__(self, replica: Replica, *, learns: bool) -> None:
        self._replica = replica
        self._learns = learns
        self._originals: list[tuple[Attribute, Any]] = []  # and what is in them
        known = [(replica.copy_of(master), name) for master, name in replica.unit.fills]
        found = [(module, name, read(module, name)) for module, name in known if module is not None]
        if learns:
            places = {(id(module), name) for module, name, _ in found}
            found_now = containers_of(without_metrics(replica.module.modules()))
            found += [one for one in found_now if (id(one[0]), one[1]) not in places]
        copies: dict[int, Any] = {}  # several modules may hold the same
        for module, name, value in found:
            if is_container(value):  # and not something else that user code has put in its place
                self._originals.append(((module, name, value), nested_copy(value)))
                if id(value) not in copies:
                    made = nested_copy(value, _NOTING.get(type(value), copy.copy) if learns else copy.copy)
                    if learns and type(made) in _PLAIN:
                        made.was_changed = False
                    copies[id(value)] = made
                assign(module, name, copies[id(value)])

    def end(self) -> list[Attribute]:
        """Puts the originals back; what the run has filled."""
        filled: dict[int, Attribute] = {}
        places = []
        for (module, name, value), before in self._originals:
            now = read(module, name)
            assign(module, name, value)
            is_same = is_unchanged(now, before)
            if not is_same:
                filled.setdefault(id(now), (module, name, plain(now)))
            if not is_same or (self._learns and getattr(now, "was_changed", False)):
                places.append((module, name))
        masters = [(self._replica.master_of(module), name) for module, name in places]
        new = {(master, name): None for master, name in masters if master is not None}
        _note_fills(self._replica.unit, new)
        return list(filled.values())


class GivenFills:
    """The lists and dicts among the arguments of one run of a unit.

    Args:
        learns: whether it may turn out that the unit fills some.
    """

    def __init__(self, unit: Unit, arguments: Any, *, learns: bool) -> None:
        self._unit = unit
        found = _given(arguments) if learns or unit.fills_arguments else ()
        self._found = [(i, x, copy.copy(x)) for i, x in enumerate(found) if learns or i in unit.fills_arguments]

    def end(self) -> list[tuple[int, Any]]:
        """What the run has filled: ordinal and content."""
        filled = [(i, now) for i, now, before in self._found if not is_unchanged(now, before)]
        new = {i for i, _ in filled}
        if not new <= self._unit.fills_arguments:
            with _learning:
                self._unit.fills_arguments = self._unit.fills_arguments | new
        return filled

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """While it is as if the run had filled none."""
        contents = [(container, copy.copy(container)) for _, container, _ in self._found]
        for _, container, before in self._found:
            _set_content(container, before)
        try:
            yield
        finally:
            for container, now in contents:
                _set_content(container, now)


def _set_content(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def fill_given(arguments: Any, filled: Sequence[tuple[int, Any]]) -> None:
    """Puts what a unit has left in lists and dicts that it was given into those of user code."""
    own = _given(arguments)
    for i, value in filled:
        refill(own[i], value)


def _given(arguments: Any) -> list[Any]:
    return [container for container in trees.containers_in(arguments) if is_container(container)]


def _note_fills(unit: Unit, places: dict[Place, None]) -> None:
    if not places.keys() <= unit.fills.keys():
        with _learning:
            unit.fills = unit.fills | places  # another one: threads may read the old one


def side_of(unit: Unit, state: UserCodeState) -> tuple[list[list[Place]], list[Any]]:
    """What user code has written on a unit, which are inputs as well: for each value the places that have it, and the
    values. Several places may have the same list or dict."""
    side, values = [], []
    known: dict[int, list[Place]] = {}
    for place in [(module, name) for (key, name), (module, _) in state.overlay.items() if key in unit.places]:
        value = read(*place)
        holders = known.get(id(value))
        if holders is None:
            holders = []
            side.append(holders)
            values.append(value)
            if isinstance(value, (list, dict)):
                known[id(value)] = holders
        holders.append(place)
    return side, values


def contents_of(unit: Unit, side: Sequence[list[Place]]) -> list[tuple[nn.Module, str, Any, Any]]:
    """What is in the lists and dicts of a unit, besides those that are inputs: where they are, they, copies."""
    known = {(id(module), name) for places in side for module, name in places}
    found = containers_of(without_metrics(unit.members))
    return [(*one, nested_copy(one[2])) for one in found if (id(one[0]), one[1]) not in known]


def contents_before(call: Call) -> list[Attribute]:
    """Lists and dicts of the unit that user code has changed since the call: as the call has found them."""
    changed = [one for one in call.contents if read(*one[:2]) is one[2] and not is_unchanged(*one[2:])]
    return [(module, name, before) for module, name, _, before in changed]


def fill(lock: UserCodeLock, state: UserCodeState, unit: Unit, place: Place, value: Any) -> None:
    """Puts what a unit has left in a list or dict into that of the micro-batch, which holds the lock; see
    [Note: fills]."""
    own = read(*place)
    if is_container(own) and (id(place[0]), place[1]) not in state.overlay:
        places = state.copies.places_of(own)
        own = state.copies.of(own)
        for module, name in places:
            lock.write(state, module, name, own)
        _note_fills(unit, dict.fromkeys(places))
    if not refill(own, value):  # there is none yet
        lock.write(state, *place, value)
