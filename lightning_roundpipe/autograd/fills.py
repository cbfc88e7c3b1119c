"""Lists and dicts in attributes of units that the units fill: ``self.skips.append(x)``, ``self.store["h"] = h``.

[Note: fills]
All replicas share the lists and dicts of the master. Those that a unit fills are found in its first call, which runs
alone; from then on each run has copies. What is in them when the run ends is written like an attribute: user code of
the micro-batch sees it, later calls are given it, and the step merges it into the original (see [Note: collected lists]
in :mod:`usercode.collected_lists`)::

    first call     master.skips []  -- shared by -->  copy.skips [x]    found: [x] is written, the master has []
    later calls    master.skips []  -- copied to -->  copy.skips [x]    [x] is written

A list that several modules of a unit share stays shared by all replicas.

Used by the thread that holds the compute lane of the replica's device.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from ..common import trees
from ..common.attributes import assign, read
from ..usercode.collected_lists import Attribute, containers_of, content, is_unchanged, refill
from ..weights.parameters import Replica
from .recompute import Call


def num_arguments(call: Call, leaves: list[Any]) -> int:
    """How many leaves a call is given, besides what is in the lists that its unit fills, of which there may be more in
    every step."""
    unit = call.unit
    if not (unit.fills and call.side):
        return len(leaves)
    _, side = trees.unflatten_call(call.structure, leaves)
    filled = [value for place, value in zip(call.side, side, strict=True) if place in unit.fills]
    return len(leaves) - len(trees.leaves_of(filled))


class Fills:
    """Of one run of a unit; see [Note: fills].

    Args:
        replica: has what user code has written on it.
        learns: whether it may turn out that the unit fills something.
    """

    def __init__(self, replica: Replica, *, learns: bool) -> None:
        self._replica = replica
        self._shared: list[tuple[Attribute, Any]] = []  # lists and dicts of the master, and what was in them
        known = replica.unit.fills
        if learns:
            found = [
                one
                for one in containers_of(replica.module.modules())
                if (replica.master_of(one[0]), one[1]) not in known
            ]
            times = Counter(id(value) for _, _, value in found)
            self._shared = [(one, content(one[2])) for one in found if times[id(one[2])] == 1]
        self._own: list[tuple[Attribute, Any]] = []
        for master, name in known:
            module = replica.copy_of(master)
            assert module is not None
            value = read(module, name)
            if (before := content(value)) is not None:  # not something else that user code has put in its place
                self._own.append(((module, name, value), before))
                assign(module, name, copy.copy(value))

    def end(self, assigned: list[Attribute]) -> list[Attribute]:
        """Puts back what was there; what the run has filled.

        Args:
            assigned: attributes that it has written; the next run may fill them.
        """
        filled = []
        for (module, name, value), before in self._shared:
            if not is_unchanged(value, before):
                filled.append((module, name, copy.copy(value)))
                refill(value, before)
        for module, name, value in (*filled, *assigned):
            master, unit = self._replica.master_of(module), self._replica.unit
            if master is not None and content(value) is not None and (master, name) not in unit.fills:
                unit.fills = {**unit.fills, (master, name): None}  # another one: threads may read the old one
        for (module, name, value), before in self._own:
            now = read(module, name)
            assign(module, name, value)
            if not is_unchanged(now, before):
                filled.append((module, name, now))
        return filled
