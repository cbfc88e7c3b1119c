"""Clipping by norm, whose multiplication the update does: plain numbers, and no code sees the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_roundpipe.optimizer.updates import Updates
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

Fit = Callable[..., L.LightningModule]
pytestmark = pytest.mark.usefixtures("small_updates")


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What updates multiply gradients by, step by step."""
    found: list[Tensor | None] = []
    start = Updates.start

    def noting(self: Updates, optimizer: Any, order: Any, factor: Tensor | None = None, *others: Any) -> None:
        found.append(factor)
        start(self, optimizer, order, factor, *others)

    monkeypatch.setattr(Updates, "start", noting)
    return found


def fit(module: L.LightningModule, mode: str, **kwargs: Any) -> L.LightningModule:
    kwargs = {"gradient_clip_val": 0.05, **kwargs}
    make_trainer(options={"optimizer_overlap": mode}, **kwargs).fit(module, make_loader())
    return module


def assert_equal(ours: nn.Module, expected: nn.Module) -> None:
    """Weights and their gradients, bit for bit."""
    for (name, weight), other in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other), name
        assert weight.grad is not None
        assert torch.equal(weight.grad, other.grad), name  # type: ignore[arg-type]


def test_code_of_the_user_after_the_clipping_sees_clipped_gradients(factors: list[Tensor | None]) -> None:
    class Own(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, *args, **kwargs)
            self.norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    ours = fit(Own(), "exact")
    assert ours.norms == pytest.approx([0.05] * 3, rel=1e-4)
    assert factors == [None] * 3
    assert_equal(ours, fit(Own(), "off"))


def test_a_precision_plugin_of_the_user_clips_by_itself(factors: list[Tensor | None]) -> None:
    class Own(Precision):
        clipped = 0

        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            Own.clipped += 1
            super().clip_grad_by_norm(optimizer, clip_val)

    ours = fit(Small(), "exact", plugins=[Own()])
    assert Own.clipped == 3
    assert factors == [None] * 3
    assert_equal(ours, fit(Small(), "off"))


@pytest.mark.parametrize("closes_first", [False, True])
def test_own_optimizer_steps(factors: list[Tensor | None], closes_first: bool) -> None:
    class Own(Small):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if closes_first:
                optimizer_closure()
                optimizer.step()
            else:
                optimizer.step(closure=optimizer_closure)

    ours = fit(Own(), "exact")
    assert all(factor is not None for factor in factors)
    assert "clip_grad_by_norm" not in vars(ours.trainer.precision_plugin), "nothing is left on the plugin"
    assert_equal(ours, fit(Own(), "off"))
