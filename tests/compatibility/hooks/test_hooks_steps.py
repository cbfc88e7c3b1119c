"""Signatures and results of steps, and what a step may ask its module and its trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from tests.support.parity import KINDS, both, both_refuse, compare, fit, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns of steps that return None once per process."""
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())


def with_step(step: Any) -> Any:
    return type("Learns", (Small,), {"training_step": step})


# --- signatures --------------------------------------------------------------------------------------------------


def only_the_batch(self: Any, batch: Any) -> Any:
    return self.loss(batch)


def other_names_and_a_default(self: Any, rows: Any, number: int, scale: float = 0.5) -> Any:
    return self.loss(rows) * (scale + number)


def any_arguments(self: Any, *args: Any, **kwargs: Any) -> Any:
    assert not kwargs
    return self.loss(args[0]) * len(args)


@pytest.mark.parametrize("step", [only_the_batch, other_names_and_a_default, any_arguments])
@compat("LightningModule hook", "training_step (any signature)")
def test_signatures_of_training_step(step: Any) -> None:
    compare(with_step(step))


def only_by_name(self: Any, batch: Any, *, batch_idx: int) -> Any:
    return self.loss(batch)


def test_a_signature_that_plain_does_not_call_raises_the_same_error() -> None:
    both_refuse(lambda kind: make_trainer(kind).fit(with_step(only_by_name)(), make_loader()), TypeError, "argument")


class Evaluates(Small):
    """Two loaders: a step may take their index or not."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("val", self.loss(batch) * (1 + dataloader_idx))

    def test_step(self, rows: Any, number: int, dataloader_idx: int = 3) -> None:
        self.log("test", self.loss(rows) * (1 + dataloader_idx + number))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"logits": self(batch[0]), "from": dataloader_idx}


class Pulls(Small):
    """Its steps take their batches from the loader themselves."""

    def validation_step(self, dataloader_iter: Any) -> None:
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.log("val", self.loss(batch) * (1 + batch_idx + dataloader_idx), batch_size=len(batch[0]))

    test_step = validation_step

    def predict_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return self(batch[0]) + batch_idx


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("module", [Evaluates, Pulls])
@compat("LightningModule hook", "validation_step; test_step; predict_step")
def test_signatures_of_evaluation_steps(module: Any) -> None:
    def act(kind: str) -> Any:
        trainer, loaders = (
            make_trainer(kind),
            make_loader(20) if module is Pulls else [make_loader(20), make_loader(11)],
        )
        figures = [getattr(trainer, run)(module(), loaders, verbose=False) for run in ("validate", "test")]
        return figures, trainer.predict(module(), loaders)

    figures, predictions = both(act)
    assert len(figures[0]) == (1 if module is Pulls else 2)
    assert len(predictions) == (3 if module is Pulls else 2)


# --- results -----------------------------------------------------------------------------------------------------


# What the step returns for each of three batches.
RESULTS: dict[str, list[Callable[[Tensor], Any]]] = {
    "always None": [lambda loss: None] * 3,
    "None, a dict with things, nothing to learn": [
        lambda loss: None,
        lambda loss: {"note": None, "loss": loss, "text": "a", "n": 2},
        lambda loss: loss * 0.0,
    ],
    "a loss, a dict, None": [lambda loss: loss, lambda loss: {"loss": loss}, lambda loss: None],
}
ALWAYS, AT_FIRST, AT_LAST = RESULTS


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize(
    ("result", "accumulate"), [(ALWAYS, 1), (AT_FIRST, 1), (AT_FIRST, 2), (AT_LAST, 1), (AT_LAST, 2)]
)
@compat("LightningModule hook", "training_step (returns None)")
def test_results_of_training_step(result: str, accumulate: int) -> None:
    """Also what hooks are given: momentum moves the weights in skipped steps as well, or does not, in both."""
    make = with_step(lambda self, batch, batch_idx: RESULTS[result][batch_idx](self.loss(batch)))
    found = both(lambda kind: fit(kind, make, make_loader(), accumulate_grad_batches=accumulate).results)
    assert (found["optimizers"][0]["state"] == {}) == (result == ALWAYS), "there is momentum if there was a loss"


@pytest.mark.parametrize("extra", [False, True])
@compat("LightningModule hook", "training_step (None for some micro-batches)")
def test_none_for_some_micro_batches(extra: bool) -> None:
    """They add nothing to the loss: as in plain Lightning where their rows do not count there either."""
    seen: list[int] = []

    def filters(self: Any, batch: Any, batch_idx: int) -> Any:
        """Trains on rows of one class only, which some micro-batches have none of."""
        x, y = batch
        kept = y == 1
        seen.append(int(kept.sum()))
        if not kept.any():
            return None
        loss = F.cross_entropy(self(x[kept]), y[kept], reduction="sum") / 8
        return {"loss": loss, "rows": x[kept]} if extra else loss

    ours = {"num_microbatches": 6, "options": {"loss_weight": "sum"}}
    # The rows of some micro-batches are a list, which callbacks see.
    compare(with_step(filters), ours=ours, but_for=["losses"] if extra else [])
    assert 0 in seen


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_micro_batches_without_a_weight_are_not_asked_for_a_loss() -> None:
    """None from those that have a weight trains nothing."""

    def weight(batch: Any) -> float:
        return float(batch[0][0, 0] > 0)

    make = with_step(lambda self, batch, batch_idx: None if weight(batch) else self.loss(batch))
    assert not fit("roundpipe", make, make_loader(), options={"loss_weight": weight}).moved


# --- what a step can do ------------------------------------------------------------------------------------------


class Inner(L.LightningModule):
    """A LightningModule of its own right: as a part of another one its hooks do nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.hooks: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) / (1 + self.global_step + self.current_epoch + self.trainer.fit_loop.batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch[0]), batch[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks.append("on_train_batch_start")

    def configure_optimizers(self) -> Any:
        raise AssertionError("the optimizers are those of the outer module")


@compat("LightningModule hook", "training_step (of a LightningModule inside)")
def test_a_lightning_module_inside_another() -> None:
    class Outer(Small):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return self.loss((x + self.inner(x), y)) + self.inner.training_step(batch, batch_idx)

    plain, ours = compare(Outer, max_epochs=2)
    assert plain.module.inner.hooks == ours.module.inner.hooks == []


@compat("LightningModule hook", "training_step (changes its batch)")
def test_entries_that_a_step_puts_into_its_batch() -> None:
    """Hooks after the step find them; also with an optimizer that runs the step twice."""

    class Writes(Small):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Any] = []

        def note(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.found.append({name: value.detach().clone() for name, value in sorted(batch.items())})

        on_train_batch_end = on_validation_batch_end = note

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["logits"] = self(batch["x"])
            batch["loss"] = F.cross_entropy(batch["logits"], batch["y"])
            batch["x"] = batch["x"] + 1
            batch.pop("unused", None)
            return batch["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            batch["logits"] = self(batch.pop("x"))

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    def collate(rows: Any) -> Any:
        x, y = default_collate(rows)
        return {"x": x, "y": y, "unused": torch.zeros(len(x))}

    def act(kind: str) -> Any:
        return fit(kind, Writes, make_loader(collate_fn=collate), make_loader(10, collate_fn=collate)).module.found

    found = both(act)
    assert sorted(found[0]) == ["logits", "loss", "x", "y"]
    assert sorted(found[-1]) == ["logits", "unused", "y"]


@compat("LightningModule hook", "training_step (discards gradients)")
def test_gradients_discarded_in_a_step() -> None:
    """Of two batches that are accumulated only the second one counts."""

    def discards(self: Any, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        return self.loss(batch)

    compare(with_step(discards), accumulate_grad_batches=2)


@compat(
    "LightningModule hook",
    "optimizer_step (random numbers of several closures)",
    "differs",
    "All calls of the closure in one optimizer step draw the same random numbers.",
)
def test_random_numbers_of_several_closures() -> None:
    """A line search compares losses: with other dropout masks it would compare noise."""
    losses: list[float] = []

    class Twice(Small):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            losses.extend(optimizer_closure().item() for _ in range(2))
            optimizer.step(closure=optimizer_closure)

    def run(kind: str) -> list[tuple[float, float]]:
        losses.clear()
        make_trainer(kind).fit(Twice(dropout=0.5), make_loader())
        return list(zip(losses[::2], losses[1::2], strict=True))

    plain, ours = (run(kind) for kind in KINDS)
    assert len(ours) == 3
    assert all(first == second for first, second in ours)
    assert all(first != second for first, second in plain)
    assert len(set(ours)) == 3


@compat(
    "Misuse",
    "a scheduler stepped in `training_step` of automatic optimization",
    "refused",
    'Use `"interval": "step"`, a hook, or manual optimization.',
)
def test_schedulers_stepped_in_a_step() -> None:
    """By each micro-batch; one alone does what the step does."""

    class Steps(Small):
        def __init__(self, first: int) -> None:
            super().__init__()
            self.first = first

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx >= self.first:
                self.lr_schedulers().step()
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    for first in (0, 1):
        with pytest.raises(MisconfigurationException, match=r"3 times per batch.*interval"):
            make_trainer().fit(Steps(first), make_loader())
    trainer = make_trainer(num_microbatches=1)
    trainer.fit(Steps(1), make_loader())
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2 + 1


# --- a step that freezes and unfreezes modules: each micro-batch has the flags that it has set --------------------


PIPELINES = [{"devices": 1, "num_microbatches": 1}, {"devices": 2, "num_microbatches": 3}]


def _frozen_for_one_of_three_losses(module: Any, batch: Any) -> Tensor:
    """Before the frozen forward and after it the same blocks are trained."""
    loss = 0.1 * module(batch[0]).square().mean()
    module.body[:3].requires_grad_(False)
    loss = loss + module.loss(batch)
    module.body[:3].requires_grad_(True)
    return loss + 0.1 * module(batch[0]).abs().mean()


def _weights_frozen_for_the_forward(module: Any, batch: Any) -> Tensor:
    for block in module.body:
        block[0].weight.requires_grad = False
    loss = module.loss(batch)
    for block in module.body:
        block[0].weight.requires_grad = True
    return loss


def _frozen_by_turns(module: Any, batch: Any) -> Tensor:
    """And left so: hooks, the update and the next step find the flags."""
    module.body[::2].requires_grad_(module.global_step % 2 == 0)
    module.head.weight.requires_grad = module.global_step % 2 == 1
    return module.loss(batch)


LOSSES: list[Callable[[Any, Any], Tensor]] = [
    _frozen_for_one_of_three_losses,
    _weights_frozen_for_the_forward,
    _frozen_by_turns,
]


def _in_turns(self: Any, batch: Any, batch_idx: int) -> None:
    body, head = self.optimizers()
    self.body.requires_grad_(False)
    head.zero_grad()
    self.manual_backward(self.loss(batch))
    head.step()
    self.body.requires_grad_(True)
    self.head.requires_grad_(False)
    body.zero_grad()
    self.manual_backward(_frozen_for_one_of_three_losses(self, batch))
    body.step()
    self.head.requires_grad_(True)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=["one", "three"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@compat("LightningModule hook", "training_step (freezes and unfreezes)")
def test_freezing_in_a_step(pipeline: dict[str, int], loss: Any) -> None:
    make = type("Learns", (Small,), {"training_step": lambda self, batch, batch_idx: loss(self, batch)})
    compare(make, max_epochs=2, ours=pipeline)


def test_freezing_by_hand_in_manual_optimization() -> None:
    class Turns(Small):
        training_step = _in_turns

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.body, self.head)]

    compare(Turns, max_epochs=2)
