"""Updates in small buckets, on one thread, and updates that are held back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_roundpipe.optimizer import buckets
from lightning_roundpipe.optimizer.updates import Updates
from tests.optimizer.held_updates import Held, WaitSpy


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group of the order is a bucket of its own."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def closed_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The threads of all that a test makes end with it."""
    made: list[Updates] = []

    original = Updates.__init__

    def note(updates: Updates, *args: Any, **kwargs: Any) -> None:
        original(updates, *args, **kwargs)
        made.append(updates)

    monkeypatch.setattr(Updates, "__init__", note)
    yield
    for updates in made:
        updates.close()


@pytest.fixture
def make_held() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(num_free: int = 0) -> Held:
        made.append(Held(num_free))
        return made[-1]

    yield make
    for held in made:
        held.release()


@pytest.fixture
def held(make_held: Callable[..., Held]) -> Held:
    return make_held()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> WaitSpy:
    return WaitSpy(monkeypatch)
