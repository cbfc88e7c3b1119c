"""What the entries of a batch or a step output are: rows, samples, constants."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ...common.trees import children_of

_REPLICATED = (
    *(type(None), bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.Generator, torch.Size, torch.layout, torch.memory_format),
)


def is_array(value: Any) -> bool:
    """Tell whether the value is a tensor or a numpy array."""
    # numpy is optional for torch: there are arrays only if it has been imported.
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
