"""Optimizers, accumulation, clipping and parameter hooks: what happens to the gradients afterwards; rounds, and few and
many devices with few and many micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.driver import MakeData, assert_parity, assert_same, plain, train
from tests.support.models import Chain, NormedBlock, six_vectors, vectors
from tests.support.rows import compat


class Scaled(Chain):
    """With a parameter that user code uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def tied(module: Scaled) -> None:
    module.blocks[3].inner.weight = module.blocks[0].inner.weight


TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    # Small enough to be at work in every step: asserted below.
    "clip-value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "accumulate-and-clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
}


@compat("Trainer argument", "accumulate_grad_batches; gradient_clip_val; gradient_clip_algorithm")
@pytest.mark.parametrize("options", TRAINER_OPTIONS)
def test_trainer_options(pipeline: dict[str, Any], options: str) -> None:
    run = assert_parity(Scaled, six_vectors, **pipeline, trainer_options=TRAINER_OPTIONS[options], min_calls=6)
    assert len(run.watch.losses) == 3 * TRAINER_OPTIONS[options].get("accumulate_grad_batches", 1)
    gradients = torch.cat([g.flatten() for g in run.watch.gradients[-1].values()])
    clip = TRAINER_OPTIONS[options].get("gradient_clip_val")
    if clip is not None:
        # Lightning clips after on_before_optimizer_step, where the gradients were taken: they are above the limit.
        by_value = TRAINER_OPTIONS[options].get("gradient_clip_algorithm") == "value"
        assert (gradients.abs().max() if by_value else gradients.norm()) > clip


class ScaledGradient(Scaled):
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


def test_parameter_hooks_act_once(pipeline: dict[str, Any]) -> None:
    run = assert_parity(ScaledGradient, six_vectors, **pipeline, min_calls=6)
    assert len(run.module.calls) == 3 * 3, "three hooks, three steps"


class AccumulationHook(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []
        for parameter in (self.blocks[0].inner.weight, self.scale):
            parameter.register_post_accumulate_grad_hook(self.note)

    def note(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.norms.append(parameter.grad.norm())


def test_post_accumulate_hooks_see_whole_gradients(pipeline: dict[str, Any]) -> None:
    run = assert_parity(AccumulationHook, six_vectors, **pipeline, min_calls=6)
    expected = plain(AccumulationHook, six_vectors).module.norms
    assert len(run.module.norms) == len(expected) == 6
    # Within a step the order of two parameters is not fixed.
    for step in range(3):
        mine, theirs = (sorted(norms[2 * step : 2 * step + 2]) for norms in (run.module.norms, expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


# eps above the noise of zero gradients: see default_optimizer in driver.py.
fused = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True)


class Everything(ScaledGradient):
    """One module with what bookkeeping of gradients could get wrong at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].requires_grad_(False)


@pytest.mark.ways("lazy")
def test_everything_at_once(pipeline: dict[str, Any]) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_parity(Everything, six_vectors, **pipeline, trainer_options=options, optimizer=fused)


@pytest.mark.parametrize(("devices", "round_size"), [(2, 1), (4, 2)])
@pytest.mark.ways("lazy")
def test_rounds(devices: int, round_size: int) -> None:
    run = assert_parity(
        Scaled,
        partial(vectors, 9, 9, 10),
        devices=devices,
        num_microbatches=9,
        strategy_options={"round_size": round_size},
    )
    assert run.watch.num_microbatches == [9, 9, 9]


class ResidualMLP(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(5))


class SmallTransformer(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=i % 2 == 0) for i in range(4)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        tokens = batch["tokens"]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}


def seven_texts() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{"tokens": torch.randint(13, (7, 6), generator=generator)} for _ in range(3)]


def ten_rows_in_batches_of_four() -> DataLoader[tuple[Tensor, ...]]:
    x, y = (torch.cat(part) for part in zip(*vectors(4, 4, 2), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=4)


FEW_ROWS = (ResidualMLP, ten_rows_in_batches_of_four, (4, 4, 2))
SEVEN_ROWS = (SmallTransformer, seven_texts, (7, 7, 7))


@pytest.mark.parametrize(
    ("model", "make_data", "rows", "devices", "num_microbatches"),
    [
        (*FEW_ROWS, 1, 3),
        (*FEW_ROWS, 4, 5),
        (*FEW_ROWS, 8, 9),
        (*SEVEN_ROWS, 1, 1),
        (*SEVEN_ROWS, 2, 2),
        (*SEVEN_ROWS, 4, 5),
        (*SEVEN_ROWS, 8, 2),
    ],
)
@pytest.mark.ways("lazy")
def test_few_and_many_devices_and_micro_batches(
    model: type, make_data: MakeData, rows: tuple[int, ...], devices: int, num_microbatches: int
) -> None:
    """On batches that do not divide evenly."""
    run = assert_parity(model, make_data, devices=devices, num_microbatches=num_microbatches, min_calls=7)
    assert run.watch.num_microbatches == [min(num_microbatches, n) for n in rows]


class Tempered(Chain):
    """With a tensor that the optimizer updates, and that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.ones(2, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.temperature], lr=0.1)


def test_tensors_of_an_optimizer_that_are_no_parameters_are_trained(pipeline: dict[str, Any]) -> None:
    modules: list[Tempered] = []

    def make() -> Tempered:
        modules.append(Tempered())
        return modules[-1]

    expected, run = (train(make, vectors, optimizer=None, **chosen) for chosen in ({}, pipeline))

    assert_same(run, expected)
    assert not modules[0].temperature.equal(torch.ones(2))
    torch.testing.assert_close(modules[1].temperature, modules[0].temperature, rtol=1e-4, atol=1e-6)
