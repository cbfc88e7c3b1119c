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

from tests.support.rows import compat, compat_each


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns of steps that return None once per process."""
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())


# --- signatures --------------------------------------------------------------------------------------------------


def _only_the_batch(self: Any, batch: Any) -> Any:
    return self.loss(batch)


def _other_names(self: Any, rows: Any, number: int) -> Any:
    return self.loss(rows) * (1 + number)


def _with_defaults(self: Any, batch: Any, batch_idx: int = 7, scale: float = 0.5) -> Any:
    return self.loss(batch) * (scale + batch_idx)


def _any_arguments(self: Any, *args: Any, **kwargs: Any) -> Any:
    assert not kwargs
    return self.loss(args[0]) * len(args)


def _missing_default(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
    return self.loss(batch)


def _only_by_name(self: Any, batch: Any, *, batch_idx: int) -> Any:
    return self.loss(batch)


@pytest.mark.parametrize("step", [_only_the_batch, _other_names, _with_defaults, _any_arguments])
@compat("LightningModule hook", "training_step (any signature)")
def test_signatures_of_training_step(small: Any, fit_both: Any, assert_same_training: Any, step: Any) -> None:
    assert_same_training(*fit_both(type("Learns", (small,), {"training_step": step})))


@pytest.mark.parametrize("step", [_missing_default, _only_by_name])
def test_signatures_that_plain_does_not_call_raise_the_same_error(
    small: Any, make_trainer: Any, make_loader: Any, step: Any
) -> None:
    texts = []
    for kind in ("plain", "roundpipe"):
        with pytest.raises(TypeError, match="argument") as error:
            make_trainer(kind).fit(type("Learns", (small,), {"training_step": step})(), make_loader())
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@compat_each("LightningModule hook", "validation_step test_step predict_step")
def test_signatures_of_evaluation_steps(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    """Two loaders: a step may take their index or not."""

    class Evaluates(small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            self.log("val", self.loss(batch) * (1 + dataloader_idx))

        def test_step(self, rows: Any, number: int, dataloader_idx: int = 3) -> None:
            self.log("test", self.loss(rows) * (1 + dataloader_idx + number))

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"logits": self(batch[0]), "from": dataloader_idx}

    results = []
    for kind in ("plain", "roundpipe"):
        trainer, module, loaders = make_trainer(kind), Evaluates(), [make_loader(20), make_loader(11)]
        figures = [trainer.validate(module, loaders, verbose=False), trainer.test(module, loaders, verbose=False)]
        results.append([figures, trainer.predict(module, loaders)])
    assert len(results[0][0][0]) == 2
    assert_alike(results[1], results[0])


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@compat_each("LightningModule hook", "validation_step test_step predict_step")
def test_evaluation_steps_that_pull_from_the_loader(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any
) -> None:
    class Pulls(small):
        def validation_step(self, dataloader_iter: Any) -> None:
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            self.log("val", self.loss(batch) * (1 + batch_idx + dataloader_idx), batch_size=len(batch[0]))

        test_step = validation_step

        def predict_step(self, dataloader_iter: Any) -> Any:
            batch, batch_idx, _ = next(dataloader_iter)
            return self(batch[0]) + batch_idx

    results = []
    for kind in ("plain", "roundpipe"):
        trainer, module, loader = make_trainer(kind), Pulls(), make_loader(20)
        figures = [trainer.validate(module, loader, verbose=False), trainer.test(module, loader, verbose=False)]
        results.append([figures, trainer.predict(module, loader)])
    assert len(results[0][1]) == 3
    assert_alike(results[1], results[0])


# --- results -----------------------------------------------------------------------------------------------------


RESULTS: dict[str, Callable[[Tensor, int], Any]] = {
    "always None": lambda loss, batch_idx: None,
    "None at first": lambda loss, batch_idx: loss if batch_idx else None,
    "None at last": lambda loss, batch_idx: None if batch_idx == 2 else {"loss": loss},
    "nothing to learn": lambda loss, batch_idx: loss * 0.0,
    "a dict with things": lambda loss, batch_idx: {"note": None, "loss": loss, "text": "a", "n": batch_idx},
}


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("result", RESULTS)
@compat("LightningModule hook", "training_step (returns None)")
def test_results_of_training_step(small: Any, fit_both: Any, assert_alike: Any, result: str, accumulate: int) -> None:
    """Also what hooks are given: momentum moves the weights in skipped steps as well, or does not, in both."""

    class Returns(small):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return RESULTS[result](self.loss(batch), batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.given.append(outputs)

    plain, ours = fit_both(Returns, accumulate_grad_batches=accumulate)
    for state in (lambda run: dict(run.module.state_dict()), lambda run: run.trainer.optimizers[0].state_dict()):
        assert_alike(state(ours), state(plain))
    assert_alike(ours.module.given, plain.module.given)
    assert ours.trainer.global_step == plain.trainer.global_step


@pytest.mark.parametrize("extra", [False, True])
@compat("LightningModule hook", "training_step (None for some micro-batches)")
def test_none_for_some_micro_batches(small: Any, fit_both: Any, assert_same_training: Any, extra: bool) -> None:
    """They add nothing to the loss: as in plain Lightning where their rows do not count there either."""

    class Filters(small):
        """Trains on rows of one class only, which some micro-batches have none of."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            kept = y == 1
            seen.append(int(kept.sum()))
            if not kept.any():
                return None
            loss = F.cross_entropy(self(x[kept]), y[kept], reduction="sum") / 8
            return {"loss": loss, "rows": x[kept]} if extra else loss

    seen: list[int] = []
    plain, ours = fit_both(Filters, max_epochs=2, ours={"num_microbatches": 6, "options": {"loss_weight": "sum"}})
    assert 0 in seen
    assert_same_training(plain, ours)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_without_a_loss_that_counts(small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any) -> None:
    """None from the micro-batches that have a weight; those without one are not asked."""

    class Returns(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if weight(batch) else self.loss(batch)

    def weight(batch: Any) -> float:
        return float(batch[0][0, 0] > 0)

    module = Returns()
    make_trainer(options={"loss_weight": weight}).fit(module, make_loader())
    assert_alike(dict(module.state_dict()), dict(small().state_dict()), rtol=0, atol=0)


def test_a_loss_of_none_in_a_dict_is_the_error_of_plain(small: Any, make_trainer: Any, make_loader: Any) -> None:
    class Returns(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": None}

    for kind in ("plain", "roundpipe"):
        with pytest.raises(MisconfigurationException, match="'loss'"):
            make_trainer(kind).fit(Returns(), make_loader())


@pytest.mark.parametrize("kind", ["plain", "roundpipe"])
def test_a_loss_without_a_graph_is_an_error(small: Any, make_trainer: Any, make_loader: Any, kind: str) -> None:
    class Returns(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch).detach()

    with pytest.raises(RuntimeError, match="does not require"):
        make_trainer(kind).fit(Returns(), make_loader())


# --- what a step can ask -----------------------------------------------------------------------------------------


@compat_each("LightningModule attribute", "trainer global_step current_epoch logger loggers automatic_optimization")
@compat_each("LightningModule method", "optimizers lr_schedulers")
def test_what_a_step_can_ask(small: Any, fit_both: Any, make_loader: Any, assert_same_training: Any) -> None:
    answers: list[set[Any]] = []

    class Asks(small):
        def __init__(self) -> None:
            super().__init__()
            answers.append(set())
            self.answers = answers[-1]

        def ask(self, stage: str, batch_idx: int) -> None:
            trainer = self.trainer
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            bare = self.optimizers(use_pl_optimizer=False)
            monitored = trainer.callback_metrics.get("loss")
            answers[-1].add(
                (
                    *(stage, batch_idx, self.global_step, self.current_epoch, self.automatic_optimization),
                    *(trainer.global_step, trainer.current_epoch, trainer.is_last_batch, trainer.state.fn),
                    *(trainer.training, trainer.validating, trainer.sanity_checking, trainer.num_training_batches),
                    *(trainer.num_val_batches[0], trainer.max_epochs, trainer.estimated_stepping_batches),
                    *(type(optimizer).__name__, type(bare).__name__, bare.param_groups[0]["lr"]),
                    *(scheduler.last_epoch, tuple(scheduler.get_last_lr()), trainer.accumulate_grad_batches),
                    *(trainer.optimizers[0] is bare, trainer.model is self, trainer.lightning_module is self),
                    *(self.training, torch.is_grad_enabled(), str(self.device), self.dtype, self.fabric),
                    *(self.logger, len(self.loggers), self.local_rank, self.global_rank, trainer.world_size),
                    None if monitored is None else round(monitored.item(), 4),
                )
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.ask("train", batch_idx)
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.ask("val", batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    plain, ours = fit_both(Asks, max_epochs=2, val_loader=make_loader(10, 4))
    assert_same_training(plain, ours)
    assert len(answers[0]) == 2 * (3 + 3)
    assert plain.module.answers == ours.module.answers


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
def test_a_lightning_module_inside_another(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    class Outer(small):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return self.loss((x + self.inner(x), y)) + self.inner.training_step(batch, batch_idx)

    plain, ours = fit_both(Outer, max_epochs=2)
    assert_same_training(plain, ours)
    assert plain.module.inner.hooks == ours.module.inner.hooks == []


@compat("LightningModule hook", "training_step (changes its batch)")
def test_entries_that_a_step_puts_into_its_batch(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any
) -> None:
    """Hooks after the step find them; also with an optimizer that runs the step twice."""

    class Writes(small):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Any] = []

        def note(self, batch: Any) -> None:
            self.found.append({name: value.detach().clone() for name, value in sorted(batch.items())})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["logits"] = self(batch["x"])
            batch["loss"] = F.cross_entropy(batch["logits"], batch["y"])
            batch["x"] = batch["x"] + 1
            batch.pop("unused", None)
            return batch["loss"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.note(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            batch["logits"] = self(batch.pop("x"))

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.note(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    def collate(rows: Any) -> Any:
        x, y = default_collate(rows)
        return {"x": x, "y": y, "unused": torch.zeros(len(x))}

    found = []
    for kind in ("plain", "roundpipe"):
        module = Writes()
        make_trainer(kind).fit(module, make_loader(collate_fn=collate), make_loader(10, collate_fn=collate))
        found.append(module.found)
    assert sorted(found[0][0]) == ["logits", "loss", "x", "y"]
    assert sorted(found[0][-1]) == ["logits", "unused", "y"]
    assert_alike(found[1], found[0])


@compat(
    "LightningModule hook",
    "training_step (reads gradients)",
)
def test_gradients_of_the_step_before(small: Any, fit_both: Any, assert_alike: Any) -> None:
    class Reads(small):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.norms.append(-1.0 if self.head.weight.grad is None else self.head.weight.grad.norm().item())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            in_steps[-1].add((self.global_step > 0, self.head.weight.grad is None))
            return super().training_step(batch, batch_idx)

    in_steps: list[set[Any]] = []

    def make() -> Any:
        in_steps.append(set())
        return Reads()

    plain, ours = fit_both(make, max_epochs=2)
    assert_alike(ours.module.norms, plain.module.norms)
    assert in_steps == [{(False, True), (True, False)}] * 2


@compat("LightningModule hook", "training_step (discards gradients)")
def test_gradients_discarded_in_a_step(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    """Of two batches that are accumulated only the second one counts."""

    class Discards(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.zero_grad()
            return super().training_step(batch, batch_idx)

    assert_same_training(*fit_both(Discards, accumulate_grad_batches=2))


@compat(
    "LightningModule hook",
    "optimizer_step (random numbers of several closures)",
    "differs",
    "every call of the closure in one optimizer step draws the same random numbers",
)
def test_random_numbers_of_several_closures(small: Any, make_trainer: Any, make_loader: Any) -> None:
    """A line search compares losses: with other dropout masks it would compare noise."""
    losses: list[float] = []

    class Twice(small):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            losses.extend(optimizer_closure().item() for _ in range(2))
            optimizer.step(closure=optimizer_closure)

    def run(kind: str) -> list[tuple[float, float]]:
        losses.clear()
        make_trainer(kind).fit(Twice(dropout=0.5), make_loader())
        return list(zip(losses[::2], losses[1::2], strict=True))

    ours, plain = run("roundpipe"), run("plain")
    assert len(ours) == 3
    assert all(first == second for first, second in ours)
    assert all(first != second for first, second in plain)
    assert len(set(ours)) == 3


@pytest.mark.parametrize("every", [1, 2])
@compat(
    "Misuse",
    "a scheduler stepped in `training_step` of automatic optimization",
    "refused",
    'it would be stepped once per micro-batch: use `"interval": "step"`, a hook, or manual optimization',
)
def test_schedulers_stepped_in_a_step(small: Any, make_trainer: Any, make_loader: Any, every: int) -> None:
    class Steps(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if (batch_idx + 1) % every == 0:
                self.lr_schedulers().step()
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    with pytest.raises(MisconfigurationException, match=r"3 times per batch.*interval"):
        make_trainer().fit(Steps(), make_loader())
    trainer = make_trainer(num_microbatches=1)
    trainer.fit(Steps(), make_loader())
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3 // every + 1
