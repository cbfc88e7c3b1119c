"""Mixed precision: the results of plain Lightning, the same loss scale and the same skipped steps.

- With one micro-batch everything is equal bit for bit.
- With several, everything is equal to plain Lightning on the same micro-batches one after the other, to the order in
  which float32 adds up: autocast rounds every micro-batch by itself there as well.

How close that is to plain Lightning on the whole batch: tests/compatibility/precision/test_precision_values.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.parity.driver import assert_same, difference, sequential, train
from tests.support.huggingface import VOCAB, adapted, causal
from tests.support.identical import assert_identical
from tests.support.models import NormedBlock, vectors
from tests.support.parity import Run, fit
from tests.support.rows import compat

WIDTH = 8
sgd = torch.optim.SGD


def mixed(precision: Any, **options: Any) -> dict[str, Any]:
    """Arguments of a Trainer for ``"bf16-mixed"`` or ``"16-mixed"`` on the host, which Lightning itself refuses."""
    if precision == "32-true":
        return {}
    if precision == "bf16-mixed":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, **options})
    return {"plugins": [MixedPrecision(precision, "cpu", scaler=scaler)]}


class MixedChain(L.LightningModule):
    """Regression; ``boosts`` multiply the losses of batches, by their index."""

    def __init__(self, boosts: dict[int, float] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(NormedBlock(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)
        self.boosts = boosts or {}
        self.scales: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(self.mix(x)).float(), y) * self.boosts.get(batch_idx, 1.0)

    def mix(self, x: Tensor) -> Tensor:
        return x

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            self.scales.append(plugin.scaler.get_scale())


class OwnFactor(MixedChain):
    """Multiplies the loss by a factor of its own on the way to the backward."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 4.0, *args, **kwargs)


class Careful(nn.Module):
    """A block that computes in float32, and so does its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x + torch.tanh(self.inner(x.float()))


class PartlyMixed(MixedChain):
    """Regions without autocast in a unit and between units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Careful() if i % 2 else NormedBlock(WIDTH) for i in range(4))
        self.register_buffer("mixing", torch.randn(WIDTH, WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return torch.tanh(x.float() @ self.mixing)


class Encoder(L.LightningModule):
    """Attention of torch, whose projections are one weight, and an embedding that is its own head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (tokens,) = batch
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


class Adapted(L.LightningModule):
    """A language model with LoRA: nearly all weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = adapted(model=causal("Qwen3"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss


def data() -> list[tuple[Tensor, Tensor]]:
    return vectors(8, 8, 6, 8, 8, 8)


def texts() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(32)
    return [(torch.randint(VOCAB, (rows, 7), generator=generator),) for rows in (6, 6, 4)]


MODELS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Any]]] = {
    "chain": (MixedChain, data),
    "regions": (PartlyMixed, data),
    "own factor": (OwnFactor, data),
    "encoder": (Encoder, texts),
    "lora": (Adapted, texts),
}
# A factor matters where losses are scaled; regions and adapters are the same in either precision.
with_models = pytest.mark.parametrize(
    ("precision", "model"),
    [
        ("bf16-mixed", "regions"),
        ("bf16-mixed", "encoder"),
        ("bf16-mixed", "lora"),
        ("16-mixed", "chain"),
        ("16-mixed", "own factor"),
        ("16-mixed", "encoder"),
    ],
)


@compat("Precision", "bf16-mixed; 16-mixed")
@with_models
@pytest.mark.ways("aliases")
def test_one_microbatch_is_equal_bit_for_bit(precision: str, model: str) -> None:
    make, data = MODELS[model]
    plain = train(make, data, trainer_options=mixed(precision))
    ours = train(make, data, devices=2, num_microbatches=1, trainer_options=mixed(precision))
    assert_same(ours, plain, exact=True)
    assert all(p.dtype is torch.float32 for p in ours.module.parameters())


@with_models
@pytest.mark.ways("lazy")
def test_microbatches_are_equal_to_plain_training_on_them_one_by_one(precision: str, model: str) -> None:
    make, data = MODELS[model]
    plain = train(sequential(make, 2), data, trainer_options=mixed(precision))
    ours = train(make, data, devices=2, num_microbatches=2, trainer_options=mixed(precision))
    assert_same(ours, plain)


# --- loss scaling ----------------------------------------------------------------------------------------------------

# Overflows at the beginning, grows often, and meets a batch with a huge loss, and one that is not a number.
SCALER = {"init_scale": 2.0**19, "growth_interval": 2}
BOOSTS = {4: 1e5, 7: float("nan")}
DATA = 10


def long_data() -> list[tuple[Tensor, ...]]:
    return vectors(*[8] * DATA)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Of a number of batches that is not a power of two.
    "accumulate and clip": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.02},
    # Takes out the scale itself.
    "fused": {},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.ways("lazy")
def test_the_scale_and_the_skipped_steps_are_those_of_plain_lightning(setting: str) -> None:
    """With several micro-batches as well, where no micro-batch overflows but their sum would in float16."""
    options = SETTINGS[setting]
    make = partial(MixedChain, BOOSTS)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if setting == "fused":
            return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True)
        return sgd(parameters, lr=0.05, momentum=0.9)

    plain, ours, in_four = (
        train(
            make,
            long_data,
            **kind,
            steps=DATA,
            optimizer=optimizer,
            trainer_options={**mixed("16-mixed", **SCALER), **options},
        )
        for kind in ({}, {"devices": 2, "num_microbatches": 1}, {"devices": 2, "num_microbatches": 4})
    )
    scales = plain.module.scales
    assert ours.module.scales == scales
    assert in_four.module.scales == scales
    assert len(set(scales)) > 3
    assert any(b < a for a, b in pairwise(scales)), "steps were skipped"
    assert any(b > a for a, b in pairwise(scales))
    assert_same(ours, plain, exact=True)
    assert difference(in_four.state, plain.state) < 1e-2 * difference(plain.state, plain.start)


@pytest.mark.ways("lazy")
def test_small_gradients_survive() -> None:
    """Without a scale inside the pipeline they would vanish in float16: the last layer's are about 1e-9."""
    boosts = dict.fromkeys(range(DATA), 1e-8)
    runs = [
        train(
            lambda: MixedChain(boosts),
            long_data,
            **kind,
            optimizer=lambda parameters: sgd(parameters, lr=1e6),
            steps=3,
            trainer_options=mixed("16-mixed", init_scale=scale),
        )
        for kind, scale in (({}, 2.0**24), ({"devices": 2, "num_microbatches": 4}, 2.0**24), ({}, 1.0))
    ]
    plain, ours, vanished = runs
    way = difference(plain.state, plain.start)
    assert difference(vanished.state, vanished.start) < 0.5 * way
    assert difference(ours.state, plain.state) < 1e-2 * way


@pytest.mark.parametrize("kinds", [("roundpipe", "plain"), ("plain", "roundpipe")], ids=" to ".join)
@pytest.mark.ways("lazy")
def test_a_checkpoint_brings_the_scale_along(kinds: tuple[str, str], tmp_path: Path) -> None:
    class Fitting(MixedChain):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.parameters(), lr=0.05)

    def fit_epochs(kind: str, epochs: int, checkpoint: Path | None = None) -> Run:
        settings = {"max_epochs": epochs, "num_microbatches": 1, **mixed("16-mixed", **SCALER)}
        return fit(kind, Fitting, vectors(*[8] * 7), fit_options={"ckpt_path": checkpoint}, **settings)

    path = tmp_path / "half.ckpt"
    fit_epochs(kinds[0], 1).trainer.save_checkpoint(path)
    resumed, whole = fit_epochs(kinds[1], 2, path), fit_epochs("plain", 2)
    assert whole.module.scales[7:] == resumed.module.scales
    assert_identical(resumed.state, whole.state)
    saved = torch.load(path, weights_only=False)["MixedPrecision"]
    assert saved["scale"] == whole.module.scales[6]


@pytest.mark.ways("lazy")
def test_a_scaler_for_gpus_keeps_its_state_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own on GPUs: it follows the loss, which is on the host, as are the weights."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    scaler = torch.amp.GradScaler("cuda", **SCALER)  # type: ignore[arg-type]
    assert scaler.is_enabled()
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    plain = train(MixedChain, long_data, trainer_options=mixed("16-mixed", **SCALER), steps=8)
    ours = train(MixedChain, long_data, devices=2, num_microbatches=1, trainer_options={"plugins": [plugin]}, steps=8)
    assert ours.module.scales == plain.module.scales
    assert_same(ours, plain, exact=True)
    scale = scaler._get_scale_async()
    assert scale is not None
    assert scale.device.type == "cpu"
