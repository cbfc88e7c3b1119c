"""Sizes of tensors in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def num_bytes_of(values: Iterable[Any]) -> int:
    """Bytes of all elements of the tensors among ``values``; anything else takes none."""
    return sum([x.numel() * x.element_size() for x in values if isinstance(x, Tensor)])


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """First element of ``tensor`` (strided) in its storage, and the one after its last; in elements."""
    start = int(tensor.storage_offset())
    if tensor.is_contiguous():  # most are; an empty one is, too
        return start, start + tensor.numel()
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + last + 1
