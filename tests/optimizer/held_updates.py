"""Optimizer steps that have begun and are held back, and threads that look at their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights.futures import ParameterFuture

TIMEOUT_S = 120.0  # nothing here takes so long: what hangs fails
SHAPES = ((5, 3), (5,), (4, 5), (4,), (3, 4), (2,), ())


def make_weights(seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def fill_gradients(weights: list[nn.Parameter], seed: int, sparse: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for weight in weights:
        gradient = torch.randn(weight.shape, generator=generator)
        if sparse and weight.dim() == 2:
            rows = torch.tensor([0, 2, 0])  # a row twice
            values = torch.randn(3, weight.shape[1], generator=generator)
            gradient = torch.sparse_coo_tensor(rows[None], values, weight.shape, check_invariants=True)
        weight.grad = gradient


class Gated(torch.optim.SGD):
    """Each bucket waits for the gate that its first weight has in ``gates``, if any."""

    is_separable = True

    def __init__(self, weights: list[nn.Parameter], **options: Any) -> None:
        super().__init__(weights, lr=0.5, momentum=0.9, **options)
        self.gates: dict[int, threading.Event] = {}
        self.entered: list[int] = []
        self.arrived = threading.Event()

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0].data_ptr()
        self.entered.append(first)
        self.arrived.set()
        if first in self.gates:
            assert self.gates[first].wait(TIMEOUT_S)
        return super().step(closure)


def make_blocker() -> tuple[Gated, threading.Event]:
    """An optimizer of one weight, whose update holds up all that come after it, and the gate that lets it go."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    blocker = Gated([weight])
    gate = blocker.gates[weight.data_ptr()] = threading.Event()
    return blocker, gate


class Held:
    """Weights, each a bucket of its own, whose update has begun and waits for :meth:`release`."""

    def __init__(self, num_free: int = 0, num_weights: int = 4) -> None:
        self.weights = make_weights(shapes=((4, 3), (4,), (2, 4), (3, 3))[:num_weights])
        fill_gradients(self.weights, 0)
        self.old = [w.detach().clone() for w in self.weights]
        self.new = [w.detach() - 0.5 * w.grad for w in self.weights if w.grad is not None]
        self.optimizer = Gated(self.weights)
        self.gate = threading.Event()
        self.optimizer.gates[self.weights[num_free].data_ptr()] = self.gate
        self.updates = Updates(1)
        self.order = [[w] for w in self.weights]
        self.updates.start(self.optimizer, self.order)

    def release(self) -> None:
        self.gate.set()
        self.updates.wait()


def outcome_of(access: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs ``access`` on another thread; what it gave, or the error, once the thread has ended."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(access())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


class WaitSpy:
    """Tells when something begins to wait for a bucket, or for all of an optimizer's updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = threading.Event()
        self.count = 0

        def watched(original: Any) -> Any:
            def wait(this: Any) -> None:
                self.count += 1
                self.waits.set()
                original(this)

            return wait

        monkeypatch.setattr(ParameterFuture, "wait", watched(ParameterFuture.wait))
        monkeypatch.setattr(Updates, "join", watched(Updates.join))
