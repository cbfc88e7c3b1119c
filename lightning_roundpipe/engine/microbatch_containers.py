"""The containers that a batch or a step output may be made of: one way to look into them, one way to rebuild them."""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_REPLICATED = (
    *(type(None), bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.Generator, torch.Size, torch.layout, torch.memory_format),
)


def is_array(value: Any) -> bool:
    """Tell whether the value is a tensor or a numpy array."""
    # numpy is optional for torch: an array can only exist if somebody else has imported it.
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def is_replicated(value: Any) -> bool:
    """Tell whether the value is a scalar or constant that every micro-batch may share."""
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, _REPLICATED) or (numpy is not None and isinstance(value, numpy.generic))


def is_sequence(value: Any) -> bool:
    """Tell lists and tuples, whose length may be the batch size, from records such as namedtuples."""
    is_record = hasattr(value, "_fields") or hasattr(value, "n_fields")  # namedtuple, torch.return_types
    return isinstance(value, (list, tuple)) and not is_record


def rows_of(value: Any) -> int | None:
    """Return the leading size of a tensor or array, ``None`` if it has none by which it can be cut and joined."""
    if not is_array(value) or why_not_split(value):
        return None
    return int(value.shape[0]) if value.ndim else None


def why_not_split(value: Any) -> str:
    """Return why a leaf can be neither cut nor shared, an empty string if it can be."""
    if isinstance(value, PackedSequence):
        return "the rows of a PackedSequence are interleaved by time step"
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested tensors are not split"
        if value.layout not in (torch.strided, torch.sparse_coo):
            return f"tensors of layout {value.layout} are not split"
        return ""
    return "" if is_array(value) or is_replicated(value) else "its rows are unknown"


def children_of(value: Any) -> list[tuple[str, Any]] | None:
    """Return (path suffix, entry) for each entry of a container, ``None`` if the value is not one."""
    if is_replicated(value) or isinstance(value, PackedSequence):
        return None
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", entry) for name, entry in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", entry) for index, entry in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value))
        return [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]
    return None


def rebuild(template: Any, entries: Sequence[Any]) -> Any:
    """Return a container like ``template`` that holds ``entries``, in the order of :func:`children_of`."""
    if isinstance(template, Mapping):
        return _rebuild_mapping(template, dict(zip(template, entries, strict=True)))
    if type(template) is list:
        return list(entries)
    if isinstance(template, list):
        result = copy.copy(template)
        result[:] = entries
        return result
    if isinstance(template, tuple):
        if hasattr(template, "_make"):
            return template._make(entries)
        return type(template)(entries)
    result = copy.copy(template)
    names = [field.name for field in fields(template) if hasattr(template, field.name)]
    for name, entry in zip(names, entries, strict=True):
        object.__setattr__(result, name, entry)  # also for frozen dataclasses and fields with init=False
    return result


def _rebuild_mapping(template: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(template) is dict:
        return items
    if isinstance(template, UserDict):
        result: Any = copy.copy(template)
        result.data = items
        return result
    if not isinstance(template, dict):
        try:
            return type(template)(items)  # type: ignore[call-arg]
        except TypeError:
            pass
    # Subclasses of dict keep what else they carry, such as a default factory. Item by item: some forbid update().
    result = copy.copy(template)
    for key, entry in items.items():
        result[key] = entry
    return result


def _kind(value: Any) -> tuple[Any, ...]:
    """Classify an entry of a sequence: the entries of a per-sample sequence are of one kind."""
    if is_array(value):
        return ("array", type(value), value.ndim, value.dtype, getattr(value, "layout", None))
    if isinstance(value, (str, bytes)):
        return ("text",)
    if is_replicated(value):
        return ("scalar",)
    if children_of(value) is None:
        return ("object",)
    return ("container", "mapping" if isinstance(value, Mapping) else type(value))


def common_kind(values: Iterable[Any]) -> str | None:
    """Return "array", "text", "scalar", "object" or "container" if all entries are of one kind, else ``None``.

    Arrays are of one kind if they have the same number of dimensions, dtype and layout, containers if they have the
    same type. Entries that are ``None`` do not count.
    """
    kinds = {_kind(value) for value in values if value is not None}
    return str(next(iter(kinds))[0]) if len(kinds) == 1 else None


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested containers, with the way to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for suffix, entry in children_of(value) or ():
        yield from tensors_in(entry, path + suffix)
