"""Lists and dicts on modules that micro-batches fill.

[Note: collected lists]
``self.validation_step_outputs.append(x)`` is how Lightning projects collect step outputs, and hooks fill dicts
(``self.features[name] = out``). Lists and dicts that are attributes of user code modules are given to every micro-batch
as a copy; what the micro-batches appended or set is merged into what one call on the whole batch would have put there,
and lands in the original container. So are lists and dicts in them (``self.outputs["preds"].append(x)``), where there
are few, what forward hooks hold by themselves, those that units fill, see [Note: fills] in :mod:`autograd.fills`, and
those of units that user code changes, if only for a while (``scaling["lora"] = 0.0``). These are found while the first
micro-batch runs alone, before each call of a unit and where it gives up the lock; from then on they are its own. ::

    original  [a]  --copies-->  [a] + [x0]      micro-batch 0
                                [a] + [x1]      micro-batch 1
              [a, merge(x0, x1)]  <-- collected

One item per micro-batch is one item of the batch (a loss, a tensor of predictions); what cannot be merged comes one by
one. Several items are merged like a list that a step returns. Of items that came at once (``extend``, ``+=``) there may
also be several for each sample. Of a list that they have cleared, or from which they have taken items, what
all of them still have stays in front. Lists and dicts that all of them have assigned (``if batch_idx == 0:
self.validation_step_outputs = []``) are put together in a new one, unless they are equal (constants that are made
at their first use), or hold activations with a graph: of these the last one stays.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from ..common.attributes import MISSING, Attributes, assign, is_container, read
from ..common.trees import are_equal, tensors_in
from .hook_state import held_by_hooks
from .outputs import brought_home, is_integer

Attribute = tuple[Any, str, Any]  # module or another place, see common.attributes; name; value
# Merges what the micro-batches have put in one place; told ``given_at_once=True`` of lists that have extended a list.
Merge = Callable[..., Any]
# Of torch and Lightning, which look after them.
NOT_OF_USERS = frozenset([*vars(nn.Module()), "_param_requires_grad_state", "_fabric_optimizers", "_metric_attributes"])
# Entries that a list or dict has at most if lists and dicts in it are collected as well. Vocabularies have more.
_MOST_LOOKED_INTO = 64


def containers_of(modules: Iterable[nn.Module]) -> Iterator[Attribute]:
    """The lists and dicts in attributes of these modules."""
    for module in modules:
        for name, value in module.__dict__.items():
            if is_container(value) and name not in NOT_OF_USERS:
                yield module, name, value


def without_metrics(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Metrics belong to all micro-batches; they are hashed by their state, as no other modules are."""
    return (module for module in modules if type(module).__hash__ is nn.Module.__hash__)


class CollectedLists:
    """The lists and dicts of these modules; see [Note: collected lists].

    Args:
        modules: all of theirs are collected.
        filled: gives the attributes that units are known to fill.
        others: modules, with those of units, whose attributes may hold the same lists and dicts, and whose hooks.
        called: modules that user code calls, see :func:`held_by_hooks`.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        filled: Callable[[], Iterable[tuple[nn.Module, str]]] = tuple,
        others: Sequence[nn.Module] = (),
        called: Iterable[nn.Module] = (),
    ) -> None:
        self._filled = filled
        self._others = others
        self._modules = {id(module) for module in modules}
        self._originals = [*containers_of(modules), *held_by_hooks(others, called)]
        self._note_filled()
        self._copies: list[Copies] = []  # of each micro-batch

    def _note_filled(self) -> None:
        known = {(id(module), name) for module, name, _ in self._originals}
        filled = [(module, name, read(module, name)) for module, name in self._filled()]
        self._originals += [one for one in filled if is_container(one[2]) and (id(one[0]), one[1]) not in known]

    def copies(self) -> Copies:
        """Copies for one micro-batch."""
        copies = Copies(self._originals, self._others)
        self._copies.append(copies)
        return copies

    @contextlib.contextmanager
    def watching(self, give: Callable[[int, nn.Module, str, Any, Any], None]) -> Iterator[Watch]:
        """While open, the first micro-batch runs alone. Other lists and dicts, of units, of which the watch finds by
        then that user code has changed them are given to every micro-batch.

        Args:
            give: gives a micro-batch (its index) an attribute of its own, in the place of the original.
        """
        watch = Watch(self._others, {id(value) for _, _, value in self._originals})
        try:
            yield watch
        finally:  # also if it fails, which leaves everything as it was
            watch.look()
            for original, before, places in watch.changed:
                for index, copies in enumerate(self._copies):
                    own = copies.of(original)
                    if index == 0:
                        refill(original, before)
                    for module, name in places:
                        give(index, module, name, own, original)
                self._originals += [(module, name, original) for module, name in places]

    def collect(self, overlays: Sequence[Attributes], merge: Merge) -> None:
        """Takes the copies out of what the micro-batches have written, and puts what came into them, merged, into the
        originals. Comes between :meth:`UserCodeLock.suspend` and :meth:`UserCodeLock.close`."""
        self._note_filled()  # in this step
        collected = set()
        inside: dict[int, Any] = {}
        for copies in self._copies:
            inside |= copies.put_back()
        for key, original in inside.items():
            _collect(original, [copies.made.get(key, original) for copies in self._copies], merge)
            collected.add(key)
        for module, name, original in self._originals:
            # Of what a unit fills a micro-batch that has not called it may have no copy.
            found = [overlay.pop((id(module), name), (module, original))[1] for overlay in overlays]
            if id(original) in collected and all(map(operator.is_, found, self._made_of(original))):
                continue  # several attributes hold it
            if _collect(original, found, merge):
                collected.add(id(original))
            elif any(map(operator.is_, found, self._made_of(original))) or _is_of_the_step(found):
                assign(module, name, _plain(found[-1]))
            else:
                for overlay, value in zip(overlays, found, strict=True):
                    overlay[id(module), name] = (module, value)
        for overlay, copies in zip(overlays, self._copies, strict=True):
            overlay.update({key: (module, copies.original_of(value)) for key, (module, value) in overlay.items()})
        self._merge_assigned(overlays, merge)

    def _merge_assigned(self, overlays: Sequence[Attributes], merge: Merge) -> None:
        """The last micro-batch, whose attributes stay, gets what came into lists and dicts that all have assigned."""
        merged: dict[tuple[int, ...], Any] = {}  # several attributes may hold one
        for key, (module, last) in overlays[-1].items():
            found = [overlay[key][1] for overlay in overlays if key in overlay]
            if key[0] not in self._modules or key[1] in NOT_OF_USERS or not all(map(is_container, found)):
                continue
            ids = tuple(map(id, found))
            is_anew = 1 < len(overlays) == len(set(ids)) and not _is_of_the_step(found)
            if is_anew and not all(are_equal(last, one) for one in found):
                if ids not in merged:
                    merged[ids] = copy.copy(last)
                    merged[ids].clear()
                    if not _collect(merged[ids], found, merge):
                        merged[ids] = last
                overlays[-1][key] = (module, merged[ids])

    def _made_of(self, original: Any) -> list[Any]:
        return [copies.made.get(id(original)) for copies in self._copies]


class Watch:
    """Finds lists and dicts that change.

    Args:
        modules: they are in attributes of these.
        known: ids of those that are left out.

    Attributes:
        changed: each with what was in it before, and the attributes that hold it.
    """

    def __init__(self, modules: Iterable[nn.Module], known: Container[int]) -> None:
        self.changed: list[tuple[Any, Any, list[tuple[nn.Module, str]]]] = []
        places: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}
        for module, name, value in containers_of(without_metrics(modules)):
            if id(value) not in known:
                places.setdefault(id(value), (value, []))[1].append((module, name))
        self._others = [(value, nested_copy(value), held_by) for value, held_by in places.values()]

    def look(self) -> list[tuple[nn.Module, str]]:
        """Attributes that hold what has changed, and had not when this was called before."""
        is_same = [is_unchanged(now, before) for now, before, _ in self._others]
        if all(is_same):
            return []
        found = [one for one, same in zip(self._others, is_same, strict=True) if not same]
        self._others = list(itertools.compress(self._others, is_same))
        self.changed += found
        return [place for _, _, places in found for place in places]


class Copies:
    """The copies for one micro-batch: one of each list or dict, also if several attributes hold it.

    Attributes:
        made: id of an original -> its copy.
        attributes: what the micro-batch has from the beginning: (module, attribute, copy).
    """

    def __init__(self, originals: Iterable[Attribute] = (), others: Iterable[nn.Module] = ()) -> None:
        self.made: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}  # by the id of the copy
        self._holders: list[tuple[Any, list[Any]]] = []  # copies, and the originals of what was in them
        self._others = others
        self.attributes: list[Attribute] = [(module, name, self.of(original)) for module, name, original in originals]

    def of(self, original: Any) -> Any:
        """The copy of a list or dict, with copies of the lists and dicts in it."""
        found = self._shallow(original)
        if len(original) <= _MOST_LOOKED_INTO:
            inside = {key: entry for key, entry in _items(original) if is_container(entry)}
            for key, entry in inside.items():
                found[key] = self._shallow(entry)
            if inside:
                self._holders.append((found, list(inside.values())))
        return found

    def _shallow(self, original: Any) -> Any:
        if id(original) not in self.made:
            made = _Filled(original) if isinstance(original, list) else copy.copy(original)
            if isinstance(made, defaultdict) and made.default_factory is list:
                made.default_factory = _Filled
            self.made[id(original)] = made
            self._originals[id(made)] = original
        return self.made[id(original)]

    def places_of(self, original: Any) -> list[tuple[nn.Module, str]]:
        """Attributes that hold it now."""
        return [(module, name) for module, name, value in containers_of(self._others) if value is original]

    def original_of(self, value: Any) -> Any:
        """Of which it is the copy; other values stay as they are."""
        return self._originals.get(id(value), value)

    def put_back(self) -> dict[int, Any]:
        """Copies hold the originals of the lists and dicts in them again; these, by their ids."""
        for holder, _ in self._holders:
            for key, entry in _items(holder):
                if id(entry) in self._originals:
                    holder[key] = self._originals[id(entry)]
        return {id(original): original for _, inside in self._holders for original in inside}


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, _Filled) else value


class _Filled(list[Any]):
    """A micro-batch's copy of a list, or a new list in a copy.

    Attributes:
        chunks: position and items of what it was given by ``extend`` or ``+=``.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(items)
        self.chunks: list[tuple[int, list[Any]]] = []

    def extend(self, items: Iterable[Any]) -> None:
        start = len(self)
        super().extend(items)
        self.chunks.append((start, self[start:]))

    def __iadd__(self, items: Iterable[Any]) -> _Filled:  # type: ignore[misc]
        self.extend(items)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def parts(self, start: int) -> list[tuple[bool, list[Any]]]:
        """What is in it from a position on: runs of single items, and chunks that are still there; with whether it is
        a chunk."""
        found, end = [], start
        for begin, items in self.chunks:
            stop = begin + len(items)
            if end <= begin and _are_same(self[begin:stop], items):
                found += [(False, self[end:begin]), (True, items)]
                end = stop
        return [part for part in (*found, (False, self[end:])) if part[0] or part[1]]


def _collect(original: Any, copies: list[Any], merge: Merge) -> bool:
    """Puts what came into copies of a list or dict into it; False if another one was assigned."""
    if any(type(one) not in (type(original), _Filled) for one in copies):
        return False
    if isinstance(original, dict):
        _collect_dict(original, copies, merge)
    elif all(_starts_with(one, original) for one in copies):
        _collect_list(original, copies, merge)
    elif all(type(one) is _Filled for one in copies):
        original[:] = _still_there(original, copies)
        _collect_list(original, copies, merge)
    else:
        return False
    return True


def _collect_list(original: list[Any], copies: list[list[Any]], merge: Merge) -> None:
    start = len(original)
    parts = [c.parts(start) if isinstance(c, _Filled) else [(False, c[start:])] for c in copies]
    if len({tuple(at_once for at_once, _ in of_one) for of_one in parts}) > 1:
        parts = [[(True, c[start:])] for c in copies]
    for column in zip(*parts, strict=True):
        items = brought_home([given for _, given in column])
        lengths = {len(given) for given in items}
        if column[0][0]:
            original.extend(merge(items, given_at_once=True))
        elif lengths == {1}:
            merged = merge([given[0] for given in items])
            is_apart = isinstance(merged, list) and [id(one) for one in merged] == [id(given[0]) for given in items]
            original.extend(merged if is_apart else [merged])
        elif lengths != {0}:
            original.extend(itertools.chain.from_iterable(items) if len(lengths) > 1 else merge(items))


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
        if changed and all(type(value) is _Filled for value in changed):  # that a defaultdict has made
            original[key] = filled = list[Any]()
            _collect_list(filled, [_Filled() if value is MISSING else value for value in values], merge)
        elif changed:
            changed = brought_home(changed)
            is_merged = len(changed) == len(copies) and not all(map(is_integer, changed))
            original[key] = merge(changed) if is_merged else changed[-1]


def _is_of_the_step(found: Sequence[Any]) -> bool:
    """Whether lists and dicts hold activations with a graph, which no later step reads. To bring them home is dear."""
    return any(tensor.requires_grad and tensor.ndim > 0 for one in found for _, tensor in tensors_in(one))


def refill(own: Any, now: Any) -> bool:
    """Lets a list or dict hold what another one holds, and so those in it; False if one of them is none."""
    if isinstance(own, list) and isinstance(now, list):
        own[:] = [
            *(old if refill(old, new) else new for old, new in zip(own, now, strict=False)),
            *now[len(own) :],
        ]
    elif isinstance(own, dict) and isinstance(now, dict):
        renewed = {key: own[key] if refill(own.get(key), new) else new for key, new in now.items()}
        own.clear()
        own.update(renewed)
    else:
        return False
    return True


def nested_copy(value: Any, make: Callable[[Any], Any] = copy.copy) -> Any:
    """A copy of a list or dict, made by ``make``, with copies of the lists and dicts in it."""
    made = make(value)
    if len(value) <= _MOST_LOOKED_INTO:
        for key, entry in _items(value):
            if is_container(entry):
                made[key] = copy.copy(entry)
    return made


def content(value: Any) -> Any:
    """What is in a list or dict now, for :func:`follow`; None for anything else."""
    return copy.copy(value) if is_container(value) or type(value) is _Filled else None


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
    """By identity: items may be tensors, whose ``==`` is elementwise. Vocabularies are large, so that C compares. Lists
    and dicts may be copies of each other."""
    if len(ours) != len(theirs):
        return False
    if all(map(operator.is_, ours, theirs)):
        return True
    return len(ours) <= _MOST_LOOKED_INTO and all(
        one is other or (is_container(one) and is_container(other) and is_unchanged(one, other))
        for one, other in zip(ours, theirs, strict=True)
    )
