"""What hooks and overrides do to an optimizer step has the effect that it has with plain Lightning."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.parity import COPIES, both, both_refuse, compare, fit, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small


def _norm(module: nn.Module) -> float:
    return sum(p.grad.square().sum().item() for p in module.parameters() if p.grad is not None)


# --- hooks that read and change gradients ------------------------------------------------------------------------


class ChangesGradients(Small):
    """Hooks around the backward change gradients and weights, and note what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.notes.append(loss.item())
        with torch.no_grad():
            self.head.bias += 0.01 * loss

    def on_after_backward(self) -> None:
        self.notes.append(_norm(self))
        self.head.weight.grad.mul_(1.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(_norm(self))
        self.body[0][0].weight.grad = self.body[1][0].weight.grad.clone()
        self.body[2][0].bias.grad = None
        optimizer.param_groups[0]["lr"] = 0.05

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append(_norm(self))
        with torch.no_grad():
            self.body[1][0].bias.clamp_(-0.2, 0.2)


@compat("LightningModule hook", "on_before_backward; on_after_backward; on_before_optimizer_step; on_before_zero_grad")
@compat("Misuse", "weights changed in hooks that run once per batch")
def test_hooks_that_change_gradients_and_weights() -> None:
    """Callbacks that do it are in test_callbacks_own.py."""
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    compare(ChangesGradients, also=lambda run: run.module.notes, **settings)


# --- overrides of the optimizer step -----------------------------------------------------------------------------


def _skips_every_other(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    """The learning rate is set after a step whose update is still under way: neither the first nor the last one is."""
    if batch_idx % 2 == 0:
        optimizer_closure()
    else:
        optimizer.step(closure=optimizer_closure)
        optimizer.param_groups[0]["lr"] = 0.1 * (self.trainer.global_step + 1) / 4


def _sharpness_aware(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    """Two backwards per batch: at the weights, and where the loss is higher."""
    loss = optimizer_closure()
    moves = [(p, loss * 0.1 * p.grad.clone()) for p in self.parameters()]
    with torch.no_grad():
        for parameter, move in moves:
            parameter += move
    optimizer_closure()
    with torch.no_grad():
        for parameter, move in moves:
            parameter -= move
    optimizer.optimizer.step()


def _without_gradients_around_it(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:
    with torch.no_grad():
        optimizer_closure()
    super(type(self), self).optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


STEPS = [_skips_every_other, _sharpness_aware, _without_gradients_around_it]


@pytest.mark.parametrize("override", STEPS, ids=lambda override: override.__name__)
@compat("LightningModule hook", "optimizer_step")
def test_optimizer_step_overrides(override: Any) -> None:
    make = type("Learns", (Small,), {"optimizer_step": override})
    compare(make, max_epochs=2, also=lambda run: run.trainer.fit_loop.epoch_loop.state_dict())


def test_a_closure_that_is_never_called_is_the_error_of_plain() -> None:
    class Forgets(Small):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            pass

    match = "closure hasn't been executed"
    both_refuse(lambda kind: make_trainer(kind).fit(Forgets(), make_loader()), MisconfigurationException, match)


@compat("LightningModule hook", "optimizer_zero_grad")
def test_gradients_that_are_never_zeroed_add_up() -> None:
    class Keeps(Small):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx == 0:
                optimizer.zero_grad()

    compare(Keeps, max_epochs=2)


# --- overrides of the backward -----------------------------------------------------------------------------------


def _creates_a_graph(self: Any, loss: Tensor) -> None:
    L.LightningModule.backward(self, loss, create_graph=True)
    for parameter in self.parameters():
        parameter.grad = parameter.grad.detach()


def _weighs_by_the_loss_and_adds_a_term(self: Any, loss: Tensor) -> None:
    (0.5 * loss.square() + 0.1 * self.head.weight.square().sum()).backward()


def _asks_for_gradients(self: Any, loss: Tensor) -> None:
    parameters = list(self.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient.sign() * gradient.abs().sqrt()


def _for_all_for_nothing_and_for_the_head(self: Any, loss: Tensor) -> None:
    batch_idx = self.trainer.fit_loop.batch_idx
    if batch_idx == 0:
        loss.backward()
    elif batch_idx == 2:
        loss.backward(inputs=list(self.head.parameters()))


BACKWARDS = [
    _creates_a_graph,
    _weighs_by_the_loss_and_adds_a_term,
    _asks_for_gradients,
    _for_all_for_nothing_and_for_the_head,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("override", BACKWARDS, ids=lambda override: override.__name__)
@compat("LightningModule hook", "backward")
def test_backward_overrides(override: Any) -> None:
    compare(type("Learns", (Small,), {"backward": override}))


def test_a_second_backward_of_a_step_is_an_error() -> None:
    class Twice(Small):
        def backward(self, loss: Any) -> None:
            loss.backward(retain_graph=True)
            loss.backward()

    with pytest.raises(RuntimeError, match="call backward once per training_step"):
        make_trainer().fit(Twice(), make_loader())


class OverridesAll(Small):
    """Overrides all that concerns the optimizer step, and notes when, and what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def backward(self, loss: Any) -> None:
        self.notes.append(("backward", loss.item()))
        (loss * 2.0).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.notes.append(("step", self.head.weight.norm().item()))
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.notes.append(("zero", batch_idx))
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **options: Any) -> None:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.notes.append(("clip", norm.item(), given, options))
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="value")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.notes.append(("scheduler", scheduler.last_epoch))
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


@compat("LightningModule hook", "configure_gradient_clipping")
@compat("LightningModule method", "clip_gradients")
def test_overrides_of_everything_around_a_step() -> None:
    plain, _ = compare(OverridesAll, also=lambda run: run.module.notes, max_epochs=2)
    assert sum(what == "backward" for what, *_ in plain.module.notes) == 6


# --- optimizers --------------------------------------------------------------------------------------------------


class CallsTwice(torch.optim.Optimizer):
    """An optimizer of the user: calls the closure twice, and moves against the sum of both gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure()
        first = [p.grad.clone() for p in self.param_groups[0]["params"]]
        loss = closure()
        for parameter, gradient in zip(self.param_groups[0]["params"], first, strict=True):
            parameter -= self.param_groups[0]["lr"] * (gradient + parameter.grad).sign()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "LBFGS with line search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
    "of the user": lambda p: CallsTwice(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@compat("LightningModule hook", "configure_optimizers; optimizer_step (closure called several times)")
def test_more_optimizers(name: str) -> None:
    """In float64: line searches and signs take decisions, which rounding must not change."""

    class Learns(Small):
        num_steps = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.num_steps += 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.parameters())

    # num_steps: closures are called as often
    compare(Learns, precision="64-true", also=lambda run: run.module.num_steps)


def test_sparse_gradients() -> None:
    """Also added up, over batches."""

    class Words(Small):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                self.words = nn.Embedding(10, 6, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.words(x.abs().mul(3).long().clamp(max=9)).mean(1), y.clamp(max=5))

        def configure_optimizers(self) -> Any:
            return torch.optim.SparseAdam([self.words.weight], lr=0.01, eps=1e-4)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.words.weight.grad.is_sparse

    compare(Words, accumulate_grad_batches=2)


def test_freezing_and_unfreezing_between_batches() -> None:
    """Also while gradients are accumulated; the optimizer moves what is frozen by its momentum, in both.

    Devices keep frozen weights from step to step, and must not keep those that are trained again.
    """

    class Thaws(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.body[:2].requires_grad_(batch_idx % 2 == 1)
            self.head.bias.requires_grad_(batch_idx != 1)

    compare(Thaws, max_epochs=2, accumulate_grad_batches=2, ours=COPIES)


# --- what configure_optimizers returns ---------------------------------------------------------------------------


class Doubling:
    """A scheduler that is not torch's: it needs an override of ``lr_scheduler_step``."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, epoch: int) -> None:
        self.num_steps += 1
        self.optimizer.param_groups[0]["lr"] *= 2 + 0.1 * epoch

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


@compat("LightningModule hook", "configure_optimizers; lr_scheduler_step")
def test_schedulers_of_all_kinds() -> None:
    """Per step and per epoch, by a logged value, and one that is not torch's."""
    kinds = torch.optim.lr_scheduler

    class Learns(Small):
        rates: tuple[float, ...] = ()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            plateau = kinds.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [
                {"scheduler": kinds.StepLR(optimizer, 1, gamma=0.5), "interval": "step", "frequency": 2},
                {"scheduler": kinds.StepLR(optimizer, 1, gamma=0.9), "name": "b"},
                {"scheduler": plateau, "monitor": "loss", "interval": "step"},
                {"scheduler": Doubling(optimizer), "interval": "step"},
            ]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if isinstance(scheduler, Doubling):
                scheduler.step(epoch=self.current_epoch)
            else:
                super().lr_scheduler_step(scheduler, metric)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rates += (self.optimizers().param_groups[0]["lr"],)

    plain, ours = compare(Learns, max_epochs=2)
    assert ours.module.rates == plain.module.rates
    assert len(set(plain.module.rates)) > 4
    assert plain.results["schedulers"][2]["best"] < 10, "the logged loss has come to the scheduler, and is compared"


def test_no_optimizer_at_all() -> None:
    class Only(Small):
        def configure_optimizers(self) -> Any:
            return None

    def act(kind: str) -> Any:
        with pytest.warns(UserWarning, match="fit will run with no optimizer"):
            run = fit(kind, Only, make_loader())
        assert not run.moved
        return run.results, [p.grad for p in run.module.parameters()]

    assert both(act)[0]["progress"] == (1, 3)


# --- being stopped -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="the system has no SIGTERM")
def test_sigterm_in_a_step_stops_where_plain_stops() -> None:
    class Killed(Small):
        ended: tuple[int, ...] = ()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and not self.trainer.received_sigterm:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.ended += (batch_idx,)

    def act(kind: str) -> Any:
        module, trainer = Killed(), make_trainer(kind)
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SIGTERMException):
            trainer.fit(module, make_loader())
        assert signal.getsignal(signal.SIGTERM) == before
        return module.ended, trainer.global_step, trainer.state.status

    assert both(act)[0] == (0, 1)
