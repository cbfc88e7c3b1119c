"""Lists and dicts on modules that micro-batches fill.

[Note: collected lists]
``self.validation_step_outputs.append(x)`` is how Lightning projects collect step outputs, and hooks fill dicts
(``self.features[name] = out``). Lists and dicts that are attributes of user code modules are given to every micro-batch
as a copy; what the micro-batches appended or set is merged into what one call on the whole batch would have put there,
and lands in the original container. So are those that units fill, see [Note: fills] in :mod:`autograd.fills`. ::

    original  [a]  --copies-->  [a] + [x0]      micro-batch 0
                                [a] + [x1]      micro-batch 1
              [a, merge(x0, x1)]  <-- collected

One item per micro-batch is one item of the batch (a loss, a tensor of predictions). Several items, or some that came at
once (``extend``, ``+=``), are merged like a list that a step returns: as many as a micro-batch has rows are samples. Of
a list that they have cleared, or from which they have taken items, what all of them still have stays in front.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..common.attributes import MISSING, Attributes, assign, read
from .outputs import brought_home

Attribute = tuple[nn.Module, str, Any]  # module, name, value
Merge = Callable[[list[Any]], Any]
# Module, name of an attribute, its value before the step, one value per micro-batch.
NumbersLeft = tuple[nn.Module, str, Any, list[Any]]
# Of torch and Lightning, which look after them.
_NOT_OF_USERS = frozenset([*vars(nn.Module()), "_param_requires_grad_state", "_fabric_optimizers"])


def containers_of(modules: Iterable[nn.Module]) -> Iterator[Attribute]:
    """The lists and dicts in attributes of these modules."""
    for module in modules:
        for name, value in module.__dict__.items():
            if type(value) in (list, dict) and name not in _NOT_OF_USERS:
                yield module, name, value


class CollectedLists:
    """The lists and dicts of these modules; see [Note: collected lists].

    Args:
        modules: all of theirs are collected.
        filled: gives the attributes that units are known to fill.
    """

    def __init__(
        self, modules: Iterable[nn.Module], filled: Callable[[], Iterable[tuple[nn.Module, str]]] = tuple
    ) -> None:
        self._filled = filled
        self._originals = list(containers_of(modules))
        self._note_filled()

    def _note_filled(self) -> None:
        known = {(id(module), name) for module, name, _ in self._originals}
        filled = [(module, name, read(module, name)) for module, name in self._filled()]
        self._originals += [one for one in filled if type(one[2]) in (list, dict) and (id(one[0]), one[1]) not in known]

    def copies(self) -> Iterator[Attribute]:
        """Copies for one micro-batch: (module, attribute, copy)."""
        for module, name, original in self._originals:
            yield module, name, _Filled(original) if isinstance(original, list) else copy.copy(original)

    def collect(self, overlays: Sequence[Attributes], merge: Merge) -> None:
        """Takes the copies out of what the micro-batches have written, and puts what came into them, merged, into the
        originals. Comes between :meth:`UserCodeLock.suspend` and :meth:`UserCodeLock.close`."""
        self._note_filled()  # in this step
        for module, name, original in self._originals:
            # Of what a unit fills a micro-batch that has not called it may have no copy.
            copies = [overlay.pop((id(module), name), (module, original))[1] for overlay in overlays]
            is_replaced = any(type(c) not in (type(original), _Filled) for c in copies)
            if not is_replaced and isinstance(original, dict):
                _collect_dict(original, copies, merge)
            elif not is_replaced and all(_starts_with(c, original) for c in copies):
                _collect_list(original, copies, merge)
            elif all(type(c) is _Filled for c in copies):
                original[:] = _still_there(original, copies)
                _collect_list(original, copies, merge)
            else:  # another one was assigned: the last micro-batch counts
                assign(module, name, list(copies[-1]) if isinstance(copies[-1], _Filled) else copies[-1])


def numbers_left(overlays: Sequence[Attributes]) -> list[NumbersLeft]:
    """Attributes to which each micro-batch has assigned a number, or a tensor of one: of these the last one stays.

    Comes between :meth:`UserCodeLock.suspend` and :meth:`UserCodeLock.close`.
    """
    found = []
    for key, (module, _) in overlays[0].items():
        values = [overlay[key][1] for overlay in overlays if key in overlay]
        if len(values) == len(overlays) > 1 and all(map(is_number, values)):
            found.append((module, key[1], read(module, key[1]), values))
    return found


def is_number(value: Any) -> bool:
    """Whether it is a real number, or a tensor of one."""
    if not isinstance(value, Tensor):
        return type(value) in (int, float)
    return value.layout is torch.strided and value.numel() == 1 and not (value.is_complex() or value.is_meta)


class _Filled(list[Any]):
    """A micro-batch's copy of a list; ``at_once`` tells whether it was given items by ``extend`` or ``+=``."""

    at_once = False

    def extend(self, items: Iterable[Any]) -> None:
        self.at_once = True
        super().extend(items)

    def __iadd__(self, items: Iterable[Any]) -> _Filled:  # type: ignore[misc]
        self.extend(items)
        return self


def _collect_list(original: list[Any], copies: list[list[Any]], merge: Merge) -> None:
    appended = [brought_home(c[len(original) :]) for c in copies]
    lengths = {len(items) for items in appended}
    if len(lengths) > 1:
        original.extend(item for items in appended for item in items)
    elif lengths == {1} and not any(isinstance(c, _Filled) and c.at_once for c in copies):
        original.append(merge([items[0] for items in appended]))
    elif lengths != {0}:
        original.extend(merge(appended))


def _still_there(original: list[Any], copies: list[list[Any]]) -> list[Any]:
    """What all copies begin with, of what they were given."""
    given = set(map(id, original))
    columns = zip(*copies, strict=False)
    same = itertools.takewhile(lambda items: len(ids := set(map(id, items))) == 1 and ids <= given, columns)
    return [items[0] for items in same]


def _collect_dict(original: dict[Any, Any], copies: list[dict[Any, Any]], merge: Merge) -> None:
    if all(is_unchanged(c, original) for c in copies):
        return
    for key in [key for key in original if key not in copies[-1]]:
        del original[key]
    changes = (key for c in copies for key, value in c.items() if original.get(key, MISSING) is not value)
    for key in dict.fromkeys(changes):
        values = [c.get(key, MISSING) for c in copies]
        before = original.get(key, MISSING)
        changed = [value for value in values if value is not before and value is not MISSING]
        if changed:
            changed = brought_home(changed)
            original[key] = merge(changed) if len(changed) == len(copies) else changed[-1]


def content(value: Any) -> Any:
    """What is in a list or dict now, for :func:`follow` and :func:`is_unchanged`; None for anything else."""
    return copy.copy(value) if type(value) in (list, dict, _Filled) else None


def follow(other: Any, before: Any, now: Any) -> None:
    """Does to the container of another micro-batch what was done to one: what was appended to it or set in it."""
    if isinstance(before, list) and isinstance(other, list):
        if _starts_with(now, before):
            list.extend(other, now[len(before) :])
    elif isinstance(before, dict) and isinstance(other, dict):
        other.update({key: value for key, value in now.items() if before.get(key, MISSING) is not value})


def is_unchanged(now: Any, before: Any) -> bool:
    """Whether a list or dict holds what it held."""
    if isinstance(now, list):
        return isinstance(before, list) and _are_same(now, before)
    return isinstance(now, dict) and _are_same(now, before) and _are_same(now.values(), before.values())


def _starts_with(longer: list[Any], shorter: list[Any]) -> bool:
    return len(longer) >= len(shorter) and all(map(operator.is_, longer, shorter))


def _are_same(ours: Collection[Any], theirs: Collection[Any]) -> bool:
    """By identity: items may be tensors, whose ``==`` is elementwise. Vocabularies are large, so that C compares."""
    return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))
