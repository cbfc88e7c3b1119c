"""What a step does with lists and dicts of modules; see [Note: collected lists] in :mod:`usercode.containers`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ..common.attributes import MISSING, assign
from .containers import Filled, collect_dict, collect_list, starts_with
from .lock import UserCodeLock, UserCodeState


class CollectedLists:
    """Lists and dicts on modules that micro-batches fill; see [Note: collected lists] in :mod:`usercode.containers`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._originals = [
            (module, name, value)
            for module in modules
            for name, value in module.__dict__.items()
            if type(value) in (list, dict) and not name.startswith("_")
        ]

    def hand_out(self, states: Sequence[UserCodeState], lock: UserCodeLock) -> None:
        """Gives every micro-batch its own copies."""
        for state in states:
            for module, name, original in self._originals:
                lock.note(state, module, name)
                handed = Filled(original) if isinstance(original, list) else copy.copy(original)
                state.overlay[id(module), name] = (module, handed)

    def collect(self, states: Sequence[UserCodeState], merge: Callable[[list[Any]], Any]) -> None:
        """Puts what came in, merged over the micro-batches, into the original containers.

        Comes between :meth:`UserCodeLock.suspend` and :meth:`UserCodeLock.close`.
        """
        for module, name, original in self._originals:
            copies = [state.overlay.pop((id(module), name), (module, MISSING))[1] for state in states]
            last = list(copies[-1]) if isinstance(copies[-1], Filled) else copies[-1]
            if any(type(c) not in (type(original), Filled) for c in copies):
                assign(module, name, last)  # replaced by something else: the last micro-batch counts
            elif isinstance(original, dict):
                collect_dict(original, copies, merge)
            elif all(starts_with(c, original) for c in copies):
                collect_list(original, copies, merge)
            else:
                assign(module, name, last)
