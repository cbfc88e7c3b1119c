"""Updates that begin only when something waits for them: who does not wait sees old weights, in every run."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_roundpipe.integration import overlap
from lightning_roundpipe.optimizer import buckets
from lightning_roundpipe.optimizer.buckets import Bucket
from lightning_roundpipe.optimizer.state import GuardedState
from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights.futures import ParameterFuture, PendingParameter, State

_TIMEOUT_S = 60.0


class Late:
    """Lets updates begin when something waits for them, and no sooner.

    Attributes:
        num_buckets: buckets that have been updated.
        demands: the weights of the buckets that were waited for, in order; None for all.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_buckets = 0
        self.demands: list[list[nn.Parameter] | None] = []
        self._changed = threading.Condition()
        self._wanted: list[Callable[[], bool]] = []
        wait_for_bucket, wait_for_all, step = ParameterFuture.wait, Updates.join, Bucket.step

        def wait(future: ParameterFuture) -> None:
            if future.state is State.UPDATING:
                self._demand(future.parameters, lambda: future.state is not State.UPDATING)
            wait_for_bucket(future)

        def wait_all(updates: Updates) -> None:
            last = updates._last
            if last is not None and not last._has_ended.is_set():
                self._demand(None, last._has_ended.is_set)
            wait_for_all(updates)

        def late_step(bucket: Bucket) -> None:
            with self._changed:
                assert self._changed.wait_for(self._is_wanted, _TIMEOUT_S)
            self.num_buckets += 1
            step(bucket)

        monkeypatch.setattr(ParameterFuture, "wait", wait)
        monkeypatch.setattr(Updates, "join", wait_all)
        monkeypatch.setattr(Bucket, "step", late_step)

    def _demand(self, weights: list[nn.Parameter] | None, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self.demands.append(weights)
            self._wanted.append(is_over)
            self._changed.notify_all()

    def _is_wanted(self) -> bool:
        return any(not is_over() for is_over in self._wanted)


def copied(value: Any) -> Any:
    """The values of tensors as they are now."""
    return copy.deepcopy(value)


def assert_finished(trainer: L.Trainer, module: nn.Module) -> None:
    """Nothing is left of the overlap."""
    assert not any(type(p) is PendingParameter for p in module.parameters())
    assert not any(isinstance(optimizer.state, GuardedState) for optimizer in trainer.optimizers)
    assert not any(thread.name == "roundpipe-optimizer" for thread in threading.enumerate())


def overlap_small_weights(patch: pytest.MonkeyPatch) -> None:
    """Updates of small weights overlap as well, unit by unit."""
    patch.setattr(overlap, "MIN_BYTES", 0)
    patch.setattr(buckets, "BUCKET_BYTES", 1)


@pytest.fixture
def small_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap_small_weights(monkeypatch)


@pytest.fixture
def late(small_updates: None, monkeypatch: pytest.MonkeyPatch) -> Late:
    """No update begins before something waits for it."""
    return Late(monkeypatch)


@pytest.fixture(autouse=True)
def late_updates(late: Late) -> None:
    """In all tests of the folder whose conftest imports it: small models, too, overlap as they do by default.

    Not in fixtures of a module, which are made before it.
    """
