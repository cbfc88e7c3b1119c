"""Metrics that all micro-batches of a step update: those with lists, with others inside, and those of units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper, Running

from tests.support.parity import COPIES, both, compare, make_loader, make_trainer
from tests.support.small import Small


class Measured(Small):
    """Calls metrics with others inside in every step, and notes what they show after batches and epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.difference = 1 - MulticlassAccuracy(3)
        self.sum = MulticlassAccuracy(3) + MulticlassF1Score(3)
        self.running = Running(MulticlassAccuracy(3), window=100)
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        for name in ("difference", "sum", "running"):
            metric = getattr(self, name)
            metric(logits, batch[1])
            self.log(name, metric, on_step=True, on_epoch=True)
        self.classwise(logits, batch[1])
        return nn.functional.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.classwise.compute())
        self.classwise.reset()


def test_metrics_that_have_metrics_inside() -> None:
    """On devices with memory of their own, where the state of metrics is noted before a step."""

    def act(kind: str) -> Any:
        module = Measured()
        metrics = [part for part in module.modules() if isinstance(part, Metric)]
        before = [(metric.update, metric.forward) for metric in metrics]
        make_trainer(kind, max_epochs=2, **COPIES).fit(module, make_loader(12))
        assert [(metric.update, metric.forward) for metric in metrics] == before, "they are as before"
        return module.seen

    assert len(both(act)) == 2 * (2 + 1)


def test_lists_of_metrics_keep_the_order_of_rows() -> None:
    class Collects(Small):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.updated = CatMetric(), CatMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            self.called(logits[:, 0])
            self.updated.update(self(batch[0])[:, 0])

        def collected(self) -> list[Tensor]:
            return [self.called.compute(), self.updated.compute()]

    def act(kind: str) -> Any:
        module = Collects()
        trainer = make_trainer(kind, num_microbatches=8)
        for _ in range(2):  # threads take turns in another order each time
            trainer.validate(module, make_loader(rows=32, batch_size=8), verbose=False)
        return module.collected()

    assert len(both(act)[0]) == 2 * 32


class Distance(Metric):
    """What a network makes of the logits: as a part of the loss, in the way of LPIPS."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor) -> None:
        self.total = self.total + self.network(logits).square().sum()
        self.rows += len(logits)

    def compute(self) -> Tensor:
        return self.total / self.rows


def test_a_network_in_a_metric_lets_no_other_micro_batch_in() -> None:
    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.distance = Distance()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            distance = self.distance(logits)
            self.log("distance", self.distance, on_step=True, on_epoch=True)
            return nn.functional.cross_entropy(logits, batch[1]) + distance

    compare(Module, make_loader(rows=32, batch_size=8), ours={"num_microbatches": 8, **COPIES})


class Total(Metric):
    """Adds in place, and says nothing about how states are put together."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total += x.detach().sum()

    def compute(self) -> Tensor:
        return self.total


def test_a_unit_that_runs_again_leaves_the_states_of_a_metric_alone() -> None:
    class Measures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.total = Total()

        def forward(self, x: Tensor) -> Tensor:
            self.total(x)
            return self.scale * x

    class Module(Small):
        def __init__(self) -> None:
            super().__init__()
            self.body.insert(1, Measures())

    def act(kind: str) -> Any:
        module = Module()
        make_trainer(kind).fit(module, make_loader())
        return [part.total.compute() for part in module.body if isinstance(part, Measures)]

    both(act)


def test_the_value_of_a_step_is_of_this_rank_alone() -> None:
    class Pretends(MeanMetric):
        """Believes to be one of several ranks."""

        num_gathered = 0

        def gather(self, value: Tensor, group: Any = None) -> list[Tensor]:
            Pretends.num_gathered += 1
            return [value]

    def act(kind: str) -> Any:
        Pretends.num_gathered = 0

        class Module(Small):
            def __init__(self) -> None:
                super().__init__()
                self.mean = Pretends(distributed_available_fn=lambda: True)
                self.mean.dist_sync_fn = self.mean.gather

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                self.mean(loss, weight=len(batch[0]))
                self.log("mean", self.mean, on_step=True, on_epoch=True)
                return loss

        make_trainer(kind).fit(Module(), make_loader())
        return Pretends.num_gathered

    assert both(act)
