"""Updates before the end of the backward, in whole trainings: steps that fail, what is never early, kinds of models."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.adapter import early_trainings
from tests.adapter.early_trainings import (
    CALLS,
    NUM_AWAITED,
    Arrivals,
    Counts,
    Does,
    Gate,
    Train,
    assert_kept,
    assert_nothing_has_begun,
)

arrivals = early_trainings.arrivals
copies = early_trainings.copies
gated = early_trainings.gated
train = early_trainings.train
unknown_code = early_trainings.unknown_code


# --- steps that fail --------------------------------------------------------------------------------------------------


class Stop(RuntimeError):
    """What user code raises here."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_backward_that_fails_leaves_what_was_before_the_step(
    gated: Any, train: Train, copies: bool, error: type[BaseException]
) -> None:
    class Fails(gated):  # type: ignore[misc]
        def in_backward(self) -> None:
            if self.fails and self.trainer.global_step == 2:
                raise error("now")

    counts = train(Fails, raises=(error, SystemExit), options={"virtual_copies": copies})
    assert counts.taken_back >= NUM_AWAITED
    assert counts.kept >= NUM_AWAITED
    assert not counts.is_mistaken


def test_a_training_step_that_fails_in_its_last_micro_batch(gated: Any, train: Train) -> None:
    class Fails(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.places = iter([False] * 2 + [True])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.trainer.global_step == 2 and next(self.places):
                raise Stop("now")
            return super().training_step(batch, batch_idx)

    assert_kept(train(Fails, raises=Stop), 1)


def test_a_hook_that_fails_after_the_backward(gated: Any, train: Train, unknown_code: None) -> None:
    def fail(trainer: L.Trainer, module: Any) -> None:
        if module.fails:
            raise Stop("now")

    counts = train(gated, lambda: [Does("on_before_optimizer_step", fail, first=2)], raises=Stop)
    assert counts.taken_back >= NUM_AWAITED
    assert not counts.is_mistaken


@pytest.mark.filterwarnings("ignore:training_step does not fit on the devices with 3")
def test_a_step_that_does_not_fit_is_run_again(gated: Any, train: Train) -> None:
    class Full(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors = iter([torch.OutOfMemoryError("full")])

        def in_backward(self) -> None:
            if self.trainer.global_step == 2 and (error := next(self.errors, None)) is not None:
                raise error

        def awaited(self) -> list[nn.Module]:  # with more micro-batches the plan is a single stage
            return super().awaited() if operator.length_hint(self.errors) else []

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append(dict(self.trainer.strategy.retry.num_microbatches))

    counts = train(Full, options={"virtual_copies": True, "device_memory_limit": "1MiB"})
    assert counts.taken_back >= NUM_AWAITED
    assert counts.kept >= NUM_AWAITED
    assert not counts.is_mistaken


# --- where nothing is early -------------------------------------------------------------------------------------------


def _scaling() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))]


NOT_EARLY: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation, clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "loss scaler": {"plugins": _scaling},
}


@pytest.mark.parametrize("name", NOT_EARLY)
def test_what_waits_for_the_last_gradient(gated: Any, train: Train, arrivals: Arrivals, name: str) -> None:
    assert_nothing_has_begun(train(gated, **NOT_EARLY[name]))
    assert arrivals.num_offers == 0


def test_manual_optimization(gated: Any, train: Train, arrivals: Arrivals) -> None:
    class Manual(gated):  # type: ignore[misc]
        calls = ()
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_nothing_has_begun(train(Manual))
    assert arrivals.num_offers == 0


@pytest.mark.filterwarnings("ignore:optimizer_overlap='stale'")
def test_stale_weights(gated: Any, make_trainer: Any, make_loader: Any, arrivals: Arrivals) -> None:
    counts = Counts(None)
    make_trainer(options={"optimizer_overlap": "stale"}, callbacks=[counts]).fit(gated(), make_loader(40))
    assert_nothing_has_begun(counts)
    assert arrivals.num_offers == 0


@pytest.mark.parametrize(("limit_bytes", "num_kept"), [(0, 0), (100, 2 * 4)])  # two biases with momentum take 72
def test_the_memory_for_what_is_overwritten_is_limited(
    gated: Any, train: Train, limit_bytes: int, num_kept: int
) -> None:
    counts = train(gated, limit_bytes=limit_bytes)
    assert (counts.kept, counts.taken_back) == (num_kept, 0)


# --- weights that are not of one unit alone ---------------------------------------------------------------------------


def _penalty(module: Any) -> Tensor:
    return sum((weight.square().sum() for weight in module.parameters()), torch.zeros(()))


@pytest.fixture
def make_model(gated: Any) -> Callable[[str], type[Any]]:
    """Makes one of the models below, by its name."""

    class Tied(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body[2][0].weight = self.body[1][0].weight

    class Twice(gated):  # type: ignore[misc]
        calls = (*CALLS[:4], "body.3.0", "head")

        def forward(self, x: Tensor) -> Tensor:
            x = Gate.apply(self.body[0](x), self.gate)
            return self.head(self.body[3](self.body[3](self.body[2](self.body[1](x)))))

        def awaited(self) -> list[nn.Module]:
            return [self.head]

    class InGlue(gated):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.head.weight.mean())

        def awaited(self) -> list[nn.Module]:
            return [self.body[3]]

    class LateInGlue(gated):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + 0.1 * _penalty(self) if batch_idx >= 2 else loss

        def awaited(self) -> list[nn.Module]:
            return [self.body[3], self.head] if self.trainer.global_step < 2 else []

    class DetachedInGlue(gated):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            x = self.body[0](x)
            x = Gate.apply(nn.functional.linear(x, self.body[3][0].weight.detach()), self.gate)
            return self.head(self.body[3](self.body[2](self.body[1](x))))

        def awaited(self) -> list[nn.Module]:
            return [self.head]

    class TiedByMemory(gated):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body[3][0].weight.data = self.body[0][0].weight.data

        def awaited(self) -> list[nn.Module]:
            return [self.head]

    class Thaws(gated):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            self.body[1].requires_grad_(batch_idx >= 2)

    class Norms(gated):  # type: ignore[misc]
        calls = (*(f"body.{i}.{j}" for i in range(4) for j in range(2)), "head")

        def __init__(self) -> None:
            super().__init__()
            for block in self.body:
                block[1] = nn.BatchNorm1d(6)

    class Checkpoints(gated):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            x = self.body[2](checkpoint(self.body[1], self.body[0](x), use_reentrant=False))
            return self.head(checkpoint(self.body[3], x, use_reentrant=False))

    class Skips(gated):  # type: ignore[misc]
        calls = ()

        def forward(self, x: Tensor) -> Tensor:
            x = self.body[1](self.body[0](x))
            return self.head(self.body[3](self.body[2](x) if x.sum() > 0 else x))

    return {cls.__name__: cls for cls in locals().values() if isinstance(cls, type)}.__getitem__


MODELS = {"Tied": True, "Twice": True, "InGlue": True, "LateInGlue": True, "DetachedInGlue": True, "Thaws": True,
          "TiedByMemory": True, "Norms": True, "Checkpoints": False, "Skips": False}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(make_model: Any, train: Train, copies: bool, name: str) -> None:
    counts = train(make_model(name), options={"virtual_copies": copies})
    assert (counts.kept > 0) or not MODELS[name]
    assert (counts.taken_back, counts.is_mistaken) == (0, False)
