"""What a step does to its micro-batches, done to the whole batch; and what it returns of them, as a part of that.

[Note: changes to a batch]
Hooks that come after a step are given the whole batch, and look there for what the step has put into it. They compare
it with what the step has returned, which often is the batch itself::

    batch            {"x": x, "info": Info(ids)}
    micro-batches    {"x": x0, "info": Info(ids0)}                 {"x": x1, "info": Info(ids1)}
    step             microbatch["info"].scores = s0                microbatch["info"].scores = s1
                     return microbatch                             return microbatch
    batch            {"x": x, "info": Info(ids, scores=merge(s0, s1))}, and this object is what the step has returned

What the containers of micro-batches hold is noted before the step: entries of mappings, lists and tuples, attributes of
dataclasses and of objects of the user's classes. Afterwards the batch and its micro-batches are walked through side by
side. What the step has put into every micro-batch, or replaced there, is merged and comes into the container at the
same place of the batch; what it has taken out of all of them goes. Tensors that it has changed in place are views of
those of the batch.

What a step returns is brought home and merged, which would make other objects of it. So a part of the micro-batch in it
is only named (:class:`merging.Part`), and what the batch has in its place is put in afterwards.

With one micro-batch, which mostly is the batch itself, the same makes ``outputs is batch`` hold, and brings home what
was put into it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...common.attributes import MISSING, is_of_users
from ...common.trees import mapped
from ...usercode.outputs import brought_home
from .merging import Part, merge_outputs
from .nodes import is_array

Path = tuple[Any, ...]
# A part of a micro-batch, and the index of that.
Found = tuple[int, Any]
_LEAVES = (Tensor, Enum, torch.Size, PackedSequence, str, bytes)
_SCALARS = frozenset({str, bytes, int, float, complex, bool, type(None)})
# Entries that are looked at in one micro-batch: its objects may lead to a whole data set.
_MOST_ENTRIES = 2**17


class Changes:
    """Made before a step of its micro-batches; see [Note: changes to a batch].

    Args:
        sizes, weights: of :func:`merging.merge_outputs`.
    """

    def __init__(self, microbatches: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> None:
        self._microbatches = microbatches
        self._sizes, self._weights = sizes, weights
        self._before = [dict(_contents(microbatch)) for microbatch in microbatches]
        self._has_parts = False
        self._whole: dict[Path, Any] = {}  # what the batch has, in the places that correspond to those of micro-batches
        self._kept: list[dict[int, Path]] = [{} for _ in microbatches]  # ids of parts that were there before

    def named(self, index: int, output: Any, *, is_training: bool) -> Any:
        """What the step has returned for a micro-batch, with names in place of the parts of that.

        Args:
            is_training: then Lightning makes a dict of its own of what a step returns, and wants the loss.
        """
        own: set[int] = set()
        if is_training:
            if not isinstance(output, Mapping) or output.keys() <= {"loss"}:
                return output
            own = {id(output), id(output.get("loss"))}
        if type(output) in _SCALARS:
            return output
        paths = {id(value): path for path, value in _places(self._microbatches[index])}

        def name(value: Any) -> Any:
            path = None if id(value) in own else paths.get(id(value))
            return value if path is None else Part(path, value)

        made = mapped(output, name, every=True)
        self._has_parts |= made is not output
        return made

    def merged(self, outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float]) -> Any:
        """What the step would have returned for the batch, of what it has returned for the micro-batches."""
        if not self._has_parts:
            return merge_outputs(outputs, sizes, weights)

        def known(value: Any) -> Any:
            is_other = isinstance(value, Part) and value.path not in self._whole
            return brought_home(value.value) if is_other else value

        merged = merge_outputs([mapped(output, known, every=True) for output in outputs], sizes, weights)
        return self._with_parts(merged)

    def _with_parts(self, merged: Any) -> Any:
        return mapped(merged, lambda value: self._whole[value.path] if isinstance(value, Part) else value, every=True)

    # --- the batch -------------------------------------------------------------------------------------------------

    def bring_back(self, batch: Any) -> None:
        """Does to the batch what the step has done to the micro-batches."""
        walk = _Walk(self._before, self._whole, self._kept)
        walk.match(batch, [*enumerate(self._microbatches)], ())
        values = [(container, key, path, self._merge(found)) for container, key, path, found in walk.put]
        contents = [
            (container, path, [one.value if isinstance(one, _Kept) else self._merge(one) for one in content])
            for container, path, content in walk.refilled
        ]
        for container, key in walk.taken:
            _take(container, key)
        for container, key, path, value in values:
            _put(container, key, value)
            self._note(path, value)
        for container, path, content in contents:
            list.__setitem__(container, slice(None), content)
            for j, value in enumerate(content):
                self._note(None if path is None else (*path, j), value)

    def _merge(self, found: list[Found]) -> Any:
        """What comes into one place of the batch; parts of it that it had before are the same objects there."""

        def named(kept: dict[int, Path], value: Any) -> Any:
            path = kept.get(id(value))
            return value if path is None else Part(path, value)

        names = [functools.partial(named, self._kept[index]) for index, _ in found]
        values = [brought_home(mapped(value, name, every=True)) for name, (_, value) in zip(names, found, strict=True)]
        indices = [index for index, _ in found]
        sizes, weights = self._sizes, self._weights
        if indices != [*range(len(sizes))]:  # of one sample, or some
            sizes, weights = [sizes[index] for index in indices], [weights[index] for index in indices]
        return self._with_parts(merge_outputs(values, sizes, weights))

    def _note(self, path: Path | None, value: Any) -> None:
        """The batch has ``value`` in a place now. What is in it has the same place as in the micro-batch if there is
        only one: what was merged may have another form."""
        if path is not None:
            places = _places(value) if len(self._microbatches) == 1 else [((), value)]
            self._whole.update({(*path, *below): entry for below, entry in places})


class _Kept:
    """An entry of a list that stays."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Walk:
    """Through a batch and its micro-batches, side by side, after the step.

    Args:
        before: of each micro-batch, what its containers held.
        whole: is told what the batch has in each place.
        kept: is told where micro-batches have what they had.

    Attributes:
        put: container, key and path of an entry of the batch, and what it is to hold, of each micro-batch.
        taken: entries to be removed.
        refilled: lists and their paths, and what they are to hold.
    """

    def __init__(
        self, before: list[dict[int, tuple[Any, dict[Any, Any]]]], whole: dict[Path, Any], kept: list[dict[int, Path]]
    ) -> None:
        self._before, self._whole, self._kept = before, whole, kept
        self._seen: set[tuple[int, ...]] = set()
        self.put: list[tuple[Any, Any, Path | None, list[Found]]] = []
        self.taken: list[tuple[Any, Any]] = []
        self.refilled: list[tuple[Any, Path | None, list[list[Found] | _Kept]]] = []

    def match(self, whole: Any, parts: list[Found], path: Path | None) -> None:
        """Finds what has changed in the parts of micro-batches that are in the place of ``whole``.

        Args:
            path: of the place; None if micro-batches have it elsewhere.
        """
        if type(whole) in _SCALARS or not _are_alike([whole, *(part for _, part in parts)]):
            return
        if path is not None and (is_array(whole) or _entries(whole) is not None):
            self._whole[path] = whole
            for index, part in parts:
                self._kept[index].setdefault(id(part), path)
        key = (id(whole), *(id(part) for _, part in parts))
        noted = [self._before[index].get(id(part)) for index, part in parts]
        if key in self._seen or any(one is None for one in noted):
            return
        self._seen.add(key)
        indices = [index for index, _ in parts]
        before = [one[1] for one in noted if one is not None]
        now = [_entries(part) or {} for _, part in parts]
        match = self._match_sequence if isinstance(whole, (list, tuple)) else self._match_record
        match(whole, indices, before, now, path)

    def _match_record(
        self, whole: Any, indices: list[int], before: list[dict[Any, Any]], now: list[dict[Any, Any]], path: Path | None
    ) -> None:
        own = _entries(whole) or {}
        for key in dict.fromkeys(chain(*before, *now)):
            values = [entries.get(key, MISSING) for entries in now]
            below = None if path is None else (*path, key)
            is_missing = [value is MISSING for value in values]
            found = list(zip(indices, values, strict=True))
            if all(value is entries.get(key, MISSING) for value, entries in zip(values, before, strict=True)):
                if key in own and not any(is_missing):
                    self.match(own[key], found, below)
            elif all(is_missing):
                self.taken.append((whole, key))
            elif not any(is_missing):
                self.put.append((whole, key, below, found))

    def _match_sequence(
        self, whole: Any, indices: list[int], before: list[dict[Any, Any]], now: list[dict[Any, Any]], path: Path | None
    ) -> None:
        """A list with entries of each sample was cut between these; the entries of others correspond."""
        own, lengths = list(whole), {len(entries) for entries in (*before, *now)}
        columns = lengths == {len(own)} or len(indices) == 1
        is_cut = len(indices) > 1 and _are_same(own, chain(*(entries.values() for entries in before)))
        if all(_are_same(ours.values(), theirs.values()) for ours, theirs in zip(now, before, strict=True)):
            if _SCALARS.issuperset(map(type, own)):
                return
            for index, entries in zip(indices, now, strict=True) if is_cut else ():
                for entry in entries.values():
                    self.match(entry, [(index, entry)], None)
            for j in range(len(own)) if columns and not is_cut else ():
                below = None if path is None else (*path, j)
                self.match(own[j], [(i, entries[j]) for i, entries in zip(indices, now, strict=True)], below)
        elif isinstance(whole, list):
            each = [[(i, entry) for entry in entries.values()] for i, entries in zip(indices, now, strict=True)]
            if is_cut or len(set(map(len, each))) > 1:
                self.refilled.append((whole, None, [[found] for found in chain(*each)]))
                return
            content: list[list[Found] | _Kept] = []
            for j, found in enumerate(zip(*each, strict=True)):
                stays = [entries.get(j, MISSING) is value for entries, (_, value) in zip(before, found, strict=True)]
                content.append(_Kept(own[j]) if j < len(own) and all(stays) else [*found])
                if j < len(own) and all(stays):
                    self.match(own[j], [*found], None if path is None else (*path, j))
            self.refilled.append((whole, path, content))


def _entries(value: Any) -> dict[Any, Any] | None:
    """What a container holds, by keys, indices or names of attributes; None for anything else."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if not (is_of_users(value) or (is_dataclass(value) and not isinstance(value, type))):
        return None
    slots = {name: getattr(value, name) for name in _slots_of(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _slots_of(value: Any) -> list[str]:
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    return [name for name in names if isinstance(inspect.getattr_static(type(value), name, None), MemberDescriptorType)]


def _contents(root: Any) -> Iterator[tuple[int, tuple[Any, dict[Any, Any]]]]:
    """The containers in a micro-batch by their ids, and what they hold."""
    todo, seen, num_entries = [root], set(), 0
    while todo and num_entries < _MOST_ENTRIES:
        value = todo.pop()
        if id(value) in seen or (entries := _entries(value)) is None:
            continue
        seen.add(id(value))
        yield id(value), (value, entries)
        num_entries += len(entries)
        if not _SCALARS.issuperset(map(type, entries.values())):
            todo.extend(entries.values())


def _places(root: Any) -> Iterator[tuple[Path, Any]]:
    """The containers, tensors and arrays in a value, with the ways to them; the shortest way comes last."""
    todo: list[tuple[Path, Any]] = [((), root)]
    found: list[tuple[Path, Any]] = []
    seen: set[int] = set()
    for path, value in todo:
        entries = _entries(value)
        if entries is None and not is_array(value):
            continue
        found.append((path, value))
        if entries and id(value) not in seen and len(todo) < _MOST_ENTRIES:
            seen.add(id(value))
            if not _SCALARS.issuperset(map(type, entries.values())):
                todo.extend(((*path, key), entry) for key, entry in entries.items())
    return iter(found[::-1])


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether they are of one type, or mappings that can be written."""
    first = type(values[0])
    return all(type(value) is first for value in values) or all(isinstance(value, MutableMapping) for value in values)


def _are_same(ours: Iterable[Any], theirs: Iterable[Any]) -> bool:
    one, other = list(ours), list(theirs)
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, Mapping):
        if isinstance(container, MutableMapping) and container.get(key, MISSING) is not value:
            container[key] = value
    elif key in _slots_of(container):
        object.__setattr__(container, key, value)  # also for frozen dataclasses
    else:
        vars(container)[key] = value


def _take(container: Any, key: Any) -> None:
    if isinstance(container, Mapping):
        if isinstance(container, MutableMapping):
            container.pop(key, None)
    elif key in _slots_of(container):
        object.__delattr__(container, key)
    else:
        vars(container).pop(key, None)
