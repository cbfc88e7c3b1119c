"""Optimizer steps behind the pipeline, in whole trainings: the numbers of steps that are not, and who waits for them.

The updates here are late: none begins before something waits for it. So what looks at weights, gradients or optimizer
state without a wait finds the old ones, in every run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.utils import prune

from lightning_roundpipe.integration import overlap
from lightning_roundpipe.weights.futures import PendingParameter
from tests.support.identical import assert_identical
from tests.support.late_updates import Late, assert_finished, copied
from tests.support.parity import compare, make_loader, make_trainer
from tests.support.small import Small

pytestmark = pytest.mark.usefixtures("late")

# --- the same numbers ------------------------------------------------------------------------------------------------


SETTINGS: dict[str, dict[str, Any]] = {
    "epochs with validation": {"max_epochs": 2, "limit_train_batches": 3},
    "clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulate and clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    "copies, clip norm": {"options": {"virtual_copies": True}, "gradient_clip_val": 0.05},
    "64-true": {"precision": "64-true"},  # changes the default dtype of the process
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed", "options": {"virtual_copies": True}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(compare_modes: Any, name: str) -> None:
    class Learns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(_groups(self), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    compare_modes(Learns, **SETTINGS[name])


def _groups(module: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return [
        {"params": module.head.parameters(), "lr": 0.05},
        {"params": [p for p in module.body.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.body.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def test_hooks_of_the_module(compare_modes: Any) -> None:
    """Clipping of one's own, warm-up, ``zero_grad`` to zeros, parameters that come and go, raw weights in user code."""

    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.scale = nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch) * self.scale + 0.01 * self.head.weight.square().mean()
            return None if batch_idx == 2 else loss

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.clamp_(-0.01, 0.01)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (batch_idx + 1)
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.body[1].requires_grad_(batch_idx % 2 == 0)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append([None if p.grad is None else p.grad.norm() for p in self.parameters()])

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])

    compare_modes(Learns, max_epochs=2)


def test_weights_that_are_frozen_before_their_update_has_begun(compare_modes: Any) -> None:
    """Under mixed precision the update makes low copies as well, which for frozen weights are told by their values."""

    class Learns(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            self.head.requires_grad_(self.global_step % 3 != 1)

    compare_modes(Learns, precision="bf16-mixed", options={"virtual_copies": True})


def _scaling() -> list[Any]:
    # So large that the first step overflows in float16; doubled after every second step that does not.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling_with_skipped_steps(compare_modes: Any, fused: bool) -> None:
    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=fused)

        def on_train_batch_end(self, *args: Any) -> None:
            scaler = self.trainer.precision_plugin.scaler
            self.seen.append((scaler.get_scale(), [p.detach().clone() for p in self.parameters()]))

    _, ours = compare_modes(Learns, plugins=_scaling, max_epochs=2)
    scales = [scale for scale, _ in ours.seen]
    assert min(scales) < 2.0**20
    assert any(later > earlier for earlier, later in itertools.pairwise(scales))


class Gan(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[Any] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.G = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            self.D = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        for_g, for_d = self.optimizers()
        fake = self.G(real.flip(1))
        self.toggle_optimizer(for_d)
        # One call: gradients of two calls are added up in the order of the plan, which depends on measured times.
        judged = self.D(torch.cat([fake.detach(), real]))
        loss = nn.functional.softplus(judged[: len(real)] - judged[len(real) :]).mean()
        for_d.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_d, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        for_d.step()
        self.untoggle_optimizer(for_d)
        self.log("d", loss)
        loss = nn.functional.softplus(-self.D(fake)).mean()
        for_g.zero_grad()
        self.manual_backward(loss)
        for_g.step()
        self.log("g", loss)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(copied([p.detach() for p in self.parameters()]))

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.G.parameters(), lr=0.01),
            torch.optim.SGD(self.D.parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]


@pytest.mark.parametrize("copies", [False, True])
def test_manual_optimization_with_two_optimizers(compare_modes: Any, copies: bool) -> None:
    compare_modes(Gan, options={"virtual_copies": copies})


def test_coupled_optimizers_are_not_taken_apart(compare_modes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Learns(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    messages: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", messages.append)
    compare_modes(Learns, overlaps=False)
    (message,) = messages
    assert "LBFGS is not known to update each parameter by itself" in message


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated:DeprecationWarning")
def test_scripted_modules_do_not_meet_weights_that_are_under_way(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read weights in C++, where nobody would wait."""

    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.jit.script(self.head)

    messages: list[str] = []
    monkeypatch.setattr(overlap, "rank_zero_info", messages.append)
    make_trainer(options={"optimizer_overlap": "exact"}).fit(Learns(), make_loader())
    assert late.num_buckets == 0
    (message,) = messages
    assert "torch.jit.ScriptModule" in message


def test_the_same_training_as_plain_lightning(late: Late) -> None:
    compare(Small, max_epochs=2)
    assert late.num_buckets > 0


# --- who looks sees finished values ---------------------------------------------------------------------------------


class Takes(cb.Callback):
    """Does one of ``actions`` in ``hook``, another one in each step, and notes what they give.

    Each begins while no weight has been looked at since the step of the optimizer.
    """

    def __init__(self, actions: dict[str, Callable[[L.Trainer, Any], Any]], hook: str = "on_train_batch_end") -> None:
        self.seen: list[Any] = []
        self._left = dict(actions)
        setattr(self, hook, self._take)

    def _take(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if self._left and trainer.global_step >= 2:  # the first update is over at once
            name = next(iter(self._left))
            self.seen.append((name, copied(self._left.pop(name)(trainer, module))))


def _saved(trainer: L.Trainer, module: Any) -> Any:
    path = Path(trainer.default_root_dir) / "middle.ckpt"
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=False)
    return {key: content[key] for key in ("state_dict", "optimizer_states", "global_step")}


LOOKS: dict[str, Callable[[L.Trainer, Any], Any]] = {
    "state_dict": lambda t, m: m.state_dict(),
    "strategy's state_dict": lambda t, m: t.strategy.lightning_module_state_dict(),
    "gradients": lambda t, m: [p.grad for p in m.parameters()],
    "optimizer state": lambda t, m: [t.optimizers[0].state[p] for p in m.parameters()],
    "strategy's optimizer state": lambda t, m: t.strategy.optimizer_state(t.optimizers[0]),
    "checkpoint": _saved,
    "forward": lambda t, m: m(torch.linspace(-1, 1, 6)[None]).detach(),
}


def test_callbacks_that_read(compare_modes: Any) -> None:
    _, ours = compare_modes(Small, lambda: [Takes(LOOKS)], max_epochs=3, gradient_clip_val=0.05)
    assert ours.trainer.global_step > len(LOOKS)


def test_other_hooks_that_read(compare_modes: Any) -> None:
    class Learns(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

    def make() -> list[Any]:
        hooks = ("on_before_zero_grad", "on_train_epoch_end", "on_validation_start", "on_train_end", "on_fit_end")
        looks = {"state": lambda t, m: (m.state_dict(), t.optimizers[0].state_dict())}
        return [Takes(looks, hook) for hook in hooks]

    compare_modes(Learns, make, limit_train_batches=3)


def _replace_data(trainer: L.Trainer, module: Any) -> None:
    for p in module.parameters():
        p.data = p.data + 0.125


def _load(trainer: L.Trainer, module: Any) -> None:
    module.load_state_dict({key: value * 2 for key, value in module.state_dict().items()})
    trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())


def _edit_state(trainer: L.Trainer, module: Any) -> None:
    for entry in trainer.optimizers[0].state.values():
        entry["momentum_buffer"].mul_(0.5)


def _forget_state(trainer: L.Trainer, module: Any) -> None:
    trainer.optimizers[0].state.clear()


def _prune(trainer: L.Trainer, module: Any) -> None:
    prune.l1_unstructured(module.body[1][0], "weight", amount=3)
    prune.remove(module.body[1][0], "weight")


def _new_optimizer(trainer: L.Trainer, module: Any) -> None:
    trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.05)]


WRITES = [_replace_data, _load, _edit_state, _prune, _forget_state, _new_optimizer]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_callbacks_that_write(compare_modes: Any, hook: str) -> None:
    writes = {write.__name__: write for write in WRITES}
    _, ours = compare_modes(Small, lambda: [Takes(writes, hook)], max_epochs=2)
    assert ours.trainer.global_step > len(WRITES)


# --- ways out ---------------------------------------------------------------------------------------------------------


def test_fit_twice() -> None:
    ends = []
    for mode in ("off", "exact"):
        module, trainer = Small(), make_trainer(options={"optimizer_overlap": mode})
        trainer.fit(module, make_loader(40))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, make_loader(40))
        assert_finished(trainer, module)
        ends.append([copied(module.state_dict()), trainer.global_step])
    assert_identical(ends[1], ends[0])
    assert ends[0][1] == 10


# --- who does not pay -------------------------------------------------------------------------------------------------


class Watches(cb.Callback):
    """Looks at losses and metrics only."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        assert "loss" in trainer.callback_metrics
        assert trainer.optimizers[0].param_groups[0]["lr"] > 0
        assert pl_module.head.weight.shape == (3, 6)
        assert sum(p.numel() for p in pl_module.parameters() if p.requires_grad) > 0


def test_what_only_watches_losses_does_not_wait(late: Late, tmp_path: Path) -> None:
    """The next step has begun, with everything between the steps done, and nobody has waited for the update."""
    demands_at_start: list[int] = []
    demands_after_step: list[int] = []

    class Learns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(demands_at_start) == len(demands_after_step):
                demands_at_start.append(len(late.demands))
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            demands_after_step.append(len(late.demands))
            if len(demands_after_step) not in (1, 5, 10):
                assert all(type(p) is PendingParameter for p in self.parameters())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    watching = Watches()
    trainer = make_trainer(
        options={"optimizer_overlap": "exact"},
        max_epochs=2,
        gradient_clip_val=0.5,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        enable_progress_bar=True,
        callbacks=[
            watching,
            cb.LearningRateMonitor("step"),
            cb.EarlyStopping("loss", patience=5, check_on_train_epoch_end=True),
            cb.Timer(),
        ],
    )
    trainer.fit(Learns(), make_loader(40))
    assert len(watching.losses) == len(demands_after_step) == 10
    # The first steps compare weights before and after, to find mistakes of user code. The last of an epoch waits.
    assert demands_at_start[3:] == demands_after_step[2:-1]


def test_units_wait_for_their_own_weights_in_the_order_of_the_forward(late: Late) -> None:
    class Learns(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                late.demands.clear()

        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.trainer.fit_loop.batch_idx == 4:
                self.demanded = list(late.demands)

    module = Learns()
    make_trainer(options={"optimizer_overlap": "exact"}, devices=1, num_microbatches=2).fit(module, make_loader(40))
    names = {p: name for name, p in module.named_parameters()}
    asked = [[names[p] for p in bucket] for bucket in module.demanded if bucket is not None]
    assert [bucket[0] for bucket in asked] == [*(f"body.{i}.0.weight" for i in range(4)), "head.weight"]
    assert all(len(bucket) == 2 for bucket in asked)
