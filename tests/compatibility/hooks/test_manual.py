"""Toggled optimizers, backwards without ``manual_backward``, and steps that pull their batches from the loader.

The other methods are in ``parity/test_parity_manual.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import GradientCutError
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH, Small


class Halves(L.LightningModule):
    """An encoder and a head with an optimizer each: one loss for the head, another one for both that moves one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.encoder = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
            self.head = nn.Linear(WIDTH, CLASSES)
        self.head.bias.requires_grad_(False)  # toggling must put this back
        self.flags: list[Any] = []

    def note(self) -> None:
        flags = [parameter.requires_grad for parameter in self.parameters()]
        if self.flags[-1:] != [flags]:
            self.flags.append(flags)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for index, optimizer in enumerate(self.optimizers()):
            with self.toggled_optimizer(optimizer):
                self.note()
                loss = F.cross_entropy(self.head(self.encoder(x)), y) * (1 + index)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.note()
            self.log(f"loss{index}", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD([self.head.weight], lr=0.2),
        ]


@compat("LightningModule method", "toggled_optimizer")
@pytest.mark.skipif(not hasattr(L.LightningModule, "toggled_optimizer"), reason="Lightning 2.5.0 does not have it yet")
def test_toggled_optimizer(fit_both: Any, assert_same_training: Any, assert_alike: Any) -> None:
    plain, ours = fit_both(Halves, max_epochs=2)
    assert_same_training(plain, ours)
    assert_alike(dict(ours.trainer.callback_metrics), dict(plain.trainer.callback_metrics))
    assert plain.module.flags[:3] == [[True] * 6 + [False] * 2, [True] * 7 + [False], [False] * 6 + [True, False]]
    assert ours.module.flags == plain.module.flags
    assert [p.requires_grad for p in ours.module.parameters()] == [True] * 7 + [False]


# --- backwards ---------------------------------------------------------------------------------------------------


def _optimized(self: Small, batch: Any, backward: Callable[[Tensor], None]) -> Tensor:
    optimizer = self.optimizers()
    loss = self.loss(batch)
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    return loss


def _plainly(self: Small, batch: Any) -> Any:
    return _optimized(self, batch, lambda loss: loss.backward())


def _manually(self: Small, batch: Any) -> Any:
    return _optimized(self, batch, self.manual_backward)


def _without_result(self: Small, batch: Any) -> None:
    _optimized(self, batch, lambda loss: loss.backward())


def _twice(self: Small, batch: Any) -> Any:
    def backward(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()

    return _optimized(self, batch, backward)


def _for_the_head(self: Small, batch: Any) -> Any:
    return _optimized(self, batch, lambda loss: loss.backward(inputs=list(self.head.parameters())))


def _in_a_closure(self: Small, batch: Any) -> Any:
    optimizer = self.optimizers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        return loss

    return optimizer.step(closure)


def _beside_units(self: Small, batch: Any) -> Any:
    """The second backward goes through nothing of the module."""
    step = torch.ones(WIDTH, requires_grad=True)
    step.square().sum().backward()
    return _optimized(self, (batch[0] * step.grad, batch[1]), lambda loss: loss.backward())


BACKWARDS = (_plainly, _manually, _without_result, _twice, _for_the_head, _in_a_closure, _beside_units)


class ByHand(Small):
    """Runs one of the steps with manual optimization, on the batch that it is given or takes from the loader."""

    def __init__(self, step: Callable[..., Any] = _plainly) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


class Pulls(ByHand):
    """The step looks one batch ahead, and stops when there is none."""

    def __init__(self, step: Callable[..., Any] = _plainly) -> None:
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
@pytest.mark.parametrize("options", [{}, {"virtual_copies": True}], ids=["aliases", "copies"])
@pytest.mark.parametrize("step", BACKWARDS, ids=lambda step: step.__name__[1:])
def test_backwards_of_losses(fit_both: Any, assert_same_training: Any, step: Any, options: dict[str, Any]) -> None:
    plain, ours = fit_both(lambda: ByHand(step), max_epochs=2, ours={"options": options})
    assert_same_training(plain, ours)
    assert torch.Tensor.backward.__module__ == "torch._tensor"


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("options", [{}, {"virtual_copies": True}], ids=["aliases", "copies"])
@pytest.mark.parametrize("step", BACKWARDS, ids=lambda step: step.__name__[1:])
def test_steps_that_pull_from_the_loader(
    fit_both: Any, make_loader: Any, assert_same_training: Any, step: Any, options: dict[str, Any]
) -> None:
    """Batches are taken by the step itself: each is a single micro-batch."""
    plain, ours = fit_both(lambda: Pulls(step), make_loader(24), max_epochs=2, ours={"options": options})
    assert_same_training(plain, ours)
    assert ours.module.num_pulled == plain.module.num_pulled == 6
    assert ours.trainer.strategy.last_step.num_microbatches == 1


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_automatic_steps_that_pull_from_the_loader(fit_both: Any, make_loader: Any, assert_same_training: Any) -> None:
    class Automatic(Pulls):
        def __init__(self) -> None:
            super().__init__(lambda self, batch: self.loss(batch))
            self.automatic_optimization = True

    plain, ours = fit_both(Automatic, make_loader(24), max_epochs=2)
    assert_same_training(plain, ours)
    assert ours.module.num_pulled == plain.module.num_pulled == 6


def _of_the_call_before(self: Any, batch: Any) -> None:
    before, self.loss_before = getattr(self, "loss_before", None), self.loss(batch)
    if before is not None:
        before.backward()


class _Holder:
    """Holds something where nothing looks for it."""

    held: Any = None


def _of_the_call_before_elsewhere(self: Any, batch: Any) -> None:
    if not hasattr(self, "holder"):
        self.holder = _Holder()
    before, self.holder.held = self.holder.held, self.loss(batch)
    if before is not None:
        before.backward()


def _by_autograd(self: Any, batch: Any) -> None:
    torch.autograd.grad(self.loss(batch), list(self.parameters()))


def _with_graph(self: Any, batch: Any) -> None:
    self.loss(batch).backward(create_graph=True)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (_of_the_call_before, RuntimeError, "an attribute of the module holds is when a step ends"),
    (_of_the_call_before_elsewhere, GradientCutError, "after the training_step that called it.* that has made it"),
    (_by_autograd, GradientCutError, r"went through unit '[\w.]+', whose graph is cut there.*manual_backward\(loss\)"),
    (_with_graph, MisconfigurationException, r"create_graph=True\) needs the graph of the whole model"),
]


@compat(
    "Misuse",
    "a backward of a loss that an earlier `training_step` has made",
    status="refused",
    note="The graph ends with its step: run the backward in the same one.",
)
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("module", [ByHand, Pulls])
@pytest.mark.parametrize(("step", "error", "match"), REFUSED, ids=[step.__name__[1:] for step, *_ in REFUSED])
def test_backwards_that_need_the_whole_graph(
    make_trainer: Any, make_loader: Any, module: Any, step: Any, error: type[Exception], match: str
) -> None:
    make_trainer("plain").fit(module(step), make_loader(24))
    with pytest.raises(error, match=match):
        make_trainer().fit(module(step), make_loader(24))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("is_automatic", [True, False], ids=["automatic", "manual"])
def test_a_step_that_ends_with_stop_iteration(
    make_trainer: Any, make_loader: Any, assert_alike: Any, is_automatic: bool
) -> None:
    """It has not failed: what it has pulled, written and logged until then stays."""

    class Stops(Pulls):
        def __init__(self) -> None:
            super().__init__((lambda self, batch: self.loss(batch)) if is_automatic else _plainly)
            self.automatic_optimization = is_automatic
            self.seen: list[int] = []
            self.num_called = 0

        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            loss = super().training_step(dataloader_iter)
            self.seen.append(self.num_pulled)
            self.num_called += 1
            self.log("called", float(self.num_called), on_epoch=True, on_step=False, batch_size=1)
            if self.num_called == 2:
                raise StopIteration
            return loss

    results = []
    for kind in ("plain", "roundpipe"):
        module, trainer = Stops(), make_trainer(kind)
        trainer.fit(module, make_loader(24))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.append([module.seen, module.num_called, trainer.global_step, metrics, dict(module.state_dict())])
    assert results[0][:2] == [[2, 3], 2]
    assert_alike(results[1], results[0])
