"""Lists and dicts on modules that micro-batches fill.

[Note: collected lists]
``self.validation_step_outputs.append(x)`` is how Lightning projects collect step outputs, and hooks fill dicts
(``self.features[name] = out``). Lists and dicts that are attributes of user code modules are given to every micro-batch
as a copy; what the micro-batches appended or set is merged into what one call on the whole batch would have put there,
and lands in the original container. One item per micro-batch is one item of the batch (a loss, a tensor of
predictions). Several items, or some that came at once (``extend``, ``+=``), are merged like a list that a step returns:
as many as a micro-batch has rows are samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from ..common.attributes import MISSING
from .outputs import brought_home


class Filled(list[Any]):
    """A micro-batch's copy of a list; ``at_once`` tells whether it was given items by ``extend`` or ``+=``."""

    at_once = False

    def extend(self, items: Iterable[Any]) -> None:
        self.at_once = True
        super().extend(items)

    def __iadd__(self, items: Iterable[Any]) -> Filled:  # type: ignore[misc]
        self.extend(items)
        return self


def content(value: Any) -> Any:
    """What is in a container that grows; None for anything else."""
    return copy.copy(value) if type(value) in (list, dict, Filled) else None


def follow(other: Any, before: Any, now: Any) -> None:
    """Does to the container of another micro-batch what was done to one: what was appended to it or set in it."""
    if isinstance(before, list) and isinstance(other, list):
        if starts_with(now, before):
            list.extend(other, now[len(before) :])
    elif isinstance(before, dict) and isinstance(other, dict):
        other.update({key: value for key, value in now.items() if before.get(key, MISSING) is not value})


def collect_list(original: list[Any], copies: list[list[Any]], merge: Callable[[list[Any]], Any]) -> None:
    """Appends to ``original`` what came into its copies, merged over the micro-batches."""
    appended = [brought_home(c[len(original) :]) for c in copies]
    lengths = {len(items) for items in appended}
    if len(lengths) > 1:
        original.extend(item for items in appended for item in items)
    elif lengths == {1} and not any(isinstance(c, Filled) and c.at_once for c in copies):
        original.append(merge([items[0] for items in appended]))
    elif lengths != {0}:
        original.extend(merge(appended))


def collect_dict(original: dict[Any, Any], copies: list[dict[Any, Any]], merge: Callable[[list[Any]], Any]) -> None:
    """Changes ``original`` as its copies were changed, with values merged over the micro-batches."""
    for key in [key for key in original if key not in copies[-1]]:
        del original[key]
    for key in dict.fromkeys(key for c in copies for key in c):
        values = [c.get(key, MISSING) for c in copies]
        before = original.get(key, MISSING)
        if all(value is before for value in values):
            continue
        changed = [value for value in values if value is not before and value is not MISSING]
        if changed:
            changed = brought_home(changed)
            original[key] = merge(changed) if len(changed) == len(copies) else changed[-1]


def starts_with(longer: list[Any], shorter: list[Any]) -> bool:
    """By identity: items may be tensors, whose ``==`` is elementwise."""
    return len(longer) >= len(shorter) and all(a is b for a, b in zip(longer, shorter, strict=False))
