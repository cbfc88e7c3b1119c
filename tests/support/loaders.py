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


class Resumable(Loader):
    """Remembers its place, as Lightning demands for resuming in the middle of an epoch."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches)
        self.position = self.loaded = 0

    def __iter__(self) -> Iterator[Any]:
        self.position, self.loaded = self.loaded % len(self), 0
        while self.position < len(self):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]
