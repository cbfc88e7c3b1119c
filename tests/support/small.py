"""One small model, one data set and two kinds of trainer, plain and pipelined: for tests of what Lightning offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe import RoundPipeStrategy

WIDTH = 6
CLASSES = 3
# How far a weight at least must go in a training that is compared with another: far above what rounding can do.
_WAY = 1e-3


class Small(L.LightningModule):
    """Four blocks and a head, a classification loss, SGD with momentum. Always starts from the same weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)]
            self.body = nn.Sequential(*blocks)
            self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Run:
    """A module and the trainer that has run it."""

    module: Any
    trainer: L.Trainer


@pytest.fixture(autouse=True)
def one_thread(fixed_global_state: None) -> None:
    """The models are so small that a second thread only costs."""
    torch.set_num_threads(1)


@pytest.fixture
def small() -> type[Small]:
    """The class of the small model, to be used or derived from."""
    return Small


@pytest.fixture
def make_loader() -> Callable[..., DataLoader[Any]]:
    """Makes a loader of ``(x, y)``; 20 rows in batches of 8 leave a last batch of 4, and 3 divides none of them."""

    def make(rows: int = 20, batch_size: int = 8, **kwargs: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, WIDTH, generator=generator)
        y = torch.randint(CLASSES, (rows,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=batch_size, **kwargs)

    return make


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """Makes a quiet trainer: plain Lightning on one CPU device, or RoundPipe on 2 virtual ones and 3 micro-batches."""

    def make(
        kind: str = "roundpipe",
        *,
        devices: int = 2,
        num_microbatches: int = 3,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> L.Trainer:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "default_root_dir": tmp_path,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        if kind == "plain":
            return L.Trainer(**{**settings, "devices": 1, **kwargs})
        strategy = RoundPipeStrategy(num_microbatches=num_microbatches, **(options or {}))
        return L.Trainer(**{**settings, "strategy": strategy, "devices": devices, **kwargs})

    return make


@pytest.fixture
def fit_both(make_trainer: Callable[..., L.Trainer], make_loader: Callable[..., Any]) -> Callable[..., tuple[Run, Run]]:
    """Trains two fresh modules with the same settings: plain first, RoundPipe second."""

    def fit(
        make_module: Callable[[], Any],
        loader: Any = None,
        *,
        val_loader: Any = None,
        callbacks: Callable[[], list[Any]] | None = None,
        seed: int = 0,
        plain: dict[str, Any] | None = None,
        ours: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Run, Run]:
        runs = []
        for kind, own in (("plain", plain), ("roundpipe", ours)):
            torch.manual_seed(seed)
            module = make_module()
            given = {**kwargs, **(own or {})}
            if callbacks is not None:
                given["callbacks"] = callbacks()
            trainer = make_trainer(kind, **given)
            trainer.fit(module, make_loader() if loader is None else loader, val_loader)
            runs.append(Run(module, trainer))
        return runs[0], runs[1]

    return fit


@pytest.fixture
def fit_alike(fit_both: Callable[..., tuple[Run, Run]], assert_same_training: Callable[..., None]) -> Any:
    """As ``fit_both``, and both must have trained the same."""

    def fit(*args: Any, **kwargs: Any) -> tuple[Run, Run]:
        plain, ours = fit_both(*args, **kwargs)
        assert_same_training(plain, ours)
        return plain, ours

    return fit


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in _flat(entry, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, entry in enumerate(value) for k, v in _flat(entry, f"{path}.{i}").items()}
    return {path: value}


@pytest.fixture
def assert_alike() -> Callable[..., None]:
    """Compares two nestings leaf by leaf: tensors and floats to a tolerance, anything else exactly."""

    def check(ours: Any, plain: Any, rtol: float = 1e-4, atol: float = 1e-6) -> None:
        left, right = _flat(ours), _flat(plain)
        assert list(left) == list(right)
        for name, expected in right.items():
            if isinstance(expected, (Tensor, float)):
                torch.testing.assert_close(
                    torch.as_tensor(left[name]),
                    torch.as_tensor(expected),
                    rtol=rtol,
                    atol=atol,
                    msg=lambda text, name=name: f"{name}: {text}",
                )
            else:
                assert left[name] == expected, name

    return check


@pytest.fixture
def assert_same_training(assert_alike: Callable[..., None]) -> Callable[..., None]:
    """Both runs have moved, and to the same weights and the same optimizer state."""

    def check(plain: Run, ours: Run, **tolerances: float) -> None:
        start = {name: value for name, value in type(plain.module)().state_dict().items() if value.is_floating_point()}
        ways = [(v - start[k]).abs().max() for k, v in plain.module.state_dict().items() if k in start]
        assert max(ways) > _WAY, "the plain run has trained nothing: the comparison would prove nothing"
        assert_alike(dict(ours.module.state_dict()), dict(plain.module.state_dict()), **tolerances)
        states = [[optimizer.state_dict() for optimizer in run.trainer.optimizers] for run in (ours, plain)]
        assert_alike(*states, **tolerances)
        assert ours.trainer.global_step == plain.trainer.global_step

    return check
