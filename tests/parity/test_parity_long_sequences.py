"""Losses that take the weight of the head by themselves, so that the logits never exist as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.usercode import loose_parameters as loose_parameters
from lightning_roundpipe.usercode.loose_parameters import LooseParameters
from tests.parity.driver import assert_parity

WIDTH, VOCABULARY, TOKENS = 8, 11, 6
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def matmul(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """By a view of the weight."""
    return F.cross_entropy(hidden @ weight.t(), targets)


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Of torch: its gradients are made in the forward."""
    return F.linear_cross_entropy(hidden, weight, targets, options=nn.LinearCrossEntropyOptions(batch_chunk_size=4))


def in_pieces(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """With activation checkpointing in the loss."""
    parts = zip(hidden.split(4), targets.split(4), strict=True)
    return torch.stack([checkpoint(summed, x, weight, y, use_reentrant=False) for x, y in parts]).sum() / len(targets)


def summed(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(torch.cat([x, x.cumsum(1)], dim=-1)))


class LanguageModel(L.LightningModule):
    """The head is never called. Tied: its weight is that of the embedding, which is a unit."""

    def __init__(self, loss: Loss, tied: bool) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.loss(self.norm(x).flatten(0, 1), self.lm_head.weight, batch[:, 1:].flatten())


def batches() -> list[Tensor]:
    return [torch.randint(VOCABULARY, (6, TOKENS + 1)) for _ in range(3)]


CASES = [(whole, False), (whole, True), (matmul, False), (fused, True), (in_pieces, False)]


@functools.cache
def maker(loss: Loss, tied: bool) -> Callable[[], LanguageModel]:
    """The same object every time, by which the plain run is found again."""
    return functools.partial(LanguageModel, loss, tied)


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Uses of parameters in user code on devices with copies of their own: whether a copy was used."""
    seen: list[bool] = []
    use = LooseParameters.use

    def noting(*args: Any, **kwargs: Any) -> Tensor | None:
        used = use(*args, **kwargs)
        seen.append(used is not None)
        return used

    monkeypatch.setattr(LooseParameters, "use", noting)
    return seen


@pytest.mark.parametrize(("loss", "tied"), CASES)
@pytest.mark.ways("lazy")
def test_weight_of_the_head_in_the_loss(
    pipeline: dict[str, Any], monkeypatch: pytest.MonkeyPatch, uses: list[bool], loss: Loss, tied: bool
) -> None:
    if loss is fused and not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no linear_cross_entropy in pieces")
    monkeypatch.setattr(loose_parameters, "LARGE_BYTES", 0)  # gradients are added up on the device
    run = assert_parity(maker(loss, tied), batches, **pipeline)
    assert set(run.watch.num_calls) == {1 + 4 + 1}  # the head is no unit
    if uses:
        assert all(uses) or loss is in_pieces  # a checkpoint recomputes in the middle of a backward


def test_gradients_of_a_small_weight(pipeline: dict[str, Any]) -> None:
    """They go to the master one by one."""
    assert_parity(maker(whole, True), batches, **pipeline)


@pytest.mark.ways("lazy")
def test_copies_are_used(uses: list[bool]) -> None:
    options = {"devices": 2, "num_microbatches": 3, "strategy_options": {"virtual_copies": True}}
    assert_parity(maker(whole, False), batches, **options)
    assert uses
