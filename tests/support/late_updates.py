"""Updates that begin only when something waits for them, and trainings with them that are compared with plain ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_roundpipe.integration import overlap
from lightning_roundpipe.optimizer import buckets
from lightning_roundpipe.optimizer.buckets import Bucket
from lightning_roundpipe.optimizer.state import GuardedState
from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights.futures import ParameterFuture, PendingParameter, State
from tests.support.identical import assert_identical
from tests.support.parity import make_loader, make_trainer

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
            thread = updates._last
            if thread is not None and thread.is_alive():
                self._demand(None, lambda: not thread.is_alive())
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


@pytest.fixture
def small_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of small weights overlap as well, unit by unit."""
    monkeypatch.setattr(overlap, "MIN_BYTES", 0)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)


@pytest.fixture
def late(small_updates: None, monkeypatch: pytest.MonkeyPatch) -> Late:
    """No update begins before something waits for it."""
    return Late(monkeypatch)


@pytest.fixture
def compare_modes(late: Late) -> Callable[..., tuple[Any, Any]]:
    """Trains the same twice, without overlap and with it, and compares every bit of weights, optimizer state, metrics
    and of what modules and callbacks have noted in ``seen``. Gives both modules."""

    def run(
        make_module: Callable[[], Any],
        callbacks: Callable[[], list[Any]] = list,
        *,
        options: dict[str, Any] | None = None,
        plugins: Callable[[], list[Any]] = list,
        overlaps: bool = True,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        modules, found = [], []
        for mode in ("off", "exact"):
            torch.manual_seed(3)
            module, own = make_module(), callbacks()
            before = late.num_buckets
            trainer = make_trainer(
                options={**(options or {}), "optimizer_overlap": mode}, callbacks=own, plugins=plugins(), **kwargs
            )
            has_validation = getattr(type(module), "validation_step", None) is not L.LightningModule.validation_step
            trainer.fit(module, make_loader(40), make_loader(10, 4) if has_validation else None)
            assert (late.num_buckets > before) == (mode == "exact" and overlaps)
            assert_finished(trainer, module)
            seen = [x.seen for x in (module, *own) if hasattr(x, "seen")]
            modules.append(module)
            found.append(
                {
                    "weights": module.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
                    "metrics": dict(trainer.callback_metrics),
                    "seen": seen,
                    "step": trainer.global_step,
                }
            )
        assert_identical(found[1], found[0])
        start = dict(make_module().state_dict())
        assert any(not torch.equal(value, start[key]) for key, value in found[0]["weights"].items() if key in start)
        return modules[0], modules[1]

    return run
