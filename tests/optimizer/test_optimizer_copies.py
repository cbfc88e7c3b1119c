"""Low-precision copies of weights: updates make them right after the weights; they are used if nothing has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights import events
from lightning_roundpipe.weights.futures import PendingParameter, is_pending, take_unseen
from lightning_roundpipe.weights.low_precision import WorkingCopies
from tests.optimizer.held_updates import TIMEOUT_S, Gated, fill_gradients, make_weights, outcome_of
from tests.support.identical import assert_identical

LOW = torch.bfloat16


class Trained:
    """Weights with low-precision copies, whose updates make them.

    Attributes:
        converted: the threads that have made copies, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights = make_weights(shapes=((4, 3), (4,), (2, 4)))
        self.optimizer = Gated(self.weights)
        self.copies = WorkingCopies()
        self.updates = Updates(1, self.copies.updating)
        self.converted: list[str] = []
        monkeypatch.setattr(events, "observer", self._note)

    def _note(self, event: str, *args: Any) -> None:
        if event == "refresh":
            self.converted.append(threading.current_thread().name)

    def step(self) -> list[Tensor]:
        """A training step begins: what it computes with."""
        self.copies.begin_step("train", training=True)
        self.converted.clear()
        return [self.copies.source(weight, LOW).clone() for weight in self.weights]

    def update(self) -> None:
        fill_gradients(self.weights, 0)
        self.updates.start(self.optimizer, [[weight] for weight in self.weights])

    @property
    def right(self) -> list[Tensor]:
        return [weight.detach().to(LOW) for weight in self.weights]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trained]:
    made = Trained(monkeypatch)
    made.step()
    assert made.converted == ["MainThread"] * 3
    yield made
    for gate in made.optimizer.gates.values():
        gate.set()
    made.updates.join()
    take_unseen()
    assert not any(type(weight) is PendingParameter for weight in made.weights)


def test_the_next_step_converts_nothing(trained: Trained) -> None:
    for _ in range(3):
        trained.update()
        trained.updates.join()
        made = list(trained.converted)
        found = trained.step()
        assert made[-3:] == ["roundpipe-optimizer"] * 3
        assert trained.converted == []
        assert_identical(found, trained.right)


def test_who_needs_a_copy_waits_for_its_bucket_and_converts_nothing(trained: Trained) -> None:
    gate = trained.optimizer.gates[trained.weights[1].data_ptr()] = threading.Event()
    trained.update()
    trained.copies.begin_step("train", training=True)
    trained.converted.clear()
    assert torch.equal(trained.copies.source(trained.weights[0], LOW), trained.weights[0].to(LOW))
    thread, found = outcome_of(lambda: trained.copies.source(trained.weights[1], LOW).clone())
    assert is_pending(trained.weights[1:2])
    assert not found
    gate.set()
    thread.join(TIMEOUT_S)
    trained.updates.join()
    assert_identical(found, trained.right[1:2])
    assert set(trained.converted) <= {"roundpipe-optimizer"}


def _through_data(weight: nn.Parameter, view: Tensor) -> None:
    weight.data[0].clamp_(max=0.0)


def _through_numpy(weight: nn.Parameter, view: Tensor) -> None:
    weight.detach().numpy()[0] = 3.0


def _in_place(weight: nn.Parameter, view: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2.0)


def _replaced(weight: nn.Parameter, view: Tensor) -> None:
    weight.data = weight.data + 1


def _through_an_older_view(weight: nn.Parameter, view: Tensor) -> None:
    view.mul_(2.0)


@pytest.mark.parametrize("write", [_through_data, _through_numpy, _in_place, _replaced, _through_an_older_view])
def test_a_weight_that_was_written_is_converted_anew(
    trained: Trained, write: Callable[[nn.Parameter, Tensor], None]
) -> None:
    """Also where the write leaves no trace, in all but a few values or in all."""
    view = trained.weights[0].detach()
    trained.update()
    trained.updates.join()
    write(trained.weights[0], view)
    found = trained.step()
    assert trained.converted == ["MainThread"]
    assert_identical(found, trained.right)


def test_a_weight_that_is_updated_and_unseen_need_not_be_waited_for(trained: Trained) -> None:
    trained.update()
    trained.updates.join()
    assert all(type(weight) is PendingParameter for weight in trained.weights)
    assert not is_pending(trained.weights)
    assert trained.weights[0].shape == (4, 3), "what an update does not change may be looked at"
    trained.step()
    assert trained.converted == []
    assert not any(type(weight) is PendingParameter for weight in trained.weights)


def test_evaluation_trusts_the_copies_as_well(trained: Trained) -> None:
    trained.update()
    trained.updates.join()
    trained.converted.clear()
    trained.copies.begin_step("validate", training=False)
    found = [trained.copies.source(weight, LOW) for weight in trained.weights]
    assert trained.converted == []
    assert_identical(found, trained.right)


def test_weights_without_copies_are_plain_as_soon_as_they_are_updated(trained: Trained) -> None:
    trained.copies.clear()
    trained.update()
    trained.updates.join()
    assert not any(type(weight) is PendingParameter for weight in trained.weights)


def test_a_copy_that_cannot_be_made_fails_the_update(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("no copy")

    with monkeypatch.context() as patched:
        patched.setattr(WorkingCopies, "_convert", broken)
        trained.update()
        trained.updates.join()
    with pytest.raises(ValueError, match="no copy"):
        trained.updates.check()
