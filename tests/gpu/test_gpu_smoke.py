"""The adapter on a GPU: a few steps of two models equal plain Lightning on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe import RoundPipeStrategy

pytestmark = pytest.mark.gpu

VOCABULARY = 17


class Learner(L.LightningModule):
    """Trains a network with a classification loss over its last dimension."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.network(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A large eps: where the true gradient is nearly zero Adam follows the sign of rounding errors.
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


class Transformer(nn.Module):
    """A tiny causal language model with a learned position parameter used outside any unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Parameter(0.1 * torch.randn(8, 16))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(12, 12), nn.GELU()) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(12, VOCABULARY))


def vectors() -> TensorDataset:
    return TensorDataset(torch.randn(20, 3, 12), torch.randint(VOCABULARY, (20, 3)))


def tokens() -> TensorDataset:
    data = torch.randint(VOCABULARY, (20, 9))
    return TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset]]] = {
    "mlp": (mlp, vectors),
    "transformer": (Transformer, tokens),
}


@pytest.fixture(autouse=True)
def exact_matmul() -> Any:
    """Plain float32 products: TF32 would be compared with the CPU's full precision."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run(kind: str, model: str, folder: Path, num_microbatches: int = 3) -> tuple[Learner, L.Trainer, list[Any]]:
    make_network, make_data = MODELS[model]
    torch.manual_seed(0)
    module, data = Learner(make_network()), make_data()
    strategy = RoundPipeStrategy(num_microbatches=num_microbatches)
    where = {"accelerator": "cpu"} if kind == "plain" else {"accelerator": "cuda", "strategy": strategy}
    trainer = L.Trainer(
        **where,
        devices=1,
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=8)
    trainer.fit(module, loader)
    predictions = trainer.predict(module, loader)
    return module, trainer, predictions or []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_equal_to_plain_on_the_cpu(model: str, num_microbatches: int, tmp_path: Path) -> None:
    """GPU kernels add in another order than the CPU's: a relative 1e-3 over six steps."""
    ours, trainer, predictions = run("gpu", model, tmp_path, num_microbatches)
    plain, reference, expected = run("plain", model, tmp_path)
    assert len(plain.losses) == 6
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-3, atol=1e-5)
    for name, value in plain.state_dict().items():
        found = ours.state_dict()[name]
        assert found.device.type == "cpu", "master weights live on the host"
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for state, wanted in zip(
        trainer.optimizers[0].state_dict()["state"].values(),
        reference.optimizers[0].state_dict()["state"].values(),
        strict=True,
    ):
        torch.testing.assert_close(state["exp_avg"], wanted["exp_avg"], rtol=1e-3, atol=1e-5)
    for left, right in zip(predictions, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(left).cpu(), right, rtol=1e-3, atol=1e-4)


def test_the_work_is_done_on_the_gpu(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run("gpu", "transformer", tmp_path)
    assert torch.cuda.max_memory_allocated() > before
    assert torch.cuda.memory_allocated() <= before + 2**20, "weights or activations were left on the GPU"
