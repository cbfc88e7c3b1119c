"""Models, data and runs for tests on GPUs, which compare with plain Lightning on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy

VOCABULARY = 17
WIDTH = 16


class Learner(L.LightningModule):
    """Trains a network with a classification loss over its last dimension."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.losses: list[float] = []
        self.validation: list[float] = []
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.network(x).flatten(0, -2), y.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self.network(x).flatten(0, -2), y.flatten()))

    def on_validation_epoch_end(self) -> None:
        self.validation.append(float(self.trainer.callback_metrics["validation"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.scales.append(scaler.get_scale())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A large eps: where the true gradient is nearly zero Adam follows the sign of rounding errors.
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-3)


class Transformer(nn.Module):
    """A tiny causal language model with a learned position parameter used outside any unit."""

    def __init__(self, width: int = WIDTH, depth: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.1 * torch.randn(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


class Convolutions(nn.Module):
    """Blocks whose norms write buffers, and a skip connection over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        for block in self.blocks:
            y = block(y)
        return self.head(x + y.transpose(1, 2))


class Dropping(nn.Module):
    """Draws random numbers in every unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.GELU()) for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def mlp(width: int = WIDTH, depth: int = 5) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, VOCABULARY))


def vectors(rows: Iterable[int] = (8, 8, 4), width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(n, 6, width, generator=generator), torch.randint(VOCABULARY, (n, 6), generator=generator))
        for n in rows
    ]


def tokens(rows: Iterable[int] = (8, 8, 4), lengths: Iterable[int] | None = None) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = list(rows)
    made = [
        torch.randint(VOCABULARY, (n, length + 1), generator=generator)
        for n, length in zip(rows, lengths or [8] * len(rows), strict=True)
    ]
    return [(data[:, :-1].contiguous(), data[:, 1:].contiguous()) for data in made]


@dataclass
class Outcome:
    """What a run left behind."""

    module: Learner
    state: dict[str, Tensor]
    optimizer: dict[str, Any]
    predictions: list[Tensor] = field(default_factory=list)


def train(
    make_network: Callable[[], nn.Module],
    batches: list[Any],
    folder: Path,
    *,
    devices: list[int] | None = None,
    options: Mapping[str, Any] = {},
    epochs: int = 2,
    prepare: Callable[[nn.Module], nn.Module] = lambda network: network,
    validates: bool = False,
    predicts: bool = True,
    **settings: Any,
) -> Outcome:
    """Trains and predicts: on GPUs, or (None) plain; ``settings`` go to the Trainer."""
    torch.manual_seed(0)
    module = Learner(prepare(make_network()))
    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if devices is not None:
        where = {"accelerator": "roundpipe", "devices": devices, "strategy": RoundPipeStrategy(**options)}
    trainer = L.Trainer(
        **{
            **where,
            "max_epochs": epochs,
            "default_root_dir": folder,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 1.0 if validates else 0,
            **settings,
        }
    )
    loader = DataLoader(batches, batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]
    torch.manual_seed(1)
    trainer.fit(module, loader, loader)
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    optimizer = trainer.optimizers[0].state_dict()
    predictions = trainer.predict(module, loader) if predicts else []
    return Outcome(module, state, optimizer, [torch.as_tensor(p).cpu() for p in predictions or []])


def _as_it_is(batch: Any) -> Any:
    return batch


def assert_alike(found: Outcome, wanted: Outcome, *, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    """GPU kernels add in another order than the CPU's, and errors grow over the steps."""
    torch.testing.assert_close(found.module.losses, wanted.module.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.module.validation, wanted.module.validation, rtol=rtol, atol=atol)
    for name, value in wanted.state.items():
        assert found.state[name].device.type == "cpu", "master weights live on the host"
        torch.testing.assert_close(
            found.state[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    for index, state in wanted.optimizer["state"].items():
        torch.testing.assert_close(found.optimizer["state"][index]["exp_avg"], state["exp_avg"], rtol=rtol, atol=atol)
    assert len(found.predictions) == len(wanted.predictions)
    for one, other in zip(found.predictions, wanted.predictions, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=10 * atol)
