"""Manual optimization: several optimizers, backwards and schedulers inside ``training_step``, as on one device."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.support.identical import assert_identical
from tests.support.parity import KINDS, Run, assert_alike, fit
from tests.support.rows import compat

WIDTH = 6
LATENT = 4


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(31)
    rows = (7, 7, 5, 6, 7, 7)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, LATENT, generator=generator)) for n in rows[:count]]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.dropout(torch.tanh(self.inner(x))))


class Net(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(inputs, WIDTH), Block(dropout), Block(dropout), nn.Linear(WIDTH, outputs))


class Gan(L.LightningModule):
    """Base of the modules here: a generator, a critic, an optimizer and a scheduler for each."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(5)
        self.G = Net(LATENT, 3, self.dropout)
        self.D = Net(3, 1, self.dropout)
        self.events: list[Any] = []

    def critic_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(-self.D(real)).mean() + F.softplus(self.D(fake.detach())).mean()

    def generator_loss(self, fake: Tensor) -> Tensor:
        return F.softplus(-self.D(fake)).mean()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.G.parameters(), lr=1e-2, eps=1e-3),
            torch.optim.SGD(self.D.parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]

    def _note(self, *what: Any) -> None:
        self.events.append((*what, self.trainer.global_step, [p.requires_grad for p in self.parameters()]))

    def on_before_backward(self, loss: Tensor) -> None:
        self._note("before backward", loss.detach().clone(), loss.requires_grad)

    def on_after_backward(self) -> None:
        self._note("after backward", self._gradients())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._note("before step", type(optimizer).__name__, self._gradients())

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self._note("before zero_grad", type(optimizer).__name__)

    def _gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.parameters()]


class Carried(Gan):
    """The generator runs once; its backward comes after the critic's step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        generator, critic = self.optimizers()
        fake = self.G(z)
        loss = self.critic_loss(real, fake)
        critic.zero_grad()
        self.manual_backward(loss)
        critic.step()
        self.log("critic", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", real.max(), reduce_fx="max", on_step=True, on_epoch=True)
        loss = self.generator_loss(fake)
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.log("generator", loss, prog_bar=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("lr", self.lr_schedulers()[0].get_last_lr()[0])


class Toggled(Gan):
    """Toggling, clipping with Lightning and with torch, a dict as the result."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        real, z = batch
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        loss = self.generator_loss(self.G(z))
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        with critic.toggle_model():
            fake = self.G(z)
            assert not fake.requires_grad
            loss = self.critic_loss(real, fake)
            self.manual_backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(self.D.parameters(), 0.02)
            critic.step()
            critic.zero_grad()
        return {"loss": loss, "norm": norm, "fake": fake}


class InTurns(Gan):
    """Toggled by a context manager, which must leave frozen what was frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.D[3].bias.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        for index, optimizer in enumerate(self.optimizers()):
            with self.toggled_optimizer(optimizer):
                self._note("toggled", index)
                loss = self.critic_loss(real, self.G(z)) if index else self.generator_loss(self.G(z))
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self._note("toggled back", index)
            self.log(f"loss{index}", loss)


class Retained(Gan):
    """Two backwards through one graph; one optimizer that the user asks for as it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, z = batch
        generator = self.optimizers()[0]
        critic = self.optimizers(use_pl_optimizer=False)[1]
        out = self.D(self.G(z))
        generator.zero_grad()
        critic.zero_grad()
        self.manual_backward(F.softplus(out).mean(), retain_graph=True)
        self.manual_backward(out.square().mean())
        critic.step()
        generator.step()
        return out.detach().mean()


class Closures(Gan):
    """Closures that run backward; one of them is called several times."""

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.G.parameters(), lr=0.1),
            torch.optim.LBFGS(self.D.parameters(), lr=0.05, max_iter=3, history_size=2),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        generator, critic = self.optimizers()

        def critic_closure() -> Tensor:
            loss = self.critic_loss(real, self.G(z))
            critic.zero_grad()
            self.manual_backward(loss)
            return loss

        def generator_closure() -> Tensor:
            loss = self.generator_loss(self.G(z))
            self.manual_backward(loss)
            return loss

        critic.step(closure=critic_closure)
        with generator.toggle_model():
            value = generator.step(closure=generator_closure)
        generator.zero_grad()
        self.log("value", value)


class Accumulated(Gan):
    """Gradients of several batches; the critic is trained in every other batch only, before the generator."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        generator, critic = self.optimizers()
        if batch_idx % 2:
            self.manual_backward(self.critic_loss(real, self.G(z)))
            critic.step()
            critic.zero_grad()
        self.manual_backward(self.generator_loss(self.G(z)) / 2)
        if batch_idx % 2:
            generator.step()
            generator.zero_grad()


class Attributes(Gan):
    """State on ``self`` from one segment to the next, parameters that user code uses, hooks that write attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.memory: dict[str, Tensor] = {}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_after_backward(self) -> None:
        super().on_after_backward()
        self.told = self.trainer.global_step + len(self.events)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.generated = self.G(z) * self.scale
        self.memory["real"] = self.D(real * self.scale)
        self.manual_backward(F.softplus(self.memory["real"]).mean())
        self.events.append(("told", self.told))
        self.manual_backward(F.softplus(-self.D(self.generated)).mean() + self.scale.square().sum())
        optimizer.step()


class Forgiving(Gan):
    """A hook that fails, and code that goes on without that step; an output that is not differentiated."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.trainer.global_step == 1 and isinstance(optimizer, torch.optim.SGD):
            raise ArithmeticError("not now")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        generator, critic = self.optimizers()
        unused = self.G(z).square().mean()
        self.manual_backward(self.critic_loss(real, self.G(z)))
        with contextlib.suppress(ArithmeticError):
            critic.step()
        critic.zero_grad()
        self.manual_backward(self.generator_loss(self.G(z)))
        generator.step()
        generator.zero_grad()
        self.log("unused", unused)


class Reading(Gan):
    """Gradients that are read, copied and dropped between backwards, also after the forward of the next one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        generator, critic = self.optimizers()
        for parameter in self.D.parameters():
            parameter.grad = None
        self.manual_backward(self.critic_loss(real, self.G(z)))
        loss = self.generator_loss(self.G(z))
        self.log("critic", torch.stack([p.grad.norm() for p in self.D.parameters()]).norm())
        self.first = [p.grad.clone() for p in self.D.parameters()]
        self.manual_backward(loss)
        moved = [(p.grad - one).norm() for p, one in zip(self.D.parameters(), self.first, strict=True)]
        self.log("moved", torch.stack(moved).norm())
        critic.step()
        generator.step()
        generator.zero_grad(set_to_none=False)


class OwnObjects(Gan):
    """An optimizer, schedulers and a scaler of gradients that Lightning does not know."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.G.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), plateau]
        self.own = {"critic": torch.optim.Adam(self.D.parameters(), lr=1e-2, eps=1e-3)}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        generator, critic = self.optimizers(), self.own["critic"]
        critic.zero_grad(set_to_none=False)
        self.manual_backward(self.scaler.scale(self.critic_loss(real, self.G(z))))
        self.scaler.unscale_(critic)
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.D.parameters(), 0.1))
        self.scaler.step(critic)
        self.scaler.update()
        self.log("scale", self.scaler.get_scale())
        loss = self.generator_loss(self.G(z))
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.schedulers[0].step()
        self.schedulers[1].step(metrics=loss)
        self.log("best", self.schedulers[1].best)
        self.log("lr", generator.param_groups[0]["lr"])


class OwnGradients(Gan):
    """Gradients that the step makes of those of several backwards, as gradient surgery does: one micro-batch may."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z = batch
        critic = self.optimizers()[1]
        fake = self.G(z).detach()
        found = []
        for loss in (F.softplus(-self.D(real)).mean(), F.softplus(self.D(fake)).mean()):
            critic.zero_grad()
            self.manual_backward(loss)
            found.append([parameter.grad.clone() for parameter in self.D.parameters()])
        critic.zero_grad()
        for parameter, *gradients in zip(self.D.parameters(), *found, strict=True):
            parameter.grad = torch.stack(gradients).amax(0)
        critic.step()


MODULES: list[Any] = [
    *(Carried, Toggled, Retained, Closures, Accumulated, Attributes, Forgiving, Reading, OwnObjects),
    pytest.param(
        InTurns,
        marks=[
            compat("LightningModule method", "toggled_optimizer"),
            pytest.mark.skipif(
                not hasattr(L.LightningModule, "toggled_optimizer"), reason="Lightning 2.5.0 does not have it yet"
            ),
        ],
    ),
]


ONE = {"num_microbatches": 1}


def run_of(kind: str, module: type[Gan], **settings: Any) -> Run:
    # LBFGS divides by small differences of gradients: in float32 it follows the rounding.
    precision = {"precision": "64-true"} if module is Closures else {}
    return fit(kind, module, batches(6 if module is Accumulated else 4), seed=6, **precision, **settings)


@functools.cache
def plain(module: type[Gan]) -> Run:
    """What all tests of the module compare with."""
    run = run_of("plain", module)
    run.assert_moved()
    return run


@compat(
    "LightningModule method",
    "manual_backward; optimizers; lr_schedulers; toggle_optimizer; untoggle_optimizer; clip_gradients; "
    "log (in manual optimization)",
)
@compat("LightningModule attribute", "automatic_optimization")
@compat("Library", "GAN (two optimizers, schedulers and clipping by hand)")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.ways("lazy")
def test_equal_to_one_device(module: type[Gan]) -> None:
    expected, ours = plain(module), run_of("roundpipe", module)
    for one, other in ((ours.results, expected.results), (ours.module.events, expected.module.events)):
        assert_alike(one, other, rtol=2e-4, atol=2e-6)
    # Both networks were in pipelined segments, layer by layer: a part of them would be fewer calls.
    assert min(ours.watch.num_calls[1:]) >= 8


@pytest.mark.parametrize("module", [Carried, Toggled, Closures, Accumulated, Reading, OwnObjects, OwnGradients])
@pytest.mark.ways("aliases")
def test_one_microbatch_is_exact(module: type[Gan]) -> None:
    expected, ours = plain(module), run_of("roundpipe", module, **ONE)
    assert_identical([ours.results, ours.module.events], [expected.results, expected.module.events])


@pytest.mark.parametrize("where", ["by a function", "before a backward", "after the last barrier"])
@pytest.mark.ways("aliases")
def test_gradients_that_a_step_changes_are_an_error(where: str) -> None:
    """Each micro-batch would change them; that functions of torch imported by name are meant shows in the message."""

    class Changing(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            real, z = batch
            critic = self.optimizers()[1]
            self.manual_backward(self.critic_loss(real, self.G(z)))
            if where == "by a function":
                clip_grad_norm_(self.D.parameters(), 0.1)
            loss = self.generator_loss(self.G(z))
            if where == "before a backward":
                weight = self.D[1].inner.weight
                weight.grad = 0.5 * weight.grad
                self.manual_backward(loss)
            critic.step()
            if where == "after the last barrier":
                self.D[1].inner.bias.grad.zero_()

    message = r"the gradient \(.grad\) of 'D.*made 3 times: clip with self.clip_gradients\(...\), or call torch.nn"
    with pytest.raises(MisconfigurationException, match=message):
        fit("roundpipe", Changing, batches())
    fit("roundpipe", Changing, batches(), **ONE)


@pytest.mark.ways("aliases")
def test_a_loss_that_is_no_scalar() -> None:
    class Rows(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.D(batch[0]))

    with pytest.raises(MisconfigurationException, match=r"a loss of shape \(3, 1\): it must be a scalar"):
        fit("roundpipe", Rows, batches())


@pytest.mark.ways("lazy")
def test_dropout_does_not_depend_on_the_number_of_devices() -> None:
    class Dropped(Carried):
        dropout = 0.4

    one, three = (run_of("roundpipe", Dropped, devices=devices) for devices in (1, 3))
    assert_alike(three.state, one.state)
    without = plain(Carried).state["G.0.weight"]
    assert (one.state["G.0.weight"] - without).abs().max() > 1e-3


@compat("Migration", "checkpoints of manual optimization, both ways")
@pytest.mark.ways("lazy")
def test_a_training_goes_on_from_a_checkpoint_of_either(tmp_path: Path) -> None:
    def end(first: Run, second: str) -> Any:
        path = tmp_path / f"{first.kind}.ckpt"
        first.trainer.save_checkpoint(path)
        return run_of(second, Carried, max_epochs=2, fit_options={"ckpt_path": path}).results

    expected = end(plain(Carried), "plain")
    assert expected["progress"] == (2, 2 * 2 * 4)
    for first, second in ((plain(Carried), "roundpipe"), (run_of("roundpipe", Carried), "plain")):
        assert_alike(end(first, second), expected, rtol=2e-4, atol=2e-6)


@pytest.mark.ways("lazy")
def test_loss_scaling() -> None:
    """Scaled in the backward, taken out before the step; a step that overflows is skipped, and the scale halved."""
    runs, scales = [], []
    for kind in KINDS:
        # So large that the first steps overflow in float16.
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**22))
        runs.append(fit(kind, Carried, batches(6), seed=6, num_microbatches=2, plugins=[plugin]))
        scales.append(plugin.scaler.get_scale())  # type: ignore[union-attr]
    assert scales[0] == scales[1] < 2.0**22
    assert_alike(runs[1].state, runs[0].state, rtol=2e-2, atol=2e-3)
