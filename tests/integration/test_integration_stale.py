"""``optimizer_overlap="stale"`` under the Trainer: a plain loop of delayed updates, and everything around a step."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe.reporting.host_memory import HostMemory
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

pytestmark = pytest.mark.usefixtures("small_updates")
STALE = {"optimizer_overlap": "stale"}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
}


class Delayed(Small):
    """With a raw parameter, an optimizer and a schedule."""

    def __init__(self, optimizer: str = "SGD", skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.optimizer, self.skipped = optimizer, skipped

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def plain_loop(
    module: Any,
    loader: Any,
    *,
    warmup: int = 0,
    accumulate: int = 1,
    clip: float | None = None,
    epochs: int = 1,
) -> list[dict[str, Tensor]]:
    """The weights after every optimizer step, whose gradients were computed with those before the last one."""
    setup = module.configure_optimizers()
    optimizer, scheduler = setup["optimizer"], setup["lr_scheduler"]["scheduler"]
    after = [copy.deepcopy(module.state_dict())]
    updates = [0]  # of them, those that an update has made
    for _ in range(epochs):
        batches = list(loader)
        for first in range(0, len(batches), accumulate):
            window = batches[first : first + accumulate]
            number = len(after) - 1
            used = updates[-2] if number > warmup and len(updates) > 1 else number
            module.load_state_dict(after[used])
            optimizer.zero_grad()
            for batch_idx, batch in enumerate(window, first):
                if (loss := module.training_step(batch, batch_idx)) is not None:
                    (loss / accumulate).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            module.load_state_dict(after[number])
            optimizer.step()
            scheduler.step()
            if any(p.grad is not None for p in module.parameters()):
                updates.append(len(after))
            after.append(copy.deepcopy(module.state_dict()))
    return after


def assert_close(ours: Any, expected: dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-7) -> None:
    torch.testing.assert_close(dict(ours.state_dict()), dict(expected), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("optimizer", "copies", "settings"),
    [
        ("SGD", False, {}),
        ("AdamW fused", True, {"warmup": 2, "accumulate": 3, "clip": 0.1, "epochs": 2}),
    ],
    ids=["SGD, aliases", "fused AdamW, copies, warm-up, accumulation, clipping, two epochs"],
)
def test_equals_a_plain_loop_of_delayed_updates(optimizer: str, copies: bool, settings: dict[str, Any]) -> None:
    """In double precision nothing but rounding differs."""
    batches = [(x.double(), y) for x, y in make_loader(40, 5)]
    expected = plain_loop(Delayed(optimizer).double(), batches, **settings)
    exact = plain_loop(Delayed(optimizer).double(), batches, **{**settings, "warmup": 100})
    module = Delayed(optimizer)
    make_trainer(
        options={**STALE, "stale_after_steps": settings.get("warmup", 0), "virtual_copies": copies},
        max_epochs=settings.get("epochs", 1),
        accumulate_grad_batches=settings.get("accumulate", 1),
        gradient_clip_val=settings.get("clip"),
        precision="64-true",
    ).fit(module, make_loader(40, 5))
    assert_close(module, expected[-1], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(module.head.weight, exact[-1]["head.weight"], rtol=1e-4)


def test_the_same_every_time() -> None:
    states = []
    for devices in (1, 3, 3):
        module = Delayed("AdamW")
        make_trainer(options=STALE, devices=devices).fit(module, make_loader(20, 5))
        states.append(module.state_dict())
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


def test_steps_without_a_loss_change_nothing() -> None:
    skipped = (0, 2, 3, 5)
    expected = plain_loop(Delayed(skipped=skipped), make_loader(40, 5))
    module = Delayed(skipped=skipped)
    make_trainer(options=STALE).fit(module, make_loader(40, 5))
    assert_close(module, expected[-1])


def test_low_working_copies_are_made_of_the_same_weights() -> None:
    weights = []
    for overlap, copies in (("stale", False), ("stale", True), ("exact", True)):
        module = Delayed("SGD")
        options = {"optimizer_overlap": overlap, "virtual_copies": copies}
        make_trainer(options=options, precision="bf16-mixed").fit(module, make_loader(20, 5))
        weights.append(module.head.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[1], weights[2], rtol=1e-3)


class Looks(L.Callback):
    """Notes the weights that everybody sees between the training steps."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.seen.append(copy.deepcopy(pl_module.state_dict()))


def test_between_steps_everybody_sees_the_newest_weights(tmp_path: Any) -> None:
    losses: list[float] = []

    class Validates(Delayed):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            losses.append(float(self.loss(batch).detach()))

    expected = plain_loop(Delayed(), make_loader(25, 5))
    looks, module = Looks(), Validates()
    trainer = make_trainer(options=STALE, callbacks=[looks], val_check_interval=1, num_microbatches=1)
    trainer.fit(module, make_loader(25, 5), make_loader(4, 4))
    for seen, after in zip(looks.seen, expected[1:], strict=True):
        torch.testing.assert_close(seen, dict(after), rtol=1e-5, atol=1e-7)
    (batch,) = make_loader(4, 4)
    for loss, after in zip(losses, expected[1:], strict=True):
        module.load_state_dict(after)
        assert loss == pytest.approx(float(module.loss(batch)), rel=1e-5)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(saved, dict(module.state_dict()), rtol=0, atol=0)


def test_a_resumed_run_begins_with_the_newest_weights(tmp_path: Any) -> None:
    """And does not warm up again: ``stale_after_steps`` counts all steps."""
    path = tmp_path / "half.ckpt"
    options = {**STALE, "stale_after_steps": 3}
    batches: list[Any] = []  # Lightning resumes with the first one of an epoch that has ended

    class Notes(Delayed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches.append(batch)
            return super().training_step(batch, batch_idx)

    first = make_trainer(options=options, max_epochs=-1, max_steps=4)
    first.fit(Delayed(), make_loader(20, 5))
    first.save_checkpoint(path)
    module = Notes()
    second = make_trainer(options=options, num_microbatches=1, max_epochs=-1, max_steps=8)
    second.fit(module, make_loader(20, 5), ckpt_path=path)
    # The same by hand: from the checkpoint, with the state of the optimizer and of the scheduler.
    reference = Delayed()
    setup = reference.configure_optimizers()
    saved = torch.load(path, weights_only=True)
    setup["optimizer"].load_state_dict(saved["optimizer_states"][0])
    setup["lr_scheduler"]["scheduler"].load_state_dict(saved["lr_schedulers"][0])
    reference.load_state_dict(saved["state_dict"])
    reference.configure_optimizers = lambda: setup
    assert len(batches) == 4
    assert_close(module, plain_loop(reference, batches)[-1])


def test_training_goes_on_after_an_error_in_a_step() -> None:
    class Fails(Delayed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ValueError("no step today")
            return super().training_step(batch, batch_idx)

    expected = plain_loop(Delayed(), list(make_loader(40, 5))[:3])
    module = Fails()
    places = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(ValueError, match="no step today"):
        make_trainer(options=STALE).fit(module, make_loader(40, 5))
    assert [p.data_ptr() for p in module.parameters()] == places
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert_close(module, expected[-1])


def test_a_step_that_is_run_again_computes_with_the_same_weights(caplog: pytest.LogCaptureFixture) -> None:
    batches = [batch for rows in (4, 4, 4, 64, 64) for batch in make_loader(rows, rows)]
    states = []
    for limit in (None, 4096):
        caplog.clear()
        module = Small()
        options = {**STALE, "virtual_copies": True, "device_memory_limit": limit}
        trainer = make_trainer(options=options, num_microbatches="auto", devices=1)
        with caplog.at_level("INFO"):
            trainer.fit(module, DataLoader(batches, batch_size=None))
        states.append(module.state_dict())
        assert ("is run again" in caplog.text) is (limit is not None)
    torch.testing.assert_close(states[0], states[1], rtol=1e-5, atol=1e-7)


# --- what is refused, and said -------------------------------------------------------------------------------------


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoOptimizer(Small):
    def configure_optimizers(self) -> Any:
        return []


class Couples(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Renorms(Small):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3, max_norm=1.0)


class Shares(Small):
    def __init__(self) -> None:
        super().__init__()
        self.body[3][0].weight.data = self.body[0][0].weight.data


REFUSED = {
    Manual: "manual optimization",
    NoOptimizer: "returned 0 optimizers",
    Couples: "LBFGS is not known to update each parameter by itself",
    Renorms: "the embedding 'table' with its max_norm",
    Shares: "two parameters of the module share their memory",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stale_is_refused(kind: type[Small]) -> None:
    words = f"optimizer_overlap='stale' is not possible: .*{re.escape(REFUSED[kind])}.* Use optimizer_overlap='exact'"
    with pytest.raises(MisconfigurationException, match=words):
        make_trainer(options=STALE).fit(kind(), make_loader())


def test_an_optimizer_that_gets_hooks_later_is_refused_then() -> None:
    class Hooks(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.optimizers[0].register_step_post_hook(lambda *args: None)

    with pytest.raises(MisconfigurationException, match="stale' is not possible: hooks are registered"):
        make_trainer(options=STALE).fit(Hooks(), make_loader())


def test_a_step_that_changes_a_weight_is_refused() -> None:
    class Writes(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            with torch.no_grad():
                self.head.bias.mul_(0.5)
            return loss.detach().requires_grad_()

    with pytest.raises(MisconfigurationException, match=r"training_step has changed the weight 'head\.bias' in place"):
        make_trainer(options=STALE, num_microbatches=1).fit(Writes(), make_loader())


def test_a_warning_says_what_it_means(recwarn: pytest.WarningsRecorder) -> None:
    make_trainer(options={**STALE, "stale_after_steps": 5}, max_epochs=2).fit(Small(), make_loader())
    (told,) = [str(w.message) for w in recwarn if "optimizer_overlap='stale'" in str(w.message)]
    assert "another algorithm than plain Lightning. After 5 exact optimizer steps" in told


def test_the_host_report_counts_both_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    module = Small()
    module.body[0].requires_grad_(False)
    num_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    trainer = make_trainer(options=STALE)
    found: list[HostMemory] = []
    trainer.callbacks.append(
        L.pytorch.callbacks.LambdaCallback(
            on_train_batch_end=lambda t, *_: found.append(t.strategy.steps.report.memory)
        )
    )
    with caplog.at_level("INFO"):
        trainer.fit(module, make_loader())
    assert found[-1].snapshots == 2 * num_bytes
    assert any(re.search(r"on the host", r.message) and "snapshots" in r.message for r in caplog.records)
