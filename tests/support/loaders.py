"""Loaders that are no :class:`DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Loader:
    """An iterable of ready-made batches."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
