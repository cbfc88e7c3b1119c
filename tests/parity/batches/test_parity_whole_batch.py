"""Losses over the whole batch by ``whole_batch``: as on one device, while towers run in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import whole_batch
from tests.support.parity import compare
from tests.support.small import WIDTH


def tower(*, dropout: float = 0.0) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def batches(rows: tuple[int, ...] = (8, 7, 8, 5)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(n, WIDTH, generator=generator) for _ in range(2)) for n in rows]  # type: ignore[misc]


def info_nce(one: Tensor, other: Tensor, scale: Any = 5.0) -> Tensor:
    logits = scale * F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T
    labels = torch.arange(len(one), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Towers(L.LightningModule):
    """Two towers, a head behind the rows of the batch, and a temperature that is learned."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.image, self.text = tower(), tower()
            self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
            self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class SimCLR(Towers):
    """Two views, one encoder, two calls."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one = whole_batch(self.image(x))
        return info_nce(one, whole_batch(self.image(y)))


class CLIP(Towers):
    """Two towers, a temperature."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = whole_batch({"image": self.image(x), "text": (self.text(y),)})
        return info_nce(found["image"], found["text"][0], self.scale.exp())


class OwnRows(Towers):
    """The loss of own rows against all: gradients of a row come by both ways, and by a third one to its tower."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, index = self.image(x), y[:, 0]
        everything, indices = whole_batch((one, index))
        labels = (index[:, None] == indices).float().argmax(1)
        return F.cross_entropy(self.scale * one @ everything.T, labels) + self.text(one).square().mean()


class Heads(Towers):
    """Units on both sides, also behind the second exchange; a statistic of the batch without gradients."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one = self.head(whole_batch(self.image(x)))
        with torch.no_grad():
            mean = whole_batch(self.text(y)).mean(0)
        again = whole_batch(self.text(y) + self.image(x))
        return info_nce(one, self.head(again)) + (one.mean(0) - mean).square().sum() + one.std(0).mean()


class Router(Towers):
    """The loss that balances experts: the mean of probabilities by the fraction of rows, over the whole batch. That of
    the task is of own rows, and there before they are gathered."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.image(x)
        logits, of_task = self.head(hidden), F.mse_loss(self.text(hidden), y)
        probabilities = whole_batch(logits).softmax(-1)
        fraction = F.one_hot(probabilities.argmax(-1), WIDTH).float().mean(0)
        return of_task + WIDTH * (fraction * probabilities.mean(0)).sum()


class ByHand(CLIP):
    """Manual optimization: two backwards, the first of which retains the graph of both towers."""

    def __init__(self) -> None:
        super().__init__(0.02)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        x, y = batch
        one, other = whole_batch((self.image(x), self.text(y)))
        first = info_nce(one, other)
        self.manual_backward(first, retain_graph=True)
        second = one.square().mean() + self.head(whole_batch(self.text(y))).std(0).sum()
        self.manual_backward(second)
        optimizer.step()
        optimizer.zero_grad()
        return first.detach()


FORMS: list[Callable[[], Towers]] = [SimCLR, CLIP, OwnRows, Heads, Router, ByHand]


@pytest.mark.parametrize("make", FORMS)
def test_losses_over_the_whole_batch(make: Callable[[], Towers]) -> None:
    _, ours = compare(make, batches(), batches((6, 9)), max_epochs=2, tolerances={"of_largest": 1e-5})
    assert set(ours.watch.num_microbatches) == {3}
    assert ours.watch.num_devices == {2}


class WarmUp(CLIP):
    """Begins to compare rows later: the step, which nothing is prepared for, is run again."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.trainer.global_step < 2:
            return F.mse_loss(self.image(x), self.text(y))
        return super().loss(x, y)


class Leaves(CLIP):
    """Weights that user code brings by itself, and a hook on what it gets."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.head[0].weight  # type: ignore[index]
        gathered = whole_batch(F.linear(self.image(x), weight) * self.scale)
        gathered.register_hook(lambda gradient: gradient * 2)
        gathered += 1.0
        return info_nce(gathered, whole_batch(y * self.scale) @ weight)


SETTINGS: dict[str, tuple[Callable[[], Towers], dict[str, Any]]] = {
    "accumulated": (CLIP, {"accumulate_grad_batches": 2}),
    "low precision": (Router, {"precision": "bf16-mixed", "max_epochs": 1, "tolerances": {"of_largest": 0.15}}),
    "rounds": (SimCLR, {"ours": {"num_microbatches": 5, "options": {"round_size": 2}}}),
    "some weigh nothing": (
        CLIP,
        {"ours": {"options": {"loss_weight": lambda part: float((part[0][:, 0] > 0.3).sum())}}},
    ),
    "late": (WarmUp, {}),
    "other ways": (Leaves, {}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_ways_to_train(case: str) -> None:
    make, settings = SETTINGS[case]
    _, ours = compare(make, batches(), **{"max_epochs": 2, "tolerances": {"of_largest": 1e-5}, **settings})
    assert min(ours.watch.num_microbatches) > 1


def test_batches_of_one_row_in_between() -> None:
    """Their steps have one segment, and the plan of one that is recorded keeps graphs which others then give up."""
    _, ours = compare(Router, batches((8, 1, 1, 8, 7)), max_epochs=2, tolerances={"of_largest": 1e-5})
    assert set(ours.watch.num_microbatches) == {1, 3}
