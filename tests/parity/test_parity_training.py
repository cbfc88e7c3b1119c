"""Optimizers, accumulation, clipping and parameter hooks: what happens to the gradients afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.rows import compat

WIDTH = 6


def vectors(sizes: tuple[int, ...] = (7, 7, 5, 6, 6, 4)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(31)
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Chain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x) * self.scale, y)


def tied(module: Chain) -> None:
    module.blocks[3].inner.weight = module.blocks[0].inner.weight


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    # eps above the noise of zero gradients: see default_optimizer in conftest.py.
    "adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(assert_parity: Callable[..., Any], pipeline: dict[str, Any], optimizer: str) -> None:
    assert_parity(Chain, vectors, **pipeline, optimizer=OPTIMIZERS[optimizer], min_calls=6)


@compat("LightningModule hook", "optimizer_step (closure called several times)")
def test_an_optimizer_that_calls_its_closure_several_times(
    assert_parity: Callable[..., Any], pipeline: dict[str, Any]
) -> None:
    """In double precision: LBFGS keeps differences of gradients, which are mostly rounding in single precision."""
    assert_parity(
        Chain,
        vectors,
        **pipeline,
        optimizer=partial(torch.optim.LBFGS, lr=0.1, max_iter=4, history_size=3),
        trainer_options={"precision": "64-true"},
        min_calls=6,
    )


TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate_grad_batches": 2},
    # Small enough to be at work in every step: asserted below.
    "clip-norm": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"},
    "clip-value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "accumulate-and-clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
}


@pytest.mark.parametrize("options", TRAINER_OPTIONS)
def test_trainer_options(assert_parity: Callable[..., Any], pipeline: dict[str, Any], options: str) -> None:
    outcome = assert_parity(Chain, vectors, **pipeline, trainer_options=TRAINER_OPTIONS[options], min_calls=6)
    assert len(outcome.losses) == 3 * TRAINER_OPTIONS[options].get("accumulate_grad_batches", 1)
    gradients = torch.cat([g.flatten() for g in outcome.gradients.values()])
    clip = TRAINER_OPTIONS[options].get("gradient_clip_val")
    if clip is not None:
        # Lightning clips after on_before_optimizer_step, where the gradients were taken: they are above the limit.
        by_value = TRAINER_OPTIONS[options].get("gradient_clip_algorithm") == "value"
        assert (gradients.abs().max() if by_value else gradients.norm()) > clip


class ScaledGradient(Chain):
    """A hook that halves a gradient acts once per backward, on a tied weight and on one used in user code as well."""

    def __init__(self) -> None:
        super().__init__()
        tied(self)
        self.calls: list[Tensor] = []
        for parameter in (self.blocks[0].inner.weight, self.blocks[1].outer.weight, self.scale):
            parameter.register_hook(self.halve)

    def halve(self, gradient: Tensor) -> Tensor:
        self.calls.append(gradient)
        return gradient * 0.5


def test_parameter_hooks_act_once(assert_parity: Callable[..., Any], pipeline: dict[str, Any]) -> None:
    outcome = assert_parity(ScaledGradient, vectors, **pipeline, min_calls=6)
    assert len(outcome.module.calls) == 3 * 3, "three hooks, three steps"


class AccumulationHook(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []
        for parameter in (self.blocks[0].inner.weight, self.scale):
            parameter.register_post_accumulate_grad_hook(self.note)

    def note(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.norms.append(parameter.grad.norm())


def test_post_accumulate_hooks_see_whole_gradients(
    train: Callable[..., Any], assert_parity: Callable[..., Any], pipeline: dict[str, Any]
) -> None:
    outcome = assert_parity(AccumulationHook, vectors, **pipeline, min_calls=6)
    expected = train(AccumulationHook, vectors).module.norms
    assert len(outcome.module.norms) == len(expected) == 6
    # Within a step the order of two parameters is nobody's promise.
    for step in range(3):
        mine, plain = (sorted(norms[2 * step : 2 * step + 2]) for norms in (outcome.module.norms, expected))
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


class Everything(ScaledGradient):
    """One module with what bookkeeping of gradients could get wrong at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].requires_grad_(False)


def test_everything_at_once(assert_parity: Callable[..., Any], pipeline: dict[str, Any]) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_parity(Everything, vectors, **pipeline, trainer_options=options, optimizer=OPTIMIZERS["adamw-fused"])


@pytest.mark.parametrize("round_size", [1, 2, 3, 9])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.ways("lazy")
def test_rounds(assert_parity: Callable[..., Any], devices: int, round_size: int) -> None:
    outcome = assert_parity(
        Chain,
        partial(vectors, (9, 9, 10)),
        devices=devices,
        num_microbatches=9,
        strategy_options={"round_size": round_size},
    )
    assert outcome.num_microbatches == [9, 9, 9]
