"""Batches whose gradients are accumulated: the pipeline does not drain between them, and the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.engine import runner
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import CallCost, CostProfile
from lightning_roundpipe.tails import Tails
from tests.identical import assert_identical

WIDTH = 8
NUM_BLOCKS = 4
# So that there are several stages, whatever the machine is doing.
CALLS = [*(f"blocks.{i}" for i in range(NUM_BLOCKS)), "head"]
COSTS = CostProfile(tuple(CallCost(name, 1.0, 2.0) for name in CALLS))
both_modes = pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
Look = Callable[[L.LightningModule], None]


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.dropout(self.linear(x)))


class Deep(L.LightningModule):
    """Blocks, which are units, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = batch
        for block in self.blocks:
            x = block(x)
        self.log("val_loss", self.head(x).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every training step, whether it has ended before its backward."""
    noted: list[bool] = []
    run = Engine.run

    def noting(self: Engine, request: StepRequest) -> StepResult:
        result = run(self, request)
        if request.key == "training_step":
            noted.append(result.has_tail)
        return result

    monkeypatch.setattr(runner.Engine, "run", noting)
    return noted


class Outcome:
    """What a training leaves."""

    def __init__(self, module: L.LightningModule, trainer: L.Trainer) -> None:
        self.weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        self.optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        self.metrics = dict(trainer.callback_metrics)


def make_trainer(overlap: str, *, copies: bool = False, **settings: Any) -> L.Trainer:
    """On two devices, with as many stages on any machine."""
    strategy = RoundPipeStrategy(
        num_microbatches=4,
        virtual_copies=copies,
        optimizer_overlap=overlap,  # type: ignore[arg-type]
        cost_profile=COSTS,
    )
    settings = {"accumulate_grad_batches": 5, "enable_checkpointing": False, **settings}
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def train(
    make: Callable[[], L.LightningModule],
    *,
    overlap: str = "exact",
    num_batches: int = 14,
    validates: bool = False,
    **settings: Any,
) -> Outcome:
    """What a training leaves, of two epochs as a rule."""
    torch.manual_seed(1)
    module = make()
    trainer = make_trainer(overlap, **{"max_epochs": 2, **settings})
    rows = torch.randn(8 * num_batches, WIDTH)
    data = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    trainer.fit(module, data, DataLoader(rows[:16], batch_size=8) if validates else None)  # type: ignore[arg-type]
    return Outcome(module, trainer)


def assert_same(make: Callable[[], L.LightningModule], **settings: Any) -> None:
    found, wanted = (train(make, overlap=overlap, **settings) for overlap in ("exact", "off"))
    assert_identical(vars(found), vars(wanted))


@both_modes
def test_batches_that_are_accumulated(copies: bool, tails: list[bool]) -> None:
    train(Deep, copies=copies)
    epoch = [True] * 4 + [False] + [True] * 4 + [False] + [True] * 3 + [False]
    assert tails[14:] == epoch
    assert tails[2:14] == epoch[2:], "the first steps are looked at closely"
    assert_same(Deep, copies=copies)


@pytest.fixture
def without_tails(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on no step ends before its backward."""
    return lambda: monkeypatch.setattr(Tails, "late", lambda *_, **__: None)


STALE: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.01},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
}


@both_modes
@pytest.mark.parametrize("case", STALE)
@pytest.mark.filterwarnings("ignore:optimizer_overlap='stale'")
def test_stale_steps(case: str, copies: bool, tails: list[bool], without_tails: Callable[[], None]) -> None:
    settings = {"accumulate_grad_batches": 1, "overlap": "stale", "copies": copies, **STALE[case]}
    found = train(Deep, **settings)
    assert tails[14:] == [True] * 13 + [False], tails
    without_tails()
    wanted = train(Deep, **settings)
    assert not any(tails[28:])
    assert_identical(vars(found), vars(wanted))
