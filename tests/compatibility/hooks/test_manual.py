"""Backwards without ``manual_backward``, and steps that pull their batches from the loader.

The other methods of manual optimization are in ``parity/test_parity_manual.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_roundpipe import GradientCutError
from tests.support.parity import COPIES, compare, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import WIDTH, Small

pytestmark = pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")


def optimized(self: Small, batch: Any, backward: Callable[[Tensor], None]) -> Tensor:
    optimizer = self.optimizers()
    loss = self.loss(batch)
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    return loss


def plainly(self: Small, batch: Any) -> Any:
    return optimized(self, batch, lambda loss: loss.backward())


def for_all_and_for_the_head(self: Small, batch: Any) -> Any:
    def backward(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (loss * 0.5).backward(inputs=list(self.head.parameters()))

    return optimized(self, batch, backward)


def in_a_closure(self: Small, batch: Any) -> Any:
    optimizer = self.optimizers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        return loss

    return optimizer.step(closure)


def beside_units(self: Small, batch: Any) -> Any:
    """The first backward goes through nothing of the module."""
    step = torch.ones(WIDTH, requires_grad=True)
    step.square().sum().backward()
    return plainly(self, (batch[0] * step.grad, batch[1]))


def automatically(self: Small, batch: Any) -> Any:
    return self.loss(batch)


class ByHand(Small):
    """Runs one of the steps on the batch that it is given or takes from the loader."""

    def __init__(self, step: Callable[..., Any] = plainly) -> None:
        super().__init__()
        self.automatic_optimization = step is automatically
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


class Pulls(ByHand):
    """The step looks one batch ahead, and stops when there is none."""

    def __init__(self, step: Callable[..., Any] = plainly) -> None:
        super().__init__(step)
        self.ahead: Any = None
        self.num_pulled = 0

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        if self.ahead is None:
            self.ahead = self.pull(dataloader_iter)
        batch, self.ahead = self.ahead, None
        with contextlib.suppress(StopIteration):
            self.ahead = self.pull(dataloader_iter)
        return self.step(self, batch)

    def pull(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        assert (batch_idx, dataloader_idx) == (self.num_pulled % 3, 0)
        self.num_pulled += 1
        return batch


@compat("LightningModule method", "manual_backward (and `loss.backward()`)")
@pytest.mark.parametrize(
    ("step", "ours"), [(plainly, COPIES), (for_all_and_for_the_head, {}), (in_a_closure, {}), (beside_units, {})]
)
def test_backwards_of_losses(step: Any, ours: dict[str, Any]) -> None:
    compare(lambda: ByHand(step), max_epochs=2, ours=ours)
    assert torch.Tensor.backward.__module__ == "torch._tensor"


class PullsBoth(Pulls):
    """The validation step as well."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__(step)
        self.validated: list[Any] = []

    def validation_step(self, dataloader_iter: Any) -> None:
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.validated.append((batch_idx, dataloader_idx, len(batch[0])))
        self.log("val", self.loss(batch), batch_size=len(batch[0]))


@compat("LightningModule hook", "training_step (dataloader_iter)")
@pytest.mark.parametrize("step", [in_a_closure, automatically])
def test_steps_that_pull_from_their_loaders(step: Any) -> None:
    """Batches are taken by the step itself: each is a single micro-batch."""
    loaders = make_loader(24), make_loader(10, 4)
    plain, ours = compare(
        lambda: PullsBoth(step), *loaders, max_epochs=2, ours=COPIES, also=lambda run: run.module.validated
    )
    assert ours.module.num_pulled == plain.module.num_pulled == 6
    assert len(plain.module.validated) == 6
    assert set(ours.watch.num_microbatches) == {1}


def of_the_call_before(self: Any, batch: Any) -> None:
    before, self.loss_before = getattr(self, "loss_before", None), self.loss(batch)
    if before is not None:
        before.backward()


class Holder:
    """Holds something where nothing looks for it."""

    held: Any = None


def of_the_call_before_elsewhere(self: Any, batch: Any) -> None:
    if not hasattr(self, "holder"):
        self.holder = Holder()
    before, self.holder.held = self.holder.held, self.loss(batch)
    if before is not None:
        before.backward()


def by_autograd(self: Any, batch: Any) -> None:
    torch.autograd.grad(self.loss(batch), list(self.parameters()))


def with_graph(self: Any, batch: Any) -> None:
    self.loss(batch).backward(create_graph=True)


REFUSED: list[tuple[type[ByHand], Any, type[Exception], str]] = [
    (ByHand, of_the_call_before, RuntimeError, "an attribute of the module holds is when a step ends"),
    (ByHand, of_the_call_before_elsewhere, GradientCutError, "after the training_step that called it.* has made it"),
    (Pulls, of_the_call_before_elsewhere, GradientCutError, "after the training_step that called it.* has made it"),
    (ByHand, by_autograd, GradientCutError, r"unit '[\w.]+', whose graph is cut there.*manual_backward\(loss\)"),
    (ByHand, with_graph, MisconfigurationException, r"create_graph=True\) needs the graph of the whole model"),
]


@compat(
    "Misuse",
    "a backward of a loss that an earlier `training_step` has made",
    status="refused",
    note="Run the backward in the same step.",
)
@pytest.mark.parametrize(("module", "step", "error", "match"), REFUSED)
def test_backwards_that_need_the_whole_graph_are_refused(
    module: Any, step: Any, error: type[Exception], match: str
) -> None:
    make_trainer("plain").fit(module(step), make_loader(24))
    with pytest.raises(error, match=match):
        make_trainer().fit(module(step), make_loader(24))
